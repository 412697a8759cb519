"""Engines of a group on toy models that meet the other ranks in each pass, as models with experts elsewhere do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.step.step import EngineStep
from headrace.wire.frames import Failed, Output
from helpers.engine.drafting_toy import DraftingToy
from helpers.engine.toy import ToyHasher
from helpers.ranks.thread_group import Member

if TYPE_CHECKING:
    from headrace._core import GrammarVocabulary
    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.ops import Progress

BLOCK = 4


class MeetingToy(DraftingToy):
    """A pass meets the other ranks twice: before its results and after them."""

    def __init__(self, member: Member, *, agreement: float = 0.6) -> None:
        super().__init__(agreement=agreement, block_tokens=BLOCK)
        self.member = member

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        self.member.exchange("forward")
        logits = super().forward(batch, progress)
        self.member.exchange("forward")
        return logits

    def draft(self, batch: DraftBatch) -> torch.Tensor:
        self.member.exchange("draft")
        logits = super().draft(batch)
        self.member.exchange("draft")
        return logits


def rank_engine(
    member: Member,
    *,
    k: int = 0,
    fixed: bool = True,
    rejection: bool = False,
    blocks: int = 64,
    sequences: int = 8,
    batched: int = 32,
    agreement: float = 0.6,
    prompt_wait_rounds: int = 0,
    reads_late: bool = False,
    vocabulary: GrammarVocabulary | None = None,
) -> tuple[Engine, MeetingToy]:
    """One rank's engine."""
    model = MeetingToy(member, agreement=agreement)
    model.ahead_on = torch.device("cpu") if reads_late else None
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=batched,
        prompt_wait_rounds=prompt_wait_rounds,
        mtp=k,
        mtp_fixed=fixed,
        mtp_verify="rejection" if rejection else "noise",
    )
    engine = Engine(
        model,
        config,
        ToyHasher(BLOCK),
        clock=model.clock,
        lockstep=member,
        vocabulary=vocabulary,
    )
    return engine, model


class StepsAhead:
    """Steps of one rank, each planned before the one before it has run, where it can be."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planned: EngineStep | None = None

    def step(self) -> StepResult:
        """One round."""
        engine = self._engine
        step = self._planned or (None if engine.idle else engine.steps.begin())
        self._planned = None
        if step is None:
            assert engine.rounds is not None
            engine.steps.tell_waiting()
            engine.rounds.join_one()
            return StepResult()
        if engine.steps.may_begin and not engine.idle:
            self._planned = engine.steps.begin()
        step.run()
        step.read()
        return engine.steps.finish(step)


class HeardOnRank:
    """What the routers of one rank hear."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.failed: dict[int, Failed] = {}
        self.results: list[StepResult] = []

    def hear(self, result: StepResult) -> None:
        self.results.append(result)
        for answers in result.answers.values():
            self.failed |= {failed.request: failed for failed in answers.failed}
            for output in answers.outputs:
                self.outputs.setdefault(output.request, []).append(output)

    def ids(self, request: int) -> list[int]:
        return [token for output in self.outputs.get(request, []) for token in output.ids]

    def finish(self, request: int) -> str | None:
        return self.outputs[request][-1].finish if request in self.outputs else None


def step_to_sleep(
    engine: Engine,
    heard: HeardOnRank,
    *,
    step: Callable[[], StepResult] | None = None,
    rounds: int = 2_000,
) -> None:
    """Rounds until no rank has work, which all ranks find in the same one."""
    assert engine.rounds is not None
    step = step or engine.step
    for _ in range(rounds):
        heard.hear(step())
        engine.check()
        if engine.rounds.lost is not None:
            return
        # A step that was planned ahead may have lost all its rows while others wait.
        if not any(load.rows or load.waiting_tokens for load in engine.rounds.loads):
            assert engine.idle
            engine.check_idle()
            return
    raise AssertionError("the group does not come to rest")
