"""A llama computed exactly by the code of DeepSeek-V3: the same weights, in the places that that family has.

Attention. All key heads side by side become the one rotated key that DeepSeek shares among heads (`nope` is 0); a
query head is zero outside its own group's part of it, and a longrope table of factors gives every part llama's own
frequencies. The value heads side by side become the latent, from which `kv_b` takes each head's part. DeepSeek norms
the latent; some elements of it that are constant and large (a bias) and that nothing reads make that a
multiplication by one: the values count for less than float32 can tell. DeepSeek's longer keys would divide the scores
by more; `mscale_all_dim` makes up for it, so that every weight keeps its bits.

MLP. Its neurons, in their order, are cut into one slice for the shared expert and equal ones for routed experts; the
router takes all of them with weight one. In the *paired* form each routed slice is there twice, with opposite rows of
the router: of each pair one is taken, which depends on the token.

Nothing is approximated, but nothing is saved either: all neurons are computed for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.config import ModelConfig, ModelFileError
from headrace.models.rope import UnsupportedRopeError, rope_of

__all__ = [
    "Form",
    "ReexpressError",
    "as_deepseek_config",
    "as_deepseek_layer",
    "form_of",
    "layer_shapes",
    "llama_layer_shapes",
    "model_shapes",
    "model_tensors",
]

ROUTED_SLICES = 16
SLICE_STEP = 64  # neurons; slices of whole steps keep llama's groups of int8 weights
DENSE_LAYERS = 1  # first layers without experts, as DeepSeek has them
NORMED = 4096.0  # root mean square of every latent before its norm, and the norm's weight
ROUTER_ROW = 2.0**40  # so large that the sigmoid of a score is 0 or 1
STRETCH = math.e  # `factor` of the rope table: its logarithm is 1

Weights = NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]
Take = Callable[[str, tuple[int, ...]], Weights]  # the tensor of a name, in the given shape


class ReexpressError(ModelFileError):
    """DeepSeek-V3 has no place for something in the model; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Sizes of a llama, and of what becomes of it. All in elements."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    latent: int
    constants: int  # elements of the latent, after the values and perhaps some zeros
    slice_width: int
    paired: bool

    @property
    def values(self) -> int:
        """Width of all value heads, and of all key heads, which is the shared rotated key."""
        return self.kv_heads * self.head_dim

    @property
    def shared_width(self) -> int:
        return self.ffn - ROUTED_SLICES * self.slice_width

    @property
    def experts(self) -> int:
        return ROUTED_SLICES * (2 if self.paired else 1)


def form_of(config: ModelConfig, *, paired: bool = False) -> Form:
    """Raises `ReexpressError` where the form would not be exact."""
    if config.model_type != "llama":
        raise ReexpressError(
            f"model_type {config.model_type!r} cannot be re-expressed as deepseek_v3; only llama can"
        )
    if config.attention_bias:
        raise ReexpressError(
            "attention_bias: deepseek_v3 has no bias for what queries are made with"
        )
    if config.mlp_bias:
        raise ReexpressError("mlp_bias: the experts of deepseek_v3 have no biases")
    if config.sliding_window is not None and config.sliding_window < config.context_tokens:
        raise ReexpressError("sliding_window: deepseek_v3 attends to all of a sequence")
    values = config.num_kv_heads * config.head_dim
    latent, constants = _latent(values)
    return Form(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        latent=latent,
        constants=constants,
        slice_width=_slice_width(config.intermediate_size),
        paired=paired,
    )


