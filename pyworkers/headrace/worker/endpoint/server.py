"""The endpoint's socket, connections and thread.

It has a thread and an event loop of its own: the worker's loop never waits for whoever asks, and a worker that stands
still can be looked at. A connection serves one request. What strangers may hold is bounded: connections in number and
in time, requests in bytes; of a request's body no more is read than comes within a second of the answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading

from aiohttp import web

from headrace.worker.endpoint.pages import HttpPage, Pages, said
from headrace.worker.endpoint.profiler import MOST_S
from headrace.worker.endpoint.watched import WatchedWorker

log = logging.getLogger(__name__)

MOST_CONNECTIONS = (
    32  # a new one takes the place of the oldest. A guess: probes and scrapers take one or two
)
CONNECTION_S = MOST_S + 30.0  # the longest profile, and time to take it
LINE_BYTES = 4096  # of a request line or a header
HEADERS = 64
LINGER_S = 1.0  # for a client that still sends to see its answer
BYE_S = 2.0  # for the thread to end
# Headers that proxies add: such a request comes from somebody else than from whom its connection comes.
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via")


class Endpoint:
    """Listens from its making on, until `close`."""

    def __init__(self, listener: socket.socket, watched: WatchedWorker) -> None:
        self._listener = listener
        self._pages = Pages(watched)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Hang up on everybody."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(BYE_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = BoundedServer(self._pages)
        listening = await self._loop.create_server(
            server, sock=self._listener, backlog=MOST_CONNECTIONS
        )
        async with listening:
            await self._over.wait()
            server.hang_up()


class BoundedServer(web.Server):
    """Connections, each of which ends in time."""

    def __init__(self, pages: Pages) -> None:
        quiet = logging.getLogger(f"{__name__}.strangers")
        quiet.setLevel(logging.CRITICAL + 1)  # what they send is no matter for the log
        super().__init__(
            self._answer,
            handler_cancellation=True,  # a profile whose client is gone ends
            logger=quiet,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_S,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            max_headers=HEADERS,
        )
        self._pages = pages
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._open) >= MOST_CONNECTIONS:
            self._forget(next(iter(self._open)), hang_up=True)
        deadline = asyncio.get_running_loop().call_later(CONNECTION_S, transport.abort)
        self._open[handler] = transport, deadline

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        self._forget(handler)
        super().connection_lost(handler, exc)

    def hang_up(self) -> None:
        for handler in list(self._open):
            self._forget(handler, hang_up=True)

    def _forget(self, handler: web.RequestHandler, *, hang_up: bool = False) -> None:
        if handler in self._open:
            transport, deadline = self._open.pop(handler)
            deadline.cancel()
            if hang_up:
                transport.abort()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            page = await self._page(request)
        except Exception:
            log.exception("%s could not be answered", request.path)
            page = said(500, message="the log of the worker says what went wrong")
        headers = {
            "Content-Type": page.content_type,
            "Cache-Control": "no-store",
            "Server": "headrace",
        }
        answer = web.Response(
            status=page.status, body=page.text.encode(), headers=headers | dict(page.headers)
        )
        answer.force_close()
        return answer

    async def _page(self, request: web.BaseRequest) -> HttpPage:
        if request.method not in {"GET", "HEAD"}:
            refused = said(405, message="only GET and HEAD are answered here")
            return HttpPage(405, refused.text, headers={"Allow": "GET, HEAD"})
        return await self._pages.page(request.path, list(request.query.items()), stranger(request))


def stranger(request: web.BaseRequest) -> str | None:
    """Why this is not sent by a process of this machine for itself, if so. A page in its browser is no such process."""
    if not _is_local(request.remote or ""):
        return "it comes from another one"
    if any(name in request.headers for name in FORWARDED):
        return "a proxy passed it on"
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
        return "a page in a browser sent it"
    # a name that somebody's DNS points here may stand in an address bar
    host = request.headers.get("Host", "localhost")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name != "localhost" and _address(name.strip("[]")) is None:
        return "Host has to be localhost or an address"
    return None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_local(text: str) -> bool:
    address = _address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback
