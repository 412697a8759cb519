"""The processes: a router, a forking host for each machine, and workers that are started again under their names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from chaos.clients import call
from chaos.control import ControlServer
from chaos.load import BLOCK_TOKENS, CHUNK_TOKENS
from chaos.plan import Shape

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
ANSWER_S = 30.0  # for an order, on a machine that is busy
HEARTBEAT_MS = 500
REMOVED_MS = 2_500  # silence until the router drops a worker
T = TypeVar("T")

ROUTER_FLAGS = (
    f"--heartbeat-ms={HEARTBEAT_MS}",
    f"--heartbeat-timeout-ms={REMOVED_MS}",
    "--first-token-timeout-ms=20000",
    "--token-timeout-ms=10000",
    "--worker-queue-ms=400",  # so that requests can be made to wait in the router, too
    "--circuit-breaks=0",  # deaths are what this is about
    "--allow-anonymous-workers",  # hosts may have namespaces of their own, where nobody else is
    "--retries=20",  # of those without a first token: workers die faster here than 200 prompts are computed
)
WORKER_FLAGS = (
    f"--block-tokens={BLOCK_TOKENS}",
    f"--max-batched-tokens={CHUNK_TOKENS}",
    "--max-sequences=100",
    "--kv-memory=24MiB",
    "--device=cpu",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ChaosError(AssertionError):
    """What must hold does not, whatever goes wrong in the fleet."""


@dataclass(eq=False)
class Host:
    """A machine on which workers run: this one, or a network namespace."""

    name: str
    router: str = ""  # its address as seen from there
    within: tuple[str, ...] = ()  # what puts a command there
    writer: asyncio.StreamWriter | None = None
    process: asyncio.subprocess.Process | None = None


@dataclass(eq=False)
class Worker:
    """A worker as the harness sees it; the process behind the name changes."""

    name: str
    role: str
    host: Host
    pid: int | None = None
    writer: asyncio.StreamWriter | None = None
    starts: int = 0
    started_ms: float = 0.0  # wall clock: the epoch that the worker tells is later
    wanted: bool = True  # to be started again when it ends
    holds: dict[int, int] = field(default_factory=dict[int, int])  # legs by seed

    def say(self, **command: Any) -> None:
        """Send a command to its seams; lost with a process that has just died."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(json.dumps(command).encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule came true at `at_s`; the worker had these requests, by seed with the tokens generated."""

    at_s: float
    seed: int | None
    held: dict[int, int]


