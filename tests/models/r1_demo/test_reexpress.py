"""A llama as DeepSeek-V3: the same answers by transformers' own implementations, the same weights, and what is refused.

Tolerance: both sides sum in float32 but in other orders; logits of these models have a standard deviation of about 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models import load_model
from headrace.models.config import ModelFileError, parse_config
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.safetensors_file import SafetensorsFile
from headrace.models.r1_demo.deepseek_folder import plan
from headrace.models.r1_demo.reexpress import Form, ReexpressError, as_deepseek_layer, form_of
from headrace.mtp_training.head_file import read_head
from headrace_kernels.upload import tensor_of
from helpers.models.deepseek_oracle import BackendName, load
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper
from helpers.models.tiny_model import tiny_llama, tiny_mtp_head

FFN = 17 * 64  # the least that can be cut


def converted(
    folder: Path, source: Path, *, paired: bool = False, head: Path | None = None
) -> Path:
    folder.mkdir()
    plan(SafetensorsCheckpoint(source), paired=paired, head=head).write(folder, lambda *_: None)
    return folder


def of_transformers(folder: Path) -> Any:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM  # takes seconds

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = of_transformers(folder)
    with torch.inference_mode():
        return model(ids).logits


def llama_config(**fields: Any) -> Any:
    raw = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return parse_config(raw | fields)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"rope_scaling": LLAMA3, "intermediate_size": 24 * 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 1024},
    ],
    ids=["grouped", "all-heads", "one-kv-head", "llama3", "yarn"],
)
@pytest.mark.parametrize("paired", [False, True], ids=["exact", "paired"])
def test_transformers_gives_the_same_logits(
    tmp_path: Path, fields: dict[str, Any], paired: bool
) -> None:
    source = tiny_llama(tmp_path / "llama", **({"intermediate_size": FFN} | fields))
    target = converted(tmp_path / "deepseek", source, paired=paired)
    ids = torch.randint(0, 285, (3, 200), generator=torch.Generator().manual_seed(1))
    expected, found = logits(source, ids), logits(target, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_conversion_repeats_to_the_byte(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    first = converted(tmp_path / "first", source, paired=True)
    second = converted(tmp_path / "second", source, paired=True)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_every_neuron_is_where_it_was(tmp_path: Path) -> None:
    """Slices in order, each of whole groups of 64: int8 weights get llama's own scales."""
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    target = converted(tmp_path / "deepseek", source)
    before = SafetensorsFile(source / "model.safetensors")
    after = SafetensorsFile(target / "model.safetensors")
    mlp = "model.layers.1.mlp"
    parts = [f"{mlp}.shared_experts", *(f"{mlp}.experts.{expert}" for expert in range(16))]
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        pieces = [tensor_of(after.tensor(f"{part}.{name}.weight")) for part in parts]
        assert torch.equal(torch.cat(pieces, dim), tensor_of(before.tensor(f"{mlp}.{name}.weight")))
        assert {piece.shape[dim] % 64 for piece in pieces} == {0}
    for name in ("o_proj", "q_proj"):  # queries: more rows, of which the further ones are zero
        was = tensor_of(before.tensor(f"model.layers.1.self_attn.{name}.weight")).flatten()
        now = tensor_of(after.tensor(f"model.layers.1.self_attn.{name}.weight")).flatten()
        assert torch.equal(now[now != 0].sort().values, was.sort().values)


def test_the_paired_router_takes_each_slice_once_and_depends_on_the_token() -> None:
    form = form_of(llama_config(), paired=True)
    tensors = dict(as_deepseek_layer(lambda _, shape: np.ones(shape, np.float32), form, seed=3))
    x = np.random.default_rng(2).standard_normal((500, form.hidden)).astype(np.float32)
    scores = torch.from_numpy(x @ tensors["mlp.gate.weight"].T).sigmoid()
    taken = scores.topk(16).indices.sort().values
    assert torch.equal((taken % 16).sort().values, torch.arange(16).expand(500, 16))
    weights = scores.gather(1, taken)
    assert torch.equal(weights, torch.ones_like(weights))  # so each counts for exactly one
    assert len({tuple(row) for row in taken.tolist()}) > 450
    load = torch.bincount(taken.flatten(), minlength=32)
    assert load.min() > 100


