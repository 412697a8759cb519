"""One step on its way: ordered by the engine, computed on whatever thread, finished by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.engine.cache.kv_export import Chunk
from headrace.engine.errors import KernelPanic
from headrace.engine.result import StepResult
from headrace.engine.sampling.verify import ChosenRows
from headrace.engine.step.input_batch import AddedRow, GrownTables, TableUpdate
from headrace.engine.step.work import StepWork, Work
from headrace.wire.frames import TokenLogprob


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be computed, and what changed about batch rows since the step before."""

    work: StepWork
    placed: list[AddedRow]
    tables: list[TableUpdate]
    grown: GrownTables
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class SequencesAfter:
    """Where a step leaves its sequences. All are `[work]`."""

    computed: NDArray[np.int64]  # tokens whose KV is in the cache
    drafts: NDArray[np.int64]  # that there are for the next step
    keys_from: NDArray[np.int64]
    keys_to: NDArray[np.int64]

    def where(self, mask: NDArray[np.bool_]) -> SequencesAfter:
        if mask.all():
            return self
        fields = (self.computed, self.drafts, self.keys_from, self.keys_to)
        return SequencesAfter(*[field[mask] for field in fields])


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model said of `work`: that of the order without those who had ended."""

    work: StepWork
    after: SequencesAfter
    chosen: ChosenRows
    prompt_logprobs: list[tuple[Work, list[TokenLogprob]]]
    first_drafts: int  # for a sequence that comes with its KV


Read: TypeAlias = Callable[[], Computed]


class EngineStep:
    """`run` it once, after the step before it, then `read` it; each on any thread. Then the engine finishes it."""

    def __init__(self, order: Order, launch: Callable[[Order], Read], result: StepResult) -> None:
        self.order = order
        self.result = result
        self.computed: Computed | None = None  # once it was read and went well
        self.error: Exception | None = None  # once it did not
        # No other one begins before its end: until then a chunk of an export does not count.
        self.last = len(order.chunks) > 0
        self._launch = launch
        self._read: Read | None = None

    def run(self) -> None:
        """Give it to the model. Never raises for what that did."""
        try:
            self._read = self._launch(self.order)
        except BaseException as error:
            self.error = _failure(error)

    def read(self) -> None:
        """Wait for the model's end of it. Never raises for what that did."""
        if self._read is None:
            return
        try:
            self.computed = self._read()
        except BaseException as error:
            self.error = _failure(error)
        self._read = None


def _failure(error: BaseException) -> Exception:
    """What fails a batch. Raises what is to end the worker."""
    if isinstance(error, Exception):
        return error
    if type(error).__module__ != "pyo3_runtime":
        raise error
    panic = KernelPanic(str(error))
    panic.__cause__ = error
    return panic
