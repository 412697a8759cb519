"""Restart decisions with given times, and a Keeper with real, tiny processes."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from headrace.cli.children.process import Command, lines
from headrace.cli.supervise import (
    EXIT_CONFIG,
    EXIT_USAGE,
    GaveUpError,
    Keeper,
    RestartRule,
    Restarts,
    ToldWrongError,
    describe_exit,
    reason,
)
from helpers.require import needs
from helpers.serving.processes import until_gone

RULE = RestartRule(first_delay_s=0.5, longest_delay_s=3.0, crashes=5, window_s=100.0)
AT_ONCE = RestartRule(first_delay_s=0.0, longest_delay_s=0.0, crashes=3, window_s=100.0)


class Lines:
    """A log that tells when a line comes."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._new = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.all.append(f"{name}: {line}")
        self._new.set()

    async def until(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while sum(text in line for line in self.all) < times:
                self._new.clear()
                await self._new.wait()


def python(code: str, name: str = "child") -> Command:
    return Command(name=name, argv=[sys.executable, "-S", "-c", code])


def test_delays_double_up_to_the_longest_and_what_was_never_ready_is_given_up() -> None:
    restarts = Restarts(RULE)
    delays = [restarts.delay_after(1, now) for now in (0.0, 1.0, 3.0, 6.0, 10.0)]
    assert delays == [0.5, 1.0, 2.0, 3.0, None]


def test_what_was_ready_once_is_started_again_for_ever_but_ever_later() -> None:
    restarts = Restarts(RULE)
    restarts.ready()
    delays = [restarts.delay_after(-9, 2.0 * n) for n in range(1_000)]
    assert delays[:5] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert set(delays[5:]) == {3.0}


def test_old_crashes_are_forgotten() -> None:
    restarts = Restarts(RULE)
    assert [restarts.delay_after(1, now) for now in (0.0, 1.0, 2.0, 3.0)][-1] == 3.0
    assert restarts.delay_after(1, 150.0) == 0.5


def test_a_crash_every_half_window_never_gives_up() -> None:
    restarts = Restarts(RULE)
    assert all(restarts.delay_after(1, 50.0 * n) is not None for n in range(100))


def test_leaving_after_a_drain_is_no_crash_however_often() -> None:
    restarts = Restarts(RULE)
    for n in range(100):
        restarts.ready()
        assert restarts.left(0)
        assert restarts.delay_after(0, 0.1 * n) == 0.5
    restarts.ready()
    assert restarts.delay_after(1, 10.0) == 0.5, "the first crash"


def test_status_0_of_what_was_not_ready_is_a_crash() -> None:
    restarts = Restarts(RULE)
    assert [restarts.delay_after(0, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)][-1] is None
    restarts = Restarts(RULE)
    restarts.ready()
    restarts.delay_after(0, 0.0)
    assert not restarts.left(0), "it was ready in its last run, not in this one"
    assert [restarts.delay_after(0, now) for now in (1.0, 2.0)] == [0.5, 1.0]


@pytest.mark.parametrize("status", [EXIT_USAGE, EXIT_CONFIG])
def test_an_impossible_configuration_is_impossible_only_if_it_never_worked(status: int) -> None:
    assert Restarts(RULE).delay_after(status, 0.0) is None
    restarts = Restarts(RULE)
    restarts.ready()
    assert restarts.delay_after(status, 0.0) == 0.5


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with status 0"), (3, "ended with status 3"), (-11, "was killed by SIGSEGV")],
)
def test_the_way_it_ended_is_told(status: int, words: str) -> None:
    assert describe_exit(status) == words
    assert "memory" in describe_exit(-9)


async def test_output_is_forwarded_and_a_crash_starts_it_again() -> None:
    log = Lines()
    keeper = Keeper(
        python("import os; print('pid', os.getpid()); raise SystemExit(3)"), log, AT_ONCE
    )
    with pytest.raises(GaveUpError, match=r"child keeps crashing \(it ended with status 3\).*pid"):
        await asyncio.wait_for(keeper.run(), 30)
    assert keeper.starts == AT_ONCE.crashes
    assert sum(line.startswith("child: pid ") for line in log.all) == AT_ONCE.crashes
    assert keeper.ended