class Trap:
    """Workers are to be held at a step; the first that comes there is struck once all the others are ready."""

    def __init__(
        self, fleet: Fleet, do: str, armed: dict[Worker, tuple[int, asyncio.Future[Fired]]]
    ) -> None:
        self._fleet = fleet
        self._do = do
        self._armed = armed

    async def sprung(self) -> tuple[Worker, Fired]:
        """Who was struck, and when. Raises ChaosError if nobody came."""
        futures = {future: worker for worker, (_, future) in self._armed.items()}
        done, _ = await asyncio.wait(futures, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for worker, (rule, future) in self._armed.items():
            if future not in done:
                self._fleet.disarm(worker, rule)
        if not done:
            raise ChaosError("nobody came to the step")
        struck = futures[next(iter(done))]
        await self._fleet.ready(worker.name for worker in self._armed if worker is not struck)
        _, fired = await self._fleet.arm(struck, "now", self._do)
        self._fleet.disarm(struck, self._armed[struck][0])
        return struck, await asyncio.wait_for(fired, ANSWER_S)


Listener = Callable[[Worker, dict[str, Any]], None]


class Fleet:
    """Use with `async with`. Workers of `shape` on the model at `model`, logs and sockets in `folder`."""

    def __init__(
        self,
        shape: Shape,
        model: Path,
        folder: Path,
        *,
        hosts: dict[str, Host] | None = None,
        listen: str = "127.0.0.1",
        router_flags: Iterable[str] = (),
        worker_flags: Iterable[str] = (),
    ) -> None:
        self.shape = shape
        self.folder = folder
        self.port = 0
        self.model = ""
        own = Host("here")
        self.workers = {
            name: Worker(name, role, (hosts or {}).get(name, own))
            for name, role in shape.workers.items()
        }
        self.hosts = {worker.host.name: worker.host for worker in self.workers.values()}
        self.listeners: list[Listener] = []
        self.crashes: list[str] = []  # processes that ended on their own
        self.replaced: set[int] = (
            set()
        )  # those whose name another one took: the router sends them away
        self._model_path = model
        self._listen = f"{listen}:0"
        self._router_flags = [*ROUTER_FLAGS, *router_flags]
        self._worker_flags = [*WORKER_FLAGS, *worker_flags]
        self._router: asyncio.subprocess.Process | None = None
        self._control = ControlServer(self._listen_to)
        self._fired: dict[int, asyncio.Future[Fired]] = {}
        self._armed: dict[int, asyncio.Future[None]] = {}
        self._rules = 0
        self._changed = asyncio.Event()

    # --- start and stop ---

    async def __aenter__(self) -> Self:
        try:
            await self._control.start(self.folder / "control")
            await self._start_router()
            for host in self.hosts.values():
                await self._start_host(host)
            await self.until(lambda: all(h.writer for h in self.hosts.values()), "hosts", 120)
            for worker in self.workers.values():
                self.start(worker)
            await self.ready()
            models = json.loads(await self.get("/v1/models"))
            self.model = models["data"][0]["id"]
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for worker in self.workers.values():
            worker.wanted = False
            worker.signal(signal.SIGCONT)
        for host in self.hosts.values():
            if host.writer is not None:
                host.writer.close()  # it ends its workers
            if host.process is not None:
                await host.process.wait()
        if self._router is not None and self._router.returncode is None:
            self._router.kill()
            await self._router.wait()
        await self._control.stop()

    async def _start_router(self) -> None:
        log = self.folder / "router.log"
        with log.open("wb") as output:
            self._router = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace", "router", "--port=0"),
                f"--worker-listen={self._listen}",
                *self._router_flags,
                env=environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
        line = r"http://(\S+):(\d+) for clients, (\S+) for workers"
        found = await self.until(
            lambda: re.search(line, log.read_text()), lambda: f"no router: {log.read_text()}", 60
        )
        assert found is not None
        self.port = int(found[2])
        for host in self.hosts.values():
            host.router = host.router or found[3]

    async def _start_host(self, host: Host) -> None:
        with (self.folder / f"host-{host.name}.log").open("wb") as output:
            host.process = await asyncio.create_subprocess_exec(
                *host.within,
                *(sys.executable, "-m", "chaos.worker", str(self.folder / "control"), host.name),
                env=environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )

    def start(self, worker: Worker) -> None:
        """Start a process under the name of `worker`."""
        assert worker.host.writer is not None
        worker.starts += 1
        worker.started_ms = time.time() * 1e3
        argv = [
            str(self._model_path),
            f"--name={worker.name}",
            f"--router={worker.host.router}",
            *self._worker_flags,
            *([] if worker.role == "both" else [f"--role={worker.role}"]),
        ]
        log = str(self.folder / f"{worker.name}.log")
        command = {"name": worker.name, "argv": argv, "log": log}
        worker.host.writer.write(json.dumps(command).encode() + b"\n")

    # --- what hosts and workers say ---

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        if hello["host"]:
            host = self.hosts[hello["name"]]
            host.writer = writer
            self._changed.set()
            async for line in reader:
                self._ended(json.loads(line))
            return
        worker = self.workers[hello["name"]]
        worker.pid, worker.writer = hello["pid"], writer
        worker.holds.clear()
        self._changed.set()
        async for line in reader:
            if worker.pid == hello["pid"]:  # otherwise it was replaced
                self._heard(worker, json.loads(line))

    def _ended(self, event: dict[str, Any]) -> None:
        worker = self.workers[event["name"]]
        if event["status"] > 0 and event["pid"] not in self.replaced:
            self.crashes.append(f"{worker.name} ended with status {event['status']}")
        if worker.pid == event["pid"]:
            worker.pid = None
            worker.holds.clear()
            for listener in self.listeners:
                listener(worker, event)
            if worker.wanted:
                self.start(worker)
        self._changed.set()

    def _heard(self, worker: Worker, event: dict[str, Any]) -> None:
        match event["event"]:
            case "leg":
                worker.holds[event["seed"]] = worker.holds.get(event["seed"], 0) + 1
            case "end":
                if (left := worker.holds.get(event["seed"], 1) - 1) > 0:
                    worker.holds[event["seed"]] = left
                else:
                    worker.holds.pop(event["seed"], None)
            case "armed":
                if future := self._armed.pop(event["id"], None):
                    future.set_result(None)
            case "fired":
                fired = self._fired.pop(event["id"], None)
                if fired is not None and not fired.done():
                    fired.set_result(Fired(event["at"], event["seed"], dict(event["held"])))
            case _:
                pass
        for listener in self.listeners:
            listener(worker, event)
        self._changed.set()

    # --- what the harness does ---

    async def arm(
        self, worker: Worker, point: str, do: str, **more: Any
    ) -> tuple[int, asyncio.Future[Fired]]:
        """Let `worker` do it at `point` from now on; the rule's number, and what comes true when it does."""
        self._rules += 1
        loop = asyncio.get_running_loop()
        fired: asyncio.Future[Fired] = loop.create_future()
        armed: asyncio.Future[None] = loop.create_future()
        self._fired[self._rules], self._armed[self._rules] = fired, armed
        rule = self._rules
        worker.say(command="arm", id=rule, point=point, do=do, **more)
        try:
            await asyncio.wait_for(armed, ANSWER_S)
        except TimeoutError:
            raise ChaosError(f"{worker.name} does not take orders") from None
        return rule, fired

    async def trap(self, point: str, do: str, seed: int) -> Trap:
        """For whichever worker comes first to `point` with the choice of this seed; no other one falls into it."""
        workers = list(self.workers.values())
        armed = [await self.arm(worker, point, "hold", seed=seed) for worker in workers]
        return Trap(self, do, dict(zip(workers, armed, strict=True)))

    def disarm(self, worker: Worker, rule: int) -> None:
        """Take a rule back; who is held by it goes on."""
        worker.say(command="disarm", id=rule)

    async def checked(self, worker: Worker) -> str:
        """What is wrong inside an idle worker; empty if nothing is."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def heard(who: Worker, event: dict[str, Any]) -> None:
            if who is worker and event["event"] == "checked" and not future.done():
                future.set_result(event["error"])

        self.listeners.append(heard)
        try:
            worker.say(command="check")
            return await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            return "it does not answer"
        finally:
            self.listeners.remove(heard)

    @staticmethod
    def thaw(worker: Worker) -> None:
        worker.signal(signal.SIGCONT)

    @staticmethod
    def send_signal(pid: int, number: signal.Signals) -> None:
        """To a process that no worker stands for any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def holders(self, seed: int) -> list[Worker]:
        """Who has a leg of this choice now."""
        return [worker for worker in self.workers.values() if seed in worker.holds]

    async def get(self, path: str) -> bytes:
        return await call(self.port, "GET", path)

    async def order_to_leave(self, worker: Worker) -> None:
        """Let the router drain it, its hottest blocks first: too quickly for its answers to end there."""
        body = json.dumps({"budget_ms": 150, "hand_over": 256}).encode()
        await call(self.port, "POST", f"/workers/{worker.name}/drain", body)

    async def metric(self, name: str, labels: str = "") -> float:
        """The value of one sample of `/metrics`; 0 where it is not there."""
        text = (await self.get("/metrics")).decode()
        found = re.search(rf"^{re.escape(name + labels)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def transfers(self) -> dict[str, int]:
        """Pulls of KV between workers so far, by backend and outcome."""
        text = (await self.get("/metrics")).decode()
        pattern = r'^headrace_transfers_total\{backend="(\w*)",outcome="(\w*)"\} (\d+)$'
        found = re.findall(pattern, text, re.MULTILINE)
        return {f"{backend or 'none'} {outcome}": int(count) for backend, outcome, count in found}

    async def listed(self) -> dict[str, dict[str, Any]]:
        """`/workers`, by name; of two with one name the newer."""
        workers = json.loads(await self.get("/workers"))["workers"]
        return {w["id"]: w for w in sorted(workers, key=lambda w: w["epoch"])}

    async def ready(self, names: Iterable[str] | None = None, timeout_s: float = 90.0) -> None:
        """Wait until the router gives work to these workers (all)."""
        wanted = set(self.workers if names is None else names)
        state: dict[str, str] = {}

        async def look() -> bool:
            listed = await self.listed()
            state.update({name: self._state(name, listed) for name in wanted})
            return all(state[name] == "ready" for name in wanted)

        await self.poll(look, lambda: f"not ready after {timeout_s:g} s: {state}", timeout_s)

    def _state(self, name: str, listed: dict[str, dict[str, Any]]) -> str:
        entry = listed.get(name)
        if entry is None:
            return "gone"
        return entry["state"] if entry["epoch"] >= int(self.workers[name].started_ms) else "old"

    async def until(
        self, condition: Callable[[], T], otherwise: str | Callable[[], str], timeout_s: float
    ) -> T:
        """Wait for what hosts and workers tell, or a file says; the first true value."""

        async def look() -> T:
            return condition()

        return await self.poll(look, otherwise, timeout_s)

    async def poll(
        self,
        condition: Callable[[], Awaitable[T]],
        otherwise: str | Callable[[], str],
        timeout_s: float,
    ) -> T:
        """Ask again and again for what no event tells. Raises ChaosError when it takes too long."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while not (value := await condition()):
            if loop.time() > give_up_at:
                raise ChaosError(otherwise if isinstance(otherwise, str) else otherwise())
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_S)
        return value


def environment() -> dict[str, str]:
    paths = [str(ROOT / name) for name in ("pyworkers", "kernels", "tests")]
    return os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)}
