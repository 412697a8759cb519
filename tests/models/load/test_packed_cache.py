"""The cache of packed weights: made once, shared, few, and never a reason not to serve."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import Model, load_model, on_cpu
from headrace.models.load.checkpoint import Checkpoint, SafetensorsCheckpoint
from headrace.models.load.packed_cache import LEAST_BYTES, MOST_KEPT, packed_folder
from headrace_kernels.packed import INDEX, WEIGHTS
from helpers.kernels.paged_rows import PagedRows
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama


class Packer:
    """Counts how often something is packed."""

    def __init__(self, path: Path, root: Path) -> None:
        self.checkpoint = SafetensorsCheckpoint(tiny_llama(path))
        self.root = root
        self.packed = 0

    def __call__(self, dtype: str = "int8") -> Path | None:
        return packed_folder(self.checkpoint, dtype, self._pack, root=self.root, least_bytes=1)

    def _pack(self, folder: Path) -> None:
        self.packed += 1
        (folder / "weights.bin").write_bytes(b"packed")


@pytest.fixture
def packer(tmp_path: Path) -> Packer:
    return Packer(tmp_path / "tiny", tmp_path / "cache")


def test_weights_are_packed_once_for_each_dtype(packer: Packer) -> None:
    first = packer()
    assert first is not None
    assert (first / "weights.bin").read_bytes() == b"packed"
    assert packer() == first
    assert packer("float32") != first
    assert packer.packed == 2


def test_workers_that_start_together_pack_once(packer: Packer) -> None:
    found: list[Path | None] = []
    threads = [threading.Thread(target=lambda: found.append(packer())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert packer.packed == 1
    assert len(set(found)) == 1


def test_damaged_ones_are_packed_again(packer: Packer) -> None:
    folder = packer()
    assert folder is not None
    (folder / "weights.bin").write_bytes(b"pack")
    assert packer() == folder
    assert (folder / "weights.bin").read_bytes() == b"packed"
    (folder / "manifest.json").write_text("[")
    assert packer() == folder
    assert packer.packed == 3


def test_weights_that_changed_are_packed_again(packer: Packer, tmp_path: Path) -> None:
    """In the middle, where no fingerprint looks."""
    folder = packer()
    file = tmp_path / "tiny" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    stat = file.stat()
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert packer() != folder


def test_few_are_kept_and_those_in_use_the_longest(packer: Packer, tmp_path: Path) -> None:
    others = [Packer(tmp_path / str(i), packer.root) for i in range(MOST_KEPT)]
    first = packer()
    assert first is not None
    made = [other() for other in others[:-1]]
    os.utime(first / "manifest.json", ns=(1, 1))
    assert packer() == first  # which was used last, by now
    last = others[-1]()
    kept = set((packer.root / "models").glob("packed-*"))
    assert kept == {first, last, *made[1:]}
    assert packer.packed == 1


def test_a_small_model_is_not_worth_a_file(packer: Packer) -> None:
    assert packer.checkpoint.nbytes < LEAST_BYTES
    assert packed_folder(packer.checkpoint, "int8", packer._pack, root=packer.root) is None
    assert not packer.root.exists()


def test_a_cache_that_cannot_be_used_is_said_and_does_without(
    packer: Packer, caplog: pytest.LogCaptureFixture
) -> None:
    packer.root.write_text("no folder")
    assert packer() is None
    assert "packed into this worker's own memory" in caplog.text
    assert packer.packed == 0


class SmallOnes:
    """Has models of any size packed, into a folder of the test's."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.folders: list[Path] = []
        self.damage: str | None = None
        monkeypatch.setattr(on_cpu, "packed_folder", self._folder)

    def _folder(
        self, checkpoint: Checkpoint, dtype: str, pack: Callable[[Path], None], *, drafts: bool
    ) -> Path:
        folder = packed_folder(
            checkpoint, dtype, pack, drafts=drafts, root=self.root, least_bytes=1
        )
        assert folder is not None
        if self.damage is not None:
            spoil(folder, self.damage)
        self.folders.append(folder)
        return folder


@pytest.fixture
def small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallOnes:
    return SmallOnes(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_deepseek])
@pytest.mark.parametrize(
    "damage", ["no index", "no object", "another format", "fewer items", "cut"]
)
def test_a_folder_that_is_not_what_it_should_be_is_said_and_weights_are_packed_into_memory(
    damage: str,
    tiny: Callable[[Path], Path],
    tmp_path: Path,
    small_ones: SmallOnes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = SafetensorsCheckpoint(tiny(tmp_path / "tiny"))

    def load() -> Model:
        return load_model(checkpoint, dtype="float32", device="cpu", block_tokens=16)

    mapped = load()
    assert "own memory" not in caplog.text
    small_ones.damage = damage
    packed = load()
    assert "packed into this worker's own memory" in caplog.text
    size: dict[str, Any] = {"rows": 4, "answers": 1, "context_tokens": 16, "mtp": False}
    there = mapped.step_memory(**size).lasting - packed.step_memory(**size).lasting
    assert there >= checkpoint.nbytes, "pages of files are counted as free, but are not"
    rows = PagedRows([5])
    logits: list[Any] = []
    for model in (mapped, packed):
        model.allocate_kv(2)
        logits.append(np.array(model.forward(rows.batch(rows.whole()))))
    assert np.array_equal(*logits)


def test_a_deepseek_lies_apart_with_and_without_its_drafts(
    tmp_path: Path, small_ones: SmallOnes, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "tiny", mtp=True))
    for mtp in (True, False, True):
        load_model(checkpoint, dtype="int8", device="cpu", block_tokens=16, mtp=mtp)
    with_drafts, without, again = small_ones.folders
    assert with_drafts == again != without
    assert "own memory" not in caplog.text


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_deepseek])
def test_who_maps_weights_reads_none(
    tiny: Callable[[Path], Path],
    tmp_path: Path,
    small_ones: SmallOnes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = SafetensorsCheckpoint(tiny(tmp_path / "tiny"))
    read: list[str] = []

    def tensor(self: SafetensorsCheckpoint, name: str) -> Any:
        read.append(name)
        return load_tensor(self, name)

    load_tensor = SafetensorsCheckpoint._load
    monkeypatch.setattr(SafetensorsCheckpoint, "_load", tensor)
    load_model(checkpoint, dtype="int8", device="cpu", block_tokens=16)
    packed = len(read)
    load_model(checkpoint, dtype="int8", device="cpu", block_tokens=16)
    assert len(small_ones.folders) == 2
    assert 0 < packed == len(read)


def spoil(folder: Path, damage: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    match damage:
        case "no index":
            (folder / INDEX).unlink()
        case "no object":
            (folder / INDEX).write_text("7")
        case "another format":
            (folder / INDEX).write_text(json.dumps(index | {"format": 0}))
        case "fewer items":
            (folder / INDEX).write_text(json.dumps(index | {"items": index["items"][:-1]}))
        case _:
            weights = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).unlink()  # whoever has it mapped keeps all of it
            (folder / WEIGHTS).write_bytes(weights[: len(weights) // 2])
