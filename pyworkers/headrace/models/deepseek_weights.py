"""The weights of DeepSeek-V3, from a checkpoint to a backend; each tensor is read once, experts one at a time.

Hugging Face stores experts one by one or stacked, in float or in FP8 with scales; the layer that drafts stands behind
the model's own layers, under DeepSeek's names or those of transformers. A `Share` says what part a rank reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.models.checkpoint import EMBEDDING, HEAD, Checkpoint, CheckpointError
from headrace_kernels.ops import Experts, HeadMatrices, Matrix, MlaBackend, Routing, Table, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Queries by way of a narrow value: `q_b @ norm(q_a @ x)`."""

    norm: Vector
    q_b: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    attention_norm: Vector
    qkv_a: (
        Matrix  # all that attention takes of the hidden state: q_width columns, then latent and key
    )
    q_width: int
    latent_width: int
    low_rank: LowRank | None  # None: the first columns of qkv_a are the queries
    latent_norm: Vector
    kv_b: HeadMatrices
    out: Matrix
    mlp_norm: Vector
    mlp: Mlp | None  # of a dense layer, or the shared expert
    experts: Experts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """The layer that drafts. Its embedding is the model's, its head too, or some rows of it."""

    token_norm: Vector
    hidden_norm: Vector
    join: Matrix  # of [token | hidden]
    layer: Layer
    norm: Vector
    head: Matrix
    token_ids: NDArray[np.int32] | None  # of the head's rows; None: all tokens in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: Table
    layers: list[Layer]
    norm: Vector
    head: Matrix
    mtp: Mtp | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank of a group holds: these heads of every attention, these experts of every layer, and all else."""

    heads: range
    experts: range


def load_weights(
    checkpoint: Checkpoint, backend: MlaBackend, *, mtp: bool = False, share: Share | None = None
) -> Weights:
    """Read what `share` (by default everything) needs. With `mtp` also the layer that drafts."""
    config = checkpoint.config
    loader = _Loader(checkpoint, backend, share)
    size = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.tensor(EMBEDDING, size)
    head = embedding if config.tie_word_embeddings else checkpoint.tensor(HEAD, size)
    weights = Weights(
        embedding=backend.table(embedding),
        layers=[loader.layer(f"model.layers.{i}", i) for i in range(config.num_layers)],
        norm=loader.vector("model.norm", config.hidden_size),
        head=backend.matrix([head]),
        mtp=loader.mtp(find_mtp(checkpoint), head) if mtp else None,
    )
    checkpoint.finished()
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpKeys:
    """Under which names a checkpoint has the layer that drafts."""

    index: int  # of its layer, counting on from the model's
    own: str  # prefix of what only it has
    layer: str  # prefix of the decoder layer in it
    norm: str


_MTP_NAME = re.compile(r"((?:model\.layers|(?:model\.)?mtp\.layers)\.(\d+))\.eh_proj\.weight")


def find_mtp(checkpoint: Checkpoint) -> MtpKeys:
    """The first of them. Raises `CheckpointError` where there is none."""
    layers = checkpoint.config.num_layers
    found: dict[int, str] = {}
    for name in checkpoint.names():
        if match := _MTP_NAME.fullmatch(name):
            own_count = match[1].startswith(("mtp.", "model.mtp."))  # they count from 0
            found[int(match[2]) + (layers if own_count else 0)] = match[1]
    index = min((index for index in found if index >= layers), default=None)
    if index is None:
        raise CheckpointError(
            f"{checkpoint.path}: model.layers.{layers}.eh_proj.weight is missing, and under every later layer too: "
            f"this checkpoint has no layer for multi-token prediction"
        )
    own = found[index]
    nested = f"{own}.mtp_block.input_layernorm.weight" in checkpoint  # as transformers has it
    renamed = f"{own}.post_norm.weight" in checkpoint
    return MtpKeys(
        index=index,
        own=own,
        layer=f"{own}.mtp_block" if nested else own,
        norm=f"{own}.post_norm" if renamed else f"{own}.shared_head.norm",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A projection that becomes some rows of a matrix: those of `rows`, or all of its `outputs`."""

    name: str
    outputs: int
    bias: bool = False
    rows: range | None = None


