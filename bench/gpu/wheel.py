"""What a GPU machine lacks, carried there: `headrace._core` in its wheel, and the Python packages that tests need.

    make gpu-wheel        # where Rust and a network are; fills dist/gpu

On the GPU machine nothing is installed: `_core` goes to where `make setup` would put it, and packages that are not
there, or older than what was tested with, go into a folder of their own on PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dist" / "gpu"
MANIFEST = "manifest.json"
RUST = ("router", "bindings", "kernels/native", "bench/src", "bench/presets")
CORE = re.compile(r"headrace/_core[.\w-]*\.so")


class NotReadyError(Exception):
    """Something that the run needs is missing here; the text says what, and where it comes from."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A wheel of `FOLDER`."""

    file: Path

    @property
    def name(self) -> str:
        return normal(self.file.name.split("-")[0])

    @property
    def version(self) -> str:
        return self.file.name.split("-")[1]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def rust_digest(root: Path = ROOT) -> str:
    """Of all that `_core` is built from: a wheel of other sources is of no use."""
    digest = hashlib.sha256()
    files = [root / ".cargo/config.toml", root / "Cargo.lock", root / "Cargo.toml"]
    for part in RUST:
        found = (root / part).rglob("*")
        files += [f for f in found if f.suffix in (".rs", ".toml", ".json", ".txt")]
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make_ready(site: Path, *, folder: Path = FOLDER, root: Path = ROOT) -> None:
    """Put `_core` into the tree, and into `site` what this Python lacks. Raises `NotReadyError`."""
    package = root / "pyworkers" / "headrace"
    own = Path(sys.prefix).is_relative_to(root / ".venv")  # `make setup` built for this tree
    wheels = [Carried(file) for file in sorted(folder.glob("*.whl"))]
    ours = [wheel for wheel in wheels if wheel.name == "headrace"]
    if ours and not own:
        _take_core(ours[0], folder, package, root)
    elif not list(package.glob("_core*.so")):
        raise NotReadyError(
            f"headrace._core is not in {package}, and {folder} has no wheel of it: run `make gpu-wheel` on a machine "
            f"with Rust, and bring {folder.relative_to(root)} along; with Rust here, `make setup` builds it"
        )
    if own:
        return
    for wheel in wheels:
        if wheel.name != "headrace" and _is_newer(wheel):
            with zipfile.ZipFile(wheel.file) as archive:
                archive.extractall(site)


def _take_core(wheel: Carried, folder: Path, package: Path, root: Path) -> None:
    manifest = read_manifest(folder)
    if manifest["machine"] != platform.machine():
        raise NotReadyError(
            f"{wheel.file.name} is for {manifest['machine']}, this machine is {platform.machine()}: "
            "run `make gpu-wheel` on one of its kind"
        )
    if manifest["rust"] != rust_digest(root):
        raise NotReadyError(
            f"{wheel.file.name} was built from other Rust sources than these: run `make gpu-wheel` again"
        )
    with zipfile.ZipFile(wheel.file) as archive:
        names = [name for name in archive.namelist() if CORE.fullmatch(name)]
        if len(names) != 1:
            raise NotReadyError(f"{wheel.file.name} holds no headrace._core")
        target = package / Path(names[0]).name
        new = target.with_name(f"{target.name}.new.so")
        new.write_bytes(archive.read(names[0]))
        new.replace(target)


def read_manifest(folder: Path = FOLDER) -> dict[str, Any]:
    """What `make gpu-wheel` noted. Raises `NotReadyError`."""
    path = folder / MANIFEST
    try:
        found: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotReadyError(f"{path}: {error}; run `make gpu-wheel` again") from error
    if not isinstance(found, dict) or not {"machine", "rust", "commit"} <= set(
        cast("dict[str, Any]", found)
    ):
        raise NotReadyError(f"{path} is not what `make gpu-wheel` writes; run it again")
    return cast("dict[str, Any]", found)


def _is_newer(wheel: Carried) -> bool:
    """Whether this Python lacks the package, or has an older one than was tested with."""
    try:
        here = importlib.metadata.version(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return _numbers(here) < _numbers(wheel.version)


def _numbers(version: str) -> list[int]:
    """The numbers of a release, without what follows them (`1.2.0rc1+cu130`: 1, 2, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []
