"""The DeepSeek-V3 family: latent attention, a mixture of experts, and a module that drafts tokens.

All heads attend over one compressed latent and one rotated key a token, which are what the cache holds. Most layers
have many small experts, of which a row uses a few, and a shared one. The module that drafts (multi-token prediction)
is one more layer: from token j and the main model's hidden state of position j - 1 it guesses token j + 1.
Weights go by their Hugging Face names.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.extras import needs
from headrace.models import DType, KvDType, UnsupportedModelError, dtype_of_weights
from headrace.models.compiled import CompiledModel
from headrace.models.config import ModelConfig
from headrace.models.config_deepseek import DeepseekConfig
from headrace.models.deepseek_mtp import find_mtp
from headrace.models.deepseek_weights import (
    DeepseekLayer,
    DeepseekWeights,
    Fp8Backend,
    Share,
    load_weights,
)
from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.survey import SurveyBackend, names_read, survey
from headrace.models.on_cpu import in_own_memory, on_cpu
from headrace.models.rope import attention_scale, rope_of
from headrace_kernels.ops import MlaAttention, MlaBackend, MlaStep, Value
from headrace_kernels.torch_if_loaded import type_of

if TYPE_CHECKING:
    from headrace_kernels.moe.placed import PlacedLayer
    from headrace_kernels.native import NativeBackend

# From which on GPUs multiply e4m3: Ada and Hopper.
FP8_CAPABILITY = (8, 9)

# Of the norms inside of attention, whatever rms_norm_eps is.
LATENT_EPS = 1e-6


def forward(step: MlaStep, weights: DeepseekWeights, config: ModelConfig) -> Value:
    """Logits of the wanted rows."""
    eps = config.rms_norm_eps
    x = step.embed(weights.embedding)
    for i, layer in enumerate(weights.layers):
        x = decoder_layer(step, x, layer, i, config)
    if weights.mtp is not None and deepseek_of(config).mtp_hidden_state == "normed":
        x = step.rms_norm(x, weights.norm, eps)
        step.keep_hidden(x)
        step.pool_rows(x)
        return step.linear(step.wanted_rows(x), weights.head)
    if weights.mtp is not None:
        step.keep_hidden(x)
    step.pool_rows(x, weights.norm, eps)
    return step.linear(step.rms_norm(step.wanted_rows(x), weights.norm, eps), weights.head)


def draft(step: MlaStep, weights: DeepseekWeights, config: ModelConfig) -> Value:
    """Draft logits of the wanted rows, over the tokens of the draft head."""
    mtp, eps = weights.mtp, config.rms_norm_eps
    assert mtp is not None
    token = step.rms_norm(step.embed(weights.embedding), mtp.token_norm, eps)
    hidden = step.rms_norm(step.hidden(), mtp.hidden_norm, eps)
    x = step.linear(step.concat(token, hidden), mtp.join)
    x = decoder_layer(step, x, mtp.layer, config.num_layers, config)
    if deepseek_of(config).mtp_chain_hidden_state == "normed":
        x = step.rms_norm(x, mtp.norm, eps)
        step.keep_hidden(x)
        return step.linear(step.wanted_rows(x), mtp.head)
    step.keep_hidden(x)
    return step.linear(step.rms_norm(step.wanted_rows(x), mtp.norm, eps), mtp.head)


def decoder_layer(
    step: MlaStep, x: Value, layer: DeepseekLayer, index: int, config: ModelConfig
) -> Value:
    """Attention, then the experts or the MLP; `index` is that of its cache."""
    eps = config.rms_norm_eps
    h = step.rms_norm(x, layer.attention_norm, eps)
    qkv = step.linear(h, layer.qkv_a)
    q = step.columns(qkv, 0, layer.q_width)
    latent = step.columns(qkv, layer.q_width, layer.q_width + layer.latent_width)
    if layer.low_rank is not None:
        q = step.linear(step.rms_norm(q, layer.low_rank.norm, LATENT_EPS), layer.low_rank.q_b)
    q = step.mla_store(q, latent, layer.latent_norm, LATENT_EPS, index)
    x = step.linear(step.mla_attention(q, layer.kv_b, index), layer.out, residual=x)
    h = step.rms_norm(x, layer.mlp_norm, eps)
    if layer.mlp is None:
        return step.moe(h, layer.experts, x)
    gate_up = step.linear(h, layer.mlp.gate_up)
    return step.linear(step.silu_mul(gate_up), layer.mlp.down, residual=x)


class Deepseek(CompiledModel):
    """The DeepSeek-V3 family on one backend."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DeepseekWeights,
        backend: MlaBackend,
        block_tokens: int,
        share: Share | None = None,
    ) -> None:
        run = backend.compile(partial(forward, weights=weights, config=config))
        mtp = weights.mtp
        layers = [*weights.layers, *([mtp.layer] if mtp is not None else [])]
        drafting = (
            None
            if mtp is None
            else backend.compile_draft(partial(draft, weights=weights, config=config))
        )
        super().__init__(config, backend, run, block_tokens, drafting)
        self.answers_apart = backend.answers_apart
        self.slot_store = backend
        self.expert_layers = [layer for layer in layers if layer.experts is not None]
        self.draft_token_ids = None if mtp is None else mtp.token_ids
        self.experts = None if share is None else share.spread

    @property
    def placed_layers(self) -> list[PlacedLayer]:
        """Those whose experts may move between ranks, in the order of layers."""
        from headrace_kernels.moe.placed import PlacedDispatch, PlacedLayer  # torch brings them

        return [
            PlacedLayer(store=self.slot_store, experts=layer.experts, dispatch=layer.dispatch)
            for layer in self.expert_layers
            if isinstance(layer.dispatch, PlacedDispatch)
        ]


