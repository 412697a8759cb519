"""`headrace worker`: the process around one worker, its settings and its signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace import _core, logs
from headrace.errors import CannotRun, Refused, RouterNotTrusted
from headrace.exit_status import EXIT_CONFIG, EXIT_RANK_LOST
from headrace.kv_transfer.connector import Transfer
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import Members
from headrace.kv_transfer.peers.server import TransferServer
from headrace.settings.values import SettingsError
from headrace.settings.worker import LOG_LEVELS
from headrace.wire.discovery import RouterAddress, parse_sources
from headrace.wire.frames import Hello
from headrace.wire.link import Link, LinkConfig, parse_address
from headrace.wire.links import Links, first
from headrace.wire.tls import tls_context
from headrace.worker.endpoint.start import watching
from headrace.worker.endpoint.watched import WatchedWorker
from headrace.worker.load_model import Loaded, load
from headrace.worker.log.log_format import begin_log
from headrace.worker.log.traces.start import collector_of, tracing
from headrace.worker.parallel.control import GroupFailed
from headrace.worker.parallel.environment import read_environment
from headrace.worker.service_manager import keep_told, read_service_manager
from headrace.worker.worker import Worker
from headrace_kernels.moe.transport import RankLost

if TYPE_CHECKING:
    import ssl

    from headrace.settings.worker import WorkerSettings
    from headrace.worker.log.traces.legs import LegSpans
    from headrace.worker.parallel.environment import GroupEnvironment

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # for what runs when the process is told to stop
DRAIN_OVERDUE_S = (
    10.0  # after which a process that is still there is ended: a step or a transfer hangs
)
LOST_OVERDUE_S = 10.0  # after which a rank is ended that still is there without its group


def link_tls(settings: WorkerSettings) -> ssl.SSLContext | None:
    """TLS of the links to routers, if they use it. Raises `ValueError` for files that cannot be used."""
    cert, key = settings.router_client_cert, settings.router_client_key
    identity = None if cert is None or key is None else (cert, key)
    return tls_context(settings.router_ca, identity) if settings.dials_tls else None


def links(settings: WorkerSettings, hello: Callable[[], Hello]) -> Links:
    """Raises `ValueError` for what names no router."""
    sources = parse_sources(settings.routers)
    tls = link_tls(settings)

    def dial(address: RouterAddress, joined: Callable[[str], bool]) -> Link:
        config = LinkConfig(
            address=address.text, secret=settings.secret, tls=tls, tls_name=address.tls_name
        )
        return Link(config, hello, joined=joined)

    return Links(sources, dial)


async def serve(
    loaded: Loaded,
    settings: WorkerSettings,
    *,
    alone: bool = False,
    watched: WatchedWorker | None = None,
    spans: LegSpans | None = None,
) -> None:
    """Serve the routers until one of them or a signal drains the worker; a second signal stops it.

    Where it is `alone` in its process, that ends then, whatever it is at. `watched` is what others see of it, and
    `spans` makes those of its legs.

    Raises OSError where the transfer endpoint cannot listen.
    """
    transfer = await open_transfer(loaded, settings) if settings.transfer else None
    endpoints = [] if transfer is None else transfer.server.endpoints
    hello = replace(loaded.hello, transfer=list(endpoints))
    worker = Worker(
        loaded.engine,
        links(settings, lambda: hello),
        hello=hello,
        document=loaded.document,
        transfer=transfer,
        overlap=settings.overlap,
        lines_per_s=settings.log_requests_per_s,
        spans=spans,
    )
    manager = read_service_manager(os.environ, os.getpid())
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal(number: int) -> None:
        nonlocal signals
        signals += 1
        manager.tell("STOPPING=1")
        worker.drain(DRAIN_S if signals == 1 else 0.0, signal.Signals(number).name)

    numbers = [int(signal.SIGINT), int(signal.SIGTERM)]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    if alone:
        _core.end_on_signals(numbers, DRAIN_S + DRAIN_OVERDUE_S)  # after those: they stay
    manager.tell(
        "READY=1"
    )  # it dials; a router that is not there yet is no reason to hold up what starts after it
    telling = asyncio.create_task(keep_told(manager, lambda: worker.summary), name="manager")
    try:
        with (watched or WatchedWorker()).serving(worker.report):
            await worker.serve()
    finally:
        telling.cancel()
        manager.tell("STOPPING=1", "STATUS=ended")


async def open_transfer(loaded: Loaded, settings: WorkerSettings) -> Transfer:
    """Listen for workers that want KV from here."""
    pool = loaded.engine.model.kv_pool()
    layout = loaded.hello.fingerprints.kv_layout
    members = Members()  # none, until a router took us
    server = TransferServer(pool, layout, members=members, host=transfer_host(settings))
    await server.start()
    log.info("KV can be pulled from %s", ", ".join(server.endpoints))
    return Transfer(server, TransferClient(pool, layout, members=members), members)


def transfer_host(settings: WorkerSettings) -> str:
    """Where to listen for other workers: unasked, on all addresses, or on none but this machine's own if no router is
    elsewhere. `Link` tells each router the address that it is dialled from.
    """
    if settings.transfer_host is not None:
        return settings.transfer_host
    if any(router.startswith(("dns:", "etcd:")) for router in settings.routers):
        return "0.0.0.0"
    addresses = [parse_address(router) for router in settings.routers]
    hosts = [address[0] for address in addresses if isinstance(address, tuple)]
    if all(host == "localhost" or host.startswith("127.") for host in hosts):
        return "127.0.0.1"
    if all(host == "::1" for host in hosts):
        return "::1"
    return "::" if any(":" in host for host in hosts) else "0.0.0.0"


def run(settings: WorkerSettings, *, alone: bool = False) -> int:
    """`headrace worker`: load, serve, leave; the exit status. For `alone` see `serve`.

    Raises `CannotRun` and `SettingsError`.
    """
    begin_log(LOG_LEVELS[settings.log_level], settings.log_format)
    environment = read_environment(os.environ)
    with watching(settings, environment) as watched:
        return _load_and_serve(settings, environment, watched, alone=alone)


def _load_and_serve(
    settings: WorkerSettings,
    environment: GroupEnvironment | None,
    watched: WatchedWorker,
    *,
    alone: bool,
) -> int:
    try:
        parse_sources(settings.routers)  # a wrong address is noticed sooner than a model is loaded
        link_tls(settings)  # and so is a wrong certificate
        collector_of(settings.otlp_endpoint, os.environ)
        loaded = load(settings, environment)
    except (CannotRun, SettingsError):
        raise  # the command says why
    except (GroupFailed, RankLost) as error:
        log.error("the group did not start: %s", error)  # noqa: TRY400
        return EXIT_RANK_LOST
    except (ValueError, OSError) as error:
        log.error("%s", error)  # noqa: TRY400  a setting is wrong, not the program
        return EXIT_CONFIG
    if loaded.group is not None:
        loaded.group.on_lost(end_when_overdue)
    gc.collect()
    # What is loaded by now stays. A full collection would walk it, for 0.1 s in which no answer goes on.
    gc.freeze()
    status = 0
    hello = loaded.hello
    try:
        with tracing(settings.otlp_endpoint, hello.worker, hello.model) as spans:
            _event_loop_run()(serve(loaded, settings, alone=alone, watched=watched, spans=spans))
    except* (Refused, RouterNotTrusted, OSError) as group:
        log.error("%s", first(group))  # noqa: TRY400
        status = EXIT_CONFIG
    except* RankLost as group:
        log.error("the group is over: %s", first(group))  # noqa: TRY400
        status = EXIT_RANK_LOST
    finally:
        if loaded.group is not None:
            loaded.group.close()
    return status


def end_when_overdue() -> None:
    """The group is over, of which the worker knows: end it where it does not come to that."""
    overdue = threading.Timer(LOST_OVERDUE_S, logs.end_process, (EXIT_RANK_LOST,))
    overdue.daemon = True
    overdue.start()


def _event_loop_run() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run