@pytest.mark.parametrize(
    ("ffn", "width"), [(1088, 64), (1536, 64), (5632, 256), (8192, 256), (11008, 256), (14336, 512)]
)
def test_slices_fill_the_whole_width(ffn: int, width: int) -> None:
    form = form_of(llama_config(intermediate_size=ffn))
    assert form.slice_width == width
    assert form.shared_width % width == 0
    assert form.shared_width + 16 * width == ffn


@pytest.mark.parametrize("values", [2, 62, 64, 192, 512, 1024])
def test_the_norm_of_the_latent_is_a_multiplication_by_one(values: int) -> None:
    form = form_of(llama_config(num_key_value_heads=1, head_dim=values))
    layer = dict(as_deepseek_layer(lambda _, shape: np.zeros(shape, np.float32), form, seed=0))
    bias = layer["self_attn.kv_a_proj_with_mqa.bias"][: form.latent]
    latent = torch.from_numpy(bias)
    latent[:values] = torch.randn(values, generator=torch.Generator().manual_seed(0))
    weight = torch.from_numpy(layer["self_attn.kv_a_layernorm.weight"])
    assert torch.equal(
        torch.nn.functional.rms_norm(latent, (form.latent,), weight, 1e-6)[:values], latent[:values]
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"intermediate_size": 1100}, "intermediate_size 1100 cannot be cut"),
        ({"intermediate_size": 1024}, "at least 1088"),
    ],
)
def test_what_has_no_place_is_named(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    source = tiny_llama(tmp_path / "llama", **({"intermediate_size": FFN} | fields))
    with pytest.raises(ReexpressError, match=text) as caught:
        plan(SafetensorsCheckpoint(source))
    assert str(source) in str(caught.value)


def test_rope_that_changes_with_the_length_is_named(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN, rope_scaling=scaling)
    with pytest.raises(ReexpressError, match="'dynamic' is not supported"):
        plan(SafetensorsCheckpoint(source))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    checkpoint = SafetensorsCheckpoint(source)
    checkpoint._infos.pop("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        plan(checkpoint).write(tmp_path / "out", lambda *_: None)


def test_a_narrow_head_becomes_the_layer_after_the_last(tmp_path: Path) -> None:
    """As if it were one more llama layer whose other neurons are zero."""
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    head = tiny_mtp_head(tmp_path / "head.safetensors", source, ffn=640, draft_ids=[5, 3, 284])
    target = converted(tmp_path / "deepseek", source, paired=True, head=head)
    checkpoint = SafetensorsFile(target / "model.safetensors")
    given = SafetensorsFile(head)
    form: Form = plan(SafetensorsCheckpoint(source), paired=True).form

    def padded(name: str, shape: tuple[int, ...]) -> Any:
        small = tensor_of(given.tensor(name)).float().numpy()
        return np.pad(small, [(0, n - m) for n, m in zip(shape, small.shape, strict=True)])

    expected = dict(as_deepseek_layer(padded, form, seed=2))
    for name, tensor in expected.items():
        found = tensor_of(checkpoint.tensor(f"model.layers.2.{name}"))
        assert torch.equal(found, torch.from_numpy(tensor.copy())), name
    for name in ("enorm", "hnorm", "eh_proj"):
        found = tensor_of(checkpoint.tensor(f"model.layers.2.{name}.weight"))
        assert torch.equal(found, tensor_of(given.tensor(f"{name}.weight")).float())
    norm = tensor_of(checkpoint.tensor("model.layers.2.shared_head.norm.weight"))
    assert torch.equal(norm, tensor_of(given.tensor("norm.weight")).float())
    assert checkpoint.tensor("model.layers.2.draft_token_ids").tolist() == [5, 3, 284]
    raw = SafetensorsCheckpoint(target).config.raw
    assert raw["num_nextn_predict_layers"] == 1
    assert raw["mtp_draft_vocab_size"] == 3
    assert raw["mtp_hidden_state"] == "raw"
    assert raw["mtp_chain_hidden_state"] == "normed"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"drop": "eh_proj.weight"}, "'eh_proj.weight' is missing"),
        ({"drop": "self_attn.k_proj.weight"}, "'self_attn.k_proj.weight' is missing"),
        ({"ffn": FFN + 64}, "expected 1 to 1088 neurons, found 1152"),
        (
            {"hidden_size": 32},
            r"enorm.weight: expected shape \[64\], found \[32\]; was the head trained",
        ),
        ({"draft_ids": [0, 285]}, "expected token ids from 0 to 284"),
        ({"draft_ids": []}, "expected token ids"),
        ({"choices": {"mtp_hidden_state": "cooked"}}, "expected normed or raw, found 'cooked'"),
        ({"integer": "norm.weight"}, "norm.weight: expected floating point, found int32"),
    ],
)
def test_a_head_that_does_not_fit_is_named(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    options: dict[str, Any] = {"ffn": 128, **change}
    head = tiny_mtp_head(tmp_path / "head.safetensors", source, **options)
    with pytest.raises(ModelFileError, match=text) as caught:
        plan(SafetensorsCheckpoint(source), head=head)
    assert str(head) in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("paired", [False, True], ids=["exact", "paired"])
def test_our_own_deepseek_gives_the_logits_of_our_llama(
    tmp_path: Path, paired: bool, backend: BackendName
) -> None:
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN, rope_scaling=LLAMA3)
    target = converted(tmp_path / "deepseek", source, paired=paired)
    llama = load_model(
        SafetensorsCheckpoint(source), dtype="float32", device="cpu", block_tokens=16
    )
    deepseek = load(target, backend, block_tokens=16)
    tokens = np.random.default_rng(3).integers(0, 285, 300).tolist()
    found, expected = (Stepper(model, 16).whole(tokens) for model in (deepseek, llama))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("paired", [False, True], ids=["exact", "paired"])
