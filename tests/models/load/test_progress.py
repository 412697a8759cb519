"""The progress of long reads and writes, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from headrace.models.load import progress
from headrace.models.load.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_for_each_quarter(clock: list[float]) -> None:
    out = io.StringIO()
    bar = ProgressBar("loading x", out)
    for done in range(0, 101, 10):
        bar(done * 10**6, 10**8)
    bar.close()
    assert out.getvalue().splitlines() == [
        f"loading x: {share}% of 100 MB" for share in (25, 50, 75, 100)
    ]


def test_a_terminal_gets_a_bar(clock: list[float]) -> None:
    out = Terminal()
    bar = ProgressBar("loading x", out)
    bar(5 * 10**6, 10**7)
    bar.close()
    assert out.getvalue() == f"\rloading x [{'#' * 12:<24}]  50% of 10 MB\n"


def test_what_is_quick_is_silent(clock: list[float]) -> None:
    out = io.StringIO()
    bar = ProgressBar("loading x", out, quiet_s=3.0)
    bar(5 * 10**6, 10**7)
    clock[0] += 2.9
    bar(6 * 10**6, 10**7)
    assert out.getvalue() == ""
    clock[0] += 0.1
    bar(9 * 10**6, 10**7)
    assert out.getvalue() == "loading x: 75% of 10 MB\n"