def load_deepseek(
    checkpoint: Checkpoint,
    *,
    dtype: DType,
    device: str,
    block_tokens: int,
    mtp: bool,
    kv_dtype: KvDType = "auto",
    share: Share | None = None,
) -> Deepseek:
    """The model of `checkpoint` on the backend of `device`, or what a rank holds of it.

    Raises `UnsupportedModelError`, and `CheckpointError`.
    """
    config = checkpoint.config
    attention = attention_of(config, block_tokens, mtp=mtp)
    if mtp:
        find_mtp(checkpoint)  # before anything large is read
    device_type = type_of(device)
    name = dtype_of_weights(config, dtype, device_type)
    if device_type == "cpu":
        if kv_dtype != "auto":
            raise UnsupportedModelError(
                f"a KV cache in {kv_dtype} is for GPUs; on the CPU it is float32"
            )
        native, weights = _on_cpu(checkpoint, attention, name, mtp=mtp, share=share)
        return Deepseek(config, weights, native, block_tokens, share)

    with needs("worker", f"a deepseek_v3 on {device}"):
        import torch

        from headrace_kernels.torch_mla import TRITON, TorchMlaBackend

    backend = TorchMlaBackend(
        attention,
        dtype=name,
        device=device,
        kernels=TRITON,
        kv_dtype="float8_e4m3fn" if kv_dtype == "fp8" else None,
    )
    # FP8 weights stay as they are where nobody asks for another dtype and the device multiplies them.
    capability = torch.cuda.get_device_capability(device)
    fp8 = backend if dtype == "auto" and capability >= FP8_CAPABILITY else None
    weights = _read(checkpoint, backend, mtp=mtp, fp8=fp8, share=share)
    return Deepseek(config, weights, backend, block_tokens, share)


def _on_cpu(
    checkpoint: Checkpoint, attention: MlaAttention, dtype: str, *, mtp: bool, share: Share | None
) -> tuple[NativeBackend, DeepseekWeights]:
    """Whole models come from the cache. A rank of a group packs its own: experts may move into its slots."""
    names = _names(checkpoint, mtp=mtp, fp8=False, share=share)
    load = partial(load_weights, mtp=mtp, share=share)
    if share is not None:
        return in_own_memory(checkpoint, attention, dtype, names, load)
    return on_cpu(checkpoint, attention, dtype, names, load, drafts=mtp)


def _read(
    checkpoint: Checkpoint,
    backend: MlaBackend,
    *,
    mtp: bool,
    fp8: Fp8Backend | None,
    share: Share | None,
) -> DeepseekWeights:
    names = _names(checkpoint, mtp=mtp, fp8=fp8 is not None, share=share)
    with checkpoint.read_ahead(names):
        return load_weights(checkpoint, backend, mtp=mtp, fp8=fp8, share=share)


def _names(checkpoint: Checkpoint, *, mtp: bool, fp8: bool, share: Share | None) -> list[str]:
    """All tensors that are read, once all that there is has been checked, also what other ranks read."""

    def load(surveyed: Checkpoint, nothing: SurveyBackend, part: Share | None) -> DeepseekWeights:
        keeps: Any = nothing
        return load_weights(surveyed, keeps, mtp=mtp, fp8=keeps if fp8 else None, share=part)

    names = survey(checkpoint, partial(load, part=None))
    return names if share is None else names_read(checkpoint, partial(load, part=share))


def attention_of(config: ModelConfig, block_tokens: int, *, mtp: bool) -> MlaAttention:
    """Raises `UnsupportedModelError` for rope types that are not implemented."""
    deepseek = deepseek_of(config)
    rope = rope_of(config)
    return MlaAttention(
        layers=config.num_layers + mtp,
        heads=config.num_heads,
        kv_lora_rank=deepseek.kv_lora_rank,
        nope_dim=deepseek.nope_dim,
        rope_dim=deepseek.rope_dim,
        v_dim=deepseek.v_dim,
        block_tokens=block_tokens,
        context_tokens=config.context_tokens,
        scale=attention_scale(config, deepseek.nope_dim + deepseek.rope_dim),
        inv_freq=rope.inv_freq.tolist(),
        rope_scale=rope.scale,
        rope_interleave=deepseek.rope_interleave,
        hidden_size=config.hidden_size,
        mtp=mtp,
    )


def deepseek_of(config: ModelConfig) -> DeepseekConfig:
    assert config.deepseek is not None, "of a deepseek_v3 config.json"
    return config.deepseek
