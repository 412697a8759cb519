"""Tells a service manager what the worker is at, by systemd's protocol: a datagram for each change."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headrace.errors import CannotRun

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at what the worker is at; a guess, for people who read `systemctl status`


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where it listens, and how often it wants a sign of life; None where there is none or it wants none."""

    address: str | None = None
    watchdog_s: float | None = None

    def tell(self, *lines: str) -> None:
        """A message that cannot be sent is lost, and said in the log: a manager that waits for it says so, too."""
        if self.address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # a manager that does not read holds up nobody
                sender.sendto("\n".join(lines).encode(), self.address)
        except OSError as error:
            log.warning("the service manager (NOTIFY_SOCKET) was not told %s: %s", lines, error)


def read_service_manager(environment: Mapping[str, str], pid: int) -> ServiceManager:
    """What the variables say to the process `pid`. Raises `CannotRun` for a variable that cannot be right."""
    address = environment.get("NOTIFY_SOCKET") or None
    if address is not None:
        if address[:1] not in {"/", "@"} or len(address) == 1:
            raise CannotRun(
                f"NOTIFY_SOCKET is {address!r}; it is the path of a socket, or @ and a name"
            )
        address = address.replace("@", "\0", 1) if address.startswith("@") else address
    return ServiceManager(address, _watchdog_s(environment, pid))


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    text = environment.get("WATCHDOG_USEC") or None
    if text is None or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # the variables are inherited by processes that they are not for
    if not text.isdecimal() or int(text) == 0:
        raise CannotRun(f"WATCHDOG_USEC is {text!r}; it is a number of microseconds above 0")
    return int(text) / 1e6


async def keep_told(
    manager: ServiceManager,
    status: Callable[[], str],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Say for ever that the event loop turns, and how the worker is whenever that changes.

    Half of the manager's time is what it advises.
    """
    if manager.address is None:
        return
    every_s = LOOK_S if manager.watchdog_s is None else min(LOOK_S, manager.watchdog_s / 2)
    last = ""
    while True:
        lines = [] if manager.watchdog_s is None else ["WATCHDOG=1"]
        if (now := status()) != last:
            lines.append(f"STATUS={now}")
            last = now
        if lines:
            manager.tell(*lines)
        await pause(every_s)
