"""Workers that are the ranks of one group, each with a router of its own, all in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.worker.fake_router import Conversation, FakeRouter
from helpers.worker.scene import GatedModel, Scene, joined

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch
    from headrace_kernels.ops import Progress


class MeetingModel(GatedModel):
    """A forward pass meets the other ranks."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member = member

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        logits = super().forward(batch, progress)
        self.member.exchange("forward")
        return logits


class WorkerRanks:
    """The ranks, by number."""

    def __init__(self, group: ThreadGroup, scenes: list[Scene], talks: list[Conversation]) -> None:
        self.group = group
        self.scenes = scenes
        self.talks = talks

    @property
    def passes(self) -> list[int]:
        return [scene.model.forwards for scene in self.scenes]


@contextlib.asynccontextmanager
async def worker_ranks(
    folder: Path,
    ranks: int,
    *,
    overlap: bool = True,
    transfer: bool = False,
    prompt_wait_rounds: int = 0,
    model: Callable[[Member], GatedModel] = MeetingModel,
) -> AsyncGenerator[WorkerRanks]:
    group = ThreadGroup(ranks)
    async with contextlib.AsyncExitStack() as stack:
        scenes: list[Scene] = []
        talks: list[Conversation] = []
        for member in group.members:
            router = await stack.enter_async_context(FakeRouter(folder / str(member.rank)))
            scene = Scene(
                router,
                sequences=4,
                document=b"{}",
                name=f"rank{member.rank}",
                overlap=overlap,
                model=model(member),
                lockstep=member,
                prompt_wait_rounds=prompt_wait_rounds,
            )
            await scene.start(transfer=transfer)
            scenes.append(scene)
            stack.push_async_callback(scene.stop)
            talks.append(await joined(router))
        try:
            yield WorkerRanks(group, scenes, talks)
        finally:
            group.members[0].leave()  # none of them waits for another one
            for scene in scenes:
                with contextlib.suppress(BaseExceptionGroup):
                    await scene.ended()
