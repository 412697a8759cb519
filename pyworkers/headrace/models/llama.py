"""The llama family: pre-norm transformer with grouped-query attention, rotary positions and SwiGLU.

Weights go by their Hugging Face names. Biases, tied embeddings and rope scaling are as the config says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

from headrace.extras import needs
from headrace.models import DType, UnsupportedModelError, dtype_of_weights
from headrace.models.compiled import CompiledModel
from headrace.models.config import ModelConfig
from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.survey import SurveyBackend, survey
from headrace.models.on_cpu import on_cpu
from headrace.models.rope import rope_of
from headrace_kernels.ops import (
    Attention,
    Backend,
    EmbeddingTable,
    ForwardPass,
    LinearWeight,
    Value,
    Vector,
)
from headrace_kernels.torch_if_loaded import type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    attention_norm: Vector
    qkv: LinearWeight
    out: LinearWeight
    mlp_norm: Vector
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    embedding: EmbeddingTable
    layers: list[LlamaLayer]
    norm: Vector
    head: LinearWeight


def forward(step: ForwardPass, weights: LlamaWeights, eps: float) -> Value:
    """Logits of the wanted rows."""
    x = step.embed(weights.embedding)
    for i, layer in enumerate(weights.layers):
        h = step.rms_norm(x, layer.attention_norm, eps)
        qkv = step.rope_and_store_kv(step.linear(h, layer.qkv), i)
        x = step.linear(step.paged_attention(qkv, i), layer.out, residual=x)
        h = step.rms_norm(x, layer.mlp_norm, eps)
        x = step.linear(step.silu_mul(step.linear(h, layer.gate_up)), layer.down, residual=x)
    step.pool_rows(x, weights.norm, eps)
    return step.linear(step.rms_norm(step.wanted_rows(x), weights.norm, eps), weights.head)


class Llama(CompiledModel):
    """The llama family on one backend."""

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, backend: Backend, block_tokens: int
    ) -> None:
        run = backend.compile(partial(forward, weights=weights, eps=config.rms_norm_eps))
        super().__init__(config, backend, run, block_tokens)


def load_llama(checkpoint: Checkpoint, *, dtype: DType, device: str, block_tokens: int) -> Llama:
    """The model of `checkpoint` on the backend of `device`. Raises `UnsupportedModelError`."""
    config = checkpoint.config
    attention = attention_of(config, block_tokens)
    device_type = type_of(device)
    name = dtype_of_weights(config, dtype, device_type)

    def load(surveyed: Checkpoint, nothing: SurveyBackend) -> LlamaWeights:
        return load_weights(surveyed, cast("Backend", nothing))

    names = survey(checkpoint, load)
    if device_type == "cpu":
        backend, weights = on_cpu(checkpoint, attention, name, names, load_weights)
        return Llama(config, weights, backend, block_tokens)
    with needs("worker", f"a llama on {device}"):
        from headrace_kernels.torch_ops import TRITON, TorchBackend

    torch = TorchBackend(attention, dtype=name, device=device, kernels=TRITON)
    with checkpoint.read_ahead(names):
        weights = load_weights(checkpoint, torch)
    return Llama(config, weights, torch, block_tokens)


def attention_of(config: ModelConfig, block_tokens: int) -> Attention:
    """Raises `UnsupportedModelError` for rope types and windows that are not implemented."""
    if config.sliding_window is not None and config.sliding_window < config.context_tokens:
        raise UnsupportedModelError("sliding-window attention is not supported by llama")
    rope = rope_of(config)
    return Attention(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        context_tokens=config.context_tokens,
        scale=config.head_dim**-0.5,
        inv_freq=rope.inv_freq.tolist(),
        rope_scale=rope.scale,
    )


def load_weights(checkpoint: Checkpoint, backend: Backend) -> LlamaWeights:
    """Read every tensor once and hand it to the backend."""
    config = checkpoint.config
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(prefix: str, outputs: dict[str, int], inputs: int, bias: bool) -> LinearWeight:
        names = [f"{prefix}.{name}" for name in outputs]
        sizes = list(outputs.values())
        pairs = list(zip(names, sizes, strict=True))
        parts = [checkpoint.tensor(f"{name}.weight", (n, inputs)) for name, n in pairs]
        biases = [checkpoint.tensor(f"{name}.bias", (n,)) for name, n in pairs] if bias else []
        return backend.matrix(parts, checkpoint.stacked(biases) if bias else None)

    def vector(name: str) -> Vector:
        return backend.vector(checkpoint.tensor(f"{name}.weight", (hidden,)))

    def layer(prefix: str) -> LlamaLayer:
        attention = f"{prefix}.self_attn"
        return LlamaLayer(
            attention_norm=vector(f"{prefix}.input_layernorm"),
            qkv=matrix(
                attention,
                {"q_proj": q, "k_proj": kv, "v_proj": kv},
                hidden,
                config.attention_bias,
            ),
            out=matrix(attention, {"o_proj": hidden}, q, config.attention_bias),
            mlp_norm=vector(f"{prefix}.post_attention_layernorm"),
            gate_up=matrix(
                f"{prefix}.mlp", {"gate_proj": ffn, "up_proj": ffn}, hidden, config.mlp_bias
            ),
            down=matrix(f"{prefix}.mlp", {"down_proj": hidden}, ffn, config.mlp_bias),
        )

    embedding = checkpoint.tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
    table = backend.table(embedding)
    if config.tie_word_embeddings:
        head = backend.tied_head(table, embedding)
    else:
        head = backend.matrix([checkpoint.tensor("lm_head.weight", (config.vocab_size, hidden))])
    return LlamaWeights(
        embedding=table,
        layers=[layer(f"model.layers.{i}") for i in range(config.num_layers)],
        norm=vector("model.norm"),
        head=head,
    )
