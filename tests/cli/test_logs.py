"""Nobody waits for standard error: pipes that nobody reads, full disks, closed ends, stopped terminals."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from headrace import logs
from headrace.logs import WAITING_BYTES, Lines, LogStream, Lost

SOON_S = 30.0
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


class Pipe:
    """Each end is closed once."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._open = [self.write_end, self.read_end]

    def close(self, end: int) -> None:
        self._open.remove(end)
        os.close(end)

    def close_all(self) -> None:
        while self._open:
            os.close(self._open.pop())


@pytest.fixture
def pipe() -> Generator[Pipe]:
    made = Pipe()
    yield made
    made.close_all()


def line(number: int) -> bytes:
    return b"line %d %s\n" % (number, b"x" * 90)


def read_all(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as end:
        return end.read()


def test_lines_come_whole_and_in_order(pipe: Pipe) -> None:
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(pipe.read_end)))
    reader.start()
    lines = Lines(pipe.write_end)
    for number in range(5_000):
        lines.push(line(number))
    assert lines.flush(SOON_S)
    pipe.close(pipe.write_end)
    reader.join(SOON_S)
    assert b"".join(got) == b"".join(map(line, range(5_000)))
    assert not lines.lost


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_the_gap_is_named_where_it_is(
    pipe: Pipe,
) -> None:
    lines = Lines(pipe.write_end)
    many = 3 * WAITING_BYTES // len(line(0))
    for number in range(many):
        lines.push(line(number))
    assert not lines.flush(0.01)
    lost = lines.lost.too_slow
    assert 0 < lost < many
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(pipe.read_end)))
    reader.start()
    assert lines.flush(SOON_S)
    lines.push(b"after\n")
    assert lines.flush(SOON_S)
    pipe.close(pipe.write_end)
    reader.join(SOON_S)
    *whole, notice, after = b"".join(got).splitlines(keepends=True)
    assert whole == [line(number) for number in range(many - lost)]
    assert f"lost here: {lost} because they were taken too slowly".encode() in notice
    assert after == b"after\n"


def test_a_full_disk_costs_lines_and_the_next_one_that_fits_says_how_many(
    pipe: Pipe,
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    lines = Lines(full)
    for number in range(3):
        lines.push(line(number))
        assert lines.flush(SOON_S)
    assert lines.lost == Lost(write_failed=3)
    os.dup2(pipe.write_end, full)  # there is room again
    lines.push(b"back\n")
    assert lines.flush(SOON_S)
    os.close(full)
    pipe.close(pipe.write_end)
    notice, back = read_all(pipe.read_end).splitlines()
    assert b"3 because they could not be written (No space left on device)" in notice
    assert back == b"back"


def test_a_line_that_broke_off_does_not_swallow_the_next(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = iter([4, OSError(28, "No space left on device")])

    def write(fd: int, data: bytes) -> int:
        match next(takes, len(data)):
            case int(most):
                return os.write(fd, data[:most])
            case error:
                raise error

    monkeypatch.setattr(logs, "_write_some", write)
    lines = Lines(pipe.write_end)
    for text in (b"complete\n", b"next\n"):
        lines.push(text)
        assert lines.flush(SOON_S)
    pipe.close(pipe.write_end)
    broken, notice, after = read_all(pipe.read_end).splitlines()
    assert (broken, after) == (b"comp", b"next")
    assert b"1 because they could not be written" in notice


@pytest.mark.parametrize("end", ["its reader is gone", "it is closed"])
def test_an_end_that_is_gone_is_counted(end: str, pipe: Pipe) -> None:
    pipe.close(pipe.read_end if end == "its reader is gone" else pipe.write_end)
    lines = Lines(pipe.write_end)
    for _ in range(2):
        lines.push(b"nobody reads this\n")
        assert lines.flush(SOON_S)
    assert lines.lost == Lost(write_failed=2)


def test_a_pipe_that_somebody_made_non_blocking_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    lines = Lines(pipe.write_end)
    for number in range(3_000):  # 300 kB: more than a pipe holds
        lines.push(line(number))
    assert not lines.flush(0.01)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(pipe.read_end)))
    reader.start()
    assert lines.flush(SOON_S)
    pipe.close(pipe.write_end)
    reader.join(SOON_S)
    assert b"".join(got).count(b"\n") == 3_000


def test_writes_become_lines_and_what_has_no_end_waits_for_a_flush(pipe: Pipe) -> None:
    lines = Lines(pipe.write_end)
    output = LogStream(lines, pipe.write_end)
    print("two", "words", file=output)
    output.write("half \udcff")
    assert lines.flush(SOON_S)
    assert os.read(pipe.read_end, 1_000) == b"two words\n"
    output.flush()
    assert lines.flush(SOON_S)
    assert os.read(pipe.read_end, 1_000) == b"half \\udcff"
    assert isinstance(output, io.TextIOBase)
    assert (output.isatty(), output.fileno()) == (False, pipe.write_end)


TALKER = """
import logging, sys
from headrace import logs
logs.never_wait(stdout=True)
logging.basicConfig(level="INFO", stream=sys.stderr)
for number in range(20_000):
    logging.info("line %d %s", number, "x" * 90)
    print("and on standard output", "x" * 90)
raise SystemError("as a traceback")
"""


def test_a_process_that_nobody_reads_ends_with_its_status() -> None:
    """4 MB on pipes of 64 kB, and a traceback at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )
    try:
        assert process.wait(SOON_S) == 1
    finally:
        process.kill()
        process.communicate()


def test_what_is_said_last_gets_out_where_somebody_reads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TALKER.replace("20_000", "10")],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        env=ENV,
    )
    assert "SystemError: as a traceback" in done.stderr
    assert len(re.findall("INFO:root:line", done.stderr)) == 10
    assert done.stdout.count("and on standard output") == 10


def test_a_stopped_terminal_costs_lines_only(tmp_path: Path) -> None:
    """Somebody pressed Ctrl-S, and left."""
    import pty

    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER], stdout=slave, stderr=slave, env=ENV, cwd=tmp_path
    )
    try:
        assert process.wait(SOON_S) == 1
    finally:
        process.kill()
        termios.tcflow(slave, termios.TCOON)
        os.close(slave)
        os.close(master)
