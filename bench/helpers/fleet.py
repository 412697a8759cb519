"""A real router and a mock fleet as processes. When one dies, the run ends and says which, and its last words."""

import contextlib
import json
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

START_LIMIT_S = 60
LAST_LINES = 15
T = TypeVar("T")


class ProcessDiedError(Exception):
    """A process ended that should have gone on, or failed; the message holds the end of its output."""


class Process:
    """One process, its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`environment` stands in the place of this process's own."""
        self.name = name
        self.log = folder / f"{name}.log"
        self._file: IO[bytes] = self.log.open("wb")
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def check(self) -> None:
        """Raise if it has ended."""
        status = self.popen.poll()
        if status is not None:
            raise self.failure(f"ended with status {status}")

    def failure(self, what: str) -> ProcessDiedError:
        """What happened, with the last lines of the output."""
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return ProcessDiedError("\n  ".join([f"{self.name} {what}; its last output:", *lines]))

    def stop(self) -> None:
        """End it, by force if it does not want to."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._file.close()


class Fleet:
    """A router with all its workers there."""

    def __init__(
        self,
        router: Sequence[str | Path],
        mock: Sequence[str | Path],
        workers: int,
        folder: Path,
        roles: Sequence[str] = (),
    ) -> None:
        """`router` and `mock` are commands without addresses; `roles` are flags for so many workers of roles."""
        self.processes: list[Process] = []
        listen = ["--port", "0", "--worker-listen", "127.0.0.1:0", "--log-level", "warn"]
        try:
            self.router = self._start("router", [*router, *listen], folder)
            self.address, worker_address = self._addresses()
            roles = roles or ["--workers", str(workers)]
            self._start("mock", [*mock, "--router", worker_address, *roles], folder)
            self._wait_for(workers)
        except BaseException:
            self.stop()
            raise

    def run(self, command: Sequence[str | Path], folder: Path, limit_s: float) -> None:
        """Run a client to its end, while the fleet is watched."""
        client = Process("client", command, folder)
        try:
            deadline = time.monotonic() + limit_s
            while (status := client.popen.poll()) is None:
                self._check()
                if time.monotonic() > deadline:
                    raise client.failure(f"was not done after {limit_s:.0f} s")
                time.sleep(0.05)
            if status != 0:
                raise client.failure(f"ended with status {status}")
            self._check()
        finally:
            client.stop()

    def stop(self) -> None:
        """End all processes, workers first."""
        for process in reversed(self.processes):
            process.stop()

    def _start(self, name: str, command: Sequence[str | Path], folder: Path) -> Process:
        process = Process(name, command, folder)
        self.processes.append(process)
        return process

    def _check(self) -> None:
        for process in self.processes:
            process.check()

    def _addresses(self) -> tuple[str, str]:
        def announced() -> tuple[str, str] | None:
            text = self.router.log.read_text(errors="replace")
            match = re.search(r"http://(\S+) for clients, (\S+) for workers", text)
            return (match[1], match[2]) if match else None

        return self._eventually(announced, "did not say its addresses")

    def _wait_for(self, workers: int) -> None:
        def all_there() -> bool | None:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://{self.address}/workers", timeout=5) as answer:
                    known: list[dict[str, Any]] = json.load(answer)["workers"]
                return sum(worker["state"] == "ready" for worker in known) == workers or None
            return None

        self._eventually(all_there, f"does not have {workers} workers")

    def _eventually(self, probe: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            if (value := probe()) is not None:
                return value
            self._check()
            if time.monotonic() > deadline:
                raise self.router.failure(what)
            time.sleep(0.02)


@contextlib.contextmanager
def fleet(
    router: Sequence[str | Path],
    mock: Sequence[str | Path],
    workers: int,
    roles: Sequence[str] = (),
) -> Generator[tuple[Fleet, Path]]:
    """A fleet and a folder for files; both end with the block."""
    with tempfile.TemporaryDirectory(prefix="headrace-routing-") as name:
        folder = Path(name)
        running = Fleet(router, mock, workers, folder, roles)
        try:
            yield running, folder
        finally:
            running.stop()
