"""The operations that model families are written in, and who carries them out.

A family describes its forward pass once, as a function of a `ForwardPass`. A `Backend` compiles that description:
the native one records it into a program that Rust runs whole, the torch one calls it for every batch.
All of them keep the rule of the engine: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.moe.dispatch import Dispatch

# Layers whose KV is handed on together while later ones are computed; the last group may have fewer. A guess.
LAYERS_PER_GROUP = 8

# What passes compute, float32 `[rows, width]`: an array on the host, a tensor on a device.
Results: TypeAlias = "NDArray[np.float32] | torch.Tensor"
# A weight as a checkpoint gives it, in its dtype there: numpy's own, or one of ml_dtypes.
HostArray: TypeAlias = "NDArray[Any]"

# Opaque: what a backend made, only it can read.
Value: TypeAlias = Any  # [rows, width]
LinearWeight: TypeAlias = Any  # [out, in], with an optional bias
EmbeddingTable: TypeAlias = Any  # [vocab, hidden]
Vector: TypeAlias = Any  # [width]
HeadMatrices: TypeAlias = Any  # [heads, nope_dim + v_dim, kv_lora_rank]
LayerExperts: TypeAlias = Any  # router and experts of one layer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention:
    """The other kind of attention: all heads share one latent and one turned key of each position.

    The cache holds, for each token and layer, the normed latent `[kv_lora_rank]` and the turned rope key
    `[rope_dim]`. With `mtp` its last layer is that of the drafting module, and each block ends with a
    *hidden tail* `[hidden_size]`: what the main pass kept of the newest row that was written into it.
    """

    layers: int  # of the cache, the drafting layer included
    heads: int
    kv_lora_rank: int
    nope_dim: int  # 0 where keys are turned as a whole
    rope_dim: int
    v_dim: int
    block_tokens: int
    context_tokens: int
    scale: float  # of the scores
    inv_freq: Sequence[float]  # radians per position, rope_dim / 2 of them
    rope_scale: float  # of sine and cosine
    rope_interleave: (
        bool  # True: elements 2p and 2p + 1 turn together; False: i and i + rope_dim / 2
    )
    hidden_size: int  # of the tail
    mtp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How rows choose experts (`noaux_tc`), in float32 whatever the weights are.

    Scores are sigmoids. A bias is added to choose: the groups whose two best experts have the greatest sums, then
    the best experts among them, the lower number where two are equal. Weights are the scores without the bias.
    """

    experts: int
    top_k: int
    groups: int
    top_groups: int
    normalise: bool  # weights of a row sum to `scale`
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """`down(silu(gate) * up)`: the MLP of a dense layer, or the expert that all rows share."""

    gate_up: LinearWeight  # [2 * width, hidden]
    down: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRegion:
    """The part of every block that lies in one piece of memory."""

    memory: memoryview | torch.Tensor  # whole and writable: bytes on a CPU, uint8 on a GPU
    stride: int  # bytes from a block to the next one
    offset: int  # of block 0, in bytes
    nbytes: int  # of one block


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """Where the blocks of a model's cache are. They stay there until `allocate_kv` is called again."""

    num_blocks: int
    block_bytes: int  # of all regions
    groups: list[list[KvRegion]]  # by layer group; a forward pass finishes them in this order
    device: str  # "cpu" or "cuda"
    memfd: int | None  # the anonymous file that all regions lie in; others can map it for reading


class Fence(Protocol):
    """A place in a device's queue of work. `torch.cuda.Event` is one. Any thread may ask."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Progress(Protocol):
    """Told, on the thread of the forward pass, how far it is."""

    def __call__(self, groups: int, fence: Fence | None = None) -> None:
        """The KV of the first `groups` layer groups is written for all rows of the batch.

        Where there is a fence: once it is passed, for which the forward pass does not wait.
        """
        ...


class RowStep(Protocol):
    """What every forward pass can do with rows by themselves. Each operation returns a new value."""

    def embed(self, table: EmbeddingTable) -> Value:
        """The embeddings of the batch's tokens."""
        ...

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value: ...

    def linear(self, x: Value, weight: LinearWeight, residual: Value | None = None) -> Value:
        """`x @ weight.T (+ bias) (+ residual)`."""
        ...

    def silu_mul(self, gate_up: Value) -> Value:
        """`silu(gate) * up` of rows `[gate | up]`."""
        ...

    def wanted_rows(self, x: Value) -> Value:
        """The rows whose logits the batch wants."""
        ...

    def pool_rows(self, x: Value, weight: Vector | None = None, eps: float = 0.0) -> None:
        """Keep `Batch.pool_rows` of `x`, normed where there is a weight, for `Store.pooled`."""
        ...


class ForwardPass(RowStep, Protocol):
    """One forward pass. Each operation returns a new value; only the cache is changed."""

    def rope_and_store_kv(self, qkv: Value, layer: int) -> Value:
        """Turn queries and keys by their positions, and store keys and values; `qkv` is spent."""
        ...

    def paged_attention(self, qkv: Value, layer: int) -> Value:
        """Causal attention of the turned queries over the cache, `[rows, heads * head_dim]`."""
        ...


