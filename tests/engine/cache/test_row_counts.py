"""What the engine keeps in arrays by batch row is what the sequences are, wherever they run, whenever they leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core
from headrace.engine.engine import Engine
from headrace.engine.sampling.verify import FINISHES
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Key, Sequence
from headrace.engine.step.input_batch import STOPS, AddedRow, Ends, GrownTables, InputBatch
from headrace.engine.step.row_counts import RowCounts
from headrace.engine.step.work import StepWork, Work
from headrace.wire.frames import Sampling
from helpers.engine.drafting_engine import Heard, plain
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.pipeline import Pipeline
from helpers.engine.scheduling import make_scheduler, make_sequence, run_step
from helpers.engine.toy import make_submit
from helpers.engine.toy_engine import BLOCK, make_engine

NAMES = ("computed", "pending_rows", "pending_tokens", "pending_drafts", "drafts", "published")


def check_against(scheduler: Scheduler) -> None:
    """Every question to the arrays has the answer that the sequences give one by one."""
    columns, running = scheduler.stages.columns, scheduler.stages.running
    batch_rows = scheduler.stages.batch_rows
    assert columns.sequences_of(batch_rows) == running
    decodes, prefills, full, _ = columns.core.plan(batch_rows)
    assert [columns.at(row) for row in (batch_rows if decodes is None else decodes)] == [
        it for it in running if it.remaining == 1 and not it.ends
    ]
    assert [columns.at(row) for row in prefills] == [it for it in running if it.remaining > 1]
    assert all(
        len(it.blocks) * BLOCK <= it.reached + it.pending_drafts for it in map(columns.at, full)
    )
    one_by_one = [scheduler.admission._blocks_to_come(sequence) for sequence in running]  # type: ignore[reportPrivateUsage]
    rest = [*scheduler.stages.ready, *scheduler.stages.parked]
    of_rest = sum(scheduler.admission._blocks_to_come(it) for it in rest)  # type: ignore[reportPrivateUsage]
    assert scheduler.admission.spoken_for == sum(one_by_one) + of_rest


def waiting_tokens_of(engine: Engine) -> int:
    waiting = [s for s in engine.stages.waiting if s.kv_import is None]
    running = engine.stages.running
    computing = [s for s in running if s.total - s.computed > 1 or not s.generated]
    return sum(s.total for s in waiting) + sum(s.total - s.computed for s in computing)


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["sit", "leave", "count", "add"]), st.integers(0, 9), st.integers(0, 99)
        ),
        max_size=60,
    )
)
def test_counts_follow_their_sequence_from_row_to_row(acts: list[tuple[str, int, int]]) -> None:
    columns = RowCounts(4, 4)
    sequences = [make_sequence(3) for _ in range(10)]
    true = [dict.fromkeys(NAMES, 0) for _ in sequences]
    for act, which, number in acts:
        sequence = sequences[which]
        free = np.flatnonzero(~columns.taken)
        if act == "sit" and sequence.batch_row is None and len(free):
            columns.take(sequence, int(free[number % len(free)]))
        elif act == "leave" and sequence.batch_row is not None:
            batch_row, epoch = sequence.batch_row, columns.epoch[sequence.batch_row].item()
            assert columns.leave(sequence) == batch_row
            assert columns.epoch[batch_row] == epoch + 1
        elif act == "add":
            sequence.add([number])
        elif act == "count":
            name = NAMES[number % len(NAMES)]
            setattr(sequence, name, number)
            true[which][name] = number
        columns.check()
        for it, counts in zip(sequences, true, strict=True):
            assert {name: getattr(it, name) for name in NAMES} == counts
            if it.batch_row is not None:
                assert columns.total[it.batch_row] == it.total == 3 + len(it.generated)


def test_what_an_array_says_is_what_its_sequence_says() -> None:
    columns = RowCounts(2, 4)
    sequence = make_sequence(5)
    columns.take(sequence, 1)
    columns.computed[1] += 7
    assert sequence.computed == 7
    columns.leave(sequence)
    columns.computed[1] += 1
    assert sequence.computed == 7, "the batch row is another's"


def test_work_in_columns_is_the_work_of_each() -> None:
    scheduler = make_scheduler(sequences=4, batched=64)
    for length in (5, 9, 3):
        scheduler.stages.wait(make_sequence(length))
    run_step(scheduler)
    columns, batch_rows = scheduler.stages.columns, scheduler.stages.batch_rows
    each = [Work.of(sequence, 1, columns) for sequence in scheduler.stages.running]
    together = StepWork.decoding(batch_rows, np.zeros(3, dtype=np.int64), columns)
    assert [*together] == each == [*StepWork.listed(each)]
    assert [*together.then(together)] == each + each
    assert [*together.where(np.array([True, False, True]))] == [each[0], each[2]]


jobs = st.tuples(
    st.integers(1, 3),  # prefix, of which some share one
    st.integers(1, 14),  # its length
    st.integers(1, 12),  # answer
    st.integers(-1, 1),  # priority
    st.integers(0, 2),  # link
    st.sampled_from(["plain", "logprobs", "penalties", "prompt logprobs", "drawn", "deadline"]),
)


@given(
    traffic=st.lists(jobs, min_size=1, max_size=10),
    blocks=st.integers(7, 24),
    batch_rows=st.integers(1, 4),
    reads_late=st.booleans(),
    choices=st.randoms(use_true_random=False),
)
def test_arrays_say_what_sequences_are_whatever_happens(
    traffic: list[tuple[int, int, int, int, int, str]],
    blocks: int,
    batch_rows: int,
    reads_late: bool,
    choices: Any,
) -> None:
    """Batch rows change hands, sequences lose theirs, end, are cancelled in flight; two steps run at once."""
    engine, _ = make_engine(blocks=blocks, sequences=batch_rows, batched=8, reads_late=reads_late)
    pipeline = Pipeline(engine, choices.randrange)
    todo, now_s = list(enumerate(traffic)), 0.0
    while todo or not pipeline.idle:
        now_s += 1.0
        if todo and choices.random() < 0.5:
            number, (prefix, length, answer, priority, link, kind) = todo.pop(0)
            submit = make_submit(
                number,
                [prefix] * length,
                max_tokens=answer,
                priority=priority,
                deadline_ms=5_000 if kind == "deadline" else None,
                sampling=Sampling(
                    temperature=1.0 if kind == "drawn" else 0.0,
                    logprobs=1 if kind == "logprobs" else None,
                    prompt_logprobs=1 if kind == "prompt logprobs" else None,
                    repetition_penalty=1.5 if kind == "penalties" else 1.0,
                ),
            )
            engine.submit(submit, link=link, now_s=now_s)
        if choices.random() < 0.1:
            engine.cancel(Key(choices.randrange(3), choices.randrange(len(traffic))))
        pipeline.turn(now_s)
        engine.check()
        check_against(engine.scheduler)
        assert engine.waiting_tokens == waiting_tokens_of(engine)
    engine.check_idle()


def test_one_that_ends_at_the_end_of_its_block_asks_for_no_other() -> None:
    engine, _ = make_engine(blocks=2)
    engine.submit(make_submit(0, [1] * BLOCK, max_tokens=BLOCK))
    while not engine.idle:
        engine.step()
        assert engine.pool.used <= 2
        engine.check()
    assert engine.stages.preemptions == 0


def test_blocks_for_many_at_once_are_those_that_each_would_get_alone() -> None:
    """In order, and none is left out, where there is one for each; where there is not, the last goes."""
    for blocks, preempted in ((8, 0), (7, 1)):
        scheduler = make_scheduler(blocks=blocks, sequences=4, batched=64)
        sequences = [make_sequence(BLOCK, answer=BLOCK) for _ in range(4)]
        for sequence in sequences:
            scheduler.stages.wait(sequence)
        plan = scheduler.plan()
        assert len(plan.work) == 4
        for sequence in sequences:
            sequence.computed += BLOCK
            sequence.add([0])
        assert [*scheduler.plan().work.counts] == [1] * (4 - preempted)
        assert scheduler.stages.preemptions == preempted
        held = [sequence.blocks for sequence in sequences]
        assert held == [[0, 4], [1, 5], [2, 6], [3, 7] if not preempted else []]
        scheduler.check()


def placed(
    input_batch: InputBatch, batch_row: int, stop_ids: frozenset[int], limit: int
) -> Sequence:
    sequence = make_sequence(3, answer=limit - 3)
    sequence.stop_ids, sequence.batch_row = stop_ids, batch_row
    input_batch.take(AddedRow.of(sequence))
    return sequence


def test_what_ends_an_answer_is_that_of_who_sat_there_then() -> None:
    """A step is read when the batch row may be another's already."""
    input_batch = InputBatch(block_tokens=4, max_sequences=3, max_blocks=4, drafts=0)
    many = frozenset(range(100, 101 + STOPS))
    placed(input_batch, 0, frozenset({7, 8}), 20)
    placed(input_batch, 1, many, 30)
    placed(input_batch, 2, frozenset(), 40)
    of = np.array([2, 1, 0])
    before = input_batch.ends(of)
    placed(input_batch, 0, frozenset({9}), 50)
    placed(input_batch, 1, frozenset(), 60)
    assert before.limits.tolist() == [40, 30, 20]
    for ids, ended in (
        ([7, 7, 7], [False, False, True]),
        ([100, 100, 8], [False, True, True]),
        ([100, 100 + STOPS, 9], [False, True, False]),
    ):
        assert stopped(before, ids) == ended
    after = input_batch.ends(of)
    assert stopped(after, [9, 100, 9]) == [False, False, True]


