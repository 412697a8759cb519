"""A request in two legs, with the test in the router's place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.wire.frames import Cancel, Continue, KvFrom, KvReady, KvTransfer, Ticket
from helpers.engine.toy import make_submit, pack
from helpers.kv.pull_keys import PULL_KEY
from helpers.worker.fake_router import Answer, Conversation, FakeRouter
from helpers.worker.scene import Scene, joined, running

PREFILL = 1000  # added to a request's number it names the prefill leg


@dataclass
class Legs:
    """The router's links to a prefill and to a decode worker."""

    p: Conversation
    d: Conversation
    transfer: list[str] | None = None  # ways to pull; None: all that the prefill worker has

    def submit(
        self,
        number: int,
        prompt: list[int],
        *,
        lease_ms: int = 20_000,
        timeout_ms: int = 20_000,
        pull_key: bytes = PULL_KEY,
        **fields: Any,
    ) -> None:
        """Give both legs of a request to their workers; `pull_key` is the decode worker's."""
        assert self.p.hello is not None
        hello = self.p.hello
        leg = make_submit(number, prompt, **fields)
        ways = hello.transfer if self.transfer is None else self.transfer
        kv_from = KvFrom(hello.worker, ways, timeout_ms, pull_key)
        self.p.send(
            replace(leg, request=PREFILL + number, kv_transfer=KvTransfer(lease_ms, PULL_KEY))
        )
        self.d.send(replace(leg, kv_from=kv_from))

    async def ready(self, number: int) -> KvReady:
        """The prefill worker's ticket."""
        await self.p.until(lambda: self.first(number).ready is not None)
        ready = self.first(number).ready
        assert ready is not None
        return ready

    async def pass_on(self, number: int) -> None:
        """The ticket goes to the decode worker."""
        ready = await self.ready(number)
        self.d.send(Ticket(number, ready.ticket))

    async def reserved(self, blocks: int) -> None:
        """The decode worker has so many blocks for the KV that comes."""
        await self.d.until(lambda: any(step.load.blocks_used >= blocks for step in self.d.steps))

    async def go_on(self, number: int) -> bool:
        """The first token goes to the decode worker; or, if it was the last one, a Cancel. Whether it goes on."""
        first = self.first(number)
        await self.p.until(lambda: bool(first.ids) or first.finish is not None)
        if first.finish is not None:
            self.d.send(Cancel(number))
            return False
        self.d.send(Continue(number, pack(first.ids)))
        return True

    async def whole(self, number: int, prompt: list[int], **fields: Any) -> Answer:
        """What a client would get, after both sides have freed everything."""
        self.submit(number, prompt, **fields)
        first = self.first(number)
        await self.p.until(lambda: first.ready is not None or first.finish is not None)
        if first.ready is not None:  # what is computed in one step and ends with it has no ticket
            await self.pass_on(number)
        await self.go_on(number)
        await self.freed(number)
        return self.joined(number)

    async def freed(self, number: int) -> None:
        await self.p.until_freed(PREFILL + number)
        await self.d.until_freed(number)

    def first(self, number: int) -> Answer:
        """What the prefill worker said."""
        return self.p.answer(PREFILL + number)

    def joined(self, number: int) -> Answer:
        """Both legs as one."""
        first, rest = self.first(number), self.d.answer(number)
        return Answer(
            ids=first.ids + rest.ids,
            logprobs=first.logprobs + rest.logprobs,
            finish=first.finish or rest.finish,
        )

    async def alone(self, number: int, prompt: list[int], **fields: Any) -> Answer:
        """The whole request on the decode worker, without any cache."""
        self.d.send(make_submit(number, prompt, salt=b"alone", **fields))
        await self.d.until_freed(number)
        return self.d.answer(number)

    def pull_outcomes(self, number: int) -> list[str | None]:
        return [report.error for report in self.d.answer(number).transferred]


@dataclass(kw_only=True)
class Pair(Legs):
    """Both workers, too."""

    router: FakeRouter
    prefill: Scene
    decode: Scene

    def check(self) -> None:
        """Nothing is left on either side."""
        for scene in (self.prefill, self.decode):
            scene.check()
            assert scene.transfer is not None
            assert scene.transfer.server.open_tickets == 0


@contextlib.asynccontextmanager
async def pair(
    path: Path, *, prefill_blocks: int = 64, decode_blocks: int = 64, sequences: int = 4
) -> AsyncGenerator[Pair]:
    """Two workers that have joined one router."""
    async with FakeRouter(path / "r") as router, contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            running(
                router,
                name="p",
                role="prefill",
                blocks=prefill_blocks,
                sequences=sequences,
                transfer=True,
            )
        )
        p = await joined(router)
        decode = await stack.enter_async_context(
            running(
                router,
                name="d",
                role="decode",
                blocks=decode_blocks,
                sequences=sequences,
                transfer=True,
            )
        )
        d = await joined(router)
        yield Pair(p, d, router=router, prefill=prefill, decode=decode)
