"""One step on its way: ordered by the engine, computed on whatever thread, finished by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.export import Chunk
from headrace.engine.result import StepResult
from headrace.engine.seats import Seated, Table
from headrace.engine.sequence import Sequence
from headrace.engine.verify import Chosen
from headrace.engine.work import Work
from headrace.frames import TokenLogprob


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be computed, and what changed about seats since the step before."""

    work: list[Work]
    seated: list[Seated]
    tables: list[Table]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model said, and where that leaves the sequences of `work`: those of the order that had not ended."""

    work: list[Work]
    computed: NDArray[np.int64]  # [work], tokens whose KV is in the cache now
    drafts: NDArray[np.int64]  # [work], that there are for the next step
    keys_from: NDArray[np.int64]  # [work]
    keys_to: NDArray[np.int64]  # [work]
    chosen: list[Chosen]
    prompt_logprobs: list[tuple[Work, list[TokenLogprob]]]
    first_drafts: int  # for a sequence that comes with its KV


class Step:
    """`run` it once, on any thread, after the step before it; then the engine finishes it."""

    def __init__(
        self, order: Order, compute: Callable[[Order], Computed], result: StepResult
    ) -> None:
        self.order = order
        self.result = result
        self.computed: Computed | None = None  # once it ran well
        self.error: Exception | None = None  # once it did not
        self.reserved: list[Sequence] = []  # got blocks that this step may still write to
        self._compute = compute

    def run(self) -> None:
        """Never raises for what the model did."""
        try:
            self.computed = self._compute(self.order)
        except Exception as error:
            self.error = error
