"""Keep processes running: start them, restart them, give up on what never worked.

`Restarts` decides and is pure; `Keeper` does. No process outlives its keeper: each (`children/process.py`) runs in a
process group of its own, which is killed at the end, and on Linux the kernel kills it when we die.
"""

import asyncio
import contextlib
import json
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from headrace.cli.children.process import Command, Log, Process
from headrace.exit_status import EXIT_CONFIG, EXIT_RANK_LOST, EXIT_USAGE

LOGGED_ERROR = re.compile(r"^(?:\S+Z +)?ERROR (?:headrace[\w.]*: )?")
"""What stands before the words of an error in a log of text."""
CANNOT_START = 127
"""What stands for the exit status of a process that the system did not start; shells have the same."""

# For the ranks of a group to notice that one of them has ended, and to end; whoever is left is killed, such as a rank
# that stands still. They give routers 5 s to hear of it. A guess
RANKS_END_S = 7.0


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


class Keeper:
    """Keeps one process running until told to stop, or several that are of use only together: the ranks of a group."""

    def __init__(
        self,
        command: Command,
        log: Log,
        rule: RestartRule | None = None,
        *,
        ranks: Callable[[], list[Command]] | None = None,
    ) -> None:
        """With `ranks` its processes are started instead of the one of `command`, which only names them."""
        self.command = command
        self.starts = 0
        self.ended = False  # stopped or given up: it will not be started again
        self._log = log
        self._restarts = Restarts(rule or RestartRule())
        self._commands = ranks or (lambda: [command])
        self._processes: list[Process] = []
        self._stopping = asyncio.Event()
        self._last_lines: Sequence[str] = ()

    @property
    def running(self) -> bool:
        return len(self._processes) > 0

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
                name, status = await self._run_once()
                if not self._stopping.is_set():
                    await self._wait_to_restart(name, status)
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

    def reload(self) -> None:
        """Have the process read its files of keys and certificates again."""
        self._signal(signal.SIGHUP)

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> tuple[str, int]:
        """Start what is kept, and wait for its end: the process that ended it, and its status."""
        processes = [self._process(command) for command in self._commands()]
        waiting: list[asyncio.Task[int]] = []
        try:
            for process in processes:
                try:
                    await process.start()
                except OSError as error:
                    if not self._restarts.was_ready:
                        raise GaveUpError(f"{process.name} cannot be started: {error}") from error
                    self._log(process.name, f"cannot be started now: {error}")
                    return process.name, CANNOT_START
                waiting.append(asyncio.create_task(process.wait(), name=process.name))
                self._processes.append(process)
            self.starts += 1
            if self._stopping.is_set():  # stop() came while a process was being made
                self._signal(signal.SIGTERM)
            ended = await self._until_ended(waiting)
        finally:
            self._signal(signal.SIGKILL)
            await asyncio.gather(*waiting, return_exceptions=True)
            self._processes.clear()
        name, status = blamed(ended)
        self._last_lines = next(one.last_lines for one in processes if one.name == name)
        return name, status

    def _process(self, command: Command) -> Process:
        return Process(command, self._log)

    async def _until_ended(self, waiting: Sequence[asyncio.Task[int]]) -> list[tuple[str, int]]:
        """Names and statuses in the order of the ends. The end of one is that of all: whoever stays is to be killed."""
        ended: list[tuple[str, int]] = []
        left = set(waiting)
        give_up_at: float | None = None
        while left:
            rest_s = None if give_up_at is None else max(give_up_at - time.monotonic(), 0.0)
            done, left = await asyncio.wait(
                left, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            ended += [(task.get_name(), task.result()) for task in done]
            give_up_at = give_up_at or time.monotonic() + RANKS_END_S
        return ended

    async def _wait_to_restart(self, name: str, status: int) -> None:
        restarts = self._restarts
        ended = "left in good order" if restarts.left(status) else describe_exit(status)
        delay_s = restarts.delay_after(status, time.monotonic())
        if delay_s is None and status in (EXIT_USAGE, EXIT_CONFIG):
            told = f"{name} cannot do what it was told: {reason(self._last_lines)}"
            raise ToldWrongError(told, status)
        if delay_s is None:
            last = last_line(self._last_lines)
            hint = f"; its last line was: {last}" if last else ""
            raise GaveUpError(f"{name} keeps crashing (it {ended}){hint}")
        again = (
            "starting again" if name == self.command.name else f"starting {self.command.name} again"
        )
        self._log(name, f"{ended}; {again} in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)


def blamed(ended: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Which of the processes that ended, in this order, ended the others: ranks that lost one another only followed."""
    return next((one for one in ended if one[1] not in (0, EXIT_RANK_LOST)), ended[0])


def last_line(output: Sequence[str]) -> str:
    """The last one that is not empty."""
    return next(filter(None, reversed(output)), "")


def reason(output: Sequence[str]) -> str:
    """Why a program refused what it was told: clap says so from `error: ` to an empty line, others in the last line."""
    of_clap = dropwhile(lambda line: not line.startswith("error: "), output)
    told = " ".join(line.strip() for line in takewhile(bool, of_clap))
    return told.removeprefix("error: ") or _logged(last_line(output))


def _logged(line: str) -> str:
    """The words of a line of the log, which may be of JSON."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["fields"]["message"])
    return LOGGED_ERROR.sub("", line)


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
