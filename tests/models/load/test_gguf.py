"""GGUF files: the same model as the directory they were written from, and every way they can be broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.config import ModelFileError
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace.models.load.gguf import GgufCheckpoint, GgufError
from headrace_kernels.upload import tensor_of
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("kind", "error"),  # error: of one value, in units of the largest one
    [
        (Kind.F32, 0.0),
        (Kind.F16, 2**-11),
        (Kind.BF16, 2**-8),
        (Kind.Q8_0, 1 / 127),
        (Kind.Q5_1, 1 / 16),
        (Kind.Q5_0, 1 / 16),
        (Kind.Q4_1, 1 / 8),
        (Kind.Q4_0, 1 / 8),
    ],
)
def test_tensors_are_those_of_the_directory(
    tmp_path: Path, tiny: Path, kind: Kind, error: float
) -> None:
    expected = SafetensorsCheckpoint(tiny)
    found = GgufCheckpoint(tiny_gguf(tmp_path / "tiny.gguf", tiny, kind))
    assert sorted(found.names()) == sorted(expected.names())
    for name in expected.names():
        want, got = (tensor_of(one.tensor(name)) for one in (expected, found))
        assert got.shape == want.shape
        assert str(got.dtype) == f"torch.{found.info(name).dtype}"
        assert (got.float() - want).abs().max() <= error * want.abs().max()
    embedding = found.tensor("model.embed_tokens.weight")
    assert np.array_equal(found.tensor("lm_head.weight"), embedding)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1])
def test_tensors_are_bitwise_those_of_transformers(tmp_path: Path, tiny: Path, kind: Kind) -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    path = tiny_gguf(tmp_path / "tiny.gguf", tiny, kind)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    ours = GgufCheckpoint(path)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor_of(ours.tensor(name)).float(), tensor), name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q2_K, Kind.Q3_K])
def test_k_quants_are_read(tmp_path: Path, kind: Kind) -> None:
    """The gguf package cannot write them: blocks of zeros, whose values are zero."""
    import gguf

    from headrace.models.load.gguf_file import GgufFile

    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("a", np.zeros((4, 2 * block_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GgufFile(path).float32("a")
    assert values.shape == (4, 512)
    assert not values.any()


def test_configuration_is_that_of_the_directory(tmp_path: Path, tiny: Path) -> None:
    found = GgufCheckpoint(tiny_gguf(tmp_path / "tiny.gguf", tiny)).config
    want = SafetensorsCheckpoint(tiny).config
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "context_tokens",
        "eos_token_ids",
    ]:
        assert getattr(found, field) == getattr(want, field), field
    assert (found.rope.rope_type, found.rope.theta) == (want.rope.rope_type, want.rope.theta)


def test_every_end_token_ends_an_answer(tmp_path: Path, tiny: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    found = GgufCheckpoint(tiny_gguf(tmp_path / "tiny.gguf", tiny, metadata=ends))
    assert found.config.eos_token_ids == (2, 0)


def test_llama3_rope_comes_back_from_its_factors(tmp_path: Path, tiny: Path) -> None:
    """As `convert_hf_to_gguf` computes them, from the definition in the Llama 3.1 release."""
    base, dim, factor, low, high, original = 10_000.0, 16, 8.0, 1.0, 4.0, 8192
    factors: list[float] = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * base ** (i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    rope = GgufCheckpoint(tiny_gguf(tmp_path / "a.gguf", tiny, extra=extra)).config.rope
    assert rope.rope_type == "llama3"
    assert rope.raw["factor"] == factor
    extra["rope_freqs.weight"][3] = 5.0
    with pytest.raises(GgufError, match="the factors are not those of Llama 3"):
        GgufCheckpoint(tiny_gguf(tmp_path / "b.gguf", tiny, extra=extra))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"leave_out": "llama.embedding_length"}, "llama.embedding_length: expected int, the key"),
        ({"leave_out": "model.embed_tokens.weight"}, "tensor 'token_embd.weight' is missing"),
        ({"metadata": {"llama.block_count": "2"}}, "llama.block_count: expected int, found 2"),
        (
            {"metadata": {"general.architecture": "bert"}},
            "general.architecture 'bert' is not known",
        ),
        ({"metadata": {"split.count": 3}}, "split.count: one part of several"),
        ({"metadata": {"llama.expert_count": 8}}, "experts are not supported"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "is not a multiple of num_key_value"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id: expected token ids"),
        (
            {"metadata": {"llama.rope.scaling.type": "linear"}},
            "scaling.factor: expected float, the",
        ),
        ({"extra": {"vision.weight": np.zeros(32, np.float32)}}, "'vision.weight' is not known"),
    ],
)
def test_a_foreign_or_incomplete_file_is_named(
    tmp_path: Path, tiny: Path, change: dict[str, Any], text: str
) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", tiny, **change)
    with pytest.raises(ModelFileError) as caught:
        GgufCheckpoint(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


def test_a_missing_tensor_is_named_when_a_model_asks_for_it(tmp_path: Path, tiny: Path) -> None:
    left_out = "model.layers.1.self_attn.k_proj.weight"
    checkpoint = GgufCheckpoint(tiny_gguf(tmp_path / "x.gguf", tiny, leave_out=left_out))
    with pytest.raises(CheckpointError, match=f"tensor '{left_out}' is missing"):
        checkpoint.tensor(left_out)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "truncated: a GGUF file has at least 24 bytes"),
        (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file: it starts with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it may be big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated: 1152921504606846976 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor infos"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"x" * 9,
            "truncated: a key's name",
        ),
    ],
)
def test_a_broken_start_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError) as caught:
        GgufCheckpoint(path)
    assert text in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("whole") / "whole.gguf", tiny).read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_or_damaged_file_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ModelFileError):
            GgufCheckpoint(path)
        return
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        checkpoint = GgufCheckpoint(path)
        checkpoint.doc()
    except ModelFileError:
        return
    assert checkpoint.nbytes <= len(whole)
