"""What the harness may do to a real worker when something in it comes to a named step; `steps` says where these are."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST_HOLD_S = 10.0  # the harness is gone or wrong
NO_MEMORY = "this is chaos: no memory is left"


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
        self.to_begin: set[int] = (
            set()
        )  # seeds of those resumed here whose next token is still to come
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
            case "no memory":
                raise MemoryError(NO_MEMORY)
            case "tell":
                pass
            case other:
                raise AssertionError(f"nothing does {other!r}")

    def requests(self) -> list[tuple[int, int]]:
        """Seed and generated tokens of each request that the engine has."""
        if self.engine is None:
            return []
        sequences = list(self.engine._requests.here.values())
        return [(sequence.sampling.seed, len(sequence.generated)) for sequence in sequences]
