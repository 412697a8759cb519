"""Ranks as threads that compute rows round by round while their experts move, with faults where a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.worker.parallel.rebalance import Rebalancer
from headrace.worker.parallel.rebalanced import RebalanceConfig
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.balance import GroupShape
from headrace_kernels.moe.dispatch import Dispatch, Received, Returned, Routed, Sent
from headrace_kernels.moe.placed import PlacedDispatch, PlacedLayer, SlotClock
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import Arrived, Columns, Span, StepAborted, Transport
from headrace_kernels.ops import MlaAttention, MlaStep, Routing, Value
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend

CPU = torch.device("cpu")
LAYERS, HIDDEN, WIDTH, EXPERTS, TOP_K = 2, 32, 24, 12, 2
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=1, top_groups=1, normalise=True, scale=1.0)
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=64,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip
SECONDS_OF_A_ROW = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong between steps, by rank and the number of the exchange there."""

    # The rank learns, after all ranks sent, that the round was aborted.
    misses: Callable[[int, int], bool] = lambda _rank, _exchange: False
    # What comes to the rank, part by part.
    damage: Callable[[int, torch.Tensor], torch.Tensor] = lambda _rank, part: part


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router and both halves of all experts. A few experts take most rows."""
    gate = noise(EXPERTS, HIDDEN, seed=layer) / HIDDEN**0.5
    gate_up = noise(EXPERTS, 2 * WIDTH, HIDDEN, seed=10 + layer) / HIDDEN**0.5
    return gate, gate_up, noise(EXPERTS, HIDDEN, WIDTH, seed=20 + layer) / WIDTH**0.5


BIAS = 0.6 * torch.tensor([1.0 if expert in (0, 1) else 0.0 for expert in range(EXPERTS)])
ROWS = noise(24, HIDDEN, seed=7)


class RowClock(SlotClock):
    """A clock on which each row of an expert takes as long as each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.coming = 0
        self._now = 0.0
        self._runs = False

    def now(self, device: torch.device) -> float:
        del device
        if self._runs:
            self._now += self.coming * SECONDS_OF_A_ROW
        self._runs = not self._runs
        return self._now


@dataclass(frozen=True, slots=True)
class Counted:
    """A `Dispatch` that tells the clock how many rows came."""

    dispatch: Dispatch
    clock: RowClock
    combine: Any = "exact"

    def send(self, routed: Routed) -> CountedSent:
        return CountedSent(self.dispatch.send(routed), self.clock)


@dataclass(frozen=True, slots=True)
class CountedSent:
    sent: Sent
    clock: RowClock

    def receive(self) -> Received:
        received = self.sent.receive()
        self.clock.coming = int((received.slots >= 0).sum())
        return received

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        return self.sent.collect(y, places)


