"""KV that this worker pulls from another one: where each pull stands, from the Submit of its request to its end.

    AWAITS_TICKET -> AWAITS_BLOCKS -> HAS_BLOCKS -> PULLING -> WHOLE  -> READY
                                                       |
                                                       +-----> BROKEN -> ALONE

Frames of the router, blocks from the scheduler, reports of the mover and the time are events; `TRANSITIONS` has what
becomes of a pull by each of them. Frames that are late or doubled change nothing. Any other event that `TRANSITIONS`
does not have is a mistake of ours and raises.

The first tokens (`Continue`) come at any time. A pull remembers them until its KV is whole or will not come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from headrace.engine.cache.publishing import Publishing
from headrace.engine.sequence import Key, Sequence, Stage
from headrace.engine.stages import Stages
from headrace.wire.frames import KvFrom, TransferFailure, Transferred


class PullState(Enum):
    """Where a pull stands."""

    AWAITS_TICKET = auto()  # and holds nothing
    AWAITS_BLOCKS = auto()  # in order with all others
    HAS_BLOCKS = auto()  # the steps in flight may still write to them
    PULLING = auto()  # the mover may write to its blocks, from here to its report
    STOPPING = auto()  # the mover was told to stop, and the request goes on without
    LEAVING = auto()  # the mover was told to stop, and the request is over
    WHOLE = auto()  # all KV is there, the first tokens are not
    BROKEN = auto()  # the KV does not come, and the first tokens are not there
    READY = auto()  # over: it decodes
    ALONE = auto()  # over: it computes its prompt like any other
    ENDED = auto()  # over, as its request is


class PullEvent(Enum):
    """What happens to a pull."""

    TICKET = auto()  # the router has it
    BLOCKS = auto()  # the scheduler had room
    BEGIN = auto()  # no step in flight writes to the blocks any more: the mover may
    TOKENS = auto()  # the first ones, from the other worker
    NOTHING = auto()  # neither tokens nor KV will come
    LATE = auto()  # the tokens are there, and have waited long enough for the KV
    ARRIVED = auto()  # the mover has stopped, and the source said that all was good
    FAILED = auto()  # the mover has stopped, and nothing counts
    END = auto()  # of the request: cancelled, too late, or failed


_S, _E = PullState, PullEvent
_NOBODY_WRITES: Final = {_E.NOTHING: _S.ALONE, _E.LATE: _S.ALONE, _E.END: _S.ENDED}
TRANSITIONS: Final[dict[PullState, dict[PullEvent, PullState]]] = {
    _S.AWAITS_TICKET: {_E.TICKET: _S.AWAITS_BLOCKS, _E.TOKENS: _S.AWAITS_TICKET} | _NOBODY_WRITES,
    _S.AWAITS_BLOCKS: {_E.BLOCKS: _S.HAS_BLOCKS, _E.TOKENS: _S.AWAITS_BLOCKS} | _NOBODY_WRITES,
    _S.HAS_BLOCKS: {_E.BEGIN: _S.PULLING, _E.TOKENS: _S.HAS_BLOCKS} | _NOBODY_WRITES,
    _S.PULLING: {
        _E.TOKENS: _S.PULLING,
        _E.NOTHING: _S.STOPPING,
        _E.LATE: _S.STOPPING,
        _E.ARRIVED: _S.WHOLE,
        _E.FAILED: _S.BROKEN,
        _E.END: _S.LEAVING,
    },
    _S.STOPPING: {_E.ARRIVED: _S.WHOLE, _E.FAILED: _S.BROKEN, _E.END: _S.LEAVING},
    _S.LEAVING: {_E.ARRIVED: _S.ENDED, _E.FAILED: _S.ENDED},
    _S.WHOLE: {_E.TOKENS: _S.READY, _E.NOTHING: _S.ALONE, _E.END: _S.ENDED},
    _S.BROKEN: {_E.TOKENS: _S.ALONE, _E.NOTHING: _S.ALONE, _E.END: _S.ENDED},
    **{over: {} for over in (_S.READY, _S.ALONE, _S.ENDED)},
}
OUTSIDE: Final = frozenset({_S.AWAITS_TICKET, _S.BROKEN})
"""The scheduler does not know the sequence, which holds nothing and waits for a frame."""


def next_state(state: PullState, event: PullEvent) -> PullState:
    """Raises `AssertionError` for an event that cannot come in this state."""
    after = TRANSITIONS[state].get(event)
    assert after is not None, f"a pull that is {state.name} cannot take {event.name}"
    return after


@dataclass(slots=True, eq=False)
class KvImport:
    """The pull of one sequence."""

    key: Key
    kv_from: KvFrom
    tokens: int  # whose KV comes: the prompt, and what was generated before this leg
    state: PullState = PullState.AWAITS_TICKET
    ticket: bytes = b""
    wanted: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """What the cache lacks: (place in the sequence, block here), places ascending. Known from `PULLING` on; it may be
    empty, and even so the source waits for its release."""
    continued: PullEvent | None = None  # `TOKENS` or `NOTHING`, once Continue came
    late_s: float = math.inf  # from then on the request does not wait for KV any more


class KvImports:
    """All pulls of requests, and the only place where they change their state."""

    def __init__(self, stages: Stages, publishing: Publishing) -> None:
        self._stages = stages
        self._publishing = publishing
        self._pulls: dict[Key, Sequence] = {}  # those that are not over
        self._reserved: deque[tuple[Sequence, Callable[[], bool]]] = deque()
        self.outside = 0  # sequences with a pull that the scheduler does not know
        self.stops: deque[tuple[Key, TransferFailure]] = deque()  # movers to be stopped, and why
        self.reports: deque[tuple[Key, Transferred]] = deque()  # of late pulls that never began

    def __contains__(self, key: Key) -> bool:
        """Its pull is not over: it waits for something, or a mover may write to its blocks."""
        return key in self._pulls

    @property
    def idle(self) -> bool:
        return not self._pulls

    @property
    def leaving(self) -> list[Sequence]:
        """Their requests are over, and a mover may still write to their blocks."""
        return [s for s in self._pulls.values() if _pull(s).state is PullState.LEAVING]

    @property
    def next_late_s(self) -> float:
        """When `expire` has to be called; infinite where no pull is due."""
        return min((_pull(sequence).late_s for sequence in self._pulls.values()), default=math.inf)

    def expect(self, sequence: Sequence) -> None:
        """A new one."""
        self._pulls[sequence.key] = sequence
        self.outside += 1

    def ticket(self, key: Key, ticket: bytes) -> None:
        """The router has the ticket. The first one counts; one for a request that waits for none crossed its end."""
        sequence = self._pulls.get(key)
        if sequence is not None and _pull(sequence).state is PullState.AWAITS_TICKET:
            _pull(sequence).ticket = ticket
            self._on(sequence, PullEvent.TICKET)

    def reserved(self, sequences: list[Sequence], may_write: Callable[[], bool]) -> None:
        """They have their blocks, which a mover may write to as soon as `may_write` says so."""
        for sequence in sequences:
            self._on(sequence, PullEvent.BLOCKS)
            self._reserved.append((sequence, may_write))

    def take_pulls(self) -> list[KvImport]:
        """From now on a mover may write to the blocks of these: pull what is wanted, then call `ended`."""
        begun: list[KvImport] = []
        while self._reserved:
            sequence, may_write = self._reserved[0]
            pull = sequence.kv_import
            if pull is not None and pull.state is PullState.HAS_BLOCKS:
                if not may_write():
                    break  # those behind it have their blocks from the same step or a later one
                self._on(sequence, PullEvent.BEGIN)
                begun.append(pull)
            self._reserved.popleft()
        return begun

    def awaiting_tokens(self, key: Key) -> Sequence | None:
        """The sequence with this key, if its first tokens are still to come."""
        sequence = self._pulls.get(key)
        if sequence is None:
            return None
        pull = _pull(sequence)
        known = pull.continued is not None or pull.state is PullState.LEAVING
        return None if known else sequence

    def go_on(self, sequence: Sequence, generated: list[int], now_s: float) -> None:
        """These are the first tokens, for which it was `awaiting_tokens`; none means that nothing comes."""
        pull = _pull(sequence)
        pull.continued = PullEvent.TOKENS if generated else PullEvent.NOTHING
        pull.late_s = now_s + pull.kv_from.timeout_ms / 1e3
        sequence.add(generated)
        sequence.tell(generated)
        if sequence.sampling.prompt_logprobs is not None and not sequence.generated:
            sequence.prompt_logprobs = []  # nothing comes, and nobody else gives them
        self._on(sequence, pull.continued)

    def expire(self, now_s: float) -> None:
        """Those that are late do not wait any more."""
        for sequence in list(self._pulls.values()):
            if _pull(sequence).late_s <= now_s:
                self._on(sequence, PullEvent.LATE)

    def ended(self, key: Key, *, arrived: bool) -> int | None:
        """The mover has stopped: all is there and good, or nothing counts. Once for each of `take_pulls`.

        For a request that ended meanwhile: how many blocks it gave back just now (`Freed` is due). Otherwise `None`.
        """
        sequence = self._pulls.get(key)
        assert sequence is not None, f"a mover reports request {key.request}, which has no pull"
        pull = _pull(sequence)
        self._on(sequence, PullEvent.ARRIVED if arrived else PullEvent.FAILED)
        return self._stages.remove(sequence) if pull.state is PullState.ENDED else None

    def end(self, sequence: Sequence) -> bool:
        """Its request is over. False where a mover may still write to its blocks: they are free with `ended`."""
        pull = sequence.kv_import
        if pull is not None:
            self._on(sequence, PullEvent.END)
        return pull is None or pull.state is PullState.ENDED

    def _on(self, sequence: Sequence, event: PullEvent) -> None:
        """The one place where a pull goes from state to state, and what comes with that."""
        pull = _pull(sequence)
        before, after = pull.state, next_state(pull.state, event)
        if after is before:
            return
        pull.state = after
        self.outside += (after in OUTSIDE) - (before in OUTSIDE)
        match after:
            case PullState.AWAITS_BLOCKS:
                self._stages.wait(sequence)
            case PullState.PULLING:
                pull.wanted = [*enumerate(sequence.blocks)][sequence.published :]
            case PullState.STOPPING | PullState.LEAVING:
                pull.late_s = math.inf
                late = event is PullEvent.LATE
                why = TransferFailure.TIMEOUT if late else TransferFailure.CANCELLED
                self.stops.append((pull.key, why))
            case PullState.WHOLE:
                sequence.computed = sequence.keys_to = pull.tokens
                self._publishing.publish(sequence)
                self._stages.changed()  # it may be what somebody lacks
                self._apply_tokens(sequence)
            case PullState.BROKEN:
                self._stages.remove(sequence)
                self._apply_tokens(sequence)
            case PullState.READY:
                self._over(sequence)
                self._stages.unpark(sequence)
            case PullState.ALONE:
                if event is PullEvent.LATE:
                    self._report_late(pull, had_ticket=before is not PullState.AWAITS_TICKET)
                self._stages.remove(sequence)
                self._over(sequence)
                self._stages.wait(sequence)  # it finds in the cache what was pulled
            case PullState.ENDED:
                del self._pulls[sequence.key]
            case PullState.HAS_BLOCKS | PullState.AWAITS_TICKET:
                pass

    def _apply_tokens(self, sequence: Sequence) -> None:
        """What Continue said, if it came before the end of the pull."""
        continued = _pull(sequence).continued
        if continued is not None:
            self._on(sequence, continued)

    def _over(self, sequence: Sequence) -> None:
        """From now on it is a sequence like any other."""
        del self._pulls[sequence.key]
        sequence.kv_import = None

    def _report_late(self, pull: KvImport, *, had_ticket: bool) -> None:
        """No mover has begun, so none reports. One that had its ticket lacked blocks: its source is not to blame."""
        why = TransferFailure.NO_ROOM if had_ticket else TransferFailure.TIMEOUT
        waited_ms = float(pull.kv_from.timeout_ms)
        source = pull.kv_from.worker
        report = Transferred(pull.key.request, source, None, 0, 0, waited_ms, why)
        self.reports.append((pull.key, report))

    def check(self) -> None:
        """Assert that the scheduler has each sequence where its pull says."""
        for key, sequence in self._pulls.items():
            match state := _pull(sequence).state:
                case _ if state in OUTSIDE:
                    stage = Stage.OUTSIDE
                case PullState.AWAITS_BLOCKS:
                    stage = Stage.WAITING
                case _:
                    stage = Stage.PARKED
            assert sequence.key == key, "a pull has another one's name"
            assert sequence.stage is stage, f"{state.name}, but {sequence.stage.name}"
        outside = sum(_pull(sequence).state in OUTSIDE for sequence in self._pulls.values())
        assert outside == self.outside, "miscounted who is outside"


def _pull(sequence: Sequence) -> KvImport:
    assert sequence.kv_import is not None, "it has no pull, or had one"
    return sequence.kv_import
