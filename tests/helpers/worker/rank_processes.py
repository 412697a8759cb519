"""Ranks of a group as real processes that do what a test tells them, one call after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from headrace.worker.parallel import rendezvous
from headrace.worker.parallel.environment import GroupEnvironment, read_environment
from headrace.worker.parallel.group import RankGroup
from headrace.worker.parallel.rendezvous import Met, meet
from headrace_kernels.moe.dispatch import SingleRank
from headrace_kernels.moe.transport import Span
from headrace_kernels.transport.choose import ChosenWays
from headrace_kernels.transport.shared_memory import SharedMemory
from headrace_kernels.transport.ways import RankWay
from helpers.forked import FORKED
from helpers.ports import held_ports

ANSWER_S = 60.0

SERVES = {"weights": "abc", "dtype": "int8"}


@dataclass(frozen=True, slots=True)
class Told:
    """How one process begins."""

    variables: Mapping[str, str]
    serves: Mapping[str, str] = field(default_factory=lambda: dict(SERVES))
    name: str = "worker-0"
    start_timeout_s: float = 30.0
    timeout_s: float = 30.0
    exchanges: bool = False  # it has a transport
    # Of `rendezvous`: shorter where nothing but their passing is waited for.
    naming_s: float = rendezvous.NAMING_S
    seen_s: float = rendezvous.SEEN_S


def variables(rank: int, size: int, port: int, **others: str) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    } | others


class RankProcess:
    """One rank. What it raises comes back as text: the type, and what it says."""

    def __init__(self, told: Told) -> None:
        self._calls, calls = FORKED.Pipe()
        woken, self._wakes = FORKED.Pipe(duplex=False)
        self._woken = woken
        self.process = FORKED.Process(target=_run, args=(told, calls, self._wakes), daemon=True)
        self.process.start()
        calls.close()
        self._wakes.close()

    def call(self, method: str, *args: Any) -> None:
        """Have the rank's group do it; `answer` has what came of it."""
        self._calls.send((method, args))

    def answer(self) -> Any:
        """Of the first call that has none yet; of none, whether the group came together."""
        assert self._calls.poll(ANSWER_S), "the rank does not answer"
        return self._calls.recv()

    def do(self, method: str, *args: Any) -> Any:
        self.call(method, *args)
        return self.answer()

    def wait_woken(self) -> None:
        """Until `on_wake` has called, once."""
        assert self._woken.poll(ANSWER_S), "the rank was not woken"
        self._woken.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._calls.close()
        self._woken.close()


def _run(told: Told, calls: Connection, wakes: Connection) -> None:
    rendezvous.NAMING_S, rendezvous.SEEN_S = told.naming_s, told.seen_s
    try:
        environment = read_environment(told.variables)
        assert environment is not None
        met = meet(environment, told.name, told.serves, told.start_timeout_s)
    except Exception as error:
        calls.send(_raised(error))
        return
    group = RankGroup(environment.rank, environment.size, met.links, timeout_s=told.timeout_s)
    exchange = _exchange(told, met, environment, group) if told.exchanges else None
    lock = threading.Lock()

    def woken() -> None:
        with lock, contextlib.suppress(OSError):
            wakes.send(None)

    group.on_wake(woken)
    calls.send({"name": met.name, "epoch": met.epoch, "one_host": met.one_host})
    while True:
        try:
            method, args = calls.recv()
        except EOFError:
            return
        try:
            found = exchange if method == "exchange" else getattr(group, method)
            calls.send(found(*args) if callable(found) else found)
        except Exception as error:
            calls.send(_raised(error))


def _exchange(
    told: Told, met: Met, environment: GroupEnvironment, group: RankGroup
) -> Callable[[], list[int]]:
    """One exchange: each rank sends its number to every rank."""
    memory = SharedMemory.join(
        Path(f"/dev/shm/headrace-test-{met.secret[:16]}"),
        rank=environment.rank,
        ranks=environment.size,
        deadline_s=told.timeout_s,
    )
    transport = group.watch(memory)
    way = RankWay(transport, lambda _: SingleRank())
    group.carry_by(ChosenWays(("memory", "memory"), (way, way), 0, {}))

    def exchange() -> list[int]:
        mine = torch.tensor([[environment.rank]])
        [[came], _] = transport.post((mine,), [Span(0, 1)] * environment.size)()
        return came.flatten().tolist()

    return exchange


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def processes(told: list[Told]) -> Generator[list[RankProcess]]:
    started = [RankProcess(one) for one in told]
    try:
        yield started
    finally:
        for one in started:
            one.close()


@contextlib.contextmanager
def group_of(
    size: int, *, timeout_s: float = 30.0, exchanges: bool = False
) -> Generator[list[RankProcess]]:
    """A group that has met."""
    with held_ports(1) as [port]:
        told = [
            Told(variables(rank, size, port), timeout_s=timeout_s, exchanges=exchanges)
            for rank in range(size)
        ]
        with processes(told) as ranks:
            for one in ranks:
                found = one.answer()
                assert isinstance(found, dict), found
            yield ranks
