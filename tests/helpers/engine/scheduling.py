"""Schedulers and sequences that are only lengths, and steps of an engine without a model."""

from __future__ import annotations

from itertools import count

import numpy as np

from headrace.engine.admission import Admission
from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.cache.publishing import Publishing
from headrace.engine.scheduler import Plan, Scheduler
from headrace.engine.sequence import Key, Sequence
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.stages import Stages
from headrace.engine.step.row_counts import RowCounts
from headrace.wire.frames import Sampling
from helpers.engine.toy import ToyHasher

BLOCK = 4
HASHER = ToyHasher(BLOCK)
NUMBERS = count()


def make_scheduler(
    *,
    blocks: int = 64,
    sequences: int = 8,
    batched: int = 16,
    waiting: int = 100,
    pool: BlockPool | None = None,
) -> Scheduler:
    pool = pool or BlockPool(blocks)
    columns = RowCounts(sequences, BLOCK)
    lookahead = Lookahead(pool, columns, BLOCK, 0)
    publishing = Publishing(pool, columns, lookahead, HASHER, block_tokens=BLOCK)
    stages = Stages(pool, columns, publishing, max_waiting=waiting)
    admission = Admission(pool, stages, lookahead, publishing, block_tokens=BLOCK)
    return Scheduler(
        pool, stages, admission, lookahead, block_tokens=BLOCK, max_batched_tokens=batched
    )


def make_sequence(
    prompt: int | list[int], *, answer: int = 4, priority: int = 0, cacheable: bool = True
) -> Sequence:
    """A sequence; with a number for its prompt, that many tokens like no other's."""
    number = next(NUMBERS)
    ids = [number * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    tokens = np.array(ids, dtype=np.int32)
    return Sequence(
        key=Key(0, number),
        arrival=number,
        priority=priority,
        prompt=tokens,
        listed=[],
        limit=len(tokens) + answer,
        sampling=Sampling(),
        stop_ids=frozenset(),
        salt=b"",
        deadline_s=None,
        names=HASHER.follow(None, tokens, b"") if cacheable else [],
    )


def run_step(scheduler: Scheduler) -> Plan:
    """One step of an engine whose every token is 0; finished sequences leave."""
    plan = scheduler.plan()
    for work in plan.work:
        sequence = work.sequence
        assert len(sequence.blocks) * BLOCK >= sequence.computed + work.count
        sequence.computed += work.count
        scheduler.stages.publishing.publish(sequence)
        scheduler.stages.changed()
    for work in plan.work:
        sequence = work.sequence
        if sequence.remaining == 0:
            sequence.add([0])
            if sequence.total >= sequence.limit:
                scheduler.admission.note_answer(len(sequence.generated))
                scheduler.stages.remove(sequence)
    scheduler.check()
    return plan


def counts(plan: Plan) -> list[int]:
    return [work.count for work in plan.work]