def _latent(values: int) -> tuple[int, int]:
    """A width of the latent and its number of constants, whose ratio is a square: then all numbers are exact."""
    latent = values
    while True:
        latent = (latent // SLICE_STEP + 1) * SLICE_STEP
        for root in range(2, 17):
            if latent % root**2 == 0 and latent // root**2 <= latent - values:
                return latent, latent // root**2


def _slice_width(ffn: int) -> int:
    """Of a routed slice: as wide as leaves whole slices for the shared expert."""
    if ffn % SLICE_STEP == 0:
        for width in range(ffn // ROUTED_SLICES // SLICE_STEP * SLICE_STEP, 0, -SLICE_STEP):
            shared = ffn - ROUTED_SLICES * width
            if shared and shared % width == 0:
                return width
    raise ReexpressError(
        f"intermediate_size {ffn} cannot be cut into {ROUTED_SLICES} experts and a shared one: expected a "
        f"multiple of {SLICE_STEP}, at least {(ROUTED_SLICES + 1) * SLICE_STEP}"
    )


def as_deepseek_config(config: ModelConfig, form: Form) -> dict[str, Any]:
    """The config.json of the re-expressed model."""
    try:
        rope = rope_of(config)
    except UnsupportedRopeError as error:
        raise ReexpressError(str(error)) from error
    theta, width = config.rope.theta, form.values
    wanted = np.tile(rope.inv_freq.astype(np.float64), form.kv_heads)
    factors = (theta ** (-np.arange(0, width, 2, dtype=np.float64) / width) / wanted).tolist()
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": STRETCH,
        "attention_factor": rope.scale,
        "original_max_position_embeddings": config.context_tokens,
    }
    if form.kv_heads > 1:
        # Scores are divided by the root of `width`, and multiplied by (0.1 * mscale_all_dim * ln(factor) + 1)^2.
        parameters["mscale_all_dim"] = 10.0 * (form.kv_heads**0.25 - 1.0)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config.vocab_size,
        "hidden_size": form.hidden,
        "intermediate_size": form.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.heads,
        "q_lora_rank": None,
        "kv_lora_rank": form.latent,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": form.values,
        "v_head_dim": form.head_dim,
        "attention_bias": True,
        "rope_interleave": True,
        "rope_theta": theta,
        "rope_parameters": parameters,
        "first_k_dense_replace": DENSE_LAYERS,
        "n_routed_experts": form.experts,
        "num_experts_per_tok": ROUTED_SLICES,
        "n_shared_experts": form.shared_width // form.slice_width,
        "moe_intermediate_size": form.slice_width,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(ROUTED_SLICES),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.context_tokens,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "float32",
    }


def llama_layer_shapes(form: Form, ffn: int) -> Shapes:
    """What `as_deepseek_layer` takes: names and shapes of a llama layer with `ffn` neurons."""
    hidden, q = form.hidden, form.heads * form.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (form.values, hidden),
        "self_attn.v_proj.weight": (form.values, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        **_mlp_shapes("mlp", hidden, ffn),
    }


