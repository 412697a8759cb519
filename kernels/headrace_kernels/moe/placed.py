"""A layer of experts whose placement can change between two passes: its slots, and a `Dispatch` that follows.

The time between rows that came and results that go back is that of the slots here; it is counted, as what a rank
takes for its rows says what uneven ranks cost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from headrace import _core
from headrace_kernels.moe.dispatch import (
    Combine,
    Dispatch,
    NativeDispatch,
    Received,
    Returned,
    Routed,
    Sent,
)
from headrace_kernels.moe.placement import LayerPlacement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace_kernels.ops import LayerExperts

MOST_TIMED = 256  # spans of a GPU that are not read yet; the oldest are dropped


class SlotStore(Protocol):
    """What a backend does with the slots of a layer (`MlaBackend`)."""

    def expert_counts(self, experts: LayerExperts) -> NDArray[np.int64]: ...
    def slot_bytes(self, experts: LayerExperts) -> int: ...
    def read_slot(self, experts: LayerExperts, slot: int) -> torch.Tensor: ...
    def write_slot(self, experts: LayerExperts, slot: int, image: torch.Tensor) -> None: ...


class SlotClock:
    """How long the slots of a layer computed so far. On a GPU by events in its queue, which nobody waits for."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans = deque[tuple[Any, Any]](maxlen=MOST_TIMED)
        self._native: _core.SharedExchange | None = None

    def count(self, native: _core.SharedExchange) -> None:
        """Also what programs compute by this exchange."""
        self._native = native

    def now(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def add(self, start: Any, end: Any) -> None:
        if isinstance(start, float):
            self._seconds += end - start
        else:
            self._spans.append((start, end))

    @property
    def seconds(self) -> float:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
        return self._seconds + (self._native.slots_s if self._native else 0.0)


class PlacedDispatch:
    """The `Dispatch` of the placement that is in force. `make` makes it of a placement."""

    def __init__(
        self,
        placement: LayerPlacement,
        make: Callable[[LayerPlacement], Dispatch],
        clock: SlotClock | None = None,
    ) -> None:
        self.placement = placement
        self.clock = clock or SlotClock()
        self._make = make
        self._dispatch = make(placement)
        self._native: _core.SharedExchange | None = None

    def place(self, placement: LayerPlacement) -> None:
        """Rows go by this placement from now on. For the thread of the passes, between two of them."""
        self._dispatch, self.placement = self._make(placement), placement
        if self._native is not None:
            new = self._native_of_placement()
            assert new is not None, "one way for all placements"
            self._native.follow(new)

    def native(self) -> _core.SharedExchange | None:
        """It follows the placement."""
        if self._native is None:
            self._native = self._native_of_placement()
            if self._native is not None:
                self.clock.count(self._native)
        return self._native

    def _native_of_placement(self) -> _core.SharedExchange | None:
        return self._dispatch.native() if isinstance(self._dispatch, NativeDispatch) else None

    @property
    def combine(self) -> Combine:
        return self._dispatch.combine

    def send(self, routed: Routed) -> TimedSent:
        return TimedSent(self._dispatch.send(routed), self.clock)


@dataclass(slots=True)
class TimedSent:
    """Rows on their way, and the time that those that came take here."""

    sent: Sent
    clock: SlotClock
    start: Any = field(default=None)

    def receive(self) -> Received:
        received = self.sent.receive()
        self.start = self.clock.now(received.x.device)
        return received

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        self.clock.add(self.start, self.clock.now(y.device))
        return self.sent.collect(y, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """One layer's part on this rank."""

    store: SlotStore
    experts: LayerExperts
    dispatch: PlacedDispatch

    @property
    def placement(self) -> LayerPlacement:
        return self.dispatch.placement

    @property
    def slot_bytes(self) -> int:
        return self.store.slot_bytes(self.experts)

    def counts(self) -> NDArray[np.int64]:
        """Rows that chose each expert so far, as this rank's router saw them."""
        return self.store.expert_counts(self.experts)

    def read(self, slot: int) -> torch.Tensor:
        return self.store.read_slot(self.experts, slot)

    def write(self, slot: int, image: torch.Tensor) -> None:
        self.store.write_slot(self.experts, slot, image)
