"""The weights of DeepSeek-V3, from a checkpoint to a backend; each tensor is read once, experts one at a time.

Hugging Face stores experts one by one or stacked, in float or in FP8 with scales; the layer that drafts stands behind
the model's own layers, under DeepSeek's names or those of transformers. A `Share` says what part a rank reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.models.deepseek_mtp import MtpKeys, draft_token_ids, find_mtp
from headrace.models.fp8 import Scaled
from headrace.models.load.checkpoint import EMBEDDING, HEAD, Checkpoint
from headrace.models.step_memory import ExpertSpread
from headrace_kernels.lazy import Lazy
from headrace_kernels.ops import (
    EmbeddingTable,
    GatedMlp,
    HeadMatrices,
    HostArray,
    LayerExperts,
    LinearWeight,
    MlaBackend,
    Routing,
    Vector,
)

if TYPE_CHECKING:
    from headrace_kernels.moe.dispatch import Dispatch
    from headrace_kernels.moe.placement import LayerPlacement

T = TypeVar("T")


class Fp8Backend(Protocol):
    """A backend that also computes with FP8 weights as they are stored. Matrices come as parts to be stacked."""

    def fp8_matrix(
        self, parts: Sequence[Scaled], bias: HostArray | None = None
    ) -> LinearWeight: ...

    def fp8_experts(
        self,
        gate: HostArray,
        bias: HostArray,
        gate_up: Sequence[Sequence[Scaled]],
        down: Sequence[Sequence[Scaled]],
        routing: Routing,
        *,
        shared: GatedMlp | None = None,
        dispatch: Dispatch | None = None,
    ) -> LayerExperts: ...

    def overwrite_fp8_expert(
        self,
        experts: LayerExperts,
        slot: int,
        gate_up: Sequence[Scaled],
        down: Sequence[Scaled],
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Queries by way of a narrow value: `q_b @ norm(q_a @ x)`."""

    norm: Vector
    q_b: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekLayer:
    attention_norm: Vector
    qkv_a: LinearWeight  # all that attention takes of the hidden state: q_width columns, then latent and key
    q_width: int
    latent_width: int
    low_rank: LowRank | None  # None: the first columns of qkv_a are the queries
    latent_norm: Vector
    kv_b: HeadMatrices
    out: LinearWeight
    mlp_norm: Vector
    mlp: GatedMlp | None  # of a dense layer
    experts: LayerExperts | None  # of the others, the shared one included
    dispatch: Dispatch | None  # of these, where they are on several ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """The layer that drafts. Its embedding is the model's, its head too, or some rows of it."""

    token_norm: Vector
    hidden_norm: Vector
    join: LinearWeight  # of [token | hidden]
    layer: DeepseekLayer
    norm: Vector
    head: LinearWeight
    token_ids: NDArray[np.int32] | None  # of the head's rows; None: all tokens in order


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekWeights:
    embedding: EmbeddingTable
    layers: list[DeepseekLayer]
    norm: Vector
    head: LinearWeight
    mtp: Mtp | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank of a group holds: the experts in its slots of each layer, and all else whole."""

    rank: int
    layers: Mapping[
        int, LayerPlacement
    ]  # by the number of the layer, that of the layer that drafts included
    dispatch: Callable[[LayerPlacement], Dispatch]  # what brings a layer's rows to the other ranks
    native: bool = False  # that is what programs of the CPU do by themselves

    def experts(self, layer: int) -> tuple[int, ...]:
        """Those in this rank's slots, in the order of slots."""
        return self.layers[layer].ranks[self.rank]

    @property
    def spread(self) -> ExpertSpread:
        """What the memory of a step depends on, which experts may move between ranks without changing."""
        ranks = max(len(placement.ranks) for placement in self.layers.values())
        slots = max(len(self.experts(layer)) for layer in self.layers)
        return ExpertSpread(ranks=ranks, slots=slots, native=self.native)


