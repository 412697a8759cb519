"""The numbers of a step that the router fits its cost model to: each of them against the batch that the model saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.engine.scheduler import Plan
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on

if TYPE_CHECKING:
    import torch

    from headrace_kernels.batch import Batch
    from headrace_kernels.ops import Progress

BLOCK = 4


class SeeingModel(ToyModel):
    """Keeps the batch of the last forward."""

    seen: Batch | None = None

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        self.seen = batch
        return super().forward(batch, progress)


def make_engine(*, blocks: int, sequences: int, batched: int) -> tuple[Engine, SeeingModel]:
    model = SeeingModel()
    return engine_on(model, blocks=blocks, sequences=sequences, batched=batched), model


def watch_plans(engine: Engine) -> list[Plan]:
    """All plans from now on: their work stands in the order of the batch."""
    plans: list[Plan] = []
    plan = engine.scheduler.plan

    def watched() -> Plan:
        plans.append(plan())
        return plans[-1]

    engine.scheduler.plan = watched
    return plans


def test_a_long_prompt_counts_down_chunk_by_chunk() -> None:
    engine, _ = make_engine(blocks=64, sequences=4, batched=16)
    engine.submit(make_submit(1, list(range(40)), max_tokens=3))
    assert engine.waiting_tokens == 40
    told: list[tuple[int, int, int, int, int]] = []
    while not engine.idle:
        r = engine.step()
        told.append(
            (r.prefill_tokens, r.prefill_context, r.decode_rows, r.kv_tokens, engine.waiting_tokens)
        )
    assert told == [
        (16, sum(range(16)), 0, 16, 24),
        (16, sum(range(16, 32)), 0, 32, 8),
        (8, sum(range(32, 40)), 0, 40, 0),
        (0, 0, 1, 41, 0),
        (0, 0, 1, 42, 0),
    ]


def test_a_cached_prefix_is_left_out_once_it_is_known() -> None:
    engine, _ = make_engine(blocks=64, sequences=1, batched=16)
    engine.submit(make_submit(1, list(range(32)), max_tokens=1))
    while not engine.idle:
        engine.step()
    engine.submit(make_submit(2, [*range(32), *range(20)], max_tokens=5))
    engine.submit(make_submit(3, list(range(32)), max_tokens=5))
    assert engine.waiting_tokens == 52 + 32
    result = engine.step()  # 8 blocks are found; 3 has no batch row
    assert (result.prefill_tokens, result.prefill_context) == (16, sum(range(32, 48)))
    assert engine.waiting_tokens == 4 + 32


def test_a_preempted_answer_is_to_be_computed_again() -> None:
    engine, _ = make_engine(blocks=8, sequences=2, batched=32)
    engine.submit(make_submit(1, [1] * 9, max_tokens=20))
    engine.submit(make_submit(2, [2] * 9, max_tokens=20))
    lengths: dict[int, int] = {}
    while not engine.stages.preemptions:
        assert not engine.idle
        lengths = {s.key.request: s.total for s in engine.stages.running}
        engine.step()
    assert [s.key.request for s in engine.stages.waiting] == [2]
    assert engine.waiting_tokens == lengths[2]


def test_a_cancel_takes_its_tokens_away() -> None:
    engine, _ = make_engine(blocks=64, sequences=1, batched=16)
    for request in (1, 2):
        engine.submit(make_submit(request, [request] * 40, max_tokens=3))
    engine.step()
    assert engine.waiting_tokens == 24 + 40
    assert engine.cancel_link(0) == 2
    assert engine.waiting_tokens == 0


requests = st.tuples(
    st.integers(0, 1),  # which prefix
    st.lists(st.integers(0, 3), min_size=1, max_size=30),  # the rest of the prompt
    st.integers(1, 12),  # longest answer
    st.integers(0, 3),  # steps until the next one
)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.sampled_from([24, 400]),  # with and without preemption
    sequences=st.integers(1, 6),
    batched=st.integers(6, 24),
    traffic=st.lists(requests, min_size=1, max_size=10),
)
def test_each_number_is_that_of_the_batch(
    blocks: int, sequences: int, batched: int, traffic: list[tuple[int, list[int], int, int]]
) -> None:
    engine, model = make_engine(blocks=blocks, sequences=sequences, batched=batched)
    plans = watch_plans(engine)

    def step() -> None:
        running = engine.stages.running
        decoding = {s.key for s in running if s.generated and s.computed == s.total - 1}
        waiting, preemptions = engine.waiting_tokens, engine.stages.preemptions
        result = engine.step()
        assert model.seen is not None
        batch, plan = model.seen, plans[-1]
        decodes = np.array([work.sequence.key in decoding for work in plan.work])
        assert result.decode_rows == decodes.sum()
        assert result.prefill_tokens == batch.rows - decodes.sum()
        assert result.kv_tokens == batch.context_lens.sum()
        rows = np.repeat(~decodes, np.diff(batch.seq_starts))  # those of prompts
        assert result.prefill_context == batch.positions[rows].sum()
        if engine.stages.preemptions == preemptions:
            starts = dict(
                zip(
                    [w.sequence.key for w in plan.work],
                    batch.positions[batch.seq_starts[:-1]],
                    strict=True,
                )
            )
            found = sum(int(starts[s.key]) for s in plan.admitted)  # in the cache
            assert waiting - engine.waiting_tokens == result.prefill_tokens + found

    for number, (prefix, rest, max_tokens, steps) in enumerate(traffic):
        engine.submit(make_submit(number, [prefix] * 8 + rest, max_tokens=max_tokens))
        for _ in range(steps):
            if not engine.idle:
                step()
    while not engine.idle:
        step()
    assert engine.waiting_tokens == 0
