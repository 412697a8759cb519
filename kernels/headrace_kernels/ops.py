"""The operations that model families are written in, and who carries them out.

A family describes its forward pass once, as a function of a `Step`. A `Backend` compiles that description:
the native one records it into a program that Rust runs whole, the torch one calls it for every batch.
All of them keep the rule of the engine: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from headrace.models.batch import Batch

# Opaque: what a backend made, only it can read.
Value: TypeAlias = Any  # [rows, width]
Matrix: TypeAlias = Any  # [out, in], with an optional bias
Table: TypeAlias = Any  # [vocab, hidden]
Vector: TypeAlias = Any  # [width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Shape of a model's attention and of its cache."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    context_tokens: int
    scale: float  # of the scores
    inv_freq: Sequence[float]  # radians per position, head_dim / 2 of them
    rope_scale: float  # of sine and cosine


class Step(Protocol):
    """One forward pass. Each operation returns a new value; only the cache is changed."""

    def embed(self, table: Table) -> Value:
        """The embeddings of the batch's tokens."""
        ...

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value: ...

    def linear(self, x: Value, weight: Matrix, residual: Value | None = None) -> Value:
        """`x @ weight.T (+ bias) (+ residual)`."""
        ...

    def rope_and_store_kv(self, qkv: Value, layer: int) -> Value:
        """Turn queries and keys by their positions, and store keys and values; `qkv` is spent."""
        ...

    def paged_attention(self, qkv: Value, layer: int) -> Value:
        """Causal attention of the turned queries over the cache, `[rows, heads * head_dim]`."""
        ...

    def silu_mul(self, gate_up: Value) -> Value:
        """`silu(gate) * up` of rows `[gate | up]`."""
        ...

    def wanted_rows(self, x: Value) -> Value:
        """The rows whose logits the batch wants."""
        ...


class Backend(Protocol):
    """Keeps weights and cache on one device in one dtype, and runs what families describe."""

    kv_block_bytes: int
    kv_layout: str
    dtype_name: str

    def matrix(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Matrix:
        """Matrices `[out_i, in]` as one, stacked."""
        ...

    def vector(self, x: torch.Tensor) -> Vector: ...

    def table(self, x: torch.Tensor) -> Table: ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the cache hold that many blocks, in place of what it held."""
        ...

    def compile(self, describe: Callable[[Step], Value]) -> Callable[[Batch], torch.Tensor]:
        """The function that computes `describe` for a batch: float32, valid until its next call."""
        ...
