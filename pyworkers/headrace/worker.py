"""One worker: requests of all its routers on one engine.

The event loop owns the links, one thread runs the engine, and the engine is touched only between two steps: there are
no locks. A request follows `receive` -> `inbox` -> `Worker.generate` -> `Outbox` -> `send`. A router that is slow or
gone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from headrace.engine.block_log import BlockLog, CacheView
from headrace.engine.engine import Engine, StepResult
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.names import KeyedNamer
from headrace.engine.outbox import Outbox
from headrace.engine.sequence import Key
from headrace.errors import LinkError, LinkLost
from headrace.frames import (
    Bye,
    Cancel,
    Describe,
    Drain,
    Hello,
    ModelPart,
    Ping,
    Resync,
    Submit,
)
from headrace.link import Session
from headrace.links import Links

log = logging.getLogger(__name__)

MODEL_PART_BYTES = 1 << 20
INBOX_FRAMES = 1024  # between the links and the engine; when full, the sockets push back. A guess


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something for the engine loop to take in between two steps."""

    peer: Peer
    what: Joined | Left | Submit | Cancel | Drain
    at_s: float


class Worker:
    """An engine and its links. `serve` runs it until it is drained."""

    def __init__(self, engine: Engine, links: Links, *, hello: Hello, document: bytes) -> None:
        self.engine = engine
        self._links = links
        self._hello = hello
        self._document = document
        self._inbox: asyncio.Queue[Arrival | None] = asyncio.Queue(INBOX_FRAMES)
        self._peers: dict[int, Peer] = {}  # those that joined
        self._numbers = count()
        self._view = CacheView()
        self._hash_key: bytes | None = None
        self._drain_until_s: float | None = None  # set once the worker leaves
        self._stopped = asyncio.Event()  # nothing runs any more: senders send the rest and end

    async def serve(self) -> None:
        """Run until drained. Raises what makes going on pointless, such as `Refused` by all routers."""
        async with asyncio.TaskGroup() as tasks:
            links = tasks.create_task(self._links.run(self._talk), name="links")
            await self.generate()
            self._stopped.set()
            self._links.stop()
            for peer in self._peers.values():
                peer.wake.set()
            discarding = tasks.create_task(self._discard(), name="discard")
            await asyncio.wait([links])
            discarding.cancel()

    async def generate(self) -> None:
        """The main loop: take in what came, compute a step, hand out what it gave.

        A step's `ms` is all the time since the step before, or since the arrival that ended an idle time: the turns of
        this loop that requests wait for, not only the model.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            while True:
                if self.engine.idle and self._drain_until_s is None:
                    self.engine.check_idle()
                    arrival = await self._inbox.get()
                    began_s = loop.time()
                    self._take_in(arrival)
                while not self._inbox.empty():
                    self._take_in(self._inbox.get_nowait())
                self._note_changes()
                if self._drain_until_s is not None and loop.time() >= self._drain_until_s:
                    text = "the worker had no time left to finish it"
                    self._hand_out(self.engine.abandon(FailureKind.DRAINING, text))
                if not self.engine.idle:
                    step = loop.run_in_executor(thread, self.engine.step, loop.time())
                    result = await step
                    ended_s = loop.time()
                    result.ms = (ended_s - began_s) * 1e3
                    began_s = ended_s
                    self._hand_out(result)  # it leaves while the next step runs
                elif self._drain_until_s is not None:
                    return

    def _take_in(self, arrival: Arrival | None) -> None:
        if arrival is None:  # only to wake up
            return
        peer = arrival.peer
        match arrival.what:
            case Joined():
                self._join(peer)
            case Left():
                cancelled = self.engine.cancel_link(peer.number)
                self._peers.pop(peer.number, None)
                log.info("router %s left with %d requests", peer.session.router, cancelled)
            case Submit() as submit:
                try:
                    self._admit(submit, peer, arrival.at_s)
                except RequestError as error:
                    peer.outbox.failed(error.frame(submit.request))
                else:
                    return  # the next step says the rest
            case Cancel(request):
                peer.outbox.cancelled(request, self.engine.cancel(Key(peer.number, request)))
            case Drain(budget_ms):
                self.drain(budget_ms / 1e3, f"router {peer.session.router} asked for it")
        peer.wake.set()  # it sends once this turn of the loop has noted all changes

    def _admit(self, submit: Submit, peer: Peer, at_s: float) -> None:
        if self._drain_until_s is not None:
            raise RequestError(FailureKind.DRAINING, "this worker leaves")
        self.engine.submit(submit, link=peer.number, now_s=at_s)

    def _join(self, peer: Peer) -> None:
        key = peer.session.hash_key
        if key != self._hash_key:
            if self._hash_key is not None:
                log.warning(
                    "router %s brought a new hash key: the prefix cache is cleared (several routers need one secret)",
                    peer.session.router,
                )
            self._hash_key = key
            self.engine.use_namer(KeyedNamer(key, self.engine.config.block_tokens))
            self._note_changes()
        peer.outbox.log = BlockLog(self._view, self._hello.epoch)
        if self._drain_until_s is not None:
            peer.outbox.bye = Bye("draining")
        self._peers[peer.number] = peer

    def _hand_out(self, result: StepResult) -> None:
        for number, answers in result.answers.items():
            if number in self._peers:
                self._peers[number].outbox.answer(answers)
        for peer in self._peers.values():
            peer.outbox.stepped(result)
            peer.wake.set()
        self._note_changes()

    def _note_changes(self) -> None:
        """Pass on what changed in cache and load. Between steps only."""
        outboxes = [peer.outbox for peer in self._peers.values()]
        self._view.apply(self.engine.take_events(), [box.log for box in outboxes if box.log])
        load, waiting_tokens = self.engine.load, self.engine.waiting_tokens
        for outbox in outboxes:
            outbox.loaded(load, waiting_tokens)

    def drain(self, budget_s: float, reason: str) -> None:
        """Take nothing new, finish what runs within `budget_s`, leave. A second call may only shorten that."""
        until_s = asyncio.get_running_loop().time() + budget_s
        if self._drain_until_s is None:
            log.info("draining for at most %.1f s: %s", budget_s, reason)
            for peer in self._peers.values():
                peer.outbox.bye = Bye(reason)
                peer.wake.set()
        self._drain_until_s = min(until_s, self._drain_until_s or until_s)
        with contextlib.suppress(asyncio.QueueFull):  # then the loop is awake
            self._inbox.put_nowait(None)

    async def _talk(self, session: Session) -> None:
        """One session with a router, to its end."""
        peer = Peer(next(self._numbers), session)
        try:
            async with session, asyncio.TaskGroup() as tasks:
                await self._put(peer, Joined())
                receiving = tasks.create_task(self._receive(peer), name="receive")
                await self._send(peer)
                receiving.cancel()
        except* LinkLost as lost:
            log.warning("router %s: %s", session.router, lost.exceptions[0])
        except* LinkError:
            await self._put(peer, Left())
            raise
        await self._put(peer, Left())

    async def _put(self, peer: Peer, what: Joined | Left | Submit | Cancel | Drain) -> None:
        await self._inbox.put(Arrival(peer, what, asyncio.get_running_loop().time()))

    async def _discard(self) -> None:
        """Keeps the inbox from filling up when nobody takes from it any more."""
        while True:
            await self._inbox.get()

    async def _receive(self, peer: Peer) -> None:
        async for frame in peer.session:
            match frame:
                case Submit() | Cancel() | Drain():
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
            last = self._stopped.is_set()
            await peer.session.send(*peer.outbox.take())
            if last:
                return
