"""What one sequence gets of a step."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.sequence import Sequence


@dataclass(slots=True)
class Work:
    """`count` tokens of `sequence`, from `sequence.computed` on, and so many of its `drafts`."""

    sequence: Sequence
    count: int
    drafts: int = 0
