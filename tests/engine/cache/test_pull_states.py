"""A pull of KV in each of its states: what moves it on, what cannot come, and what its request holds meanwhile."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.engine.cache.kv_import import (
    TRANSITIONS,
    KvImport,
    PullEvent,
    PullState,
    next_state,
)
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Sequence, Stage
from headrace.wire.frames import TransferFailure, Transferred
from helpers.engine.legs import PROMPT, D, exported, legs, make_engine, run, truth
from helpers.engine.pair import Heard, move
from helpers.engine.toy import make_submit

PAGE = Path(__file__).resolve().parents[3] / "docs/design/kv-transfer.md"
S, E = PullState, PullEvent
OVER = (S.READY, S.ALONE, S.ENDED)
LIVE = [state for state in PullState if state not in OVER]
BLOCKS = {S.HAS_BLOCKS, S.PULLING, S.STOPPING, S.LEAVING, S.WHOLE}  # with them
WRITTEN = {S.PULLING, S.STOPPING, S.LEAVING}  # by a mover


def page_table() -> dict[PullState, dict[PullEvent, PullState]]:
    """The table of `docs/design/kv-transfer.md`."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `[A-Z_]+` \|", line) or line.startswith("| state |")
    ]
    events = [PullEvent[name] for name in rows[0][1:]]
    return {
        PullState[state]: {
            event: PullState[after]
            for event, after in zip(events, after_each, strict=True)
            if after
        }
        for state, *after_each in rows[1:]
    }


def test_the_page_has_the_transitions_of_the_code() -> None:
    said = page_table()
    assert {state for state in TRANSITIONS if TRANSITIONS[state]} == set(said)
    assert {state: after for state, after in TRANSITIONS.items() if after} == said


def test_what_a_pull_cannot_take_raises_with_both_names() -> None:
    with pytest.raises(AssertionError, match=r"READY cannot take LATE"):
        next_state(S.READY, E.LATE)
    for state in OVER:
        for event in PullEvent:
            with pytest.raises(AssertionError):
                next_state(state, event)


class Scene:
    """One import on its way, and all that can happen to it."""

    def __init__(self, *, deadline_ms: int | None = None) -> None:
        self.prefill = make_engine()
        self.export, self.heard = exported(self.prefill)
        self.engine = make_engine()
        _, leg = legs(make_submit(0, PROMPT, deadline_ms=deadline_ms))
        self.engine.submit(leg)
        self.answer = Heard()
        sequence = self.engine.kv_imports.awaiting_tokens(D)
        assert sequence is not None and sequence.kv_import is not None
        self.sequence: Sequence = sequence
        self.pull: KvImport = sequence.kv_import
        self.tokens = False

    def do(self, event: PullEvent) -> int | None:
        """Let it happen, by whatever tells the engine of it in a worker."""
        match event:
            case E.TICKET:
                self.engine.kv_imports.ticket(D, b"ticket")
            case E.BLOCKS:
                self.answer.hear(self.engine.step(), D.request)
            case E.BEGIN:
                assert self.engine.kv_imports.take_pulls() == [self.pull]
            case E.TOKENS:
                self.answer.ids += self.heard.ids
                self.tokens = True
                self.engine.go_on(D, self.heard.ids)
            case E.NOTHING:
                self.engine.go_on(D, [])
            case E.LATE:
                self.answer.hear(self.engine.expire(1.0), D.request)
            case E.ARRIVED:
                if self.pull.wanted:
                    move(self.prefill, self.export, self.engine, self.pull)
                return self.engine.kv_imports.ended(D, arrived=True)
            case E.FAILED:
                return self.engine.kv_imports.ended(D, arrived=False)
            case E.END:
                return self.engine.cancel(D)
        return None

    def go(self, *events: PullEvent) -> Scene:
        for event in events:
            self.do(event)
            self.check()
        return self

    def check(self) -> None:
        self.engine.check()
        state = self.pull.state
        if state not in OVER:
            assert self.engine.pool.used == (3 if state in BLOCKS else 0)
            outside = state in (S.AWAITS_TICKET, S.BROKEN)
            assert self.engine.kv_imports.outside == outside
            assert not self.engine.empty