def stopped(ends: Ends, ids: list[int]) -> list[bool]:
    """Whether a token ends the answer of its row."""
    one = np.ones(len(ids), dtype=np.int64)
    finish = _core.cut_answers(
        np.array(ids),
        rows=one,
        drafts=np.zeros(len(ids), dtype=np.int32),
        totals=one,
        limits=ends.limits,
        stops=ends.stops,
        more_stops=ends.more_stops,
    )[1][2]
    return [FINISHES[kind] == "stop" for kind in finish]


@pytest.mark.parametrize("extra", [0, STOPS])
@pytest.mark.parametrize("drafts", [0, 3])
def test_each_of_many_stop_tokens_ends_an_answer(drafts: int, extra: int) -> None:
    prompt = [1, 2, 3]
    whole = plain(make_submit(0, prompt, max_tokens=12))[0]
    for place in range(1, 12):
        stop = whole[place]
        unused = [token for token in range(60) if token not in whole][:extra]
        if drafts:
            engine, _ = drafting_engine(drafts, agreement=1.0)
        else:
            engine, _ = make_engine()
        engine.submit(make_submit(0, prompt, max_tokens=12, stop_ids=[*unused, stop]))
        heard = Heard()
        while not engine.idle:
            heard.hear(engine.step())
            engine.check()
        assert heard.ids(0) == whole[: whole.index(stop) + 1]
        assert heard.finish(0) == "stop"


def test_tables_that_grew_by_a_block_are_those_that_were_set() -> None:
    input_batch = InputBatch(block_tokens=4, max_sequences=3, max_blocks=4, drafts=0)
    for batch_row in range(3):
        placed(input_batch, batch_row, frozenset(), 16)
    of = np.array([2, 0])
    input_batch.grow(GrownTables(of, np.array([0, 0]), np.array([5, 6]), np.array([1, 9])))
    input_batch.grow(GrownTables(of[:1], np.array([1]), np.array([7]), np.array([3])))
    blocks = [input_batch.blocks(np.array([row] * 2), np.array([0, 4])) for row in range(3)]
    assert [own.tolist() for own in blocks] == [[6, 0], [0, 0], [5, 7]]
    assert input_batch.keys_from.tolist() == [9, 1, 3]
