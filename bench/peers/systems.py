"""What a run starts: a system that answers chats, the processes that it is made of, and their addresses."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import socket
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from bench.helpers.fleet import Process
from bench.peers.cases import CACHED_PREFIXES, Case
from bench.peers.environments import Environment
from bench.peers.processes import tree

START_LIMIT_S = 90.0
WORKERS = 2
MODEL = "mock"
PORTS = (20_000, 32_000)  # below those that the system gives to clients
UNEVEN = 1.3  # most connections of a process of nginx or of a worker, over the mean; a guess
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Commands of this repository."""

    router: Sequence[str | Path]
    bench: Sequence[str | Path]
    mock: Sequence[str | Path]
    doc: (
        Path | None
    )  # of the model that Headrace's workers describe; a small built-in one where left out


def built(folder: Path, doc: Path) -> Programs:
    """Those that cargo has built."""
    bench = folder / "headrace-bench"
    return Programs(
        router=[folder / "headrace-router"], bench=[bench], mock=[bench, "mock"], doc=doc
    )


@dataclass(kw_only=True)
class Running:
    """A router, or several that share a load, with workers."""

    addresses: list[str]  # one for each client
    router: list[int] = field(default_factory=list)  # processes
    workers: list[int] = field(default_factory=list)


class Stack:
    """Processes that end together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    def start(
        self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None
    ) -> Process:
        process = Process(name, command, self.folder, environment)
        self.processes.append(process)
        return process

    def eventually(self, probe: Callable[[], T | None], what: str) -> T:
        """What `probe` finds. Raises ProcessDiedError when a process ends or the time is over."""
        deadline = time.monotonic() + START_LIMIT_S
        while (found := probe()) is None:
            for process in self.processes:
                process.check()
            if time.monotonic() > deadline:
                raise self.processes[-1].failure(what)
            time.sleep(0.05)
        return found

    def said(self, process: Process, pattern: str) -> re.Match[str]:
        """Waits for a line of output."""
        return self.eventually(
            lambda: re.search(pattern, process.log.read_text(errors="replace")),
            f"did not say {pattern}",
        )

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.stop()


def free_port() -> int:
    """A port that nobody listens at."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_addresses(count: int) -> list[str]:
    """With so many ports that nobody listens at."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [f"127.0.0.1:{port}" for port in ports]


def all_answer(addresses: list[str]) -> bool | None:
    return all(answers(address) for address in addresses) or None


def answers(address: str) -> bool | None:
    """Whether a chat gets an answer; `None` where not."""
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]}
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    # an error of HTTP is an OSError, too
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status == 200 or None
    return None


class System(ABC):
    """Something that answers chats."""

    name: ClassVar[str]
    connections = 2  # of a process for each stream: to a client and to a worker
    own_engine = False  # its workers keep their own time, so times are not compared

    def __init__(
        self, programs: Programs, descriptors: int, environment: Environment | None = None
    ) -> None:
        """A process may have so many descriptors."""
        self.programs = programs
        self.limit = descriptors
        self.program, self.versions = environment or (Path(), {})

    @abstractmethod
    def start(self, stack: Stack, case: Case) -> Running:
        """Starts all processes, and returns once a chat gets an answer."""

    def note(self, case: Case) -> str | None:
        """What is particular about this case."""
        del case
        return None

    def descriptors(self, case: Case) -> int:
        """Of the process that needs the most."""
        return case.descriptors(self.connections)

    def clients(self, case: Case) -> int:
        """Processes that it takes to have a connection for each stream. Each has an address and its ports to itself."""
        return case.processes(self.limit)

    def http_workers(self, case: Case) -> int:
        """Each has a connection for each of its streams, too, and for some that wait for the next request."""
        return max(WORKERS, math.ceil(case.descriptors(1) * UNEVEN / self.limit))


@contextlib.contextmanager
def running(system: System, case: Case, folder: Path) -> Generator[Running]:
    """The system, until the block ends."""
    stack = Stack(folder)
    try:
        started = system.start(stack, case)
        started.router = tree(*started.router) if started.router else []
        started.workers = tree(*started.workers)
        yield started
    finally:
        stack.stop()


def http_workers(stack: Stack, system: System, case: Case) -> list[Process]:
    """Workers that speak HTTP, at ports of their own."""
    command = http_worker(system.programs, case)
    return [stack.start(f"worker{i}", command) for i in range(system.http_workers(case))]


def http_worker(programs: Programs, case: Case, *flags: str) -> list[str | Path]:
    """The command of one of them."""
    command = [*programs.bench, "http-worker", "--step-ms", str(case.step_ms), *flags]
    command += ["--prefill-us", str(case.prefill_us)]
    if case.shared:
        command += ["--prefixes", str(CACHED_PREFIXES), "--prefix-words", str(case.shared)]
    return command


def address_of(stack: Stack, worker: Process) -> str:
    return stack.said(worker, r"listening on (\S+)\n")[1]
