"""One process of `serve`: started in a group of its own, its output prefixed, ended with all that it started."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headrace.settings.config_file import CONFIG_VARIABLE

_PARENT = "HEADRACE_SUPERVISOR_PID"
_LONGEST_LINE_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run, and the name under which its output appears."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])  # on top of our own environment


Log = Callable[[str, str], None]
"""Takes the name of a process and one line about it or from it."""


class Process:
    """One run of a command."""

    def __init__(self, command: Command, log: Log) -> None:
        self.name = command.name
        self.last_lines: deque[str] = deque(maxlen=20)  # clap's refusals are shorter
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def start(self) -> None:
        """Raises OSError where the system starts no such process."""
        env = os.environ | self._command.env | supervised() | {"PYTHONUNBUFFERED": "1"}
        output, transport, write_end = await _output_pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command.argv,
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
        self._output, self._transport = output, transport

    async def wait(self) -> int:
        """Its status, once it has ended and its output was passed on. A cancelled call kills it."""
        assert self._process is not None, "started"
        assert self._transport is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(), name=f"output of {self.name}")
                status = await self._process.wait()
                self.signal(signal.SIGKILL)  # what it started and left: that also ends the output
            return status
        finally:
            self.signal(signal.SIGKILL)
            self._process = None
            self._transport.close()

    def signal(self, number: signal.Signals) -> None:
        """To all of its group, if it is there."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _forward(self) -> None:
        assert self._output is not None
        async for line in lines(self._output):
            self.last_lines.append(line)
            self._log(self.name, line)


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


def supervised() -> dict[str, str]:
    """Environment of a child that calls `die_with_supervisor`, as every `headrace` does.

    Its command line says all: the file of configuration that the supervisor was given is not for it.
    """
    return {_PARENT: str(os.getpid()), CONFIG_VARIABLE: ""}


def die_with_supervisor() -> None:
    """In a child that is `supervised`, on Linux, be killed when the supervisor is. Elsewhere, nothing."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