@pytest.mark.parametrize("status", [EXIT_USAGE, EXIT_CONFIG])
async def test_an_impossible_configuration_is_given_up_at_once(status: int) -> None:
    log = Lines()
    code = f"print('no such dtype: int3'); raise SystemExit({status})"
    keeper = Keeper(python(code), log)
    with pytest.raises(
        ToldWrongError, match="cannot do what it was told: no such dtype: int3"
    ) as told:
        await asyncio.wait_for(keeper.run(), 20)
    assert (keeper.starts, told.value.status) == (1, status)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (["starting", "no such dtype: int3", ""], "no such dtype: int3"),
        (["ERROR no such dtype: int3"], "no such dtype: int3"),
        (
            ["2026-01-31T12:00:00.123456Z ERROR headrace.worker.main: no such dtype: int3"],
            "no such dtype: int3",
        ),
        (
            ['{"level": "ERROR", "fields": {"message": "no such dtype: int3"}}'],
            "no such dtype: int3",
        ),
        (['{"level": "ERROR"}'], '{"level": "ERROR"}'),
        (
            ["error: '--port' is there twice", "", "Usage: x", "", "try '--help'."],
            "'--port' is there twice",
        ),
        (
            ["error: these are missing:", "  --key <FILE>", "", "Usage: x"],
            "these are missing: --key <FILE>",
        ),
        ([], ""),
    ],
)
def test_the_reason_is_told_without_the_usage(output: list[str], why: str) -> None:
    assert reason(output) == why


async def test_what_cannot_be_started_is_named() -> None:
    keeper = Keeper(Command(name="child", argv=["/nonexistent/program"]), Lines())
    with pytest.raises(GaveUpError, match="child cannot be started"):
        await keeper.run()


async def test_what_was_ready_is_kept_running_whatever_becomes_of_it() -> None:
    """Killed, told that its configuration is wrong, drained: more often than a crash loop has crashes."""
    log = Lines()
    code = (
        "import os, signal, sys\n"
        "print('ready', flush=True)\n"
        "sys.exit({0: 3, 1: 78, 2: 0, 3: 0}.get(os.getpid() % 5, 0)) if os.getpid() % 5 < 4 \\\n"
        "    else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    keeper = Keeper(python(code), log, AT_ONCE)
    keeper.ready()
    task = asyncio.create_task(keeper.run())
    await log.until("ready", times=4 * AT_ONCE.crashes)
    assert not task.done()
    keeper.kill()
    await asyncio.wait_for(task, 20)


async def test_a_start_that_fails_later_is_tried_again(tmp_path: Path) -> None:
    log = Lines()
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho up\n")
    program.chmod(0o755)
    keeper = Keeper(Command(name="child", argv=[str(program)]), log, AT_ONCE)
    keeper.ready()
    task = asyncio.create_task(keeper.run())
    await log.until("up")
    program.chmod(0o644)
    await log.until("cannot be started now")
    program.chmod(0o755)
    before = sum("up" in line for line in log.all)
    await log.until("up", times=before + 1)
    keeper.kill()
    await asyncio.wait_for(task, 20)


async def test_stop_asks_and_does_not_start_again() -> None:
    log = Lines()
    code = (
        "import signal, sys\n"
        "def end(*_): print('bye'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up')\n"
        "while True: signal.pause()\n"
    )
    keeper = Keeper(python(code), log)
    task = asyncio.create_task(keeper.run())
    await log.until("up")
    keeper.stop()
    await asyncio.wait_for(task, 20)
    assert log.all[-1] == "child: bye"
    assert keeper.starts == 1


async def test_kill_takes_grandchildren_along() -> None:
    log = Lines()
    code = (
        "import subprocess, sys, signal\n"
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "print('grandchild', p.pid)\n"
        "signal.pause()\n"
    )
    keeper = Keeper(python(code), log)
    task = asyncio.create_task(keeper.run())
    await log.until("grandchild")
    grandchild = int(log.all[-1].rsplit(" ", 1)[1])
    keeper.kill()
    await asyncio.wait_for(task, 20)
    await until_gone(grandchild)


async def test_a_grandchild_that_keeps_the_output_open_does_not_delay_the_restart() -> None:
    log = Lines()
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "raise SystemExit(1)\n"
    )
    keeper = Keeper(python(code), log, AT_ONCE)
    with pytest.raises(GaveUpError):
        await asyncio.wait_for(keeper.run(), 30)


@needs("linux", "the death signal is of Linux", here=sys.platform == "linux")
async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from headrace.cli.children.process import Command\n"
        "from headrace.cli.supervise import Keeper\n"
        "child = 'from headrace.cli.children.process import die_with_supervisor as d; d();' \\\n"
        "        'import os, signal; print(os.getpid()); signal.pause()'\n"
        "keeper = Keeper(Command(name='x', argv=[sys.executable, '-c', child]),\n"
        "                lambda name, line: print(line, flush=True))\n"
        "asyncio.run(keeper.run())\n"
    )
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert supervisor.stdout is not None
    child = int(await asyncio.wait_for(supervisor.stdout.readline(), 30))
    supervisor.kill()
    await supervisor.wait()
    await until_gone(child)


async def test_a_line_without_end_is_cut() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"one\ntwo\r" + b"x" * 100_000 + b"\nlast \xff")
    reader.feed_eof()
    got = [line async for line in lines(reader)]
    assert got[:2] == ["one", "two"]
    assert got[-1] == "last \N{REPLACEMENT CHARACTER}"
    assert sum(line.count("x") for line in got) == 100_000
    assert max(map(len, got)) < 40_000
