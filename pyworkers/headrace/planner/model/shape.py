"""DeepSeek-R1's sizes, and what they make in parameters, bytes and operations."""

from __future__ import annotations

LAYERS = 61
DENSE_LAYERS = 3
MOE_LAYERS = LAYERS - DENSE_LAYERS
HIDDEN = 7168
DENSE_WIDTH = 18_432
EXPERT_WIDTH = 2048
EXPERTS = 256
TOP_K = 8
ROUTING_GROUPS = 4  # groups of experts, and so nodes, that a token reaches at most
VOCABULARY = 129_280

HEADS = 128
QUERY_RANK = 1536
LATENT = 512
ROTATED = 64
NOT_ROTATED = 128
VALUE = 128
KV_VALUES = LATENT + ROTATED  # of a token in a layer

# Parameters.
EXPERT = 3 * HIDDEN * EXPERT_WIDTH
DENSE_MLP = 3 * HIDDEN * DENSE_WIDTH
ABSORBED = HEADS * LATENT * (NOT_ROTATED + VALUE)  # bf16 in every checkpoint's kernels
PROJECTIONS = (
    HIDDEN * (QUERY_RANK + KV_VALUES)
    + QUERY_RANK * HEADS * (NOT_ROTATED + ROTATED)
    + HEADS * VALUE * HIDDEN
)
ATTENTION = PROJECTIONS + ABSORBED
ROUTER = EXPERTS * HIDDEN
HEAD = VOCABULARY * HIDDEN
MTP_INPUT = 2 * HIDDEN * HIDDEN

# Operations for each pair of a query and a key, all heads.
LATENT_PAIR_FLOPS = 2 * HEADS * (KV_VALUES + LATENT)  # decode: keys and values stay latents
PAIR_FLOPS = 2 * HEADS * (NOT_ROTATED + ROTATED + VALUE)  # prefill: keys and values expanded

# Bytes of a weight, its scales included.
WEIGHT_BYTES = {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
KV_BYTES = {"fp8": 1, "bf16": 2}
BF16 = 2


def kv_token_bytes(kv: str, *, drafts: bool) -> int:
    """KV of a token in all layers; a layer that drafts keeps its own."""
    return (LAYERS + drafts) * KV_VALUES * KV_BYTES[kv]


def expert_bytes(weights: str) -> float:
    return EXPERT * WEIGHT_BYTES[weights]


def own_bytes(*, drafts: bool) -> float:
    """Weights that every rank holds whole: products in fp8; embedding, head, router and absorbed matrices in bf16."""
    layers = LAYERS + drafts
    moe = MOE_LAYERS + drafts
    linear = layers * PROJECTIONS + DENSE_LAYERS * DENSE_MLP + moe * EXPERT + drafts * MTP_INPUT
    return linear + BF16 * (layers * ABSORBED + moe * ROUTER + 2 * HEAD)