class Model:
    """The layers of one rank; without a transport all experts are here."""

    def __init__(
        self,
        dtype: str,
        placements: Sequence[LayerPlacement] = (),
        transport: FaultyTransport | None = None,
    ) -> None:
        self.backend = TensorBackend(ATTENTION, dtype=dtype)
        self.backend.allocate_kv(len(ROWS) // 16 + 1)
        self.placed: list[PlacedLayer] = []
        layers: list[Any] = []
        for layer in range(LAYERS):
            gate, gate_up, down = weights(layer)
            held, dispatch = list(range(EXPERTS)), None
            if transport is not None:
                clock = RowClock()

                def make(placement: LayerPlacement, clock: RowClock = clock) -> Dispatch:
                    return Counted(AllToAll.of(placement, transport, "exact", CPU), clock)

                held = list(placements[layer].ranks[transport.rank])
                dispatch = PlacedDispatch(placements[layer], make, clock)
            experts = self.backend.experts(
                gate, BIAS, list(gate_up[held]), list(down[held]), ROUTING, dispatch=dispatch
            )
            layers.append(experts)
            if dispatch is not None:
                self.placed.append(
                    PlacedLayer(store=self.backend, experts=experts, dispatch=dispatch)
                )
        self._run = partial(self._compute, layers)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._run(rows)

    def _compute(self, layers: list[Any], rows: torch.Tensor) -> torch.Tensor:
        table = self.backend.table(torch.cat((rows, ROWS[:1])))

        def describe(step: MlaStep) -> Value:
            x = step.embed(table)
            for experts in layers:
                x = step.moe(x, experts, x)
            return step.wanted_rows(x)

        paged = PagedRows([len(rows)] if len(rows) else [])
        return self.backend.compile(describe)(paged.batch(paged.whole())).clone()

    def slot_images(self) -> list[list[torch.Tensor]]:
        return [
            [layer.read(slot) for slot in range(len(layer.placement.ranks[0]))]
            for layer in self.placed
        ]


class FaultyTransport:
    """A `Transport` with faults between steps."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.inner = inner
        self.between = False  # steps
        self.exchanges = 0  # of them
        self.most_bytes = 0  # sent in one of them
        self._faults = faults
        self._over = False  # another rank missed an exchange: the round is over

    def turn(self) -> None:
        """What is posted from here on is between two steps."""
        self.between, self._over = True, False

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def ranks(self) -> int:
        return self.inner.ranks

    def begin(self, round_number: int) -> None:
        self.inner.begin(round_number)

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        if self.between and self._over:
            raise StepAborted(0, "a test")
        wait = self.inner.post(columns, parcels)
        if not self.between:
            return wait
        self.most_bytes = max(self.most_bytes, sum(part.nbytes for part in columns))

        def waited() -> Arrived:
            (data,), counts = wait()
            self.exchanges += 1
            missed = [self._faults.misses(rank, self.exchanges) for rank in range(self.ranks)]
            self._over = any(missed)
            if missed[self.rank]:
                raise StepAborted(0, "a test")
            got = [self._faults.damage(self.rank, part) for part in data.split(counts)]
            return Arrived((torch.cat(got),), [len(part) for part in got])

        return waited

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    model: Model
    rebalancer: Rebalancer
    transport: FaultyTransport
    # Of each round that was computed: this rank's rows, and the placements that were in force.
    answers: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    placements: list[list[LayerPlacement]] = field(default_factory=list[list[LayerPlacement]])


def any_of(transport: FaultyTransport, flag: bool) -> bool:
    """As an agreement on a round has it."""
    (said,), _ = transport.inner.post((torch.tensor([flag]),), [Span(0, 1)] * transport.ranks)()
    return bool(said.any())


def run_rounds(
    inner: Transport,
    placements: Sequence[LayerPlacement],
    parts: Sequence[torch.Tensor],
    *,
    rounds: int,
    dtype: str = "float32",
    faults: Faults | None = None,
    piece_bytes: int = 2000,
    change: Callable[[Rebalancer], None] | None = None,
) -> Outcome:
    """Rounds as a group has them: turns where any rank is due, then the pass, unless any rank failed."""
    transport = FaultyTransport(inner, faults or Faults())
    model = Model(dtype, placements, transport)
    slots = len(placements[0].ranks[0])
    config = RebalanceConfig(
        shape=GroupShape(ranks=inner.ranks, slots=slots),
        rounds_of_window=2,
        piece_bytes=piece_bytes,
    )
    ticks = iter(range(1, 10**9))
    rebalancer = Rebalancer(transport, model.placed, config, clock=lambda: next(ticks) * 1e-9)
    if change is not None:
        change(rebalancer)
    outcome = Outcome(model=model, rebalancer=rebalancer, transport=transport)
    for number in range(1, rounds + 1):
        failed = False
        transport.begin(number)
        if any_of(transport, rebalancer.due(number)):
            transport.turn()
            try:
                rebalancer.run()
            except StepAborted:
                failed = True
            transport.between = False
        if any_of(transport, failed):
            continue
        outcome.answers.append(model(parts[inner.rank]))
        outcome.placements.append([layer.placement for layer in model.placed])
    return outcome
