"""A service manager for tests: it holds sockets, passes them by systemd's protocol, and hears what routers say."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from helpers.serving.server import Running

# Run by a Python that becomes the router: descriptors have to be 3, 4, ..., and LISTEN_PID is known only in the child.
BECOME = """
import os, sys
fds = [int(fd) for fd in os.environ.pop("TEST_FDS").split(",")]
spare = [os.dup(fd) for fd in fds]
spare = [os.dup2(fd, 100 + n, inheritable=True) for n, fd in enumerate(spare)]
for number, fd in enumerate(spare):
    os.dup2(fd, 3 + number, inheritable=True)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(fds))
os.execv(sys.argv[1], sys.argv[1:])
"""


class Supervisor:
    """Sockets by the names that a unit gives them, and the datagrams of the processes that it started."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.sockets: dict[str, socket.socket] = {}
        for name in names:
            if name == "admin":
                self.sockets[name] = socket.socket(socket.AF_UNIX)
                self.sockets[name].bind(str(folder / "admin.sock"))
                (folder / "admin.sock").chmod(0o600)
            else:
                self.sockets[name] = socket.socket()
                self.sockets[name].bind(("127.0.0.1", 0))
            self.sockets[name].listen(4096)
        self._path = folder / "notify.sock"
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self._path))
        self._said: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._hear, daemon=True)
        self._reader.start()

    def port(self, name: str) -> int:
        return self.sockets[name].getsockname()[1]

    def start(self, *flags: str, watchdog_s: float | None = None) -> Running:
        """`headrace router` of this Python, with all sockets."""
        fds = [one.fileno() for one in self.sockets.values()]
        environment = {
            "TEST_FDS": ",".join(map(str, fds)),
            "LISTEN_FDNAMES": ":".join(self.sockets),
            "NOTIFY_SOCKET": str(self._path),
        }
        if watchdog_s is not None:
            environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        become = (sys.executable, "-c", BECOME, sys.executable, "-m", "headrace", "router")
        return Running(*flags, env=environment, program=become, pass_fds=fds)

    def _hear(self) -> None:
        while True:
            try:
                message = self._notify.recv(4096).decode()
            except OSError:
                return
            with self._more:
                if message == "the end":
                    return
                self._said += message.splitlines()
                self._more.notify_all()

    def wait_said(self, line: str, *, times: int = 1, timeout: float = 120.0) -> None:
        """Until a line was said so often since the start."""
        with self._more:
            self._more.wait_for(lambda: self._said.count(line) >= times, timeout)
            assert self._said.count(line) >= times, f"{line} was not said: {self._said[-20:]}"

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"the end", str(self._path))
        self._reader.join()
        self._notify.close()
        for one in self.sockets.values():
            one.close()