WAYS: dict[PullState, tuple[PullEvent, ...]] = {
    S.AWAITS_TICKET: (),
    S.AWAITS_BLOCKS: (E.TICKET,),
    S.HAS_BLOCKS: (E.TICKET, E.BLOCKS),
    S.PULLING: (E.TICKET, E.BLOCKS, E.BEGIN),
    S.STOPPING: (E.TICKET, E.BLOCKS, E.BEGIN, E.NOTHING),
    S.LEAVING: (E.TICKET, E.BLOCKS, E.BEGIN, E.END),
    S.WHOLE: (E.TICKET, E.BLOCKS, E.BEGIN, E.ARRIVED),
    S.BROKEN: (E.TICKET, E.BLOCKS, E.BEGIN, E.FAILED),
}


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
def test_a_state_holds_what_it_says(state: PullState) -> None:
    scene = Scene().go(*WAYS[state])
    assert scene.pull.state is state
    stage = Stage.PARKED if state in BLOCKS else Stage.OUTSIDE
    assert scene.sequence.stage is (Stage.WAITING if state is S.AWAITS_BLOCKS else stage)
    assert scene.engine.idle == (state is not S.AWAITS_BLOCKS)
    with pytest.raises(RequestError) as caught:
        scene.engine.submit(legs()[1])
    assert caught.value.kind is FailureKind.DUPLICATE_REQUEST


STEPS = [(state, event) for state in LIVE for event in PullEvent if event in page_table()[state]]


@pytest.mark.parametrize(
    ("state", "event"),
    STEPS,
    ids=lambda it: it.name if isinstance(it, PullState | PullEvent) else "",
)
def test_every_transition_happens_in_an_engine_and_the_answer_stays(
    state: PullState, event: PullEvent
) -> None:
    """The pull of an engine goes where the page says, and whatever happened, the answer is the truth."""
    scene = Scene().go(*WAYS[state])
    if event is E.LATE:  # there is nothing to be late for before the tokens
        scene.go(E.TOKENS)
    page = page_table()
    expected = page[state][event]
    if expected in (S.WHOLE, S.BROKEN) and scene.pull.continued is not None:
        expected = page[expected][scene.pull.continued]  # at once, as there is nothing to wait for
    scene.do(event)
    assert scene.pull.state is expected
    scene.check()
    if expected is S.LEAVING:
        assert scene.do(E.FAILED) == 3
    if expected in (S.LEAVING, S.ENDED):
        assert scene.engine.empty
        scene.engine.check_idle()
        return
    if expected is S.STOPPING:
        scene.go(E.FAILED)
    elif scene.pull.state not in OVER and scene.pull.continued is None:
        scene.go(E.NOTHING)
        if scene.pull.state is S.STOPPING:
            scene.go(E.FAILED)
    if scene.pull.state not in OVER:
        scene.go(E.LATE)
        if scene.pull.state is S.STOPPING:
            scene.go(E.FAILED)
    assert scene.pull.state in (S.READY, S.ALONE)
    assert run(scene.engine, heard=scene.answer).ids == truth()
    scene.engine.check_idle()
    assert scene.engine.empty


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
def test_a_cancel_in_any_state_frees_the_blocks_once_nobody_writes(state: PullState) -> None:
    scene = Scene().go(*WAYS[state])
    freed = scene.engine.cancel(D)
    assert freed == (None if state in WRITTEN else 3 if state in BLOCKS else 0)
    scene.engine.check()
    if state in WRITTEN:
        assert scene.engine.cancel(D) is None  # again
        assert scene.engine.pool.used == 3
        assert scene.engine.kv_imports.stops.pop() == (D, TransferFailure.CANCELLED)
        assert scene.engine.kv_imports.ended(D, arrived=state is S.PULLING) == 3
    assert scene.engine.empty and scene.engine.pool.used == 0
    assert scene.engine.kv_imports.take_pulls() == []
    scene.engine.submit(legs()[1])  # its name is free
    assert scene.engine.cancel(D) == 0


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
@pytest.mark.parametrize("tokens", [True, False], ids=["after its tokens", "before"])
def test_a_source_that_dies_in_any_state_costs_nothing_but_time(
    state: PullState, tokens: bool
) -> None:
    """The mover, where there is one, reports it; the router says that nothing comes, or has passed the tokens on."""
    if state in (S.STOPPING, S.LEAVING) and tokens:
        return  # they were not waited for any more
    scene = Scene().go(*WAYS[state])
    if tokens:
        scene.go(E.TOKENS)
    if state in WRITTEN:
        scene.go(E.FAILED)
    if state is S.LEAVING:
        assert scene.engine.empty
        return
    if scene.pull.continued is None:
        scene.go(E.NOTHING)
    if scene.pull.state not in OVER:
        scene.go(E.LATE)  # it has tokens, and no mover that could report
    assert run(scene.engine, heard=scene.answer).ids == truth()
    scene.engine.check_idle()


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
def test_the_deadline_of_a_request_ends_it_in_any_state(state: PullState) -> None:
    scene = Scene(deadline_ms=500).go(*WAYS[state])
    scene.answer.hear(scene.engine.expire(0.499), D.request)
    assert scene.answer.finish is None and scene.pull.state is state
    scene.answer.hear(scene.engine.expire(0.5), D.request)
    if state is S.LEAVING:
        assert scene.answer.finish is None  # it was cancelled
    else:
        assert scene.answer.finish == "cancelled"
        assert scene.answer.freed == (None if state in WRITTEN else 3 if state in BLOCKS else 0)
    if state in WRITTEN:
        assert scene.engine.kv_imports.ended(D, arrived=False) == 3
    assert scene.engine.empty and scene.engine.next_deadline_s == math.inf
    scene.engine.check_idle()


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
def test_all_requests_can_be_abandoned_in_any_state(state: PullState) -> None:
    scene = Scene().go(*WAYS[state])
    scene.answer.hear(scene.engine.abandon(FailureKind.DRAINING, "bye"), D.request)
    assert (scene.answer.failed is None) == (state is S.LEAVING)
    if state in WRITTEN:
        assert scene.engine.kv_imports.ended(D, arrived=True) == 3
    assert scene.engine.empty
    scene.engine.check_idle()


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
def test_late_and_doubled_frames_change_nothing(state: PullState) -> None:
    scene = Scene().go(*WAYS[state])
    if state is not S.AWAITS_TICKET:
        scene.engine.kv_imports.ticket(D, b"another")
        assert (scene.pull.state, scene.pull.ticket) == (state, b"ticket")
    if state not in (S.STOPPING, S.LEAVING):
        scene.go(E.TOKENS)
    now = scene.pull.state
    total = scene.sequence.total
    scene.engine.go_on(D, [7])
    scene.engine.go_on(D, [])
    scene.engine.go_on(D, [10**9])  # not looked at
    assert (scene.pull.state, scene.sequence.total) == (now, total)
    scene.engine.check()


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.name)
@pytest.mark.parametrize("arrived", [True, False])
def test_a_mover_reports_what_it_was_given_and_once(state: PullState, arrived: bool) -> None:
    scene = Scene().go(*WAYS[state])
    imports = scene.engine.kv_imports
    if state in WRITTEN:
        imports.ended(D, arrived=arrived)
    now = scene.pull.state
    with pytest.raises(AssertionError, match=r"cannot take|has no pull"):
        imports.ended(D, arrived=arrived)
    assert scene.pull.state is now
    scene.engine.check()


