"""The sessions with routers: what comes goes to the engine's inbox, what an outbox has goes out.

A router that is slow costs the others nothing: each session has its own outbox, and a router that takes nothing is not
heard any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from headrace.errors import LinkClosed, LinkError, LinkLost
from headrace.wire.frames import (
    Cancel,
    Continue,
    Describe,
    Drain,
    Fetch,
    Hello,
    ModelPart,
    Ping,
    Resync,
    Submit,
    Ticket,
)
from headrace.wire.link import Session
from headrace.wire.links import first
from headrace.worker.outbox import Outbox

log = logging.getLogger(__name__)

MODEL_PART_BYTES = 1 << 20
INBOX_FRAMES = 1024  # between the links and the engine; when full, the sockets push back. A guess

ForEngine: TypeAlias = Submit | Cancel | Drain | Ticket | Continue | Fetch
"""Frames that are taken in before a step is planned."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The link is up."""


@dataclass(frozen=True, slots=True)
class Left:
    """The link is gone."""


@dataclass(slots=True, eq=False)
class Peer:
    """One session with a router. `number` names its requests inside the engine."""

    number: int
    session: Session
    outbox: Outbox = field(default_factory=Outbox)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    took: asyncio.Event = field(default_factory=asyncio.Event)  # the outbox was emptied


@dataclass(frozen=True, slots=True)
class EngineInput:
    """Something for the engine loop to take in."""

    peer: Peer
    what: Joined | Left | ForEngine
    at_s: float


class Sessions:
    """Runs each session to its end. `inbox` gets `None` from others, only to wake up who reads it."""

    def __init__(self, hello: Hello, document: bytes) -> None:
        self.inbox: asyncio.Queue[EngineInput | None] = asyncio.Queue(INBOX_FRAMES)
        self.stopped = asyncio.Event()  # nothing runs any more: senders send the rest and end
        self._hello = hello
        self._document = document
        self._numbers = count()

    async def talk(self, session: Session) -> None:
        """One session with a router, to its end."""
        peer = Peer(next(self._numbers), session)
        try:
            async with session, asyncio.TaskGroup() as tasks:
                await self._put(peer, Joined())
                receiving = tasks.create_task(self._receive(peer), name="receive")
                await self._send(peer)
                receiving.cancel()
        except* LinkLost as group:
            lost = first(group)
            # a router may close the link of a worker that said goodbye while that has more to say
            orderly = isinstance(lost, LinkClosed) or peer.outbox.said_bye
            level = logging.INFO if orderly else logging.WARNING
            log.log(level, "router %s: %s", session.router, lost)
        except* LinkError:
            await self._put(peer, Left())
            raise
        await self._put(peer, Left())

    async def _put(self, peer: Peer, what: Joined | Left | ForEngine) -> None:
        await self.inbox.put(EngineInput(peer, what, asyncio.get_running_loop().time()))

    async def _receive(self, peer: Peer) -> None:
        async for frame in peer.session:
            match frame:
                case Submit() | Cancel() | Drain() | Ticket() | Continue() | Fetch():
                    while peer.outbox.crowded:
                        peer.took.clear()
                        await peer.took.wait()
                    await self._put(peer, frame)
                case Ping():
                    peer.wake.set()
                case Resync(reason):
                    self._restart_log(peer, reason)
                case Describe(fingerprint):
                    await self._describe(peer, fingerprint)
                case _:
                    raise LinkLost(
                        f"the router sent a {type(frame).__name__} where it has no place"
                    )

    def _restart_log(self, peer: Peer, reason: str) -> None:
        """Needs no step's end: the log lives on the event loop."""
        log.warning("router %s wants to know all blocks again: %s", peer.session.router, reason)
        if peer.outbox.log is not None:  # otherwise the first snapshot is still to come
            peer.outbox.log.restart()
            peer.wake.set()

    async def _describe(self, peer: Peer, fingerprint: str) -> None:
        prints = self._hello.fingerprints
        ours = f"{prints.tokenizer}/{prints.chat_template}"
        if fingerprint != ours:
            raise LinkLost(f"the router asked for model {fingerprint!r}, here is {ours!r}")
        starts = range(0, len(self._document), MODEL_PART_BYTES)
        for part, start in enumerate(starts):
            data = self._document[start : start + MODEL_PART_BYTES]
            last = start + MODEL_PART_BYTES >= len(self._document)
            await peer.session.send(ModelPart(fingerprint, part, last, data))

    async def _send(self, peer: Peer) -> None:
        """All that goes to one router, at least a heartbeat. Returns after the last frame of a drained worker."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(peer.session.heartbeat_s):
                    await peer.wake.wait()
            peer.wake.clear()
            last = self.stopped.is_set()
            frames = peer.outbox.take()
            peer.took.set()
            await peer.session.send(*frames)
            if last:
                return
