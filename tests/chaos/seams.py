"""Named steps in the life of a request inside a real worker, at which the harness may strike.

The product has no hooks: its functions are wrapped here, from outside, before the worker starts. A function that is not
there any more stops the worker at once with its name.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST_HOLD_S = 10.0  # the harness is gone or wrong


@dataclass(slots=True)
class Rule:
    """At the `nth` time that something reaches `point` (any request, or the one with `seed`), do it."""

    id: int
    point: str
    do: str
    nth: int = 1
    seed: int | None = None
    ms: float = 0.0
    times: int = 1  # how often `slow` slows


class Control:
    """The worker's end of its connection to the harness: rules come in, what happens goes out."""

    def __init__(self, path: str, name: str, *, host: bool = False) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self.send(event="hello", name=name, host=host, pid=os.getpid())

    def send(self, **event: Any) -> None:
        data = json.dumps(event | {"at": time.monotonic()}).encode() + b"\n"
        with self._sending:
            self._socket.sendall(data)

    def listen(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Hand each command to `take`, on a thread of its own; end with the harness."""

        def read() -> None:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    take(json.loads(line))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=read, name="chaos", daemon=True).start()


class Seams:
    """Which rules are armed, and what they do. Called from the engine's thread and from the event loop's."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.engine: Any = None
        self.cut: Callable[[], None] = lambda: None  # resets the links to the routers
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._held: dict[int, threading.Event] = {}

    def command(self, command: dict[str, Any]) -> None:
        """From the harness."""
        match command.pop("command"):
            case "arm":
                rule = Rule(**command)
                if rule.point != "now":
                    with self._lock:
                        self._rules.append(rule)
                self.control.send(event="armed", id=rule.id)
                if rule.point == "now":
                    self._fire(rule, None)
            case "disarm":
                with self._lock:
                    self._rules = [rule for rule in self._rules if rule.id != command["id"]]
                self._release(command["id"])
            case "check":
                self.control.send(event="checked", error=self.check())
            case other:
                raise AssertionError(f"no command is {other!r}")

    def check(self) -> str:
        """What is wrong inside an engine that has nothing to do; empty if nothing is."""
        try:
            self.engine.check()
            self.engine.check_idle()
        except AssertionError as error:
            return str(error) or "an invariant does not hold"
        return ""

    def _release(self, rule: int) -> None:
        held = self._held.pop(rule, None)
        if held is not None:
            held.set()

    def reach(self, point: str, seed: int | None) -> None:
        """Something is here. Where a rule waits for that, its deed is done before this returns."""
        if not self._rules:
            return
        with self._lock:
            rule = next((rule for rule in self._rules if self._waits(rule, point, seed)), None)
            if rule is None:
                return
            rule.nth -= 1
            if rule.nth > 0:
                return
            rule.times -= 1
            if rule.times <= 0:
                self._rules.remove(rule)
            else:
                rule.nth = 1
            if rule.do == "hold":
                self._held[rule.id] = threading.Event()
        self._fire(rule, seed)

    @staticmethod
    def _waits(rule: Rule, point: str, seed: int | None) -> bool:
        return rule.point == point and rule.seed in (None, seed)

    def _fire(self, rule: Rule, seed: int | None) -> None:
        hold = self._held.get(rule.id)  # before the harness knows, and may take the rule back
        self.control.send(event="fired", id=rule.id, seed=seed, held=self.requests())
        match rule.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "drain":
                os.kill(os.getpid(), signal.SIGTERM)
            case "slow":
                time.sleep(rule.ms / 1e3)
            case "hold":
                assert hold is not None
                hold.wait(LONGEST_HOLD_S)
            case "cut link":
                self.cut()
            case "tell":
                pass
            case other:
                raise AssertionError(f"nothing does {other!r}")

    def requests(self) -> list[tuple[int, int]]:
        """Seed and generated tokens of each request that the engine has."""
        if self.engine is None:
            return []
        sequences = list(self.engine._sequences.values())
        return [(sequence.sampling.seed, len(sequence.generated)) for sequence in sequences]


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, self, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def install(seams: Seams) -> None:
    """Wrap engine and links. Before the worker is made."""
    from headrace.engine.engine import Engine
    from headrace.engine.schedule import Scheduler

    reach, tell = seams.reach, seams.control.send
    to_begin: set[int] = set()  # resumed, and the next token is still to come

    def init(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        original(engine, *args, **kwargs)
        seams.engine = engine

    def submit(original: Any, engine: Any, submit: Any, **kwargs: Any) -> None:
        seed = submit.sampling.seed
        resumed = 0 if submit.resume is None else len(submit.resume.generated) // 4
        reach("submit", seed)
        if resumed:
            reach("resumed", seed)
        original(engine, submit, **kwargs)
        tell(event="leg", seed=seed, resumed=resumed)
        if resumed:
            to_begin.add(seed)

    def start(original: Any, scheduler: Any, sequence: Any, *args: Any) -> Any:
        result = original(scheduler, sequence, *args)
        reach("admitted", sequence.sampling.seed)
        return result

    def compute(original: Any, engine: Any, plan: Any, result: Any) -> None:
        for sequence in (work.sequence for work in plan.work):
            if not sequence.decodes:
                reach("computing", _seed(sequence))
            elif len(sequence.generated) == 1:
                reach("first decode step", _seed(sequence))
            else:
                reach("decode", _seed(sequence))
        original(engine, plan, result)
        for work in plan.work:
            if work.sequence.remaining > 1:
                reach("chunk", _seed(work.sequence))

    def accept(original: Any, engine: Any, sequence: Any, *args: Any) -> None:
        if sequence.total + 1 >= sequence.limit:
            reach("last step", _seed(sequence))
        original(engine, sequence, *args)
        generated = len(sequence.generated)
        if _seed(sequence) in to_begin:
            to_begin.discard(_seed(sequence))
            tell(event="began", seed=_seed(sequence))
        if generated == 1:
            reach("first token", _seed(sequence))
        reach(f"token {generated}", _seed(sequence))

    def end(original: Any, engine: Any, sequence: Any) -> Any:
        blocks = original(engine, sequence)
        tell(event="end", seed=_seed(sequence), generated=len(sequence.generated))
        return blocks

    wrap(Engine, "__init__", init)
    wrap(Engine, "submit", submit)
    wrap(Scheduler, "_start", start)
    wrap(Engine, "_compute", compute)
    wrap(Engine, "_accept", accept)
    wrap(Engine, "_end", end)
    _install_links(seams)


def _install_links(seams: Seams) -> None:
    from headrace.connection import Connection
    from headrace.frames import Step
    from headrace.link import Session

    connections: list[tuple[Any, asyncio.AbstractEventLoop]] = []

    def made(original: Any, connection: Any, transport: Any) -> None:
        original(connection, transport)
        open_ones = [pair for pair in connections if not pair[0].is_closing()]
        connections[:] = [*open_ones, (transport, asyncio.get_running_loop())]

    def cut() -> None:
        for transport, loop in connections:
            loop.call_soon_threadsafe(_reset, transport)

    async def send(original: Any, session: Any, *frames: Any) -> None:
        await original(session, *frames)
        for frame in frames:
            if isinstance(frame, Step) and frame.outputs:
                seams.reach("token sent", None)
                if any(output.cached_tokens is not None for output in frame.outputs):
                    seams.reach("first token sent", None)

    seams.cut = cut
    wrap(Connection, "connection_made", made)
    wrap(Session, "send", send)


def _reset(transport: Any) -> None:
    if not transport.is_closing():
        linger = struct.pack("ii", 1, 0)  # an abort is a reset then
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()


def _seed(sequence: Any) -> int:
    return sequence.sampling.seed