def test_a_re_expressed_head_drafts_what_its_training_saw(tmp_path: Path, paired: bool) -> None:
    """First and chained drafts of the engine's model are those of the module that is trained, in llama's form."""
    source = tiny_llama(tmp_path / "llama", intermediate_size=FFN)
    ids, normed = [7, 50, 3, 200, 284], {"mtp_hidden_state": "normed"}
    path = tmp_path / "head.safetensors"
    head_file = tiny_mtp_head(path, source, ffn=640, draft_ids=sorted(ids), choices=normed)
    target = converted(tmp_path / "deepseek", source, paired=paired, head=head_file)
    head, kept = read_head(head_file, SafetensorsCheckpoint(source))
    tokens = np.random.default_rng(3).integers(0, 285, 52).tolist()
    llama = of_transformers(source)
    with torch.inference_mode():
        said = llama(torch.tensor([tokens]), output_hidden_states=True)
        table: Any = llama.get_input_embeddings().weight
        unrolled = head.unroll(table[tokens[1:]][None], said.hidden_states[-1][:, :-1], 2)
        first, second = (x[0] @ table[torch.from_numpy(kept).long()].T for x in unrolled)

    model = load(target, "native", block_tokens=16, mtp=True)
    drafter = Drafter(Stepper(model, 16))
    stream = drafter.stepper.stream(tokens)
    found = drafter.step([(stream, 50)])[1][0]  # drafts of positions 1 to 50
    torch.testing.assert_close(found, first[:50], rtol=0, atol=2e-4)
    chained = drafter.chain([stream])[0]  # of position 51, which reads what that of 50 said
    torch.testing.assert_close(chained[0], second[50], rtol=0, atol=2e-4)
    assert model.draft_token_ids is not None
    assert model.draft_token_ids.tolist() == sorted(ids)
