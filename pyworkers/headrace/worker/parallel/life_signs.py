"""Signs of life on control links, and who is to blame where a rank says that another one is missing.

A rank says now and then that it is there, and for how long it has waited for others: also while it computes, and while
the group sleeps, when nothing else would show that it hangs. Pure: `now_s` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BEATS = 4  # within the time after which a silent rank is lost: one that comes late costs nobody the group
DOUBT = 0.5  # of that time, after which a rank is to blame rather than one that was heard, or waits itself


class LifeSigns:
    """What one end hears of the ranks at the other ends. Nobody is silent before `start`.

    Silence counts only as far as whoever listens was there: a process that stood still itself has heard nothing.
    """

    def __init__(self, ranks: Iterable[int], timeout_s: float, *, patience_s: float = 0.0) -> None:
        """A rank is lost `timeout_s` and `patience_s` after it was heard last."""
        self.period_s = timeout_s / BEATS
        self._doubt_s = timeout_s * DOUBT
        self._most_s = timeout_s + patience_s
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._waits_s = dict.fromkeys(self._silent_s, 0.0)
        self._listened_s: float | None = None  # until when; None before the start
        self._beat_s = math.inf  # when the next one is due

    @property
    def started(self) -> bool:
        return self._listened_s is not None

    def start(self, now_s: float) -> None:
        """From now on ranks owe signs of life, this one too."""
        self._silent_s = dict.fromkeys(self._silent_s, 0.0)
        self._listened_s = self._beat_s = now_s

    def heard(self, rank: int) -> None:
        """Anything came from it."""
        self._silent_s[rank] = 0.0

    def waits(self, rank: int, seconds: float) -> None:
        """So long it waits for other ranks now; 0 where it does not. Also of this rank itself."""
        self._waits_s[rank] = seconds

    def beat_due(self, now_s: float) -> bool:
        """Whether this rank has to say that it is there; it is taken to do so."""
        if now_s < self._beat_s:
            return False
        self._beat_s = now_s + self.period_s
        return True

    def listened(self, now_s: float) -> None:
        """All that had come until now was heard."""
        if self._listened_s is None:
            return
        passed_s = min(now_s - self._listened_s, 2 * self.period_s)
        self._listened_s = now_s
        for rank in self._silent_s:
            self._silent_s[rank] += passed_s

    def next_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None before the start."""
        if not self.started:
            return None
        longest_s = max(self._silent_s.values(), default=0.0)
        return max(min(self._beat_s - now_s, self._most_s - longest_s), 0.0)

    def lost(self) -> tuple[int, str] | None:
        """The rank that was silent for too long, and what is said of it."""
        rank = self._most_silent(self._silent_s, self._most_s)
        return None if rank is None else (rank, self._silence(rank))

    def likeliest(self, missing: Sequence[int]) -> int:
        """Of ranks that did not come, the one that keeps the others: silent for longest, or else not waiting itself."""
        silent = self._most_silent(missing, self._doubt_s)
        if silent is not None:
            return silent
        return min(missing, key=lambda rank: (self._waits_s.get(rank, 0.0) > self._doubt_s, rank))

    def blamed(self, accuser: int, accused: int, how: str) -> tuple[int, str]:
        """Whom a rank's word that another one is missing is to be laid on: that one may only wait itself."""
        others = [rank for rank in self._silent_s if rank != accuser]
        silent = self._most_silent(others, self._doubt_s)
        if silent is not None and silent != accused:
            said = f"rank {accuser} waited for rank {accused}: {how}"
            return silent, f"{self._silence(silent)}, while {said}"
        if (
            silent is None
            and accuser != accused
            and self._waits_s.get(accused, 0.0) > self._doubt_s
        ):
            others = [rank for rank in self._waits_s if rank != accuser]
            working = [rank for rank in others if self._waits_s[rank] <= self._doubt_s]
            if working:
                said = f"rank {accuser} waited for rank {accused}, which waits itself: {how}"
                # Rank 0 decides this, so its threads run: it comes last.
                return min(working, key=lambda rank: (rank == 0, self._waits_s[rank])), said
        return accused, how

    def _most_silent(self, ranks: Iterable[int], most_s: float) -> int | None:
        silent = [rank for rank in ranks if self._silent_s.get(rank, 0.0) >= most_s]
        return max(silent, key=self._silent_s.__getitem__, default=None)

    def _silence(self, rank: int) -> str:
        return f"nothing was heard of it for {self._silent_s[rank]:.1f} s"
