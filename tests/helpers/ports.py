"""Ports of 127.0.0.1 for programs that have to be told theirs."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int) -> Generator[list[int]]:
    """Ports at which nobody listens, and that nobody gets who asks for any port.

    A socket that is bound and does not listen keeps each of them, until the end: a program that sets `SO_REUSEADDR`
    and asks for this one may listen there all the same, and again once it was ended. Until then dials are refused.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]
