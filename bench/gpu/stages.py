"""Stages one after the other, each a process of its own with a deadline: what breaks one breaks no other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

AGAIN = 75  # exit status of a stage that must be started again for the rest
MOST_STARTS = 40
LAST_WORDS_S = 10.0  # before its deadline a stage is asked to end, so that it can write what it has
LOG_BYTES = 512 << 10  # of each stage's output that is kept

Status = Literal["ok", "failed", "cut off", "not run"]


@dataclass(frozen=True, slots=True)
class Stage:
    """`command` is told the seconds that it has."""

    name: str
    limit_s: float
    command: Callable[[float], list[str]]
    figures: Callable[[], dict[str, Any]]  # what it found; {} where there is nothing
    fatal: int | None = None  # an exit status after which nothing else can work


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    status: Status
    seconds: float
    says: str  # why it did not end well, in one line
    code: int  # exit status, of the last start
    figures: dict[str, Any]
    output: str


def run_all(
    stages: list[Stage], env: Mapping[str, str], folder: Path, told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run every stage; each may also use the time that those before it left. `told` hears of each as it ends."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    end_at = began
    stopped = ""  # by which stage
    for stage in stages:
        end_at += stage.limit_s
        if stopped:
            outcome = Outcome(stage.name, "not run", 0.0, f"{stopped} failed", 0, {}, "")
        else:
            outcome = run(stage, env, folder / f"{stage.name.replace(' ', '_')}.log", end_at)
        if stage.fatal is not None and outcome.code == stage.fatal:
            stopped = stopped or stage.name
        outcomes.append(outcome)
        told(outcome)
    return outcomes


def run(stage: Stage, env: Mapping[str, str], log: Path, end_at: float) -> Outcome:
    """One stage until it ends, or until the clock is at `end_at`."""
    began = time.monotonic()
    code, cut_off, starts = AGAIN, False, 0
    with log.open("wb") as output:
        while code == AGAIN and starts < MOST_STARTS and not cut_off:
            starts += 1
            left = end_at - time.monotonic()
            if left <= 0:
                cut_off = True
                break
            process = subprocess.Popen(
                stage.command(max(left - LAST_WORDS_S, 0.0)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
            code, cut_off = _wait(process, end_at)
            if (
                code != 0 and not cut_off and _can_go_on(stage)
            ):  # a broken device may end it anywhere
                code = AGAIN
    text = _tail(log)
    figures, fault = _read(stage)
    status, says = _judge(code, cut_off=cut_off, text=text, figures=figures, fault=fault)
    return Outcome(stage.name, status, time.monotonic() - began, says, code, figures, text)


def _judge(
    code: int, *, cut_off: bool, text: str, figures: dict[str, Any], fault: str
) -> tuple[Status, str]:
    lines = [line for line in text.splitlines() if line.strip()]
    if cut_off:
        return "cut off", "its time was over"
    if code != 0:
        last = lines[-1][:300] if lines else ""
        return "failed", f"exit status {code}: {last}"
    if fault:
        return "failed", fault
    left_out = figures.get("left_out") or [
        step["step"] for step in figures.get("steps", []) if "left_out" in step
    ]
    if left_out:
        return "cut off", f"its time was over before {', '.join(left_out)}"
    return "ok", ""


def _wait(process: subprocess.Popen[bytes], end_at: float) -> tuple[int, bool]:
    """Exit status, and whether its time was over. Nothing that it started is left."""
    for signal_, until in ((signal.SIGINT, end_at - LAST_WORDS_S), (None, end_at)):
        try:
            return process.wait(max(until - time.monotonic(), 0.0)), signal_ is None
        except subprocess.TimeoutExpired:
            if signal_ is not None:
                process.send_signal(signal_)
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return process.wait(), True


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and those that they did, also in sessions of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def _can_go_on(stage: Stage) -> bool:
    """Whether it keeps what it has done, and so takes up where it ended."""
    return "begun" in _read(stage)[0]


def _read(stage: Stage) -> tuple[dict[str, Any], str]:
    try:
        return stage.figures(), ""
    except Exception as error:
        return {}, f"its figures cannot be read: {type(error).__name__}: {error}"


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - LOG_BYTES, 0))
        return file.read().decode(errors="replace")
