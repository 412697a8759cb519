"""What routers hear: the log of cache events, and the outbox of answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.cache import block_log
from headrace.engine.cache.block_log import SHORT_DELTA, BlockLog, CacheView, block_key
from headrace.engine.cache.block_pool import BlockEvent, BlockPool, Cleared, Removed, Stored
from headrace.engine.result import Answers, StepResult
from headrace.wire.frames import (
    Blocks,
    Failed,
    FailureKind,
    Freed,
    Load,
    Output,
    Ranked,
    Snapshot,
    Step,
    StoredRun,
    TokenLogprob,
)
from headrace.worker.outbox import FRAME_VALUES, Outbox
from helpers.worker.fake_router import keys


def pack(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def name(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


class Index:
    """A router's view, kept up from frames."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.sequence: int | None = None

    def hear(self, frames: list[Snapshot | Blocks]) -> None:
        snapshot: set[int] = set()
        for frame in frames:
            if isinstance(frame, Snapshot):
                snapshot |= keys(frame.hashes)
                if frame.last:
                    self.keys = snapshot
                    self.sequence = frame.sequence
                continue
            assert self.sequence is not None
            assert frame.sequence == self.sequence + 1
            self.sequence = frame.sequence
            if frame.cleared:
                self.keys.clear()
            removed = keys(frame.removed)
            assert removed <= self.keys, "removed what the router never heard of"
            self.keys -= removed
            for run in frame.stored:
                assert run.parent is None or run.parent in self.keys
                stored = keys(run.hashes)
                assert not stored & self.keys, "stored twice"
                self.keys |= stored


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("run"), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
            st.tuples(st.just("clear"), st.just([0])),
            st.tuples(st.just("send"), st.just([0])),
            st.tuples(st.just("lose"), st.just([0])),
        ),
        max_size=40,
    )
)
def test_a_router_knows_the_cache_however_late_it_hears(
    steps: list[tuple[str, list[int]]],
) -> None:
    pool, view = BlockPool(5), CacheView()
    prompt_log, late_log = BlockLog(view, 1), BlockLog(view, 1)
    prompt, late = Index(), Index()
    prompt.hear(prompt_log.take())
    late.hear(late_log.take())
    for what, tokens in steps:
        if what == "run":
            names = [name(hash(tuple(tokens[: i + 1])) % 2**64) for i in range(len(tokens))]
            shared = pool.match(names)
            pool.share(shared)
            blocks = shared + (pool.allocate(len(tokens) - len(shared)) or [])
            for place in range(len(shared), len(blocks)):
                pool.publish(blocks[place], names[place], names[place - 1] if place else None)
            pool.release(blocks)
        elif what == "clear":
            pool.clear_names()
        view.apply(pool.take_events(), [prompt_log, late_log])
        prompt.hear(prompt_log.take())
        if what == "send":
            late.hear(late_log.take())
        elif what == "lose":  # a delta gets lost on the way
            late_log.take()
            late_log.restart()
        cached = {block_key(n) for n in pool.names()}
        assert prompt.keys == set(view.parents) == cached
    late.hear(late_log.take())
    assert late.keys == prompt.keys
    assert not late_log.pending
    assert late_log.take() == []


def test_a_log_that_restarts_sends_all_and_goes_on_from_there() -> None:
    view = CacheView()
    log, other = BlockLog(view, 7), BlockLog(view, 7)
    view.apply([Stored([name(1)], [None]), Stored([name(2)], [name(1)])], [log, other])
    assert [frame.sequence for frame in log.take()] == [0]
    other.take()
    view.apply([Removed(name(2)), Stored([name(3)], [name(1)])], [log, other])
    log.restart()  # with changes that no delta has said
    (snapshot,) = log.take()
    assert snapshot == Snapshot(7, 1, pack(1, 3), True)
    assert log.take() == []
    view.apply([Stored([name(4)], [name(3)])], [log, other])
    assert log.take() == [Blocks(7, 2, [StoredRun(3, pack(4))], b"", False, 0)]
    (delta,) = other.take()
    assert isinstance(delta, Blocks), "the other router lost nothing"
    assert (delta.sequence, delta.removed) == (1, pack(2))


def test_the_parts_of_a_snapshot_stand_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "SNAPSHOT_KEYS", 2)
    view = CacheView()
    log = BlockLog(view, 1)
    view.apply([Stored([name(i)], [None]) for i in range(5)], [log])
    log.take()
    view.apply([Stored([name(5)], [None])], [log])
    log.restart()
    view.apply([Stored([name(6)], [None])], [log])
    assert log.take() == [
        Snapshot(1, 1, pack(0, 1), False),
        Snapshot(1, 1, pack(2, 3), False),
        Snapshot(1, 1, pack(4, 5), False),
        Snapshot(1, 1, pack(6), True),
    ]