class _Loader:
    def __init__(self, checkpoint: Checkpoint, backend: MlaBackend, share: Share | None) -> None:
        config = checkpoint.config
        assert config.deepseek is not None
        self._checkpoint, self._backend = checkpoint, backend
        self._config, self._deepseek = config, config.deepseek
        self._share = share or Share(
            heads=range(config.num_heads), experts=range(config.deepseek.experts)
        )

    def vector(self, prefix: str, width: int) -> Vector:
        return self._backend.vector(self._checkpoint.tensor(f"{prefix}.weight", (width,)))

    def layer(self, prefix: str, index: int) -> Layer:
        config, deepseek = self._config, self._deepseek
        hidden, attention = config.hidden_size, f"{prefix}.self_attn"
        latent_width = deepseek.kv_lora_rank + deepseek.rope_dim
        all_q = config.num_heads * (deepseek.nope_dim + deepseek.rope_dim)
        q_rows = self._of_heads(deepseek.nope_dim + deepseek.rope_dim)
        low_rank = None
        if deepseek.q_lora_rank is None:
            q_width = len(q_rows)
            q = _Part(name=f"{attention}.q_proj", outputs=all_q, rows=q_rows)
        else:
            q_width = deepseek.q_lora_rank
            q = _Part(name=f"{attention}.q_a_proj", outputs=q_width, bias=config.attention_bias)
            q_b = _Part(name=f"{attention}.q_b_proj", outputs=all_q, rows=q_rows)
            low_rank = LowRank(
                norm=self.vector(f"{attention}.q_a_layernorm", q_width),
                q_b=self._matrix([q_b], q_width),
            )
        kv = f"{attention}.kv_a_proj_with_mqa"
        kv_a = _Part(name=kv, outputs=latent_width, bias=config.attention_bias)
        dense = index < deepseek.dense_layers
        return Layer(
            attention_norm=self.vector(f"{prefix}.input_layernorm", hidden),
            qkv_a=self._matrix([q, kv_a], hidden),
            q_width=q_width,
            latent_width=latent_width,
            low_rank=low_rank,
            latent_norm=self.vector(f"{attention}.kv_a_layernorm", deepseek.kv_lora_rank),
            kv_b=self._kv_b(attention),
            out=self._out(attention),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self._dense(f"{prefix}.mlp") if dense else self._shared(f"{prefix}.mlp"),
            experts=None if dense else self._experts(f"{prefix}.mlp"),
        )

    def mtp(self, keys: MtpKeys, head: torch.Tensor) -> Mtp:
        hidden, own = self._config.hidden_size, keys.own
        ids = self._draft_token_ids(own)
        return Mtp(
            token_norm=self.vector(f"{own}.enorm", hidden),
            hidden_norm=self.vector(f"{own}.hnorm", hidden),
            join=self._matrix([_Part(name=f"{own}.eh_proj", outputs=hidden)], 2 * hidden),
            layer=self.layer(keys.layer, keys.index),
            norm=self.vector(keys.norm, hidden),
            head=self._backend.matrix([head if ids is None else head[ids.long()]]),
            token_ids=None if ids is None else ids.numpy().astype(np.int32),
        )

    def _of_heads(self, width: int) -> range:
        """Rows or columns of this rank's heads."""
        return range(self._share.heads.start * width, self._share.heads.stop * width)

    def _matrix(self, parts: Sequence[_Part], inputs: int, columns: range | None = None) -> Matrix:
        weights = [
            self._checkpoint.tensor(
                f"{part.name}.weight", (part.outputs, inputs), rows=part.rows, columns=columns
            )
            for part in parts
        ]
        if not any(part.bias for part in parts):
            return self._backend.matrix(weights)
        biases = [
            self._checkpoint.tensor(f"{part.name}.bias", (part.outputs,)).float()
            if part.bias
            else torch.zeros(len(weight))
            for part, weight in zip(parts, weights, strict=True)
        ]
        return self._backend.matrix(weights, torch.cat(biases))

    def _kv_b(self, attention: str) -> HeadMatrices:
        deepseek = self._deepseek
        width, rank = deepseek.nope_dim + deepseek.v_dim, deepseek.kv_lora_rank
        shape = (self._config.num_heads * width, rank)
        rows = self._of_heads(width)
        kv_b = self._checkpoint.tensor(f"{attention}.kv_b_proj.weight", shape, rows=rows)
        return self._backend.head_matrices(kv_b.view(-1, width, rank))

    def _out(self, attention: str) -> Matrix:
        config, v_dim = self._config, self._deepseek.v_dim
        part = _Part(
            name=f"{attention}.o_proj", outputs=config.hidden_size, bias=config.attention_bias
        )
        return self._matrix([part], config.num_heads * v_dim, columns=self._of_heads(v_dim))

    def _dense(self, prefix: str) -> Mlp:
        return self._mlp(prefix, self._config.intermediate_size)

    def _shared(self, prefix: str) -> Mlp | None:
        width = self._deepseek.shared_experts * self._deepseek.expert_size
        return self._mlp(f"{prefix}.shared_experts", width) if width else None

    def _mlp(self, prefix: str, width: int) -> Mlp:
        hidden = self._config.hidden_size
        halves = [_Part(name=f"{prefix}.{half}_proj", outputs=width) for half in ("gate", "up")]
        return Mlp(
            gate_up=self._matrix(halves, hidden),
            down=self._matrix([_Part(name=f"{prefix}.down_proj", outputs=hidden)], width),
        )

    def _experts(self, prefix: str) -> Experts:
        checkpoint, deepseek, hidden = self._checkpoint, self._deepseek, self._config.hidden_size
        mine, width = self._share.experts, deepseek.expert_size

        def stacked(name: str, shape: tuple[int, int]) -> _Each:
            key, whole = f"{prefix}.experts.{name}", (deepseek.experts, *shape)
            return _Each(
                mine, lambda e: checkpoint.tensor(key, whole, rows=range(e, e + 1)).squeeze(0)
            )

        def single(e: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
            return checkpoint.tensor(f"{prefix}.experts.{e}.{name}.weight", shape)

        def gate_up_of(e: int) -> torch.Tensor:
            halves = [single(e, name, (width, hidden)) for name in ("gate_proj", "up_proj")]
            return torch.cat(halves)

        if f"{prefix}.experts.gate_up_proj" in checkpoint:
            gate_up = stacked("gate_up_proj", (2 * width, hidden))
            down = stacked("down_proj", (hidden, width))
        else:
            gate_up = _Each(mine, gate_up_of)
            down = _Each(mine, lambda e: single(e, "down_proj", (hidden, width)))
        bias = f"{prefix}.gate.e_score_correction_bias"
        return self._backend.experts(
            checkpoint.tensor(f"{prefix}.gate.weight", (deepseek.experts, hidden)),
            checkpoint.tensor(bias, (deepseek.experts,)),
            gate_up,
            down,
            Routing(
                experts=deepseek.experts,
                top_k=deepseek.experts_per_token,
                groups=deepseek.groups,
                top_groups=deepseek.top_groups,
                normalise=deepseek.normalise_weights,
                scale=deepseek.routed_scale,
            ),
        )

    def _draft_token_ids(self, own: str) -> torch.Tensor | None:
        """Tokens of a reduced draft head, where the checkpoint has one."""
        checkpoint, name = self._checkpoint, f"{own}.draft_token_ids"
        size, vocab_size = self._deepseek.mtp_draft_vocab_size, self._config.vocab_size
        if size is None and name in checkpoint:
            raise CheckpointError(
                f"{checkpoint.info(name).file}: {name} is there, but mtp_draft_vocab_size is missing in config.json"
            )
        if size is None:
            return None
        ids = checkpoint.integers(name, (size,))
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < size:
            raise CheckpointError(
                f"{checkpoint.info(name).file}: {name}: expected different token ids from 0 to {vocab_size - 1}, "
                f"found {len(ids.unique())} of {size} from {int(ids.min())} to {int(ids.max())}"
            )
        return ids


class _Each(Sequence[torch.Tensor]):
    """Read when asked for: the experts of a layer need not be in memory together."""

    def __init__(self, experts: range, read: Callable[[int], torch.Tensor]) -> None:
        self._experts, self._read = experts, read

    def __len__(self) -> int:
        return len(self._experts)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return _Each(self._experts[index], self._read)
        return self._read(self._experts[index])
