"""One worker: requests of all its routers on one engine.

The event loop owns the links and the engine, a thread of its own runs the steps (`step_executor.py`): there are no
locks. A request follows `Sessions` -> `inbox` -> `Worker.generate` -> `Outbox` -> `send`. A router that
is slow or gone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.cache.block_log import BlockLog, CacheView
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.result import StepResult
from headrace.engine.sequence import Key
from headrace.kv_transfer.connector import KvConnector, Transfer
from headrace.kv_transfer.producer import News
from headrace.wire.frames import (
    Bye,
    Cancel,
    Continue,
    Drain,
    Fetch,
    Hello,
    Submit,
    Ticket,
    Transferred,
)
from headrace.wire.links import Links
from headrace.worker.endpoint.watched import WorkerReport
from headrace.worker.grammar_compiler import GrammarCompiler
from headrace.worker.log.request_log import SUMMARY_S, WorkerLog
from headrace.worker.membership import Membership
from headrace.worker.other_prompts import of_others
from headrace.worker.sessions import EngineInput, Joined, Left, Peer, Sessions
from headrace.worker.step_executor import StepExecutor

if TYPE_CHECKING:
    from headrace.worker.log.traces.legs import LegSpans

log = logging.getLogger(__name__)

# Frames taken in before the loop looks at what ran meanwhile: so a flood of them holds no other router up. A guess
FRAMES_OF_A_TURN = 256
LAST_WORDS_S = 5.0  # for routers to take what a worker says whose group is over. A guess


class Worker:
    """An engine and its links. `serve` runs it until it is drained, with all ranks of its group."""

    def __init__(
        self,
        engine: Engine,
        links: Links,
        *,
        hello: Hello,
        document: bytes,
        transfer: Transfer | None = None,
        overlap: bool = True,
        lines_per_s: int = 0,
        spans: LegSpans | None = None,
    ) -> None:
        """With `overlap` a step is planned while the one before it runs. `lines_per_s` are those about requests;
        `spans` makes those of their legs, if they are traced.
        """
        self.engine = engine
        self._overlap = overlap
        self._connector = (
            None if transfer is None else KvConnector(engine, transfer, self._tell, self._wake)
        )
        self._links = links
        self._hello = hello
        self._sessions = Sessions(hello, document)
        self._inbox = self._sessions.inbox
        self._peers: dict[int, Peer] = {}  # those that joined
        self._view = CacheView()
        self._hash_key: bytes | None = None
        self._drain_until_s: float | None = None  # set once the worker leaves
        self._gave_up = False  # all that still ran
        self._membership = Membership(engine.rounds)
        self._compiler = GrammarCompiler(engine.vocabulary, self._wake)
        self._log = WorkerLog(
            worker=hello.worker,
            model=hello.model,
            blocks=hello.capacity.blocks,
            lines_per_s=lines_per_s,
            spans=spans,
        )

    async def serve(self) -> None:
        """Run until drained. Raises what makes going on pointless, such as `Refused` by all routers, or `RankLost`."""
        async with asyncio.TaskGroup() as tasks, self._closing():
            links = tasks.create_task(self._links.run(self._sessions.talk), name="links")
            summing_up = tasks.create_task(self._sum_up(), name="log")
            await self.generate()
            summing_up.cancel()
            self._sessions.stopped.set()
            self._links.stop()
            for peer in self._peers.values():
                peer.wake.set()
            discarding = tasks.create_task(self._discard(), name="discard")
            lost = self._membership.lost
            await asyncio.wait([links], timeout=None if lost is None else LAST_WORDS_S)
            discarding.cancel()
            if lost is not None:
                raise lost

    async def generate(self) -> None:
        """The main loop: take in what came, compute steps, hand out what they gave.

        What comes is taken in at once, also while a step runs; the next one is planned shortly before that ends. A
        step's `ms` is all the time since the step before, or since the arrival that ended an idle time: the turns of
        this loop that requests wait for, not only the model.
        """
        self._watch_progress(asyncio.get_running_loop())
        began_s = time.perf_counter()
        with StepExecutor(self.engine, self._wake, overlap=self._overlap) as executor:
            while executor.busy or not self._gone:
                await self._take_in_some()
                self._settle()
                if executor.done:
                    result = executor.finish()
                    ended_s = time.perf_counter()
                    result.ms = (ended_s - began_s) * 1e3
                    began_s = ended_s
                    self._hand_out(result)
                    await asyncio.sleep(0)  # senders have it before the next one
                elif executor.prepare_s <= time.perf_counter() and executor.begin():
                    continue
                elif executor.busy:
                    await self._something(executor.prepare_s)
                else:
                    self._settle()  # the plan may have found blocks for KV that comes
                    if self._rests and self._membership.rest():
                        continue
                    if (self.engine.idle or executor.joins) and not self._gone:
                        await self._something(math.inf)
                        began_s = time.perf_counter()

    async def _take_in_some(self) -> None:
        """What came, as far as a turn goes."""
        for given in self._compiler.due():
            self._take_up(given)
        for _ in range(FRAMES_OF_A_TURN):
            if self._inbox.empty():
                return
            self._take_in(self._inbox.get_nowait())
        await asyncio.sleep(0)  # a queue that has something in it lets nobody else run

    async def _something(self, prepare_s: float) -> None:
        """Wait for an arrival, the end of a step, the next thing that is due, or `prepare_s`."""
        self.engine.check_idle()
        until_s = min(
            self.engine.next_deadline_s,
            math.inf if self._connector is None else self._connector.next_deadline_s,
            self._give_up_s,
            asyncio.get_running_loop().time() + prepare_s - time.perf_counter(),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if until_s == math.inf else until_s):
                self._take_in(await self._inbox.get())

    @property
    def _at_rest(self) -> bool:
        moved = self._connector is None or self._connector.idle
        return self.engine.empty and self._compiler.idle and moved

    @property
    def _give_up_s(self) -> float:
        """When the time of a draining worker is up; infinite where it is not, or was."""
        if self._drain_until_s is None or self._gave_up:
            return math.inf
        return self._drain_until_s

    @property
    def _rests(self) -> bool:
        """It leaves, and nothing is left here."""
        return self._drain_until_s is not None and self._at_rest

    @property
    def _gone(self) -> bool:
        return self._membership.lost is not None or (self._rests and self._membership.over)

    def _heed_group(self) -> None:
        """Leave where another rank does, or is lost."""
        budget_s, lost = self._membership.heard_leave_s(), self._membership.lost
        if budget_s is not None:
            self.drain(budget_s, "another rank of the group leaves")
        if lost is not None and not self._gave_up:
            self._give_up(FailureKind.ENGINE, text := f"the group is over: {lost}")
            self.drain(0.0, text)

    def _give_up(self, kind: FailureKind, text: str) -> None:
        """Once: what is left are movers that have yet to stop."""
        self._gave_up = True
        if self._connector is not None:
            self._connector.give_up()
        self._answer(self.engine.abandon(kind, text))

    def _settle(self) -> None:
        """All that is due."""
        self._heed_group()
        now_s = asyncio.get_running_loop().time()
        if self.engine.next_deadline_s <= now_s:
            self._answer(self.engine.expire(now_s))
        if self._connector is not None:
            self._connector.settle(now_s)
        if now_s >= self._give_up_s:
            self._give_up(FailureKind.DRAINING, "the worker had no time left to finish it")
        self._note_changes()

    def _watch_progress(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have those who pull from here hear of each group of layers, while the step goes on."""
        connector = self._connector
        if connector is None:
            return

        def ring() -> None:
            loop.call_soon_threadsafe(connector.producer.offer)

        self.engine.kv_exports.alarm.call = ring

    @contextlib.asynccontextmanager
    async def _closing(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._compiler.close()
            if self._connector is not None:
                await self._connector.close()

    def _take_in(self, arrival: EngineInput | None) -> None:
        if arrival is None:  # only to wake up
            return
        try:
            if self._compiler.hold(arrival):
                return
        except RequestError as error:
            assert isinstance(arrival.what, Submit)
            self._refuse(arrival.what, arrival.peer, error, arrival.at_s)
            arrival.peer.wake.set()
            return
        self._take_up(arrival)

    def _take_up(self, arrival: EngineInput) -> None:
        """Something that waits for nothing."""
        peer = arrival.peer
        match what := arrival.what:
            case Joined():
                self._join(peer)
            case Left():
                cancelled = (self._connector or self.engine).cancel_link(peer.number)
                self._log.left(peer.number, arrival.at_s)
                self._peers.pop(peer.number, None)
                self._trust()
                level = logging.WARNING if cancelled else logging.INFO
                log.log(level, "router %s left with %d requests", peer.session.router, cancelled)
            case Submit() as submit:
                try:
                    self._admit(submit, peer, arrival.at_s)
                except RequestError as error:
                    self._refuse(submit, peer, error, arrival.at_s)
                else:
                    self._wake_others(peer)
                    return  # the next step says the rest
            case Cancel(request):
                blocks = (self._connector or self.engine).cancel(Key(peer.number, request))
                self._log.cancelled(Key(peer.number, request), arrival.at_s)
                peer.outbox.cancelled(request, blocks)
            case Drain():
                self._drain(what, peer, arrival.at_s)
            case Ticket() | Continue() | Fetch() as frame:
                self._take_in_news(frame, peer, arrival.at_s)
        peer.wake.set()  # it sends once this turn of the loop has noted all changes

    def _admit(self, submit: Submit, peer: Peer, at_s: float) -> None:
        if self._drain_until_s is not None:
            raise RequestError(FailureKind.DRAINING, "this worker leaves")
        if self._connector is None and (
            submit.kv_from is not None or submit.kv_transfer is not None
        ):
            raise RequestError(FailureKind.UNSUPPORTED, "this worker moves no KV")
        self.engine.submit(submit, link=peer.number, now_s=at_s)
        self._log.admitted(Key(peer.number, submit.request), submit, peer.session.router, at_s)

    def _refuse(self, submit: Submit, peer: Peer, error: RequestError, at_s: float) -> None:
        peer.outbox.failed(error.frame(submit.request))
        self._log.refused(submit, peer.session.router, str(error.kind), error.message, at_s)

    def _wake_others(self, peer: Peer) -> None:
        """Others hear of the load at once: till the end of a long step they would send their prompts here, too."""
        for other in self._peers.values():
            if other is not peer:
                other.wake.set()

    def _drain(self, drain: Drain, peer: Peer, now_s: float) -> None:
        """Offer what is hot first. A later Drain that wants no offer ends the one there is."""
        budget_s = drain.budget_ms / 1e3
        if self._connector is not None:
            if drain.migration is not None:
                peer.outbox.tell(self._connector.migration.offer(drain.migration, budget_s, now_s))
            else:
                self._connector.migration.end()
        self.drain(budget_s, f"router {peer.session.router} asked for it")

    def _take_in_news(self, frame: Ticket | Continue | Fetch, peer: Peer, at_s: float) -> None:
        """Of KV that is to come. Whoever moves none has refused the request already."""
        if self._connector is None:
            return
        try:
            self._connector.take_in(peer.number, frame, at_s)
        except RequestError as error:  # tokens that cannot be
            blocks = self._connector.cancel(Key(peer.number, frame.request))
            self._log.cancelled(Key(peer.number, frame.request), at_s)
            peer.outbox.cancelled(frame.request, blocks)
            peer.outbox.failed(error.frame(frame.request))

    def _join(self, peer: Peer) -> None:
        key = peer.session.hash_key
        if key != self._hash_key:
            if self._hash_key is not None:
                log.warning(
                    "router %s brought a new hash key: the prefix cache is cleared (several routers need one secret)",
                    peer.session.router,
                )
            self._hash_key = key
            self.engine.use_hasher(KeyedBlockHasher(key, self.engine.config.block_tokens))
            self._note_changes()
        peer.outbox.log = BlockLog(self._view, self._hello.epoch)
        if self._drain_until_s is not None:
            peer.outbox.bye = Bye("draining")
        self._peers[peer.number] = peer
        self._trust()

    def _trust(self) -> None:
        """KV moves between workers of the routers that this one has links to."""
        if self._connector is not None:
            self._connector.trust(peer.session.hash_key for peer in self._peers.values())

    def _hand_out(self, result: StepResult) -> None:
        """What a step gave."""
        self._answer(result)
        for peer in self._peers.values():
            peer.outbox.stepped(result)
            peer.wake.set()
        self._note_changes()

    def _answer(self, result: StepResult) -> None:
        self._log.stepped(result, asyncio.get_running_loop().time())
        for number, answers in result.answers.items():
            if self._connector is not None:
                for request in answers.ended:
                    self._connector.producer.withdraw(Key(number, request))
            if number in self._peers:
                self._peers[number].outbox.answer(answers)
                self._peers[number].wake.set()

    def _note_changes(self) -> None:
        """Pass on what changed in cache and load."""
        outboxes = [peer.outbox for peer in self._peers.values()]
        self._view.apply(self.engine.pool.take_events(), [box.log for box in outboxes if box.log])
        load, waiting_tokens = self.engine.load, self.engine.waiting_tokens
        totals, grammars = self._membership.totals, self.engine.grammar_totals
        if len(self._peers) > 1:
            prompts = self.engine.prompts()
            for number, peer in self._peers.items():
                peer.outbox.others(of_others(prompts, number))
        for outbox in outboxes:
            outbox.loaded(load, waiting_tokens)
            outbox.spent(grammars)
            if totals is not None:
                outbox.totalled(totals)

    def report(self) -> WorkerReport:
        """What it is at, for whoever watches it. From its own loop."""
        spans = self._log.spans
        return WorkerReport(
            worker=self._hello.worker,
            model=self._hello.model,
            role=self._hello.role,
            joined=len(self._peers),
            draining=self._drain_until_s is not None,
            blocks=self._hello.capacity.blocks,
            load=self.engine.load,
            totals=self._log.totals.copy(),
            spans=None if spans is None else spans.queue.totals(),
        )

    @property
    def summary(self) -> str:
        """What it is at, in a line for people."""
        state = "serving" if self._drain_until_s is None else "draining"
        return f"{state}, joined {len(self._peers)} routers"

    def drain(self, budget_s: float, reason: str) -> None:
        """Take nothing new, finish what runs within `budget_s`, leave. A second call may only shorten that."""
        until_s = asyncio.get_running_loop().time() + budget_s
        if self._drain_until_s is None:
            log.info("draining for at most %.1f s: %s", budget_s, reason)
            for peer in self._peers.values():
                peer.outbox.bye = Bye(reason)
                peer.wake.set()
        self._drain_until_s = min(until_s, self._drain_until_s or until_s)
        self._membership.leave(budget_s)
        self._wake()

    def _wake(self) -> None:
        """Have the loop look around, if it waits."""
        with contextlib.suppress(asyncio.QueueFull):  # then it does not
            self._inbox.put_nowait(None)

    def _tell(self, link: int, news: News) -> None:
        """To a router, if it is still there."""
        if isinstance(news, Transferred):
            now_s = asyncio.get_running_loop().time()
            self._log.transferred(Key(link, news.request), news, now_s)
        peer = self._peers.get(link)
        if peer is not None:
            peer.outbox.tell(news)
            peer.wake.set()

    async def _sum_up(self) -> None:
        """A line of the log every ten seconds."""
        loop = asyncio.get_running_loop()
        while True:
            self._log.sum_up(self.engine.load, loop.time())
            await asyncio.sleep(SUMMARY_S)

    async def _discard(self) -> None:
        """Keeps the inbox from filling up when nobody takes from it any more."""
        while True:
            await self._inbox.get()
