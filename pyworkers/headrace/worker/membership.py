"""A worker as a rank of a group: its ranks leave as one, and one that is lost ends them all.

What drains one rank drains all, as no rank can compute alone. A rank that leaves takes part in rounds until nothing is
left on any rank. All ranks learn that in the same agreement, and no round follows it.
"""

from __future__ import annotations

from headrace.engine.step.rounds import Rounds
from headrace.wire.frames import GroupTotals
from headrace_kernels.moe.transport import RankLost


class Membership:
    """What a worker hears from its group, and has it know. A worker without `rounds` is its own group."""

    def __init__(self, rounds: Rounds | None) -> None:
        self._rounds = rounds
        self._heard_ms: int | None = None  # the shortest time of another rank that leaves

    @property
    def lost(self) -> RankLost | None:
        return None if self._rounds is None else self._rounds.lost

    @property
    def totals(self) -> GroupTotals | None:
        """What this rank did for its group so far. `None` without a group."""
        if self._rounds is None:
            return None
        from headrace.worker.parallel.rebalance import Rebalancer  # whoever is in a group has torch

        held_rounds, held_ms = self._rounds.held_rounds, self._rounds.held_ms
        between = self._rounds.between
        if not isinstance(between, Rebalancer):
            return GroupTotals(held_rounds, held_ms)
        done = between.done
        return GroupTotals(
            held_rounds=held_rounds,
            held_ms=held_ms,
            waves=done.waves,
            slots=done.slots_changed,
            bytes=done.bytes_sent,
            refused=done.cancelled,
            gain_s=done.gain_s,
            cost_s=done.cost_s,
            spent_s=done.spent_s,
        )

    @property
    def over(self) -> bool:
        """No other rank needs this one any more."""
        return self._rounds is None or self._rounds.over

    def heard_leave_s(self) -> float | None:
        """So much time another rank gives what runs on it, as it leaves. `None` where that is no news."""
        ms = None if self._rounds is None else self._rounds.drain_ms_of_others
        if ms is None or (self._heard_ms is not None and self._heard_ms <= ms):
            return None
        self._heard_ms = ms
        return ms / 1e3

    def leave(self, budget_s: float) -> None:
        """This rank leaves, and gives what runs on it so much time."""
        if self._rounds is not None:
            told, ms = self._rounds.drain_ms, round(budget_s * 1e3)
            self._rounds.drain_ms = ms if told is None else min(told, ms)

    def rest(self) -> bool:
        """Nothing is left on this rank, which leaves. Returns whether that is news for the group."""
        if self._rounds is None or self._rounds.at_rest:
            return False
        self._rounds.at_rest = True
        return True