def layer_shapes(form: Form, *, dense: bool) -> Shapes:
    """Names and shapes of one layer, in the order in which they are stored."""
    hidden, width, shared = form.hidden, form.slice_width, form.shared_width
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (form.heads * form.values, hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (form.latent + form.values, hidden),
        "self_attn.kv_a_proj_with_mqa.bias": (form.latent + form.values,),
        "self_attn.kv_a_layernorm.weight": (form.latent,),
        "self_attn.kv_b_proj.weight": (form.heads * form.head_dim, form.latent),
        "self_attn.o_proj.weight": (hidden, form.heads * form.head_dim),
        "self_attn.o_proj.bias": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if dense:
        return shapes | _mlp_shapes("mlp", hidden, form.ffn)
    shapes |= {
        "mlp.gate.weight": (form.experts, hidden),
        "mlp.gate.e_score_correction_bias": (form.experts,),
    }
    for expert in range(form.experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, width)
    return shapes | _mlp_shapes("mlp.shared_experts", hidden, shared)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def as_deepseek_layer(
    take: Take, form: Form, *, seed: int, dense: bool = False, ffn: int | None = None
) -> Iterator[tuple[str, Weights]]:
    """The tensors of one llama layer as those of `layer_shapes`, one after the other.

    `take` is asked for llama's names, such as "self_attn.q_proj.weight". A layer whose MLP has only `ffn` neurons
    gets further ones that are zero. Layers of other `seed`s route differently in the paired form.
    """
    hidden, heads, head_dim, width = form.hidden, form.heads, form.head_dim, form.values
    yield "input_layernorm.weight", take("input_layernorm.weight", (hidden,))

    group = heads // form.kv_heads
    q = _paired_rows(take("self_attn.q_proj.weight", (heads * head_dim, hidden)), head_dim)
    wide = np.zeros((heads, form.kv_heads, head_dim, hidden), np.float32)
    for head in range(heads):
        wide[head, head // group] = q[head]
    yield "self_attn.q_proj.weight", wide.reshape(heads * width, hidden)

    k = _paired_rows(take("self_attn.k_proj.weight", (width, hidden)), head_dim)
    v = take("self_attn.v_proj.weight", (width, hidden))
    rest = np.zeros((form.latent - width, hidden), np.float32)
    kv = np.concatenate([v, rest, k.reshape(width, hidden)])
    yield "self_attn.kv_a_proj_with_mqa.weight", kv
    constant = NORMED * math.sqrt(form.latent // form.constants)
    bias = np.zeros(form.latent + width, np.float32)
    bias[form.latent - form.constants : form.latent] = constant
    yield "self_attn.kv_a_proj_with_mqa.bias", bias
    norm = np.zeros(form.latent, np.float32)  # the constants are not read, so they need not stay
    norm[:width] = NORMED
    yield "self_attn.kv_a_layernorm.weight", norm

    values = np.zeros((heads, head_dim, form.latent), np.float32)
    for head in range(heads):
        start = head // group * head_dim
        values[head, :, start : start + head_dim] = np.eye(head_dim, dtype=np.float32)
    yield "self_attn.kv_b_proj.weight", values.reshape(heads * head_dim, form.latent)
    yield (
        "self_attn.o_proj.weight",
        take("self_attn.o_proj.weight", (hidden, heads * head_dim)),
    )
    yield "self_attn.o_proj.bias", np.zeros(hidden, np.float32)
    yield "post_attention_layernorm.weight", take("post_attention_layernorm.weight", (hidden,))
    yield from _mlp(take, form, dense=dense, seed=seed, ffn=form.ffn if ffn is None else ffn)


def _paired_rows(rows: Weights, head_dim: int) -> Weights:
    """Rows of heads from llama's halves (i, i + d/2) to DeepSeek's pairs (2i, 2i + 1): [heads, head_dim, hidden]."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(-1, head_dim, rows.shape[1])


def _mlp(
    take: Take, form: Form, *, dense: bool, seed: int, ffn: int
) -> Iterator[tuple[str, Weights]]:
    """The MLP, or the slices of it as experts; slice 0 goes to the shared one."""
    hidden, experts = form.hidden, form.experts
    missing = form.ffn - ffn
    gate = np.pad(take("mlp.gate_proj.weight", (ffn, hidden)), ((0, missing), (0, 0)))
    up = np.pad(take("mlp.up_proj.weight", (ffn, hidden)), ((0, missing), (0, 0)))
    down = np.pad(take("mlp.down_proj.weight", (hidden, ffn)), ((0, 0), (0, missing)))

    def neurons(prefix: str, start: int, stop: int) -> Iterator[tuple[str, Weights]]:
        yield f"{prefix}.gate_proj.weight", gate[start:stop]
        yield f"{prefix}.up_proj.weight", up[start:stop]
        yield f"{prefix}.down_proj.weight", down[:, start:stop]

    if dense:
        yield from neurons("mlp", 0, form.ffn)
        return
    yield "mlp.gate.weight", _router(form, seed)
    yield "mlp.gate.e_score_correction_bias", np.zeros(experts, np.float32)
    for expert in range(experts):
        start = form.shared_width + expert % ROUTED_SLICES * form.slice_width
        yield from neurons(f"mlp.experts.{expert}", start, start + form.slice_width)
    yield from neurons("mlp.shared_experts", 0, form.shared_width)


def _router(form: Form, seed: int) -> Weights:
    """Zero: every expert is taken, with the same weight. Paired: rows of random signs, and their opposites.

    Of two opposite scores, one is above 0 and its sigmoid 1; as many experts as are above 0 are taken.
    """
    if not form.paired:
        return np.zeros((form.experts, form.hidden), np.float32)
    shape = (ROUTED_SLICES, form.hidden)
    # The raw stream of a bit generator is the same in every version of numpy.
    bits = np.random.PCG64(seed).random_raw(math.prod(shape)) >> np.uint64(63)
    rows = np.where(bits.astype(bool), ROUTER_ROW, -ROUTER_ROW).astype(np.float32).reshape(shape)
    return np.concatenate([rows, -rows])


def model_shapes(config: ModelConfig, form: Form) -> Shapes:
    """Names and shapes of the whole re-expressed model, in the order in which they are stored."""
    table = (config.vocab_size, form.hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config.num_layers):
        of_layer = layer_shapes(form, dense=layer < DENSE_LAYERS)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (form.hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


def model_tensors(take: Take, config: ModelConfig, form: Form) -> Iterator[tuple[str, Weights]]:
    """The tensors of `model_shapes`, of which one at a time is in memory, or one layer's MLP."""
    table = (config.vocab_size, form.hidden)
    yield "model.embed_tokens.weight", take("model.embed_tokens.weight", table)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."

        def of_layer(name: str, shape: tuple[int, ...], prefix: str = prefix) -> Weights:
            return take(prefix + name, shape)

        tensors = as_deepseek_layer(of_layer, form, seed=layer, dense=layer < DENSE_LAYERS)
        for name, tensor in tensors:
            yield prefix + name, tensor
    yield "model.norm.weight", take("model.norm.weight", (form.hidden,))
    if not config.tie_word_embeddings:
        yield "lm_head.weight", take("lm_head.weight", table)