def test_what_undoes_itself_is_not_sent() -> None:
    view = CacheView()
    log = BlockLog(view, 1)
    view.apply([Stored([name(1)], [None])], [log])
    log.take()
    view.apply([Removed(name(1)), Stored([name(2)], [None]), Removed(name(2))], [log])
    view.apply([Stored([name(1)], [None])], [log])
    assert not log.pending


def test_a_chain_is_one_run() -> None:
    view = CacheView()
    log = BlockLog(view, 1)
    log.take()
    view.apply(
        [Stored([name(1)], [None]), Stored([name(2)], [name(1)]), Stored([name(7)], [name(1)])],
        [log],
    )
    (delta,) = log.take()
    assert isinstance(delta, Blocks)
    assert [(run.parent, sorted(keys(run.hashes))) for run in delta.stored] == [
        (None, [1, 2]),
        (1, [7]),
    ]


def test_a_delta_longer_than_a_snapshot_becomes_one() -> None:
    view = CacheView()
    log = BlockLog(view, 1)
    count = SHORT_DELTA + 10
    stored: list[BlockEvent] = [Stored([name(i)], [None]) for i in range(1, count)]
    view.apply(stored, [log])
    index = Index()
    index.hear(log.take())
    assert len(index.keys) == count - 1
    view.apply([Removed(name(i)) for i in range(1, count)], [log])
    view.apply([Stored([name(5000)], [None])], [log])
    frames = log.take()
    assert [(type(frame), frame.sequence) for frame in frames] == [(Snapshot, 1)]
    index.hear(frames)
    assert index.keys == {5000}
    view.apply([Cleared()], [log])
    index.hear(log.take())
    assert index.keys == set()


def steps_of(outbox: Outbox) -> list[Step]:
    return [frame for frame in outbox.take() if isinstance(frame, Step)]


def test_answers_add_up_until_the_link_takes_them() -> None:
    outbox = Outbox()
    logprob = TokenLogprob(-1.0, [Ranked(1, -1.0)])
    outbox.stepped(StepResult(step=1))
    outbox.answer(Answers([Output(4, [1], [logprob], None, 8), Output(5, [2])]))
    outbox.stepped(StepResult(step=2))
    outbox.loaded(Load(running=1), 77)
    outbox.answer(Answers([Output(4, [3], [logprob], "stop")], [], [Freed(4, 2)]))
    step, freed = outbox.take()
    assert isinstance(step, Step)
    assert step.step == 2
    assert (step.load.running, step.waiting_tokens) == (1, 77)
    assert step.outputs == [Output(4, [1, 3], [logprob] * 2, "stop", 8), Output(5, [2])]
    assert freed == Freed(4, 2)
    (heartbeat,) = outbox.take()
    assert isinstance(heartbeat, Step)
    assert (heartbeat.step, heartbeat.outputs) == (2, [])


def test_drafts_of_steps_that_a_slow_link_gets_as_one_add_up() -> None:
    outbox = Outbox()
    outbox.stepped(StepResult(step=1, drafted=6, accepted=3))
    outbox.answer(Answers([Output(4, [1, 2], drafted=3, accepted=1)]))
    outbox.stepped(StepResult(step=2, drafted=3, accepted=2))
    outbox.answer(Answers([Output(4, [3, 4, 5], drafted=3, accepted=2)]))
    [step] = outbox.take()
    assert isinstance(step, Step)
    assert step.outputs == [Output(4, [1, 2, 3, 4, 5], drafted=6, accepted=3)]
    assert (step.drafted, step.accepted) == (3, 2), "of the last step, as all its numbers"


def test_after_a_cancel_only_freed_is_left() -> None:
    outbox = Outbox()
    outbox.answer(
        Answers([Output(4, [1], None, "stop")], [Failed(5, FailureKind.ENGINE, "")], [Freed(4, 2)])
    )
    outbox.cancelled(4, 0)
    outbox.cancelled(5, 3)
    step, *rest = outbox.take()
    assert isinstance(step, Step)
    assert step.outputs == []
    assert rest == [Freed(4, 0), Freed(5, 3)]


def test_a_long_step_is_cut_into_frames() -> None:
    outbox = Outbox()
    entries = [TokenLogprob(-1.0, [Ranked(1, -1.0)] * 15)] * (FRAME_VALUES // 32)
    for request in range(5):
        outbox.answer(Answers([Output(request, [1], prompt_logprobs=entries)]))
    parts = steps_of(outbox)
    assert [len(part.outputs) for part in parts] == [1, 1, 1, 1, 1]
