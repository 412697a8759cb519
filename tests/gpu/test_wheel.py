"""What is carried to a GPU machine: `_core` from a wheel that fits, packages that lack there, a model in pieces."""

from __future__ import annotations

import json
import platform
import re
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import default_model
from bench.gpu.carry import THERE, packages, slim
from bench.gpu.wheel import ROOT, NotReadyError, make_ready, normal, rust_digest
from headrace.models.config import ModelFileError
from headrace.models.load.default_model import DEFAULT_MODEL


def wheel(folder: Path, name: str, version: str, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file.replace("__", "/").replace("_DOT_", "."), text)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As much of a checkout as is looked at, with a wheel of it in dist/gpu."""
    root = tmp_path / "tree"
    for file in (".cargo/config.toml", "Cargo.lock", "Cargo.toml", "router/src/lib.rs"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(file)
    (root / "pyworkers" / "headrace").mkdir(parents=True)
    folder = root / "dist" / "gpu"
    wheel(folder, "headrace", "0.1.0", headrace___core_DOT_abi3_DOT_so="of the wheel")
    write_manifest(root)
    return root


def write_manifest(root: Path, **changes: Any) -> None:
    manifest = {"commit": "abc", "rust": rust_digest(root), "machine": platform.machine()}
    (root / "dist/gpu/manifest.json").write_text(json.dumps(manifest | changes))


def ready(root: Path) -> Path:
    site = root / "site"
    make_ready(site, folder=root / "dist" / "gpu", root=root)
    return site


def core(root: Path) -> str:
    (file,) = (root / "pyworkers" / "headrace").glob("_core*")
    return file.read_text()


def test_the_extension_goes_where_the_tree_has_it(tree: Path) -> None:
    ready(tree)
    assert core(tree) == "of the wheel"


def test_only_the_extension_travels_and_is_still_found(tree: Path) -> None:
    folder = tree / "dist" / "gpu"
    files = {"headrace___core_DOT_abi3_DOT_so": "small" * 1000, "headrace__data": "x" * 10_000}
    whole = wheel(folder, "headrace", "0.1.0", **files)
    size = whole.stat().st_size
    slim(whole)
    assert [file.name for file in folder.glob("headrace*")] == [whole.name]
    assert zipfile.ZipFile(whole).namelist() == ["headrace/_core.abi3.so"]
    assert whole.stat().st_size < size / 10
    ready(tree)
    assert core(tree) == "small" * 1000


def test_a_new_wheel_takes_the_place_of_an_older_one(tree: Path) -> None:
    (tree / "pyworkers/headrace/_core.abi3.so").write_text("older")
    ready(tree)
    assert core(tree) == "of the wheel"


def test_what_make_setup_built_stays(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tree / ".venv"))
    (tree / "pyworkers/headrace/_core.abi3.so").write_text("built here")
    ready(tree)
    assert core(tree) == "built here"


def test_an_extension_without_a_wheel_is_enough(tree: Path) -> None:
    (tree / "pyworkers/headrace/_core.abi3.so").write_text("built here")
    for file in (tree / "dist/gpu").iterdir():
        file.unlink()
    ready(tree)
    assert core(tree) == "built here"


def test_without_wheel_and_extension(tree: Path) -> None:
    for file in (tree / "dist/gpu").iterdir():
        file.unlink()
    with pytest.raises(NotReadyError, match=r"headrace._core is not in .*make gpu-wheel.*dist/gpu"):
        ready(tree)


def test_a_wheel_of_other_rust_sources(tree: Path) -> None:
    (tree / "router/src/lib.rs").write_text("changed since")
    with pytest.raises(NotReadyError, match="built from other Rust sources"):
        ready(tree)
    assert not list((tree / "pyworkers/headrace").iterdir())


def test_a_wheel_for_another_machine(tree: Path) -> None:
    write_manifest(tree, machine="s390x")
    with pytest.raises(NotReadyError, match=r"is for s390x, this machine is"):
        ready(tree)


def test_a_wheel_without_the_extension(tree: Path) -> None:
    wheel(tree / "dist/gpu", "headrace", "0.1.0", headrace__cli_DOT_py="")
    with pytest.raises(NotReadyError, match=r"holds no headrace._core"):
        ready(tree)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"commit": "abc"}'])
def test_a_manifest_that_is_none(text: str, tree: Path) -> None:
    (tree / "dist/gpu/manifest.json").write_text(text)
    with pytest.raises(NotReadyError, match=r"manifest.json.*again"):
        ready(tree)


def test_packages_that_lack_or_are_older_are_put_beside(tree: Path) -> None:
    folder = tree / "dist" / "gpu"
    wheel(folder, "of_nobody", "1.0", of_nobody__init_DOT_py="")
    wheel(folder, "pytest", metadata.version("pytest"), same__init_DOT_py="")
    wheel(folder, "msgpack", "999.0", newer__init_DOT_py="")
    wheel(folder, "psutil", "0.1", older__init_DOT_py="")
    site = ready(tree)
    assert sorted(part.name for part in site.iterdir()) == ["newer", "of_nobody"]


def test_a_model_travels_in_pieces_of_several_calls(tmp_path: Path) -> None:
    package = tmp_path / DEFAULT_MODEL.wheel
    package.write_bytes(bytes(range(256)) * 5)
    pieces = default_model.split(package, tmp_path / "pieces", piece_bytes=300)
    assert [piece.name for piece in pieces] == [f"piece-{i}-of-5" for i in range(1, 6)]
    kept = tmp_path / "kept"
    for piece in pieces:  # one call each
        call = tmp_path / f"call {piece.name}"
        call.mkdir()
        piece.rename(call / piece.name)
        assert not default_model.joined(kept, tmp_path / "whole")
        default_model.keep(call, kept)
    assert default_model.joined(kept, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == package.read_bytes()


def test_pieces_of_two_packages_are_not_joined(tmp_path: Path) -> None:
    for name in ("piece-1-of-2", "piece-2-of-3"):
        (tmp_path / name).write_bytes(b"x")
    assert not default_model.joined(tmp_path, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_without_the_model_and_a_network_it_is_said_what_to_bring(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"make gpu-wheel ARGS=--model"):
        default_model.ready([tmp_path / "pieces"], root=tmp_path / "cache")


def test_pieces_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "piece-1-of-1").write_bytes(b"no wheel")
    with pytest.raises(ModelFileError, match="not the expected wheel"):
        default_model.ready([tmp_path], root=tmp_path / "cache")


def test_all_that_a_cpu_worker_needs_travels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in needed}
    assert names <= {*packages(), *THERE}