class MlaStep(RowStep, Protocol):
    """A forward pass with latent attention and experts, or a pass of the module that drafts."""

    def columns(self, x: Value, start: int, stop: int) -> Value:
        """A copy of `x[:, start:stop]`."""
        ...

    def concat(self, a: Value, b: Value) -> Value:
        """`[a | b]`."""
        ...

    def mla_store(self, q: Value, latent: Value, norm: Vector, eps: float, layer: int) -> Value:
        """Turn queries and the shared key by their positions, norm the latent, and store latent and key.

        `q` is `[rows, heads * (nope_dim + rope_dim)]`, in each head nope first; it is spent, the turned
        queries are the result. `latent` is `[rows, kv_lora_rank + rope_dim]`.
        """
        ...

    def mla_attention(self, q: Value, kv_b: HeadMatrices, layer: int) -> Value:
        """Causal attention of the turned queries over the cache, `[rows, heads * v_dim]`.

        A row sees the positions from 0 to its own; in a draft pass, from its sequence's `first_keys` on.
        """
        ...

    def moe(self, x: Value, experts: LayerExperts, residual: Value) -> Value:
        """`residual + shared(x) + sum_k weight_k * expert_k(x)`, added in ascending order of experts."""
        ...

    def keep_hidden(self, x: Value) -> None:
        """What draft passes may read of this pass: in the main pass until the next one, in a draft pass by the next
        chained one. The main pass also writes the hidden tails of the blocks from it.
        """
        ...

    def hidden(self) -> Value:
        """In a draft pass: the rows that `DraftBatch.hidden_from` names, `[rows, hidden_size]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What the memory of a step depends on beside shapes."""

    element_bytes: int  # of values
    torch: bool  # its kernels, rather than those in Rust
    fp8: bool = False  # some weights stay e4m3
    mapped_bytes: int = 0  # of weights that are files, which a system counts as free memory


class Store(Protocol):
    """Keeps weights and cache on one device in one dtype."""

    kv_block_bytes: int
    kv_layout: str
    dtype_name: str

    @property
    def step(self) -> StepKind: ...

    @property
    def ahead_on(self) -> torch.device | None:
        """The device that still computes when a pass returns; `None` where none does."""
        ...

    def record_steps(self) -> None:
        """From now on start the kernels of a decode step at once, where the device can."""
        ...

    def matrix(self, parts: Sequence[HostArray], bias: HostArray | None = None) -> LinearWeight:
        """Matrices `[out_i, in]` as one, stacked."""
        ...

    def vector(self, x: HostArray) -> Vector: ...

    def table(self, x: HostArray) -> EmbeddingTable: ...

    def tied_head(self, table: EmbeddingTable, embedding: HostArray) -> LinearWeight:
        """The embedding as the head's matrix; `table` was made of it."""
        ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the cache hold that many blocks, in place of what it held."""
        ...

    def kv_pool(self) -> KvPool:
        """Where the cache is, after `allocate_kv`."""
        ...

    @property
    def pooled(self) -> Results:
        """What the last main pass kept of the rows that its batch pools, float32; valid until the next one."""
        ...

    def fence(self) -> Fence | None:
        """After all work given to the device so far; `None` where that is done."""
        ...


class Backend(Store, Protocol):
    """Runs what families describe."""

    def compile(self, describe: Callable[[ForwardPass], Value]) -> Compiled:
        """The function that computes `describe` for a batch: float32, valid until its next call."""
        ...


class MlaBackend(Store, Protocol):
    """A backend that was made with `MlaAttention`."""

    answers_apart: bool  # rows that a batch calls prompt have an arithmetic of their own

    def head_matrices(self, kv_b: HostArray) -> HeadMatrices:
        """`[heads, nope_dim + v_dim, kv_lora_rank]`: of each head what makes keys, then what makes values."""
        ...

    def experts(
        self,
        gate: HostArray,
        bias: HostArray,
        gate_up: Sequence[HostArray],
        down: Sequence[HostArray],
        routing: Routing,
        *,
        shared: GatedMlp | None = None,
        dispatch: Dispatch | None = None,
    ) -> LayerExperts:
        """Router `[experts, hidden]` with its bias `[experts]`, and each expert's `[2 * width, hidden]` and
        `[hidden, width]`. `shared` is the expert that all rows go through.

        Without `dispatch` all experts are here, in order. With one they are those in the slots of this rank.
        """
        ...

    def expert_counts(self, experts: LayerExperts) -> NDArray[np.int64]:
        """Rows that chose each expert of the group so far, as this rank's router saw them. Any thread may ask."""
        ...

    def overwrite_expert(
        self, experts: LayerExperts, slot: int, gate_up: HostArray, down: HostArray
    ) -> None:
        """Put another expert, `[2 * width, hidden]` and `[hidden, width]`, into a slot, in the same place in memory.

        The next pass of the layer computes with it. Who exchanges rows is to send them accordingly from then on.
        """
        ...

    def slot_bytes(self, experts: LayerExperts) -> int:
        """Bytes of the image of a slot."""
        ...

    def read_slot(self, experts: LayerExperts, slot: int) -> torch.Tensor:
        """The image of a slot, uint8 `[slot_bytes]`: its expert as it is kept, scales included."""
        ...

    def write_slot(self, experts: LayerExperts, slot: int, image: torch.Tensor) -> None:
        """Like `overwrite_expert`, with the image of a slot of a backend alike: the same bits."""
        ...

    def compile(self, describe: Callable[[MlaStep], Value]) -> Compiled:
        """The main pass, as that of `Backend`."""
        ...

    def compile_draft(self, describe: Callable[[MlaStep], Value]) -> CompiledDraft:
        """Like `compile`, for the module that drafts: it shares the cache and reads kept hidden rows."""
        ...


class Compiled(Protocol):
    """A forward pass.

    Where blocks have a drafting layer, the last layer group is not whole before the draft pass, and is not told of.
    """

    def __call__(self, batch: Batch, progress: Progress | None = None) -> Results: ...


class CompiledDraft(Protocol):
    """A draft pass."""

    def __call__(self, batch: DraftBatch) -> Results: ...


def layer_groups(layers: int) -> list[range]:
    """The layers of each group."""
    starts = range(0, layers, LAYERS_PER_GROUP)
    return [range(start, min(start + LAYERS_PER_GROUP, layers)) for start in starts]
