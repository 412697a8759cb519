"""Engines whose experts lie on several ranks: every answer is that of one engine that holds all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sequence import Key
from headrace.models.deepseek import load_deepseek
from headrace.models.deepseek_weights import Share
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.wire.frames import Submit
from headrace_kernels.moe.all_to_all import AllToAll
from helpers.engine.drafting_engine import KINDS
from helpers.engine.toy import ToyHasher, make_submit
from helpers.kernels.expert_ranks import random_placement
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.ranks.toy_ranks import HeardOnRank, step_to_sleep

BLOCK, EXPERTS = 16, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek(tmp_path_factory.mktemp("deepseek") / "tiny", mtp=True)


def engine_on(
    path: Path, member: Member | None, *, k: int = 0, blocks: int = 80, **options: Any
) -> Engine:
    """All experts here, or those of one rank."""
    share = None
    if member is not None:
        layers = {layer: random_placement(EXPERTS, member.ranks, 3, layer) for layer in (1, 2, 3)}
        dispatch = partial(
            AllToAll.of,
            transport=member.transport,
            combine="exact",
            device=torch.device("cpu"),
        )
        share = Share(rank=member.rank, layers=layers, dispatch=dispatch)
    model = load_deepseek(
        SafetensorsCheckpoint(path),
        dtype="float32",
        device="cpu",
        block_tokens=BLOCK,
        mtp=k > 0,
        share=share,
    )
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=6,
        max_batched_tokens=24,
        mtp=k,
        **options,
    )
    return Engine(model, config, ToyHasher(BLOCK), lockstep=member)


def submit(rank: int, i: int) -> Submit:
    request = 10 * rank + i
    temperature = (0.0, 0.3, 1.0)[i % 3]
    return make_submit(
        request,
        [7] * (i % 4 * 4) + [(request * 11 + j) % 40 + 3 for j in range(6 + 3 * i)],
        max_tokens=12 + i,
        sampling=replace(KINDS[request % len(KINDS)], seed=request, temperature=temperature),
        stop_ids=[5],
    )


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Callable[[Submit], list[int]]:
    """Each answer by itself, on one rank, without drafts."""
    engine, known = engine_on(checkpoint, None), dict[int, list[int]]()

    def answer(submit: Submit) -> list[int]:
        if submit.request not in known:
            heard = HeardOnRank()
            engine.submit(submit)
            while not engine.idle:
                heard.hear(engine.step())
            known[submit.request] = heard.ids(submit.request)
        return known[submit.request]

    return answer


SETTINGS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "fixed drafts": {"k": 3, "mtp_fixed": True},
    "adaptive drafts": {"k": 3, "mtp_fixed": False},
    "preemption": {"k": 1, "mtp_fixed": True, "blocks": 5},
}


@pytest.mark.parametrize("counts", [[5, 0], [4, 1, 0, 2]])
@pytest.mark.parametrize("kind", SETTINGS)
def test_answers_are_those_of_one_rank(
    kind: str, counts: list[int], checkpoint: Path, alone: Callable[[Submit], list[int]]
) -> None:
    def work(member: Member) -> HeardOnRank:
        engine = engine_on(checkpoint, member, **SETTINGS[kind])
        heard = HeardOnRank()
        for i in range(counts[member.rank]):
            engine.submit(submit(member.rank, i))
        step_to_sleep(engine, heard)
        if kind == "preemption" and member.rank == 0:
            assert engine.stages.preemptions > 0
        return heard

    group = ThreadGroup(len(counts))
    for rank, heard in enumerate(group.run(work)):
        for i in range(counts[rank]):
            assert heard.ids(10 * rank + i) == alone(submit(rank, i))
    assert all(member.counts == group.members[0].counts for member in group.members)


def test_rejection_draws_what_it_draws_on_one_rank(checkpoint: Path) -> None:
    options: dict[str, Any] = {"k": 2, "mtp_fixed": True, "mtp_verify": "rejection"}

    def served(engine: Engine, rank: int) -> HeardOnRank:
        heard = HeardOnRank()
        for i in range(3):
            engine.submit(submit(rank, i))
        while not engine.idle:
            heard.hear(engine.step())
        return heard

    def work(member: Member) -> HeardOnRank:
        engine = engine_on(checkpoint, member, **options)
        heard = served(engine, member.rank)
        step_to_sleep(engine, heard)
        return heard

    for rank, heard in enumerate(ThreadGroup(3).run(work)):
        want = served(engine_on(checkpoint, None, **options), rank)
        assert heard.ids(10 * rank) == want.ids(10 * rank)
        assert heard.outputs == want.outputs


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancel_on_one_rank_changes_no_other_answer(
    after: int, checkpoint: Path, alone: Callable[[Submit], list[int]]
) -> None:
    """While it waits, in its prompt, while it decodes."""

    def work(member: Member) -> HeardOnRank:
        engine = engine_on(checkpoint, member, k=2, mtp_fixed=True)
        heard = HeardOnRank()
        for i in range(3):
            engine.submit(submit(member.rank, i))
        for _ in range(after):
            heard.hear(engine.step())
        if member.rank == 1:
            for i in range(3):
                engine.cancel(Key(0, 10 + i))
        step_to_sleep(engine, heard)
        return heard

    heard = ThreadGroup(2).run(work)
    assert all(heard[0].ids(i) == alone(submit(0, i)) for i in range(3))
    assert all(heard[1].finish(10 + i) is None for i in range(3))
