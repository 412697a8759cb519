"""What the wheel and the source archive hold. Uses the build that `make setup` left, so it is quick."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import headrace
from helpers.require import needs

ROOT = Path(__file__).parents[2]
MATURIN = Path(sys.executable).with_name("maturin")

pytestmark = [
    needs("cargo", "there is no cargo", here=shutil.which("cargo") is not None),
    needs("maturin", "there is no maturin beside this Python", here=MATURIN.exists()),
    pytest.mark.timeout(900),  # without a build to reuse, all of it is built
]


def maturin(*arguments: str) -> None:
    done = subprocess.run([MATURIN, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_both_packages_and_the_extension(tmp_path: Path) -> None:
    maturin("build", "--profile", "dev", "--locked", "--out", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.match(r"headrace-[\d.]+-cp311-abi3-", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    for name in (
        "headrace/_core.abi3.so",
        "headrace/_core.pyi",
        "headrace/cli/main.py",
        "headrace/py.typed",
        "headrace/models/__init__.py",
        "headrace/models/r1_demo/data/smollm2_mtp.safetensors",
        "headrace/planner/data/latencies.csv.gz",
        "headrace/planner/data/published.json",
        "headrace_kernels/__init__.py",
        f"{info}/licenses/LICENSE",
    ):
        assert name in names
    kernels = ROOT / "kernels"
    sources = (kernels / "headrace_kernels").rglob("*.py")
    assert {source.relative_to(kernels).as_posix() for source in sources} <= names
    assert "headrace=headrace.cli.main:main" in entry_points
    assert not [n for n in names if "__pycache__" in n or n.startswith(("tests", "kernels"))]


def test_the_source_archive_can_build_everything(tmp_path: Path) -> None:
    maturin("sdist", "--out", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    for name in (
        ".cargo/config.toml",
        "Cargo.lock",
        "LICENSE",
        "bindings/Cargo.toml",
        "kernels/native/Cargo.toml",
        "pyproject.toml",
        "pyworkers/headrace/cli/main.py",
        "pyworkers/headrace/models/r1_demo/data/smollm2_mtp.safetensors",
        "pyworkers/headrace_kernels/__init__.py",
        "router/Cargo.toml",
    ):
        assert name in names


def test_the_base_install_is_light() -> None:
    needs = [
        re.split(r"[^\w-]", requirement)[0]
        for requirement in metadata.requires("headrace") or []
        if "extra ==" not in requirement
    ]
    assert needs == ["msgpack"]


def test_one_version_stands_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert project["version"] == workspace["version"] == headrace.__version__
