"""What one sequence gets of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.sequence import Sequence


@dataclass(slots=True)
class Work:
    """The next `count` tokens of `sequence`, and at most so many of its `drafts`.

    What the sequence may have changed by when the step runs is kept here.
    """

    sequence: Sequence
    count: int
    drafts: int = 0
    begins: bool = False  # it came with all its KV: draft for it first
    seat: int = field(init=False)
    sitting: int = field(init=False)
    start: int = field(init=False)  # its first token's place, or more where drafts were accepted
    chooses: bool = field(init=False)  # a token after these
    scores: bool = field(init=False)  # tokens of the prompt

    def __post_init__(self) -> None:
        sequence = self.sequence
        assert sequence.seat is not None
        self.seat, self.sitting, self.start = sequence.seat, sequence.sitting, sequence.reached
        length = sequence.length
        self.chooses = self.start + self.count == length < sequence.limit
        self.scores = sequence.prompt_logprobs is not None and self.start < sequence.prompt_len

    @property
    def sits(self) -> bool:
        """The sequence still has the seat that it has in this step."""
        return self.sequence.seat is not None and self.sequence.sitting == self.sitting
