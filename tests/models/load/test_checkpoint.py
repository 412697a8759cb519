"""Safetensors directories: single and sharded files, tied heads, and every way a file can be broken."""

from __future__ import annotations

import gc
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.models.config import ModelFileError
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace.models.load.safetensors_file import (
    SafetensorsError,
    SafetensorsFile,
    write_safetensors,
)
from headrace_kernels.upload import tensor_of
from helpers.models.tiny_model import llama_shapes, tiny_llama


def shard(directory: Path, files: int = 2) -> Path:
    """Split model.safetensors of `directory` as `save_pretrained` does."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_tensors_equal_those_of_the_safetensors_package(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    expected = load_file(tmp_path / "tiny" / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor_of(checkpoint.tensor(name)), tensor)
    assert checkpoint.name == "tiny"


def test_shards_and_one_file_hold_the_same_model(tmp_path: Path) -> None:
    whole = SafetensorsCheckpoint(tiny_llama(tmp_path / "whole"))
    parts = SafetensorsCheckpoint(shard(tiny_llama(tmp_path / "parts")))
    assert sorted(parts.names()) == sorted(whole.names())
    assert all(np.array_equal(parts.tensor(name), whole.tensor(name)) for name in whole.names())
    assert parts.fingerprints() == whole.fingerprints()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
)
def test_every_dtype_is_read_whatever_its_alignment(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "odd.safetensors"
    tensors = {"a": torch.arange(3, dtype=torch.int8), "b": torch.arange(6).to(dtype).reshape(2, 3)}
    save_file(tensors, path)
    header_end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    text = path.read_bytes()[8:header_end].rstrip() + b" "  # moves all tensors by an odd number
    path.write_bytes(struct.pack("<Q", len(text)) + text + path.read_bytes()[header_end:])
    file = SafetensorsFile(path)
    for name, tensor in tensors.items():
        assert torch.equal(tensor_of(file.tensor(name)).float(), tensor.float())


def test_a_tied_head_is_found_by_either_name(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tied"))
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert head in checkpoint
    assert np.shares_memory(checkpoint.tensor(head), checkpoint.tensor(embedding))
    loose = SafetensorsCheckpoint(tiny_llama(tmp_path / "loose", tie_word_embeddings=False))
    assert not np.array_equal(loose.tensor(head), loose.tensor(embedding))


def test_a_weight_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    for name, shape in llama_shapes(checkpoint.config.raw).items():
        assert checkpoint.tensor(name, shape).shape == shape
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors: model.norm.weight: expected shape \[65\], found \[64\]",
    ):
        checkpoint.tensor("model.norm.weight", (65,))
    with pytest.raises(CheckpointError, match=r"the nearest is 'model.norm.weight'"):
        checkpoint.tensor("model.norm.weigth")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)  # quantised, and nobody said so
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"norm.weight: expected a floating-point .* int8"):
        SafetensorsCheckpoint(folder).tensor("model.norm.weight", (64,))


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    seen: list[tuple[int, int]] = []
    checkpoint.progress = lambda done, total: seen.append((done, total))
    for name in checkpoint.names():
        checkpoint.tensor(name)
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def test_only_the_asked_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    seen: list[int] = []
    checkpoint.progress = lambda done, _: seen.append(done)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = tensor_of(checkpoint.tensor(name, (128, 64)))
    rows = tensor_of(checkpoint.tensor(name, (128, 64), rows=range(32, 48)))
    assert torch.equal(rows, whole[32:48])
    # Views of the file: what is beside them is never touched.
    assert rows.data_ptr() == whole.data_ptr() + 32 * 64 * 4
    assert seen == [4 * 128 * 64, 4 * (128 + 16) * 64]
    checkpoint.finished()
    assert seen[-1] == checkpoint.nbytes


def test_integers_are_read_where_they_are_expected(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"ids": torch.arange(4, dtype=torch.int32)}, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.integers("ids", (4,)).tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"ids: expected shape \[5\], found \[4\]"):
        checkpoint.integers("ids", (5,))
    with pytest.raises(CheckpointError, match=r"norm.weight: expected int32, found float32"):
        checkpoint.integers("model.norm.weight", (64,))


def test_files_are_mapped_without_memory_set_aside_for_them(tmp_path: Path) -> None:
    """Shared and read-only: what is private and writable counts in full where nothing may be promised twice."""
    path = tiny_llama(tmp_path / "tiny") / "model.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of memory that cannot be written
        norm = tensor_of(SafetensorsCheckpoint(path.parent).tensor("model.norm.weight"))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert {fields[1] for fields in maps if fields[-1] == str(path)} == {"r--s"}
    assert norm.isfinite().all()


def test_a_tensor_outlives_its_checkpoint(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    want = load_file(folder / "model.safetensors")["model.norm.weight"]
    norm = tensor_of(SafetensorsCheckpoint(folder).tensor("model.norm.weight"))
    gc.collect()
    assert torch.equal(norm, want)


def header_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(
    begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        (b"{", b"", "invalid JSON in header"),
        (b"[" * 100_000, b"", "invalid JSON in header"),
        ([], b"", "invalid type: sequence"),
        ({"a": 3}, b"", "invalid type: integer `3`"),
        ({"a": entry(0, 4)}, b"", "file not fully covered"),
        ({"a": entry(4, 0)}, b"1234", "invalid offset for tensor `a`"),
        ({"a": entry(-4, 0)}, b"1234", "invalid value: integer `-4`"),
        ({"a": entry(0, 2**70)}, b"1234", "expected usize"),
        ({"a": entry(0, 4, shape=(2,))}, b"1234", "invalid shape, data type, or offset"),
        ({"a": entry(0, 4, shape=(-1,))}, b"1234", "invalid value: integer `-1`"),
        ({"a": entry(0, 4) | {"dtype": 3}}, b"1234", "invalid type: integer `3`"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "invalid offset for tensor `b`"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, b"1234567890", "invalid offset for tensor `b`"),
        ({"a": entry(0, 4)}, b"12345", "file not fully covered"),
        (
            b'{"a":' + json.dumps(entry(0, 0)).encode() + b',"a":3}',
            b"",
            "invalid type: integer `3`",
        ),
        ({"a": entry(0, 4, dtype="X9")}, b"1234", "unknown variant `X9`"),
        ({"a": entry(0, 0, shape=(2**63, 2**63))}, b"", "overflow"),
        ({"__metadata__": {"n": 3}, "a": entry(0, 4)}, b"1234", "expected a string"),
    ],
)
def test_a_broken_header_is_named(tmp_path: Path, header: object, data: bytes, text: str) -> None:
    path = header_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(SafetensorsError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "header too small"),
        (b"\xff" * 16, "header too large"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header too large"),
        (struct.pack("<Q", 1000) + b"{}", "invalid header length"),
    ],
)
def test_a_broken_start_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=text):
        SafetensorsFile(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_either_read_or_named(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_safetensors(path, {"a": (2, 3)}, [("a", np.zeros((2, 3), np.float32))])
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] = data.draw(st.integers(0, 255))
    else:
        del raw[at:]
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
    except ModelFileError:
        return
    assert sum(entry.nbytes for entry in file.entries.values()) <= len(raw)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "tiny"))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards are missing: model-00002-of-00002"):
        SafetensorsCheckpoint(directory)


def test_a_tensor_that_the_index_promises_is_missed(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "tiny"))
    index = directory / "model.safetensors.index.json"
    promised = json.loads(index.read_text())["weight_map"] | {
        "x": "model-00001-of-00002.safetensors"
    }
    index.write_text(json.dumps({"weight_map": promised}))
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: tensor 'x' is missing"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 3}, {"a": "../b"}, {"a": "/etc/passwd"}])
def test_a_broken_index_is_named(tmp_path: Path, weight_map: object) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index.json: .*expected"):
        SafetensorsCheckpoint(directory)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "tiny"))
    first = load_file(directory / "model-00001-of-00002.safetensors")
    second = load_file(directory / "model-00002-of-00002.safetensors")
    twice = next(iter(first))
    save_file(second | {twice: first[twice]}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{twice}' is in two shards"):
        SafetensorsCheckpoint(directory)


def test_tensors_are_found_behind_those_of_any_dtype_and_size(tmp_path: Path) -> None:
    """Places are added up: of bits that fill bytes together, of nothing at all, in an order of their own."""
    header = {
        "z": entry(0, 4, dtype="F4", shape=(2, 4)),
        "none": entry(4, 4, shape=(0, 3)),
        "six": entry(4, 7, dtype="F6_E2M3", shape=(4,)),
        "a": entry(7, 9, dtype="U8", shape=(2,)),
    }
    file = SafetensorsFile(header_file(tmp_path / "x.safetensors", header, b"1234567\x08\x09"))
    assert file.tensor("a").tolist() == [8, 9] and file.tensor("none").shape == (0, 3)
    data_start = (tmp_path / "x.safetensors").stat().st_size - 9
    places = {name: (one.start - data_start, one.nbytes) for name, one in file.entries.items()}
    assert places == {"z": (0, 4), "none": (4, 0), "six": (4, 3), "a": (7, 2)}


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    four_bits = {"a": entry(0, 4, dtype="F4", shape=(8,))}
    header_file(directory / "model.safetensors", four_bits, b"1234")
    with pytest.raises(CheckpointError, match="a: dtype 'F4' is not supported; supported: F64"):
        SafetensorsCheckpoint(directory)


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle"):
        SafetensorsCheckpoint(directory)
