"""A worker that runs in the test's own process, on a model that shows every mistake, against fake routers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace import _core
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.step.lockstep import Lockstep
from headrace.kv_transfer.connector import Transfer
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import Members
from headrace.kv_transfer.peers.server import TransferServer
from headrace.wire.discovery import Fixed
from headrace.wire.frames import PROTOCOL, Fingerprints, Hello, Role, Snapshot
from headrace.wire.link import Link, LinkConfig
from headrace.wire.links import Links
from headrace.worker.load_model import capacity
from headrace.worker.worker import Worker
from helpers.engine.toy import ToyModel, digest, toy_logits
from helpers.worker.fake_router import TIMEOUT_S, Conversation, FakeRouter

if TYPE_CHECKING:
    from headrace.worker.log.traces.legs import LegSpans
    from headrace_kernels.batch import Batch
    from headrace_kernels.ops import Progress

BLOCK = 4


class GatedModel(ToyModel):
    """With `gate`, every forward waits for the test to let it through."""

    def __init__(self) -> None:
        super().__init__(block_tokens=BLOCK)
        self.gate: threading.Semaphore | None = None
        self.began = threading.Event()  # a forward did, at any time
        self.spans_s: list[tuple[float, float]] = []  # begin and end of each forward

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        began_s = time.monotonic()
        self.began.set()
        if self.gate is not None:
            assert self.gate.acquire(timeout=TIMEOUT_S)
        logits = super().forward(batch, progress)
        self.spans_s.append((began_s, time.monotonic()))
        return logits


class Scene:
    """A worker that runs, and what it is made of."""

    def __init__(
        self,
        *routers: FakeRouter,
        sequences: int,
        document: bytes,
        blocks: int = 64,
        name: str = "w",
        role: Role = "both",
        overlap: bool = True,
        model: GatedModel | None = None,
        lockstep: Lockstep | None = None,
        prompt_wait_rounds: int = 0,
        spans: LegSpans | None = None,
    ) -> None:
        self._overlap, self._spans = overlap, spans
        self.model = model or GatedModel()
        self.model.allocate_kv(blocks)
        config = EngineConfig(
            num_blocks=blocks,
            block_tokens=BLOCK,
            max_sequences=sequences,
            max_batched_tokens=16,
            prompt_wait_rounds=prompt_wait_rounds,
        )
        hasher = KeyedBlockHasher(bytes(32), BLOCK)
        self.engine = Engine(self.model, config, hasher, lockstep=lockstep)
        self._hello = Hello(
            protocol=PROTOCOL,
            worker=name,
            epoch=7,
            role=role,
            model="toy",
            fingerprints=Fingerprints("w", "t", "c", "kv", _core.HASH_SCHEME, BLOCK),
            capacity=capacity(config),
            context_tokens=self.engine.context_tokens,
            kv_block_bytes=self.model.kv_block_bytes,
            dtype="float32",
        )
        self._routers = routers
        self._document = document
        self.transfer: Transfer | None = None
        self.worker: Worker
        self.task: asyncio.Task[None]

    async def start(self, *, transfer: bool) -> None:
        hello = self._hello
        if transfer:
            pool = self.model.kv_pool()
            members = Members()
            server = TransferServer(pool, "kv", members=members)
            await server.start()
            self.transfer = Transfer(server, TransferClient(pool, "kv", members=members), members)
            hello = replace(hello, transfer=server.endpoints)
        links = Links(
            [Fixed(r.address for r in self._routers)],
            lambda address, joined: Link(
                LinkConfig(address=address.text, first_backoff_s=0.01),
                lambda: hello,
                joined=joined,
            ),
        )
        self.worker = Worker(
            self.engine,
            links,
            hello=hello,
            document=self._document,
            transfer=self.transfer,
            overlap=self._overlap,
            spans=self._spans,
        )
        self.task = asyncio.create_task(self.worker.serve())

    async def computing(self) -> None:
        """Until a step runs, or ran."""
        assert await asyncio.to_thread(self.model.began.wait, TIMEOUT_S)

    async def stop(self) -> None:
        """As if the process were killed, as far as one process can do that to itself."""
        gate, self.model.gate = self.model.gate, None
        if gate is not None:
            gate.release(1000)  # the step in flight
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.task

    async def ended(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.task

    def check(self) -> None:
        self.engine.check()
        self.engine.check_idle()


@contextlib.asynccontextmanager
async def running(
    *routers: FakeRouter,
    sequences: int = 4,
    document: bytes = b"{}",
    blocks: int = 64,
    name: str = "w",
    role: Role = "both",
    transfer: bool = False,
    overlap: bool = True,
    spans: LegSpans | None = None,
) -> AsyncGenerator[Scene]:
    scene = Scene(
        *routers,
        sequences=sequences,
        document=document,
        blocks=blocks,
        name=name,
        role=role,
        overlap=overlap,
        spans=spans,
    )
    await scene.start(transfer=transfer)
    try:
        yield scene
    finally:
        await scene.stop()


def true_greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        kv = np.array([t * 4096 + i for i, t in enumerate(tokens)], dtype=np.int64)
        tokens.append(int(toy_logits(digest(kv), 50).argmax()))
    return tokens[len(prompt) :]


async def joined(router: FakeRouter, *, hash_key: bytes | None = None) -> Conversation:
    """A worker's link after its snapshot."""
    talk = await router.worker(hash_key=hash_key)
    await talk.until(lambda: any(isinstance(f, Snapshot) and f.last for f in talk.seen))
    return talk


async def stepped(talk: Conversation, number: int) -> None:
    """Receives until the engine's step of that number is told."""
    await talk.until(lambda: bool(talk.steps) and talk.steps[-1].step == number)
