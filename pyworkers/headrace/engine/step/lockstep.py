"""What keeps the engines of a group in step: rounds that all ranks begin together, and drafting passes of one number.

Ranks of a group share the experts of one model, so no rank computes a pass without the others. Before each step the
ranks agree on it. A rank without work joins with a step of no rows. Once no rank has work, the group sleeps: no rank
begins a round until one has work, or something to say, again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank brings to a round."""

    rows: int = 0  # of the step
    prompt_tokens: int = 0  # of these rows
    context_tokens: int = 0  # that the rows attend to
    waiting_tokens: int = 0  # of prompts that are not in the step
    drafts_first: bool = False  # sequences that came with their KV draft before the step
    # It takes nothing new and leaves, and what runs on it has so long: a group leaves as one. `None`: it stays.
    drain_ms: int | None = None
    at_rest: bool = False  # it leaves, and nothing of its own is left: once that is true of all, no round follows
    between: bool = (
        False  # it has something to do with all ranks before the passes (`BetweenSteps`)
    )


class BetweenSteps(Protocol):
    """What ranks do together between two steps, on the thread of the steps: all of them have it, or none.

    Each rank says with its load whether it is due there. Where it is due on any rank, and the round has passes, all
    ranks run it: after the agreement, before the first pass. What `run` raises ends the round.
    """

    def due(self, round_number: int) -> bool: ...

    def run(self) -> None: ...


class Lockstep(Protocol):
    """This rank's end of its group.

    One thread at a time calls it, that of the steps, but for `asleep` and `on_wake`. All that wait raise `RankLost`
    where a rank did not come in time; and inside of a round, which is after `agree`, `StepAborted` where a rank failed
    in this same round. A rank that is through with a round does not hear of failures in it any more.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def asleep(self) -> bool:
        """The last round found no rank with work, and no other rank has begun one since. So it is at first."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds spent in waiting for other ranks so far, in agreements and exchanges."""
        ...

    def agree(self, load: RankLoad) -> list[RankLoad]:
        """Begin a round: the loads of all ranks, by rank. Where none has rows or drafts first, it ends at once."""
        ...

    def agree_depth(self, depth: int) -> int:
        """The most drafting passes that any rank has to run now; each rank runs so many."""
        ...

    def abort(self, error: BaseException) -> None:
        """This rank failed inside of the round: end it on all ranks. They go on together with the next round."""
        ...

    def on_wake(self, call: Callable[[], None] | None) -> None:
        """Have `call` called, on any thread, when this rank is `asleep` no more: another one began a round, or is lost.

        What comes next then finds out by `agree`.
        """
        ...
