"""The layer that drafts: its guesses equal those of transformers' own layer, wherever its hidden states come from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.models import UnsupportedModelError, load_model
from headrace.models.deepseek import Deepseek
from headrace.models.deepseek_mtp import find_mtp
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from helpers.models.deepseek_oracle import (
    VOCAB,
    BackendName,
    build,
    build_mtp,
    hidden_states,
    load,
    mtp_logits,
    mtp_rows,
    prompt,
)
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper, Stream
from helpers.models.tiny_model import tiny_llama

torch.set_num_threads(1)

BLOCK = 16
BACKENDS: list[BackendName] = ["native", "reference"]
CONFIGS: dict[str, dict[str, Any]] = {
    "as R1": {},
    "plain queries": {"q_lora_rank": None, "attention_bias": True, "qk_nope_head_dim": 0},
    "a dense drafting layer": {"first_k_dense_replace": 9},
    "tied": {"tie_word_embeddings": True},
}


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def configure(path: Path, **changes: Any) -> None:
    """Fields that transformers does not know, and would not save."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drafter(path: Path, backend: BackendName) -> Drafter:
    return Drafter(Stepper(load(path, backend, block_tokens=BLOCK, mtp=True), BLOCK))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_draft_logits_equal_transformers(name: str, backend: BackendName, tmp_path: Path) -> None:
    oracle, layer = build_mtp(tmp_path, **CONFIGS[name])
    drafts = drafter(tmp_path, backend)
    tokens = prompt(70)
    wanted = mtp_logits(
        oracle, layer, mtp_rows(oracle, layer, tokens, hidden_states(oracle, tokens).normed[:-1])
    )
    stream = drafts.stepper.stream(tokens)
    found = torch.cat([drafts.step([(stream, n)])[1][0] for n in (33, 20, 14, 1, 1, 1)])
    assert found.shape == (69, VOCAB)
    assert_close(found, wanted)

    cached = drafts.stepper.stream([*tokens[:50], *prompt(15, seed=4)], shared=stream, cached=48)
    hidden = hidden_states(oracle, list(cached.tokens)).normed[:-1]
    wanted = mtp_logits(oracle, layer, mtp_rows(oracle, layer, list(cached.tokens), hidden))
    found = drafts.step([(cached, 17)])[1][0]
    assert_close(found, wanted[47:])  # row 48 reads the tail of the last cached block


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_layer_is_the_formula(backend: BackendName, tmp_path: Path) -> None:
    oracle, layer = build_mtp(tmp_path)
    tokens = prompt(30)
    hidden = hidden_states(oracle, tokens).normed[:-1]
    embeds = oracle.model.embed_tokens(torch.tensor([tokens[1:]]))
    turns = oracle.model.rotary_emb(embeds, position_ids=torch.arange(1, 30)[None])
    with torch.inference_mode():
        rows = layer(embeds, hidden[None], turns, None, None, None)[0]
        theirs = oracle.lm_head(rows)
    drafts = drafter(tmp_path, backend)
    assert_close(drafts.step([(drafts.stepper.stream(tokens), 30)])[1][0], theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden_state", ["normed", "raw"])
@pytest.mark.parametrize("chain", ["normed", "raw"])
def test_chained_passes_read_the_one_before(
    hidden_state: str, chain: str, backend: BackendName, tmp_path: Path
) -> None:
    oracle, layer = build_mtp(tmp_path)
    configure(tmp_path, mtp_hidden_state=hidden_state, mtp_chain_hidden_state=chain)
    drafts = drafter(tmp_path, backend)
    streams: list[Stream] = []
    for i, n in enumerate((21, 40, 5)):  # the main pass knows n tokens, the chain guesses on
        streams.append(drafts.stepper.stream(prompt(n + 3, seed=i)))
    counts = [len(s.tokens) - 3 for s in streams]
    first = drafts.step(list(zip(streams, counts, strict=True)))[1]
    second, third = drafts.chain(streams), drafts.chain(streams)
    for i, (stream, n) in enumerate(zip(streams, counts, strict=True)):
        tokens = list(stream.tokens)
        hidden = getattr(hidden_states(oracle, tokens[:n]), hidden_state)
        rows = mtp_rows(oracle, layer, tokens[: n + 1], hidden)
        assert_close(first[i], mtp_logits(oracle, layer, rows))
        for found, end in ((second[i], n + 2), (third[i], n + 3)):
            kept = layer.post_norm(rows[-1:]) if chain == "normed" else rows[-1:]  # pyright: ignore[reportOptionalCall]
            hidden = torch.cat((hidden, kept.detach()))
            rows = mtp_rows(oracle, layer, tokens[:end], hidden)
            assert_close(found, mtp_logits(oracle, layer, rows[-1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reduced_head_guesses_among_its_tokens(backend: BackendName, tmp_path: Path) -> None:
    oracle, layer = build_mtp(tmp_path)
    ids = torch.randperm(VOCAB)[:50].sort().values.to(torch.int32)
    add_tensor(tmp_path, "model.layers.3.draft_token_ids", ids)
    configure(tmp_path, mtp_draft_vocab_size=50)
    drafts = drafter(tmp_path, backend)
    assert drafts.stepper.model.draft_token_ids is not None
    assert drafts.stepper.model.draft_token_ids.tolist() == ids.tolist()
    tokens = prompt(20)
    rows = mtp_rows(oracle, layer, tokens, hidden_states(oracle, tokens).normed[:-1])
    found = drafts.step([(drafts.stepper.stream(tokens), 20)])[1][0]
    assert_close(found, mtp_logits(oracle, layer, rows)[:, ids.long()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("index", "renamed"), [(0, True), (7, False), (58, True)])
def test_the_layer_is_found_under_any_index_and_either_name(
    index: int, renamed: bool, backend: BackendName, tmp_path: Path
) -> None:
    oracle, layer = build_mtp(tmp_path, index, renamed=renamed)
    # Copies that checkpoints have of the model's own, which nobody reads.
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        add_tensor(tmp_path, f"model.layers.{3 + index}.{name}", torch.zeros(VOCAB, 64))
    drafts = drafter(tmp_path, backend)
    tokens = prompt(20)
    rows = mtp_rows(oracle, layer, tokens, hidden_states(oracle, tokens).normed[:-1])
    found = drafts.step([(drafts.stepper.stream(tokens), 20)])[1][0]
    assert_close(found, mtp_logits(oracle, layer, rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafting_changes_no_answer_and_the_layout(backend: BackendName, tmp_path: Path) -> None:
    build_mtp(tmp_path)
    without = load(tmp_path, backend, block_tokens=BLOCK)
    drafts = drafter(tmp_path, backend)
    model = drafts.stepper.model
    tokens = prompt(60)
    found = drafts.step([(drafts.stepper.stream(tokens), 60)])[0][0]
    assert torch.equal(found, Stepper(without, BLOCK).whole(tokens))
    assert (model.drafts, without.drafts) == (True, False)
    assert "mtp" in model.kv_layout and "mtp" not in without.kv_layout
    layer_bytes = without.kv_block_bytes // 3
    assert model.kv_block_bytes == 4 * layer_bytes + 64 * 4
    pool = model.kv_pool()
    assert sum(r.nbytes for group in pool.groups for r in group) == pool.block_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_layer_group_is_not_told_of_before_its_drafting_layer(
    backend: BackendName, tmp_path: Path
) -> None:
    build_mtp(tmp_path, num_hidden_layers=9, first_k_dense_replace=8)
    for mtp, told in ((False, [1, 2]), (True, [1])):
        model = load(tmp_path, backend, block_tokens=BLOCK, mtp=mtp)
        assert groups_told_of(model) == told


def groups_told_of(model: Deepseek) -> list[int]:
    seen: list[int] = []

    def told(groups: int, fence: object = None) -> None:
        seen.append(groups)

    model.forward = partial(model.forward, progress=told)
    Stepper(model, BLOCK).whole(prompt(20))
    return seen


def add_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file)


def test_a_checkpoint_without_the_layer_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.layers.3.eh_proj.weight is missing"):
        load_model(
            SafetensorsCheckpoint(tmp_path),
            dtype="float32",
            device="cpu",
            block_tokens=BLOCK,
            mtp=True,
        )


def test_a_llama_does_not_draft(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "tiny"))
    with pytest.raises(UnsupportedModelError, match="no layer for multi-token prediction"):
        load_model(checkpoint, dtype="float32", device="cpu", block_tokens=BLOCK, mtp=True)


def test_the_layers_of_the_model_are_no_drafting_layers(tmp_path: Path) -> None:
    build_mtp(tmp_path)
    add_tensor(tmp_path, "model.layers.2.eh_proj.weight", torch.zeros(64, 128))
    assert find_mtp(SafetensorsCheckpoint(tmp_path)).index == 3


def broken(path: Path, change: str) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    ids = "model.layers.3.draft_token_ids"
    match change:
        case "missing":
            del tensors["model.layers.3.hnorm.weight"]
        case "shape":
            tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 64)
        case "ids without a size":
            tensors[ids] = torch.arange(9, dtype=torch.int32)
        case "size without ids":
            configure(path, mtp_draft_vocab_size=9)
        case "another size":
            tensors[ids] = torch.arange(8, dtype=torch.int32)
            configure(path, mtp_draft_vocab_size=9)
        case "float ids":
            tensors[ids] = torch.zeros(9)
            configure(path, mtp_draft_vocab_size=9)
        case "large ids":
            tensors[ids] = torch.arange(VOCAB - 8, VOCAB + 1, dtype=torch.int32)
            configure(path, mtp_draft_vocab_size=9)
        case _:
            tensors[ids] = torch.zeros(9, dtype=torch.int32)
            configure(path, mtp_draft_vocab_size=9)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("missing", r"tensor 'model.layers.3.hnorm.weight' is missing"),
        ("shape", r"eh_proj.weight: expected shape \[64, 128\], found \[64, 64\]"),
        ("ids without a size", r"draft_token_ids is there, but mtp_draft_vocab_size is missing"),
        ("size without ids", r"tensor 'model.layers.3.draft_token_ids' is missing"),
        ("another size", r"draft_token_ids: expected shape \[9\], found \[8\]"),
        ("float ids", r"draft_token_ids: expected int32, found float32"),
        ("large ids", r"expected different token ids from 0 to 319, found 9 of 9 from 312 to 320"),
        ("equal ids", r"expected different token ids from 0 to 319, found 1 of 9 from 0 to 0"),
    ],
)
def test_a_broken_drafting_layer_is_named(change: str, text: str, tmp_path: Path) -> None:
    build_mtp(tmp_path)
    broken(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, "reference", block_tokens=BLOCK, mtp=True)
