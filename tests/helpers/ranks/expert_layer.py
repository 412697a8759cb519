"""One layer of experts of random sizes on ranks that are processes, with rows that all ranks can make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace_kernels.moe.dispatch import Combine, Dispatch, Routed, Sent
from headrace_kernels.ops import GatedMlp, MlaAttention, MlaStep, Routing, Value
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend

ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=512,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip
# None, few, and so many that parcels go in pieces.
ROWS = (0, 0, 1, 5, 30, 90)


@dataclass(frozen=True, slots=True)
class Called:
    """A `Dispatch` that programs have to call."""

    dispatch: Dispatch

    @property
    def combine(self) -> Combine:
        return self.dispatch.combine

    def send(self, routed: Routed) -> Sent:
        return self.dispatch.send(routed)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Sizes, and the rows of each rank."""

    hidden: int
    width: int
    experts: int
    top_k: int
    rows: tuple[int, ...]

    @staticmethod
    def random(seed: int, ranks: int) -> ExpertLayer:
        draw = random.Random(seed)
        experts = draw.randint(max(ranks, 2), 12)
        return ExpertLayer(
            hidden=draw.randint(20, 150),
            width=draw.randint(8, 70),
            experts=experts,
            top_k=draw.randint(1, min(experts, 5)),
            rows=tuple(draw.choice(ROWS) for _ in range(ranks)),
        )

    def rows_of(self, rank: int) -> torch.Tensor:
        """`[rows, 2 * hidden]`: what is computed, beside what it is added to."""
        rows = self._noise(sum(self.rows), 2 * self.hidden, seed=7)
        return rows.split(self.rows)[rank]

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up = self._noise(2 * self.width, self.hidden, seed=100 + expert)
        down = self._noise(self.hidden, self.width, seed=200 + expert)
        return gate_up / self.hidden**0.5, down / self.width**0.5

    def alone(self, dtype: str) -> list[list[float]]:
        """All rows where all experts are."""
        every = PlacedExperts(self, dtype, range(self.experts), None)
        rows = torch.cat([self.rows_of(rank) for rank in range(len(self.rows))])
        return every.run(rows)

    def _noise(self, *shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    @property
    def gate(self) -> torch.Tensor:
        return self._noise(self.experts, self.hidden, seed=1) / self.hidden**0.5

    def shared(self, backend: TensorBackend) -> GatedMlp:
        gate_up = self._noise(2 * self.width, self.hidden, seed=5) / self.hidden**0.5
        down = self._noise(self.hidden, self.width, seed=6) / self.width**0.5
        return GatedMlp(gate_up=backend.matrix([gate_up]), down=backend.matrix([down]))


class PlacedExperts:
    """The experts `held` of a layer in slots, as a rank runs them."""

    def __init__(
        self, layer: ExpertLayer, dtype: str, held: Sequence[int], dispatch: Dispatch | None
    ) -> None:
        self._layer = layer
        self.backend = TensorBackend(ATTENTION, dtype=dtype)
        self.backend.allocate_kv(sum(layer.rows) // 16 + 1)
        weights = [layer.expert(expert) for expert in held]
        self.experts: Any = self.backend.experts(
            layer.gate,
            torch.zeros(layer.experts),
            [gate_up for gate_up, _ in weights],
            [down for _, down in weights],
            Routing(
                experts=layer.experts, top_k=layer.top_k, groups=1, top_groups=1, normalise=True, scale=1.5
            ),
            shared=layer.shared(self.backend),
            dispatch=dispatch,
        )  # fmt: skip

    def hold(self, held: Sequence[int]) -> None:
        """Other experts, in the same slots."""
        for slot, expert in enumerate(held):
            self.backend.overwrite_expert(self.experts, slot, *self._layer.expert(expert))

    def run(self, rows: torch.Tensor) -> list[list[float]]:
        """The layer on its own results: two exchanges there and back."""
        hidden = self._layer.hidden
        table = self.backend.table(torch.cat((rows, torch.zeros(1, 2 * hidden))))

        def describe(step: MlaStep) -> Value:
            e = step.embed(table)
            x, residual = step.columns(e, 0, hidden), step.columns(e, hidden, 2 * hidden)
            x = step.moe(x, self.experts, residual)
            return step.wanted_rows(step.moe(x, self.experts, residual))

        paged = PagedRows([len(rows)] if len(rows) else [])
        return self.backend.compile(describe)(paged.batch(paged.whole())).tolist()
