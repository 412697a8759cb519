"""What an engine says after a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.work import Work
from headrace.frames import Failed, Freed, Output


@dataclass(slots=True)
class Answers:
    """What one link is to hear about its requests."""

    outputs: list[Output] = field(default_factory=list[Output])
    failed: list[Failed] = field(default_factory=list[Failed])
    freed: list[Freed] = field(default_factory=list[Freed])

    @property
    def ended(self) -> list[int]:
        """Requests that get no more outputs; their blocks may be free later."""
        finished = [output.request for output in self.outputs if output.finish is not None]
        return finished + [failed.request for failed in self.failed]


@dataclass(slots=True)
class StepResult:
    """What one step did. `step` counts the forwards; it stays where none was needed.

    The counts are those of the cost model in `Hello.step_prior`; `ms` is for the caller to fill in.
    """

    step: int = 0
    ms: float = 0.0
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: dict[int, Answers] = field(default_factory=dict[int, Answers])  # by link

    def count(self, work: list[Work]) -> None:
        """What is about to be computed."""
        for item in work:
            start, count = item.start, item.count
            if item.sequence.decodes:
                self.decode_rows += 1
            else:
                self.prefill_tokens += count
                self.prefill_context += count * start + count * (count - 1) // 2
            self.kv_tokens += start + count + item.drafts

    def of(self, link: int) -> Answers:
        return self.answers.setdefault(link, Answers())
