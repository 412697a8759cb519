"""One fault: what triggers it, what it does, and the wait until all streams go on and the worker is back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from chaos.clients import Stream
from chaos.crowd import Crowd
from chaos.fleet import HEARTBEAT_MS, ChaosError, Fired, Fleet, Worker
from chaos.hangups import HangUps
from chaos.load import of_seed
from chaos.network import ROUTER_HOST, Network
from chaos.plan import ON_NETWORK, Fault

REACHED_WITHIN_S = 8.0  # among 200 clients every step is reached sooner, if it is reached at all
RECOVERED_WITHIN_S = 60.0
LONG_ANSWER = 48  # tokens; an order reaches a worker before so many are there
WEATHER_ANSWERS = 150  # requests that meet a slow or lossy network, before it is fine again
SLOW_MS, SLOW_TIMES = 60.0, 12


@dataclass(frozen=True, slots=True)
class Recovery:
    """One stream that had tokens from a worker when that worker was struck."""

    total_ms: float  # to the next token that the client had not
    prefill_ms: float  # of it, the next worker had the request before it gave a token: recomputing, its own and others'

    @property
    def ms(self) -> float:
        return max(self.total_ms - self.prefill_ms, 0.0)


@dataclass(slots=True)
class Outcome:
    """What became of one fault. `error` is empty if everything recovered."""

    fault: Fault
    at_s: float = 0.0
    reached: bool = False
    error: str = ""
    wrong: int = 0  # requests that failed, hung or differed meanwhile
    recoveries: list[Recovery] = field(default_factory=list[Recovery])
    noticed_ms: float | None = None  # until the router gave the worker no more work
    cancel_to_free_ms: float | None = None

    @property
    def word(self) -> str:
        if not self.reached and not self.error:
            return "not reached"
        if self.wrong:
            return self.error or f"{self.wrong} requests went wrong"
        return self.error or "ok"


class Injector:
    """Does what the plan says, one fault at a time, to the workers of a fleet under load."""

    def __init__(
        self, fleet: Fleet, crowd: Crowd, seed: int, network: Network | None = None
    ) -> None:
        self.fleet = fleet
        self.crowd = crowd
        self.network = network
        self.hang_ups = HangUps(fleet, crowd, seed)
        self.rng = random.Random(f"injector {seed}")
        self._resumed: dict[int, tuple[float, float | None]] = {}  # by seed: resumed, began again
        fleet.listeners.append(self._heard)

    def _heard(self, _worker: Worker, event: dict[str, Any]) -> None:
        match event["event"]:
            case "leg" if event["resumed"] and event["seed"] not in self._resumed:
                self._resumed[event["seed"]] = (event["at"], None)
            case "began":
                since, began = self._resumed.get(event["seed"], (None, None))
                if (
                    since is not None and began is None
                ):  # the next leg begins later, and is no recomputing
                    self._resumed[event["seed"]] = (since, event["at"])
            case _:
                pass

    async def strike(self, fault: Fault) -> Outcome:
        """Inject `fault` and wait until everything has recovered from it."""
        outcome = Outcome(fault)
        self._resumed.clear()
        wrong = self.crowd.tally.wrong
        try:
            if fault.role == "client":
                await self._hang_up(fault, outcome)
                return outcome
            if fault.token is not None:
                worker, fired = await self._at_token(fault, fault.token)
            elif fault.point == "resumed":
                worker, fired = await self._at_resumption(fault)
            else:
                worker, fired = await self._at_step(fault)
            if worker is None or fired is None:
                return outcome
            outcome.reached, outcome.at_s = True, fired.at_s
            in_flight = (
                fault.token is not None
            )  # it was in the middle of a step, which may have gone out yet
            waiting = self._affected(fired, 1 if in_flight else 0)
            await self._follow(fault, worker, outcome)
            await self._recovered(waiting, fired, outcome)
            await self.fleet.ready()
        except (ChaosError, TimeoutError) as error:
            outcome.error = str(error) or "it took too long"
        finally:
            outcome.wrong = self.crowd.tally.wrong - wrong
        return outcome

    async def _hang_up(self, fault: Fault, outcome: Outcome) -> None:
        hung_up = await self.hang_ups.at(fault.point)
        if hung_up is not None:
            outcome.reached, outcome.at_s = True, hung_up.at_s
            outcome.cancel_to_free_ms = hung_up.freed_ms

    # --- the trigger ---

    async def _at_step(self, fault: Fault) -> tuple[Worker | None, Fired | None]:
        """A worker of the role, when something comes to the step on it."""
        workers = self._workers(fault)
        for worker in self.rng.sample(
            workers, len(workers)
        ):  # to one nothing of that kind may come
            rule, future = await self._arm(worker, fault.point, fault)
            try:
                return worker, await asyncio.wait_for(future, REACHED_WITHIN_S)
            except TimeoutError:
                self.fleet.disarm(worker, rule)
        return None, None

    async def _at_resumption(self, fault: Fault) -> tuple[Worker | None, Fired | None]:
        """A worker that was just given what another one lost; it is struck once that one is back, for one must be."""
        other, worker = self.rng.sample(self._workers(fault), 2)
        rule, resumed = await self.fleet.arm(worker, "resumed", "hold")
        try:
            if await self.crowd.first(lambda stream: self._begun(stream, other), REACHED_WITHIN_S):
                await self.fleet.arm(other, "now", "cut link")
            await asyncio.wait_for(resumed, REACHED_WITHIN_S)
            await self.fleet.ready([other.name])
            _, future = await self._arm(worker, "now", fault)
            return worker, await asyncio.wait_for(future, REACHED_WITHIN_S)
        except TimeoutError:
            return None, None
        finally:
            self.fleet.disarm(worker, rule)

    async def _at_token(self, fault: Fault, position: int) -> tuple[Worker | None, Fired | None]:
        """The worker that decodes the stream whose token of this position has just arrived."""

        def arrived(stream: Stream) -> bool:
            alone = stream.request.choices == 1
            return alone and stream.tokens == position and self._decoder(stream, fault) is not None

        stream = await self.crowd.first(arrived, REACHED_WITHIN_S)
        worker = None if stream is None else self._decoder(stream, fault)
        if worker is None:
            return None, None
        _, future = await self._arm(worker, "now", fault)
        with contextlib.suppress(TimeoutError):
            return worker, await asyncio.wait_for(future, REACHED_WITHIN_S)
        return None, None

    def _begun(self, stream: Stream, worker: Worker) -> bool:
        """Whether the worker has given one token of an answer that is still long: all that it has may be at its end."""
        body = stream.request.body
        long = body["max_tokens"] >= LONG_ANSWER and body.get("ignore_eos") and "stop" not in body
        return bool(
            long and stream.tokens == 1 and worker in self.fleet.holders(stream.request.seed)
        )

    def _decoder(self, stream: Stream, fault: Fault) -> Worker | None:
        holders = self.fleet.holders(stream.request.seed)
        return next((worker for worker in holders if worker.role == fault.role), None)

    async def _arm(
        self, worker: Worker, point: str, fault: Fault
    ) -> tuple[int, asyncio.Future[Fired]]:
        do, more = fault.kind, dict[str, Any]()
        match fault.kind:
            case "freeze briefly" | "replace":
                do = "freeze"
            case "slow":
                more = {"ms": SLOW_MS, "times": SLOW_TIMES}
            case kind if kind == "leave" or kind in ON_NETWORK:
                do = "tell"
            case _:
                pass
        return await self.fleet.arm(worker, point, do, nth=fault.nth, **more)

    def _workers(self, fault: Fault) -> list[Worker]:
        return [worker for worker in self.fleet.workers.values() if worker.role == fault.role]

    # --- after the deed ---

    def _affected(self, fired: Fired, more: int) -> list[tuple[int, asyncio.Future[float]]]:
        """Streams that had tokens from the worker, and when they get their next ones."""
        found: list[tuple[int, asyncio.Future[float]]] = []
        for seed, generated in fired.held.items():
            if generated and (future := self.crowd.next_token(seed, generated + more)):
                found.append((seed, future))
        return found

    async def _follow(self, fault: Fault, worker: Worker, outcome: Outcome) -> None:
        """What belongs to the fault beyond its first moment."""
        match fault.kind:
            case "freeze":
                await self._unheard(worker, outcome)
                await self._gone(worker)
                worker.signal(signal.SIGCONT)
            case "freeze briefly":
                await self._silent(worker, 1.5 * HEARTBEAT_MS)
                worker.signal(signal.SIGCONT)
            case "replace":
                await self._replaced(worker)
            case "kill" | "drain":
                await self._ended(worker)
            case "leave":
                await self.fleet.order_to_leave(worker)
                await self._ended(worker)
            case kind if kind in ON_NETWORK:
                await self._bad_weather(kind, worker, outcome)
            case _:
                pass

    async def _ended(self, worker: Worker) -> None:
        pid = worker.pid
        await self.fleet.until(
            lambda: worker.pid != pid or pid is None,
            f"{worker.name} does not end",
            RECOVERED_WITHIN_S,
        )

    async def _bad_weather(self, kind: str, worker: Worker, outcome: Outcome) -> None:
        """Something is wrong between the worker's host and the router's, or the other workers', for a while."""
        assert self.network is not None
        here, router = worker.host.name, ROUTER_HOST
        others = [host for host in self.fleet.hosts if host != here]
        weather: dict[str, Any] = {"delay": {"delay_ms": 80}, "loss": {"loss": 0.2}}.get(
            kind, {"drop": True}
        )
        outward = kind in ("partition", "half-open from worker", "delay", "loss")
        inward = kind in ("partition", "half-open to worker", "delay", "loss")
        ways = [*((here, router) for _ in range(outward)), *((router, here) for _ in range(inward))]
        if kind == "no way between workers":
            ways = [way for other in others for way in ((here, other), (other, here))]
        for source, target in ways:
            await self.network.set(source, target, **weather)
        try:
            if kind in ("partition", "half-open from worker"):
                await self._unheard(worker, outcome)
                await self._gone(worker)
            else:
                await self._answers(WEATHER_ANSWERS)
        finally:
            for source, target in ways:
                await self.network.set(source, target)

    async def _answers(self, count: int) -> None:
        """So many requests have begun meanwhile."""
        enough = self.crowd.tally.requests + count
        await self.fleet.until(
            lambda: self.crowd.tally.requests >= enough, "nothing is answered", RECOVERED_WITHIN_S
        )

    async def _unheard(self, worker: Worker, outcome: Outcome) -> None:
        """Until the router gives a frozen worker no more work."""

        async def suspect() -> bool:
            listed = await self.fleet.listed()
            return listed.get(worker.name, {}).get("state") != "ready"

        await self.fleet.poll(suspect, f"{worker.name} froze and nobody noticed", 30)
        outcome.noticed_ms = (time.monotonic() - outcome.at_s) * 1e3

    async def _gone(self, worker: Worker) -> None:
        async def gone() -> bool:
            return worker.name not in await self.fleet.listed()

        await self.fleet.poll(gone, f"{worker.name} froze and was never removed", 30)

    async def _silent(self, worker: Worker, silent_ms: float) -> None:
        async def silent() -> bool:
            listed = await self.fleet.listed()
            age_ms = listed.get(worker.name, {}).get("heartbeat_age_ms", silent_ms)
            return age_ms >= silent_ms

        await self.fleet.poll(silent, f"{worker.name} froze and gave signs of life", 30)

    async def _replaced(self, worker: Worker) -> None:
        """Another process gets the name once the first has been frozen for four heartbeats; then the first wakes up."""
        first, starts = worker.pid, worker.starts
        assert first is not None
        self.fleet.replaced.add(first)
        self.fleet.start(worker)
        await self.fleet.until(
            lambda: worker.pid not in (first, None) and worker.starts > starts,
            f"no second {worker.name}",
            RECOVERED_WITHIN_S,
        )
        await self.fleet.ready([worker.name])
        self.fleet.send_signal(first, signal.SIGCONT)
        await self.fleet.ready()
        self.fleet.send_signal(first, signal.SIGKILL)

    async def _recovered(
        self, waiting: list[tuple[int, asyncio.Future[float]]], fired: Fired, outcome: Outcome
    ) -> None:
        if not waiting:
            return
        futures = [future for _, future in waiting]
        _, late = await asyncio.wait(futures, timeout=RECOVERED_WITHIN_S)
        for seed, future in waiting:
            if future in late or future.cancelled():
                future.cancel()
                continue  # counted as a failed or hung request
            since, began = self._resumed.get(seed, (0.0, None))
            total_ms = (future.result() - fired.at_s) * 1e3
            prefill_ms = 0.0 if began is None else (began - since) * 1e3
            outcome.recoveries.append(Recovery(total_ms, prefill_ms))
        if late:
            seeds = [of_seed(seed) for seed, future in waiting if future in late]
            raise ChaosError(f"{len(late)} streams did not go on: {seeds[:5]}")