@dataclass(frozen=True)
class Late:
    state: PullState
    report: TransferFailure | None  # of a pull that no mover works for
    stop: bool


@pytest.mark.parametrize(
    "late",
    [
        Late(S.AWAITS_TICKET, TransferFailure.TIMEOUT, stop=False),
        Late(S.AWAITS_BLOCKS, TransferFailure.NO_ROOM, stop=False),
        Late(S.HAS_BLOCKS, TransferFailure.NO_ROOM, stop=False),
        Late(S.PULLING, None, stop=True),
    ],
    ids=lambda late: late.state.name,
)
def test_a_late_pull_is_given_up_and_reported_once(late: Late) -> None:
    scene = Scene().go(*WAYS[late.state])
    assert scene.engine.next_deadline_s == math.inf
    imports = scene.engine.kv_imports
    scene.engine.go_on(D, scene.heard.ids, 5.0)
    scene.answer.ids += scene.heard.ids
    assert scene.engine.next_deadline_s == 6.0
    scene.engine.expire(5.99)
    assert not imports.stops and not imports.reports
    scene.engine.expire(6.0)
    scene.engine.expire(60.0)
    assert scene.engine.next_deadline_s == math.inf
    assert list(imports.stops) == ([(D, TransferFailure.TIMEOUT)] if late.stop else [])
    reports = [Transferred(D.request, "p", None, 0, 0, 1000.0, late.report)] if late.report else []
    assert [report for _, report in imports.reports] == reports
    if late.stop:
        scene.go(E.FAILED)
    assert run(scene.engine, heard=scene.answer).ids == truth()


def test_a_late_pull_that_came_whole_after_all_is_used() -> None:
    scene = Scene().go(*WAYS[S.PULLING], E.TOKENS, E.LATE)
    assert scene.pull.state is S.STOPPING
    scene.go(E.ARRIVED)
    assert scene.pull.state is S.READY
    assert scene.engine.step().prefill_tokens == 0
    scene.engine.check()


def test_a_request_that_has_its_kv_may_lose_its_blocks_and_computes_it_again() -> None:
    scene = Scene().go(*WAYS[S.WHOLE], E.TOKENS)
    scene.answer.hear(scene.engine.step(), D.request)
    scene.engine.stages.preempt(scene.sequence)
    assert scene.pull.state is S.READY and scene.sequence.kv_import is None
    assert scene.sequence.stage is Stage.WAITING
    assert run(scene.engine, heard=scene.answer).ids == truth()
    scene.engine.check_idle()
