"""The re-expressed default model in its cache, with a tiny one in place of the default model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.models.load.cache import CacheError
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.r1_demo.smollm2_r1 import R1_FORMS, ensure_smollm2_r1
from helpers.models.package_index import Index
from helpers.models.tiny_model import tiny_mtp_head


class Cache:
    """A cache with the tiny default model in it."""

    def __init__(self, folder: Path) -> None:
        self.index = Index(folder, intermediate_size=17 * 64)
        self.llama = self.index.ensure()
        self.lines: list[str] = []

    def ensure(self, name: str = "smollm2-r1", head: Path | None = None) -> Path:
        return ensure_smollm2_r1(
            name,
            package=self.index.package,
            head=head,
            root=self.index.root,
            report=self.lines.append,
        )


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_each_form_is_converted_once(cache: Cache) -> None:
    paths = {name: cache.ensure(name) for name in R1_FORMS}
    assert cache.lines == [f"converting tiny to {name}, once" for name in R1_FORMS]
    assert {name: cache.ensure(name) for name in R1_FORMS} == paths
    assert len(cache.lines) == 2
    experts = [SafetensorsCheckpoint(p).config.raw["n_routed_experts"] for p in paths.values()]
    assert experts == [16, 32]


def test_many_at_once_convert_once(cache: Cache) -> None:
    threads = [threading.Thread(target=cache.ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len([line for line in cache.lines if line.startswith("converting")]) == 1


def test_a_damaged_conversion_is_made_again(cache: Cache) -> None:
    weights = cache.ensure() / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1])
    cache.ensure()
    assert weights.read_bytes() == before


def test_another_head_is_another_directory(cache: Cache, tmp_path: Path) -> None:
    without = cache.ensure()
    missing = cache.ensure(head=tmp_path / "not-there.safetensors")
    assert missing == without
    paths = {without}
    for ffn in (64, 128):
        head = tiny_mtp_head(tmp_path / f"{ffn}.safetensors", cache.llama, ffn=ffn)
        made = cache.ensure(head=head)
        assert SafetensorsCheckpoint(made).config.raw["num_nextn_predict_layers"] == 1
        paths.add(made)
    assert len(paths) == 3


def test_a_cache_that_cannot_be_written_is_named(cache: Cache) -> None:
    root = cache.index.root
    root.rename(root.with_name("moved"))
    root.write_text("a file where the folder should be")
    with pytest.raises(CacheError, match="set HEADRACE_CACHE to a folder"):
        cache.ensure()
