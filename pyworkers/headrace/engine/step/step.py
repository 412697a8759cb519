"""One step on its way: ordered by the engine, computed on whatever thread, finished by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.engine.errors import KernelPanic
from headrace.engine.pooling import Floats
from headrace.engine.result import StepResult
from headrace.engine.sampling.verify import ChosenRows
from headrace.engine.step.input_batch import AddedRow, GrownTables, TableUpdate
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.work import StepWork, Work
from headrace.wire.frames import TokenLogprob


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model made of the sequences of `chosen.work`: those of the step without those who had ended."""

    computed: Ints  # [work], tokens whose KV is in the cache
    drafts: Ints  # [work], that there are for the next step
    keys_from: Ints  # [work]
    keys_to: Ints  # [work]
    chosen: ChosenRows
    prompt_logprobs: list[tuple[Work, list[TokenLogprob]]]
    pooled: list[tuple[Work, Floats]]  # rows of prompts
    first_drafts: int  # for a sequence that comes with its KV


Read: TypeAlias = Callable[[], Computed]


@dataclass(slots=True, eq=False)
class EngineStep:
    """What is to be computed, what changed about batch rows since the step before, and in the end what became of it.

    `run` it once, after the step before it, then `read` it; each on any thread. Then the engine finishes it.
    """

    work: StepWork
    added: list[AddedRow]
    tables: list[TableUpdate]
    grown: GrownTables
    chunks: list[Work]  # of prompts that other workers pull
    launch: Callable[[EngineStep], Read]
    result: StepResult
    waiting_tokens: int = 0  # of prompts that are in no step yet; counted in a group only
    computed: Computed | None = None  # once it was read and went well
    error: Exception | None = None  # once it did not
    last: bool = field(init=False)
    _read: Read | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # No other one begins before its end: until then a chunk of an export does not count.
        self.last = len(self.chunks) > 0

    def run(self) -> None:
        """Give it to the model. Never raises for what that did."""
        try:
            self._read = self.launch(self)
        except BaseException as error:
            self.error = failure_of(error)

    def read(self) -> None:
        """Wait for the model's end of it. Never raises for what that did."""
        if self._read is None:
            return
        try:
            self.computed = self._read()
        except BaseException as error:
            self.error = failure_of(error)
        self._read = None


def failure_of(error: BaseException) -> Exception:
    """What fails a batch. Raises what is to end the worker."""
    if isinstance(error, Exception):
        return error
    if type(error).__module__ != "pyo3_runtime":
        raise error
    panic = KernelPanic(str(error))
    panic.__cause__ = error
    return panic