def load_weights(
    checkpoint: Checkpoint,
    backend: MlaBackend,
    *,
    mtp: bool = False,
    share: Share | None = None,
    fp8: Fp8Backend | None = None,
) -> DeepseekWeights:
    """Read what `share` (by default everything) needs. With `mtp` also the layer that drafts.

    `fp8` is the same backend where FP8 weights are to stay what they are; otherwise they are dequantised.
    """
    config = checkpoint.config
    loader = _Loader(checkpoint, backend, share, fp8)
    size = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.tensor(EMBEDDING, size)
    head = embedding if config.tie_word_embeddings else checkpoint.tensor(HEAD, size)
    table, layers = backend.table(embedding), range(config.num_layers)
    tied = config.tie_word_embeddings
    made = backend.tied_head(table, head) if tied else backend.matrix([head])
    weights = DeepseekWeights(
        embedding=table,
        layers=[loader.layer(f"model.layers.{i}", i) for i in layers],
        norm=loader.vector("model.norm", config.hidden_size),
        head=made,
        mtp=loader.mtp(find_mtp(checkpoint), head, made) if mtp else None,
    )
    checkpoint.finished()
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A projection that becomes some rows of a matrix."""

    name: str
    outputs: int
    bias: bool = False


# What the two halves of an expert are stacked of.
_FUSED = {"gate_up": ("gate_up_proj",), "down": ("down_proj",)}
_SINGLE = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: MlaBackend,
        share: Share | None,
        fp8: Fp8Backend | None,
    ) -> None:
        config = checkpoint.config
        assert config.deepseek is not None
        self._fp8 = fp8
        self._checkpoint, self._backend = checkpoint, backend
        self._config, self._deepseek = config, config.deepseek
        self._share = share

    def vector(self, prefix: str, width: int) -> Vector:
        return self._backend.vector(self._checkpoint.tensor(f"{prefix}.weight", (width,)))

    def layer(self, prefix: str, index: int) -> DeepseekLayer:
        config, deepseek = self._config, self._deepseek
        hidden, attention = config.hidden_size, f"{prefix}.self_attn"
        latent_width = deepseek.kv_lora_rank + deepseek.rope_dim
        all_q = config.num_heads * (deepseek.nope_dim + deepseek.rope_dim)
        low_rank = None
        if deepseek.q_lora_rank is None:
            q_width = all_q
            q = _Part(name=f"{attention}.q_proj", outputs=all_q)
        else:
            q_width = deepseek.q_lora_rank
            q = _Part(name=f"{attention}.q_a_proj", outputs=q_width, bias=config.attention_bias)
            q_b = _Part(name=f"{attention}.q_b_proj", outputs=all_q)
            low_rank = LowRank(
                norm=self.vector(f"{attention}.q_a_layernorm", q_width),
                q_b=self._matrix([q_b], q_width),
            )
        kv = f"{attention}.kv_a_proj_with_mqa"
        kv_a = _Part(name=kv, outputs=latent_width, bias=config.attention_bias)
        dense, share = index < deepseek.dense_layers, self._share
        dispatch = None if dense or share is None else share.dispatch(share.layers[index])
        return DeepseekLayer(
            attention_norm=self.vector(f"{prefix}.input_layernorm", hidden),
            qkv_a=self._matrix([q, kv_a], hidden),
            q_width=q_width,
            latent_width=latent_width,
            low_rank=low_rank,
            latent_norm=self.vector(f"{attention}.kv_a_layernorm", deepseek.kv_lora_rank),
            kv_b=self._kv_b(attention),
            out=self._out(attention),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self._dense(f"{prefix}.mlp") if dense else None,
            experts=None if dense else self._experts(f"{prefix}.mlp", index, dispatch),
            dispatch=dispatch,
        )

    def mtp(self, keys: MtpKeys, head: HostArray, made: LinearWeight) -> Mtp:
        """`made` is the model's head, which drafts share unless they have some rows of it."""
        hidden, own = self._config.hidden_size, keys.own
        ids = draft_token_ids(self._checkpoint, own)
        return Mtp(
            token_norm=self.vector(f"{own}.enorm", hidden),
            hidden_norm=self.vector(f"{own}.hnorm", hidden),
            join=self._matrix([_Part(name=f"{own}.eh_proj", outputs=hidden)], 2 * hidden),
            layer=self.layer(keys.layer, keys.index),
            norm=self.vector(keys.norm, hidden),
            head=made if ids is None else self._backend.matrix([head[ids]]),
            token_ids=None if ids is None else ids.astype(np.int32),
        )

    def _matrix(self, parts: Sequence[_Part], inputs: int) -> LinearWeight:
        if self._fp8 is not None and all(self._is_fp8(f"{part.name}.weight") for part in parts):
            shapes = [(part.outputs, inputs) for part in parts]
            scaled = [
                self._checkpoint.scaled(f"{part.name}.weight", shape)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            return self._fp8.fp8_matrix(scaled, self._bias(parts, [n for n, _ in shapes]))
        weights = [
            self._checkpoint.tensor(f"{part.name}.weight", (part.outputs, inputs)) for part in parts
        ]
        return self._backend.matrix(weights, self._bias(parts, [len(w) for w in weights]))

    def _bias(self, parts: Sequence[_Part], rows: Sequence[int]) -> HostArray | None:
        """Of stacked parts, of which some may have none."""
        if not any(part.bias for part in parts):
            return None
        found = {
            part.name: self._checkpoint.tensor(f"{part.name}.bias", (part.outputs,))
            for part in parts
            if part.bias
        }
        return np.concatenate(
            [
                found[part.name].astype(np.float32) if part.bias else np.zeros(n, np.float32)
                for part, n in zip(parts, rows, strict=True)
            ]
        )

    def _is_fp8(self, name: str) -> bool:
        return self._checkpoint.info(name).dtype.startswith("float8")

    def _kv_b(self, attention: str) -> HeadMatrices:
        deepseek = self._deepseek
        width, rank = deepseek.nope_dim + deepseek.v_dim, deepseek.kv_lora_rank
        shape = (self._config.num_heads * width, rank)
        kv_b = self._checkpoint.tensor(f"{attention}.kv_b_proj.weight", shape)
        return self._backend.head_matrices(kv_b.reshape(-1, width, rank))

    def _out(self, attention: str) -> LinearWeight:
        config, v_dim = self._config, self._deepseek.v_dim
        part = _Part(
            name=f"{attention}.o_proj", outputs=config.hidden_size, bias=config.attention_bias
        )
        return self._matrix([part], config.num_heads * v_dim)

    def _dense(self, prefix: str) -> GatedMlp:
        return self._mlp(prefix, self._config.intermediate_size)

    def _shared(self, prefix: str) -> GatedMlp | None:
        width = self._deepseek.shared_experts * self._deepseek.expert_size
        return self._mlp(f"{prefix}.shared_experts", width) if width else None

    def _mlp(self, prefix: str, width: int) -> GatedMlp:
        hidden = self._config.hidden_size
        halves = [_Part(name=f"{prefix}.{half}_proj", outputs=width) for half in ("gate", "up")]
        return GatedMlp(
            gate_up=self._matrix(halves, hidden),
            down=self._matrix([_Part(name=f"{prefix}.down_proj", outputs=hidden)], width),
        )

    def _experts(self, prefix: str, layer: int, dispatch: Dispatch | None) -> LayerExperts:
        checkpoint, deepseek, hidden = self._checkpoint, self._deepseek, self._config.hidden_size
        fused = f"{prefix}.experts.gate_up_proj" in checkpoint
        names = _FUSED if fused else _SINGLE
        shapes = {
            "gate_up_proj": (2 * deepseek.expert_size, hidden),
            "gate_proj": (deepseek.expert_size, hidden),
            "up_proj": (deepseek.expert_size, hidden),
            "down_proj": (hidden, deepseek.expert_size),
        }

        def part(read: Callable[..., T], e: int, name: str) -> T:
            """One projection of one expert, by `tensor` or `scaled`."""
            if fused:
                whole = (deepseek.experts, *shapes[name])
                return read(f"{prefix}.experts.{name}", whole, rows=range(e, e + 1))
            return read(f"{prefix}.experts.{e}.{name}.weight", shapes[name])

        def float_of(half: str) -> Callable[[int], HostArray]:
            return lambda e: checkpoint.stacked(
                [_one(part(checkpoint.tensor, e, name)) for name in names[half]]
            )

        def scaled_of(half: str) -> Callable[[int], list[Scaled]]:
            return lambda e: [
                Scaled(*map(_one, part(checkpoint.scaled, e, name))) for name in names[half]
            ]

        share = self._share
        mine = range(deepseek.experts) if share is None else share.experts(layer)
        shared = self._shared(prefix)
        bias = f"{prefix}.gate.e_score_correction_bias"
        routers = (
            checkpoint.tensor(f"{prefix}.gate.weight", (deepseek.experts, hidden)),
            checkpoint.tensor(bias, (deepseek.experts,)),
        )
        routing = self._routing()
        first = "gate_up_proj" if fused else f"{mine[0]}.down_proj.weight"
        if self._fp8 is not None and self._is_fp8(f"{prefix}.experts.{first}"):
            halves = Lazy(mine, scaled_of("gate_up")), Lazy(mine, scaled_of("down"))
            return self._fp8.fp8_experts(
                *routers, *halves, routing, shared=shared, dispatch=dispatch
            )
        gate_up, down = Lazy(mine, float_of("gate_up")), Lazy(mine, float_of("down"))
        return self._backend.experts(
            *routers, gate_up, down, routing, shared=shared, dispatch=dispatch
        )

    def _routing(self) -> Routing:
        deepseek = self._deepseek
        return Routing(
            experts=deepseek.experts,
            top_k=deepseek.experts_per_token,
            groups=deepseek.groups,
            top_groups=deepseek.top_groups,
            normalise=deepseek.normalise_weights,
            scale=deepseek.routed_scale,
        )


def _one(x: HostArray) -> HostArray:
    """A matrix, which may be alone in a stack."""
    return x.squeeze(0) if x.ndim == 3 else x
