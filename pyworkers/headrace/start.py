"""`headrace worker`: the process around one worker, its settings and its signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import torch

from headrace.discovery import Address, parse_sources
from headrace.errors import Refused, RouterNotTrusted
from headrace.frames import Hello
from headrace.link import Link, LinkConfig, tls_context
from headrace.links import Links, first
from headrace.load import Loaded, load
from headrace.supervise import EXIT_CONFIG
from headrace.worker import Worker

if TYPE_CHECKING:
    from headrace.settings import WorkerSettings

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # for what runs when the process is told to stop


def links(settings: WorkerSettings, hello: Callable[[], Hello]) -> Links:
    """Raises `ValueError` for what names no router: better before a model is loaded than after."""
    sources = parse_sources(settings.routers)
    tls = tls_context(settings.router_ca) if settings.router_tls else None

    def dial(address: Address, joined: Callable[[str], bool]) -> Link:
        config = LinkConfig(
            address=address.text, secret=settings.secret, tls=tls, tls_name=address.tls_name
        )
        return Link(config, hello, joined=joined)

    return Links(sources, dial)


async def serve(loaded: Loaded, links: Links) -> None:
    """Serve the routers until one of them or a signal drains the worker; a second signal stops it."""
    worker = Worker(loaded.engine, links, hello=loaded.hello, document=loaded.document)
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal(number: int) -> None:
        nonlocal signals
        signals += 1
        worker.drain(DRAIN_S if signals == 1 else 0.0, signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await worker.serve()


def run(settings: WorkerSettings) -> int:
    """`headrace worker`: load, serve, leave; the exit status."""
    levels = {"error": "ERROR", "warn": "WARNING", "info": "INFO", "debug": "DEBUG"}
    logging.basicConfig(
        level=levels[settings.log_level], format="%(levelname)s %(message)s", stream=sys.stderr
    )
    torch.set_num_threads(1)  # more, and the workers of a machine fight for its cores
    try:
        # the links first, for a wrong address is noticed sooner than a model is loaded
        ways = links(settings, lambda: loaded.hello)
        loaded = load(settings)
    except (ValueError, OSError) as error:
        log.error("%s", error)  # noqa: TRY400  a setting is wrong, not the program
        return EXIT_CONFIG
    status = 0
    try:
        _event_loop_run()(serve(loaded, ways))
    except* (Refused, RouterNotTrusted) as group:
        log.error("%s", first(group))  # noqa: TRY400
        status = EXIT_CONFIG
    return status


def _event_loop_run() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run
