"""What an engine says after a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.sequence import Key, Sequence
from headrace.engine.step.work import StepWork
from headrace.wire.frames import Failed, Freed, Output
from headrace.wire.output_columns import Outputs


class Answers:
    """What one link is to hear about its requests."""

    def __init__(
        self,
        outputs: list[Output] | None = None,
        failed: list[Failed] | None = None,
        freed: list[Freed] | None = None,
    ) -> None:
        self.said = outputs or []  # before `columns`
        self.columns: Outputs | None = None
        self.failed = failed or []
        self.freed = freed or []

    @property
    def outputs(self) -> list[Output]:
        return self.said if self.columns is None else [*self.said, *self.columns]

    @property
    def num_tokens(self) -> int:
        """That these answers get."""
        columns = 0 if self.columns is None else self.columns.num_tokens
        return columns + sum(len(output.ids) for output in self.said)

    @property
    def ended(self) -> list[int]:
        """Requests that get no more outputs; their blocks may be free later."""
        special = () if self.columns is None else self.columns.special.values()
        finished = [o.request for o in (*self.said, *special) if o.finish is not None]
        return finished + [failed.request for failed in self.failed]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSequence:
    """What is told of a request that computes nothing any more. `finish` is the word for its end; else `error` is."""

    key: Key
    prompt_tokens: int
    cached_tokens: int | None  # None: it did not come to be admitted
    output_tokens: int
    finish: str | None = None
    error: str | None = None
    why: str | None = None

    @staticmethod
    def of(
        sequence: Sequence,
        finish: str | None = None,
        error: str | None = None,
        why: str | None = None,
    ) -> EndedSequence:
        return EndedSequence(
            key=sequence.key,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens,
            output_tokens=sequence.total - sequence.prompt_len,
            finish=finish,
            error=error,
            why=why,
        )


@dataclass(slots=True)
class StepResult:
    """What one step did. `step` counts the forwards; it stays where none was needed.

    The counts are those of the cost model in `Hello.step_prior`; `ms` and `waited_us` are for the caller to fill in.
    """

    step: int = 0
    ms: float = 0.0
    waited_us: int = 0  # of `ms`, for other ranks of the group
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: dict[int, Answers] = field(default_factory=dict[int, Answers])  # by link
    admitted: list[Key] = field(default_factory=list[Key])  # to the batch, also once more
    begun: list[Key] = field(default_factory=list[Key])  # what is said of them now is the first
    ended: list[EndedSequence] = field(default_factory=list[EndedSequence])

    def count(self, work: StepWork, decode_rows: int, kv_tokens: int) -> None:
        """What is about to be computed; of how many rows decode, and how many tokens are read."""
        self.decode_rows += decode_rows
        self.kv_tokens += kv_tokens
        if decode_rows < len(work):
            starts, counts = work.starts[~work.decodes], work.counts[~work.decodes]
            self.prefill_tokens += int(counts.sum())
            self.prefill_context += int((counts * starts + counts * (counts - 1) // 2).sum())

    @property
    def output_tokens(self) -> int:
        """That all links get."""
        return sum(answers.num_tokens for answers in self.answers.values())

    def of(self, link: int) -> Answers:
        return self.answers.setdefault(link, Answers())
