"""Keep processes running: start them, prefix their output, restart them, give up on what never worked.

`Restarts` decides and is pure; `Keeper` does. No process outlives its keeper: each runs in a process
group of its own, which is killed at the end, and on Linux the kernel kills it when we die.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from headrace.exit_status import EXIT_CONFIG, EXIT_USAGE

CANNOT_START = 127
"""What stands for the exit status of a process that the system did not start; shells have the same."""

_PARENT = "HEADRACE_SUPERVISOR_PID"
_LONGEST_LINE_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """How long to wait before a process is started again, and when to stop trying."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 15.0
    crashes: int = (
        6  # so many within the window before it was ever ready, and the process is given up
    )
    window_s: float = 600.0  # a crash counts so long


class Restarts:
    """What to do when one process has ended. Times are seconds of any clock that only grows.

    One that was ready once can do what it was told: it is never given up, however often it crashes, only started
    again later and later. One that leaves in good order, as after a drain, has not crashed at all.
    """

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._crashes: deque[float] = deque(maxlen=64)  # more make no delay longer
        self._ready = False  # in this run
        self.was_ready = False  # in any run

    def ready(self) -> None:
        """The process does what it is for."""
        self._ready = self.was_ready = True

    def left(self, status: int) -> bool:
        """Whether this is how a process ends that was ready, and was asked to leave."""
        return status == 0 and self._ready

    def delay_after(self, status: int, now: float) -> float | None:
        """It ended with `status` at `now`; seconds until the next start, or None to give up."""
        rule, left = self._rule, self.left(status)
        self._ready = False
        if left:
            return rule.first_delay_s
        if status in (EXIT_USAGE, EXIT_CONFIG) and not self.was_ready:
            return None
        self._crashes.append(now)
        while now - self._crashes[0] > rule.window_s:
            self._crashes.popleft()
        if len(self._crashes) >= rule.crashes and not self.was_ready:
            return None
        return min(rule.first_delay_s * 2.0 ** (len(self._crashes) - 1), rule.longest_delay_s)


class GaveUpError(Exception):
    """A process cannot be kept running. The text names it and says why."""


class ToldWrongError(GaveUpError):
    """A process refused what it was told: flags, or what they name. `status` is the one that the process ended with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run, and the name under which its output appears."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])  # on top of our own environment


Log = Callable[[str, str], None]
"""Takes the name of a process and one line about it or from it."""


class Keeper:
    """Keeps one process running until told to stop."""

    def __init__(self, command: Command, log: Log, rule: RestartRule | None = None) -> None:
        self.command = command
        self.starts = 0
        self.ended = False  # stopped or given up: it will not be started again
        self._log = log
        self._restarts = Restarts(rule or RestartRule())
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=20)  # clap's refusals are shorter

    @property
    def running(self) -> bool:
        return self._process is not None

    def ready(self) -> None:
        """Take note that the process does what it is for."""
        self._restarts.ready()

    async def run(self) -> None:
        """Return after `stop`, once the process is gone.

        Raises GaveUpError when the process cannot be started, says that its configuration is
        impossible, or crashes too often, unless it was ready before.
        """
        try:
            while not self._stopping.is_set():
                status = await self._run_once()
                if not self._stopping.is_set():
                    await self._wait_to_restart(status)
        finally:
            self.kill()
            self.ended = True

    def stop(self) -> None:
        """Ask the process to end, and do not start it again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def hurry(self) -> None:
        """After `stop`: ask the process to end now. The signal is another one: two of a kind may arrive as one."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> int:
        name, argv = self.command.name, self.command.argv
        env = os.environ | self.command.env | supervised() | {"PYTHONUNBUFFERED": "1"}
        try:
            output, transport, write_end = await _output_pipe()
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    process_group=0,
                )
            except OSError:
                transport.close()
                raise
            finally:
                os.close(write_end)
        except OSError as error:
            if not self._restarts.was_ready:
                raise GaveUpError(f"{name} cannot be started: {error}") from error
            self._log(name, f"cannot be started now: {error}")
            return CANNOT_START
        self._process = process
        self.starts += 1
        try:
            if self._stopping.is_set():  # stop() came while the process was being made
                self._signal(signal.SIGTERM)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(output), name=f"output of {name}")
                status = await process.wait()
                self._signal(signal.SIGKILL)  # what it started and left: that also ends the output
            return status
        finally:
            self._signal(signal.SIGKILL)
            self._process = None
            transport.close()

    async def _forward(self, output: asyncio.StreamReader) -> None:
        async for line in lines(output):
            self._last_lines.append(line)
            self._log(self.command.name, line)

    async def _wait_to_restart(self, status: int) -> None:
        name, restarts = self.command.name, self._restarts
        ended = "left in good order" if restarts.left(status) else describe_exit(status)
        delay_s = restarts.delay_after(status, time.monotonic())
        if delay_s is None and status in (EXIT_USAGE, EXIT_CONFIG):
            told = f"{name} cannot do what it was told: {reason(self._last_lines)}"
            raise ToldWrongError(told, status)
        if delay_s is None:
            last = last_line(self._last_lines)
            hint = f"; its last line was: {last}" if last else ""
            raise GaveUpError(f"{name} keeps crashing (it {ended}){hint}")
        self._log(name, f"{ended}; starting again in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


async def _output_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, int]:
    """A pipe's reading side, what closes it, and the descriptor of the writing side.

    A pipe of asyncio's own would make `wait` wait for grandchildren that hold it open.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    return reader, transport, write_end


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a child's output. A line without end is cut, so it cannot fill our memory."""
    rest = b""
    while chunk := await reader.read(_LONGEST_LINE_BYTES):
        *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip()
        if len(rest) >= _LONGEST_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace").rstrip()


def last_line(output: Sequence[str]) -> str:
    """The last one that is not empty."""
    return next(filter(None, reversed(output)), "")


def reason(output: Sequence[str]) -> str:
    """Why a program refused what it was told: clap says so from `error: ` to an empty line, others in the last line."""
    of_clap = dropwhile(lambda line: not line.startswith("error: "), output)
    told = " ".join(line.strip() for line in takewhile(bool, of_clap))
    return told.removeprefix("error: ") or last_line(output).removeprefix("ERROR ")


def describe_exit(status: int) -> str:
    """How a process ended, in words that follow its name."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def supervised() -> dict[str, str]:
    """Environment of a child that calls `die_with_supervisor`, as every `headrace` does."""
    return {_PARENT: str(os.getpid())}


def die_with_supervisor() -> None:
    """In a child that is `supervised`, on Linux, be killed when the supervisor is. Elsewhere, nothing."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
