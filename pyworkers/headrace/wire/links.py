"""All links of a worker: one for each router, wherever that was found.

Discovery names addresses; each gets a task that dials it, again and again, until the address goes. A router has one
link even where several addresses lead to it. A link that works is kept when its address goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from headrace.errors import AlreadyJoined, HeldOff, Refused, RouterNotTrusted
from headrace.wire.discovery import Change, Discovery, RouterAddress, RouterSource
from headrace.wire.link import Link, Session

log = logging.getLogger(__name__)

LONGEST_HOLD_S = 120.0  # that a router may keep a worker waiting
SECOND_WAY_S = 30.0  # until a second address of a router is tried again, if nothing ends before
LOST_WAY_S = (
    1.0  # the same where this side knows of no first one: the router has not noticed its end yet
)

Joined = Callable[[str], bool]
"""Whether there is a session with the router of this name."""
Dial = Callable[[RouterAddress, Joined], Link]
Talk = Callable[[Session], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Way:
    """An address and the task that keeps its link."""

    address: RouterAddress
    task: asyncio.Task[None] = field(init=False)
    wanted: bool = True  # discovery still names it
    router: str | None = None  # whose session is up
    refused: bool = False  # for good


class Links:
    """`run` keeps the links until `stop` and, after that, the end of the sessions."""

    def __init__(self, sources: Iterable[RouterSource], dial: Dial) -> None:
        self._discovery = Discovery(sources, self._changed)
        self._dial = dial
        self._ways: dict[str, Way] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._talk: Talk | None = None
        self._session_ended = asyncio.Event()
        self._stopping = asyncio.Event()

    async def run(self, talk: Talk) -> None:
        """Call `talk` with each session; when it returns or raises LinkLost, the router is dialled again.

        Raises Refused or RouterNotTrusted, in a group, once every router that is known wants this worker no more.
        """
        self._talk = talk
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            discovering = tasks.create_task(self._discovery.run(), name="discovery")
            await self._stopping.wait()
            discovering.cancel()
            for way in list(self._ways.values()):
                if way.router is None:
                    way.task.cancel()

    def stop(self) -> None:
        """Dial no more. Sessions end when `talk` returns."""
        self._stopping.set()

    @property
    def routers(self) -> list[str]:
        """Names of the routers with a session."""
        return [way.router for way in self._ways.values() if way.router is not None]

    def _changed(self, change: Change) -> None:
        """The only place where addresses come and go."""
        assert self._tasks is not None
        for text in change.removed:
            way = self._ways[text]
            way.wanted = False
            if way.router is None:
                log.info("router %s: its address is gone", text)
                del self._ways[text]
                way.task.cancel()
            else:
                log.info("router %s: its address is gone; the link stays while it works", text)
        for address in change.added:
            if (way := self._ways.get(address.text)) is not None:
                way.wanted = True  # it came back before its link broke
                continue
            way = Way(address)
            self._ways[address.text] = way
            way.task = self._tasks.create_task(self._keep(way), name=f"link {address.text}")

    async def _keep(self, way: Way) -> None:
        """Dial and talk while the address is wanted and its router wants us."""
        link = self._dial(way.address, lambda router: router in self.routers)
        while way.wanted and not self._stopping.is_set():
            pause_s: float | None = None
            try:
                await self._session(way, link)
            except* AlreadyJoined as group:
                log.info("router %s: %s", way.address.text, first(group))
                already = first(group)
                assert isinstance(already, AlreadyJoined)
                known = already.router in self.routers
                await self._wait_for_an_end(SECOND_WAY_S if known else LOST_WAY_S)
            except* HeldOff as group:
                held = first(group)
                assert isinstance(held, HeldOff)
                pause_s = min(held.retry_after_s, LONGEST_HOLD_S)
                log.warning("router %s: %s", way.address.text, held)
            except* (Refused, RouterNotTrusted) as group:
                way.refused = True
                if all(way.refused for way in self._ways.values()):
                    raise
                log.error(  # noqa: TRY400
                    "router %s: %s; going on with the others", way.address.text, first(group)
                )
            if way.refused:
                return  # and stays known as such until its address goes
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        if self._ways.get(way.address.text) is way:
            del self._ways[way.address.text]

    async def _session(self, way: Way, link: Link) -> None:
        assert self._talk is not None
        session = await link.connect()
        way.router = session.router
        try:
            await self._talk(session)
        finally:
            way.router = None
            self._session_ended.set()
            self._session_ended = asyncio.Event()

    async def _wait_for_an_end(self, longest_s: float) -> None:
        """The session through the other address may be the next to break."""
        ended = self._session_ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await ended.wait()


def first(error: BaseException) -> BaseException:
    """What a group of groups is about: each task group on the way put one around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
