"""Which requests are here, when something is due for one of them, and how they end."""

from __future__ import annotations

import math

from headrace.engine.cache.kv_import import KvImports
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key, Sequence, Stage
from headrace.engine.stages import Stages


class Requests:
    """All sequences from their submit to the last of their blocks."""

    def __init__(self, stages: Stages, kv_imports: KvImports) -> None:
        self._stages = stages
        self._kv_imports = kv_imports
        self.here: dict[Key, Sequence] = {}
        self._timed: dict[Sequence, None] = {}  # those with any time limit

    @property
    def empty(self) -> bool:
        """Nor is one whose blocks a mover may still write to."""
        return not self.here and self._kv_imports.idle

    @property
    def next_due_s(self) -> float:
        """When something has to happen to one of them by itself."""
        return min((_due_s(sequence) for sequence in self._timed), default=math.inf)

    def due(self, now_s: float) -> list[Sequence]:
        """Those for whom it is time."""
        return [sequence for sequence in self._timed if _due_s(sequence) <= now_s]

    def check_new(self, key: Key) -> None:
        """Raises `RequestError` for one that is here."""
        if key in self.here or key in self._kv_imports:
            raise RequestError(
                FailureKind.DUPLICATE_REQUEST, f"request {key.request} is here already"
            )

    def add(self, sequence: Sequence) -> None:
        self.here[sequence.key] = sequence
        self.time(sequence)

    def get(self, key: Key) -> Sequence | None:
        return self.here.get(key)

    def time(self, sequence: Sequence) -> None:
        """Its time limits changed."""
        if _due_s(sequence) < math.inf:
            self._timed[sequence] = None
        else:
            self._timed.pop(sequence, None)

    def end(self, sequence: Sequence) -> int | None:
        """How many blocks it gave back; `None` where a mover may still write to them."""
        del self.here[sequence.key]
        self._timed.pop(sequence, None)
        if sequence.export is not None:
            sequence.export.revoked = True  # before a block of it can be another's
        return self._stages.remove(sequence) if self._kv_imports.end(sequence) else None

    def check(self) -> None:
        """Assert that the scheduler knows the same sequences."""
        stages = self._stages
        known = {*stages.running, *stages.waiting, *stages.ready, *stages.parked}
        here = {*self.here.values(), *self._kv_imports.leaving}
        assert known <= here, "a request is not known any more"
        assert len(here - known) == self._kv_imports.outside, "a request is lost"
        assert all(s.stage is Stage.OUTSIDE for s in here - known), "a request is lost"
        assert all(sequence in here for sequence in self._timed), "one that ended has a deadline"


def _due_s(sequence: Sequence) -> float:
    """When something has to happen to it by itself; infinity if never."""
    due_s = math.inf if sequence.deadline_s is None else sequence.deadline_s
    if sequence.lease_end_s is not None:
        due_s = min(due_s, sequence.lease_end_s)
    return due_s
