"""Ranks that are forked from one process that has imported everything, and kept running by the product's supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.control import ControlServer
from chaos.fleet import ANSWER_S, environment
from chaos.ranks.seam import NotReached
from headrace.cli.children.process import Command, Log, Process
from headrace.cli.supervise import Keeper, RestartRule

HOST_WITHIN_S = 120.0  # for the process to import everything


@dataclass(eq=False)
class Forked:
    """One process, from its fork to its end."""

    name: str
    ended: asyncio.Future[int]
    said_hello: asyncio.Event = field(default_factory=asyncio.Event)
    pid: int | None = None
    writer: asyncio.StreamWriter | None = None

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None and not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def say(self, **command: Any) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(json.dumps(command).encode() + b"\n")


class Forks:
    """The process that forks, and what its children say. Use with `start` and `stop`."""

    def __init__(self, folder: Path) -> None:
        self.now: dict[str, Forked] = {}  # the latest of each name
        self.statuses: list[tuple[str, int]] = []  # of all that ended
        self._folder = folder
        self._path = folder / "control"
        self._control = ControlServer(self._listen)
        self._process: asyncio.subprocess.Process | None = None
        self._host: asyncio.StreamWriter | None = None
        self._host_there = asyncio.Event()
        self._waiting: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._rules = 0

    async def start(self) -> None:
        await self._control.start(self._path)
        with (self._folder / "host.log").open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "chaos.worker", str(self._path), "host"),
                env=environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
        await asyncio.wait_for(self._host_there.wait(), HOST_WITHIN_S)

    async def stop(self) -> None:
        if self._host is not None:
            self._host.close()  # it ends its children
        if self._process is not None:
            await self._process.wait()
        await self._control.stop()

    @property
    def gone(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def fork(self, command: Command) -> Forked:
        """A child that runs the `headrace worker` of the command, once it is there."""
        assert self._host is not None
        assert command.name not in self.now or self.now[command.name].ended.done()
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        forked = self.now[command.name] = Forked(command.name, ended)
        order = {
            "name": command.name,
            "argv": command.argv,
            "env": command.env,
            "log": str(self._folder / f"{command.name}.log"),
        }
        self._host.write(json.dumps(order).encode() + b"\n")
        hello = asyncio.create_task(forked.said_hello.wait())
        await asyncio.wait({hello, ended}, return_when=asyncio.FIRST_COMPLETED)
        hello.cancel()
        return forked

    async def strike(self, name: str, point: str, do: str, nth: int, within_s: float) -> None:
        """Have it done at the `nth` time that the process comes to the point. Raises NotReached."""
        self._rules += 1
        rule, forked = self._rules, self.now[name]
        fired = self._expect(name, rule)
        forked.say(command="arm", id=rule, point=point, do=do, nth=nth)
        try:
            await asyncio.wait_for(fired, within_s)
        except TimeoutError:
            forked.say(command="disarm", id=rule)
            raise NotReached(f"{name} did not come to {point} within {within_s:g} s") from None

    async def checked(self, name: str) -> str:
        """What is wrong inside of an idle worker; empty if nothing is."""
        found = self._expect(name, 0)
        self.now[name].say(command="check")
        try:
            return (await asyncio.wait_for(found, ANSWER_S))["error"]
        except TimeoutError:
            return "it does not answer"

    def _expect(self, name: str, number: int) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[name, number] = future
        return future

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        name: str = hello["name"]
        if hello["host"]:
            self._host = writer
            self._host_there.set()
        else:
            forked = self.now[name]
            forked.pid, forked.writer = hello["pid"], writer
            forked.said_hello.set()
        async for line in reader:
            self._heard(name, json.loads(line))

    def _heard(self, name: str, event: dict[str, Any]) -> None:
        if event["event"] == "ended":
            self.statuses.append((event["name"], event["status"]))
            self.now[event["name"]].ended.set_result(event["status"])
            return
        number = 0 if event["event"] == "checked" else event["id"]
        if event["event"] in ("fired", "checked"):
            waiting = self._waiting.pop((name, number), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(event)


class ForkedProcess(Process):
    """What the supervisor takes for a process that it has started."""

    def __init__(self, forks: Forks, command: Command, log: Log) -> None:
        super().__init__(command, log)
        self._forks = forks
        self._wanted = command
        self._forked: Forked | None = None

    async def start(self) -> None:
        self._forked = await self._forks.fork(self._wanted)

    async def wait(self) -> int:
        assert self._forked is not None
        try:
            return await asyncio.shield(self._forked.ended)
        finally:
            self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self._forked is not None:
            self._forked.signal(number)


class ForkKeeper(Keeper):
    """The supervisor of a group, whose processes are forked."""

    def __init__(
        self, forks: Forks, group: str, ranks: Callable[[], list[Command]], log: Log
    ) -> None:
        soon = RestartRule(longest_delay_s=0.5)  # deaths are what this is about
        super().__init__(Command(name=group, argv=[]), log, soon, ranks=ranks)
        self._forks = forks

    def _process(self, command: Command) -> Process:
        return ForkedProcess(self._forks, command, self._log)
