"""Weights in a folder: mapped they compute the same bits, and what is not theirs is refused."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.models.llama import attention_of, forward, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.survey import Survey
from headrace_kernels.batch import Batch
from headrace_kernels.native import NativeBackend
from headrace_kernels.packed import INDEX, WEIGHTS, PackedBackend, PackedError, PackingBackend
from helpers.models.tiny_model import tiny_llama

DTYPES = ["float32", "bfloat16", "float16", "int8"]
BLOCK = 16
TOKENS = np.random.default_rng(2).integers(3, 250, 40).astype(np.int32)


def packed(checkpoint: SafetensorsCheckpoint, folder: Path, dtype: str) -> PackingBackend:
    folder.mkdir()
    backend = PackingBackend(attention_of(checkpoint.config, BLOCK), dtype=dtype, folder=folder)
    load_weights(checkpoint, backend)
    backend.finish()
    return backend


def logits(checkpoint: SafetensorsCheckpoint, backend: NativeBackend, weights: object) -> object:
    run = backend.compile(
        lambda step: forward(step, weights, checkpoint.config.rms_norm_eps)  # type: ignore[arg-type]
    )
    backend.allocate_kv(4)
    rows = np.arange(len(TOKENS))
    batch = Batch(
        tokens=TOKENS,
        positions=rows.astype(np.int32),
        slots=rows,
        seq_starts=np.array([0, len(TOKENS)], np.int32),
        context_lens=np.array([len(TOKENS)], np.int32),
        block_tables=np.arange(3, dtype=np.int32)[None],
        logit_rows=rows.astype(np.int32),
    )
    return np.asarray(run(batch)).tolist()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_computes_the_same_bits(dtype: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny", tie_word_embeddings=tied))
    attention = attention_of(checkpoint.config, BLOCK)
    native = NativeBackend(attention, dtype=dtype)
    want = logits(checkpoint, native, load_weights(checkpoint, native))
    packed(checkpoint, tmp_path / "packed", dtype)
    mapped = PackedBackend(attention, dtype=dtype, folder=tmp_path / "packed")
    weights = load_weights(Survey(checkpoint), mapped)
    (tmp_path / "packed" / WEIGHTS).unlink()  # whoever has it mapped keeps it
    assert logits(checkpoint, mapped, weights) == want


def test_a_matrix_with_a_bias_is_one(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    parts = [random.normal(size=(n, 64)).astype(np.float32) for n in (5, 40)]
    bias, x = random.normal(size=45).astype(np.float32), random.normal(size=(3, 64))
    attention = attention_of(SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny")).config, BLOCK)
    packing = PackingBackend(attention, dtype="float32", folder=tmp_path)
    packing.table(x.astype(np.float32))
    packing.matrix(parts, bias)
    packing.finish()
    blank = [np.zeros_like(part) for part in parts]
    found: list[object] = []
    mapped = PackedBackend(attention, dtype="float32", folder=tmp_path)
    for backend, given in ((NativeBackend(attention, dtype="float32"), parts), (mapped, blank)):
        table = backend.table(x.astype(np.float32))
        weight = backend.matrix(given, bias if backend is not mapped else np.zeros_like(bias))
        backend.allocate_kv(1)
        run = backend.compile(
            lambda step, table=table, weight=weight: step.linear(
                step.wanted_rows(step.embed(table)), weight
            )
        )
        three = np.arange(3, dtype=np.int32)
        batch = Batch(
            tokens=three,
            positions=three,
            slots=three.astype(np.int64),
            seq_starts=np.array([0, 3], np.int32),
            context_lens=np.array([3], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            logit_rows=three,
        )
        found.append(np.asarray(run(batch)).tolist())
    assert found[0] == found[1]


def test_images_are_what_they_were() -> None:
    """Whoever changes what is packed raises `packed.FORMAT`, and then these sums."""
    rows = (np.arange(70 * 130, dtype=np.float32).reshape(70, 130) % 257 - 128) / np.float32(64)
    sums = {
        dtype: hashlib.sha256(_core.Weight([rows], "float32", dtype).image().tobytes()).hexdigest()[
            :16
        ]
        for dtype in DTYPES
    }
    assert sums == IMAGES


IMAGES = {
    "float32": "9518be44f5d5becb",
    "bfloat16": "a48f26b11fb8ed14",
    "float16": "ac200c3982d9d227",
    "int8": "b5c167d97f4a20d0",
}


def test_another_folder_is_refused(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    packed(checkpoint, folder := tmp_path / "packed", "int8")
    attention = attention_of(checkpoint.config, BLOCK)
    with pytest.raises(PackedError, match="format 1 and int8"):
        PackedBackend(attention, dtype="float32", folder=folder)
    larger = SafetensorsCheckpoint(tiny_llama(tmp_path / "larger", intermediate_size=160))
    with pytest.raises(PackedError, match=r"item \d+ is .*, expected \{'matrix': \[320, 64\]\}"):
        load_weights(Survey(larger), PackedBackend(attention, dtype="int8", folder=folder))
    deeper = SafetensorsCheckpoint(tiny_llama(tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(PackedError, match=r"item \d+ is"):
        load_weights(Survey(deeper), PackedBackend(attention, dtype="int8", folder=folder))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"format": 99}))
    with pytest.raises(PackedError, match="format 99"):
        PackedBackend(attention, dtype="int8", folder=folder)


def mapped_file(path: Path, nbytes: int) -> mmap.mmap:
    path.write_bytes(bytes(nbytes))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_images_that_cannot_be_are_refused(tmp_path: Path) -> None:
    image = len(_core.Weight([np.ones((32, 64), np.float32)], "float32", "int8").image())
    buffer = mapped_file(tmp_path / "x", 64 + image)
    weight = _core.Weight.mapped
    weight(buffer, 64, n=32, k=64, dtype="int8")
    for start, text in ((128, "ends behind"), (2**62, "ends behind"), (0, None), (32, "aligned")):
        if text is None:
            weight(buffer, start, n=32, k=64, dtype="int8")
            continue
        with pytest.raises(ValueError, match=text):
            weight(buffer, start, n=32, k=64, dtype="int8")
    with pytest.raises(ValueError, match="ends behind"):
        weight(buffer, 0, n=2**40, k=2**40, dtype="int8")
    with pytest.raises(ValueError, match="bias"):
        weight(buffer, 0, n=32, k=64, dtype="int8", bias=[1.0])
    with pytest.raises(ValueError, match="bias"):
        weight(buffer, 0, n=32, k=0, dtype="int8")
    with pytest.raises(ValueError, match="dtype"):
        weight(buffer, 0, n=32, k=64, dtype="int4")
    with pytest.raises(ValueError, match="only read"):
        weight(bytearray(64 + image), 0, n=32, k=64, dtype="int8")
    with pytest.raises(ValueError, match="ends behind"):
        _core.Table.mapped(buffer, 0, rows=image, width=64, stored="float32")
    with pytest.raises(ValueError, match="aligned"):
        _core.Table.mapped(buffer, 2, rows=1, width=8, stored="float32")
    with pytest.raises(TypeError, match="int8"):
        _core.Table.mapped(buffer, 0, rows=1, width=8, stored="int8")
    with pytest.raises(OverflowError):
        _core.Table.mapped(buffer, -1, rows=1, width=8, stored="float32")
