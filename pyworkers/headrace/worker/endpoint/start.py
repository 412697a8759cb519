"""Opens the endpoint before the model is loaded, so that a worker can be watched at that, too."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import CannotRun
from headrace.extras import needs
from headrace.worker.endpoint.watched import WatchedWorker

if TYPE_CHECKING:
    from headrace.settings.worker import WorkerSettings
    from headrace.worker.parallel.environment import GroupEnvironment

log = logging.getLogger(__name__)


@contextmanager
def watching(
    settings: WorkerSettings, environment: GroupEnvironment | None
) -> Generator[WatchedWorker]:
    """What the endpoint shows, where there is one. Raises `CannotRun` where it cannot be."""
    watched = WatchedWorker()
    if settings.http_port is None:
        yield watched
        return
    with needs("cpu", "--http-port"):
        from headrace.worker.endpoint.server import Endpoint
    listener = listen(settings.http_host, port_of(settings.http_port, environment))
    endpoint = Endpoint(listener, watched)
    log.info("HTTP for probes and metrics at %s", endpoint.url)
    try:
        yield watched
    finally:
        endpoint.close()


def port_of(port: int, environment: GroupEnvironment | None) -> int:
    """The ranks of one machine are started with the same flags: each has the next port."""
    taken = port if environment is None or port == 0 else port + environment.local_rank
    if taken > 65_535:
        raise CannotRun(f"--http-port {port} leaves no port for every rank of this machine")
    return taken


def listen(host: str, port: int) -> socket.socket:
    """Raises `CannotRun`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # names that are too long are no IDNA
        raise CannotRun(
            f"--http-port {port} cannot be had on {host}: {reason(error)}; give another --http-port "
            "(0 is any that is free) or another --http-host"
        ) from error
    listener.setblocking(False)
    return listener


def reason(error: OSError | UnicodeError) -> str:
    """Why an address cannot be had, without the address: asyncio and `socket` put it into their own words."""
    if isinstance(error, UnicodeError | socket.gaierror) or error.errno is None:
        return str(error)
    return os.strerror(error.errno)
