"""Stages fail, crash, go on for ever and leave children behind; the others run all the same, and the report says so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import stages
from bench.gpu.stages import AGAIN, Outcome, Stage, run_all

LONG_S = 100.0


def of(
    name: str,
    program: str,
    limit_s: float = LONG_S,
    figures: Callable[[], dict[str, Any]] = dict,
    *,
    fatal: int | None = None,
) -> Stage:
    return Stage(name, limit_s, lambda _: [sys.executable, "-c", program], figures, fatal)


def run(folder: Path, *what: Stage) -> list[Outcome]:
    told: list[Outcome] = []
    outcomes = run_all(list(what), os.environ, folder, told.append)
    assert told == outcomes
    return outcomes


def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    bad, good = run(
        tmp_path,
        of("bad", "print('it is broken'); raise SystemExit(3)"),
        of("good", "print('done')"),
    )
    assert (bad.status, bad.says) == ("failed", "exit status 3: it is broken")
    assert (good.status, good.says, good.output) == ("ok", "", "done\n")


@pytest.mark.parametrize(("code", "status"), [(3, "not run"), (1, "ok")])
def test_one_that_others_need_stops_them_by_name(code: int, status: str, tmp_path: Path) -> None:
    first = of("machine", f"raise SystemExit({code})", fatal=3)
    outcomes = run(tmp_path, first, of("next", ""), of("last", ""))
    assert [outcome.status for outcome in outcomes] == ["failed", status, status]
    assert outcomes[2].says == ("machine failed" if status == "not run" else "")


def test_one_over_its_time_is_cut_off_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LAST_WORDS_S", 0.0)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    # It is deaf to SIGINT, and has a child in a session of its own that holds the pipe open.
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = 'import signal; print(flush=True); signal.pause()'\n"
        "subprocess.Popen([sys.executable, '-c', child], start_new_session=True, close_fds=False)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", program]
    # Popen closes what it is not told of; `env` hands the pipe on.
    monkeypatch.setattr(stages.subprocess, "Popen", _with_pipe(stages.subprocess.Popen, writer))
    slow = Stage("slow", 3.0, lambda _: command, dict)
    cut, after = run(tmp_path, slow, of("after", ""))
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody has the other end any more
    os.close(reader)
    assert (cut.status, cut.says) == ("cut off", "its time was over")
    assert after.status == "ok"


def _with_pipe(popen: Any, writer: int) -> Callable[..., Any]:
    return lambda *args, **options: popen(*args, **options, pass_fds=(writer,))


def test_one_without_any_time_left_is_not_started(tmp_path: Path) -> None:
    (cut,) = run(tmp_path, of("late", "print('here')", limit_s=0.0))
    assert (cut.status, cut.output) == ("cut off", "")


def test_one_may_use_what_those_before_it_left(tmp_path: Path) -> None:
    told: list[float] = []

    def command(left: float) -> list[str]:
        told.append(left)
        return [sys.executable, "-c", ""]

    run(tmp_path, of("quick", ""), Stage("next", 1.0, command, dict))
    assert told[0] > 1.0


COUNTING = """
import json, os, pathlib, signal
path = pathlib.Path({path!r})
rows = json.loads(path.read_text())["rows"] if path.exists() else 0
path.write_text(json.dumps({{"rows": rows + 1, "begun": rows < 2}}))
if rows < 2:
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [f"raise SystemExit({AGAIN})", "os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(1)"],
)
def test_one_that_keeps_what_it_did_is_started_again(end: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    program = COUNTING.format(path=str(path), end=end)
    (outcome,) = run(
        tmp_path, of("counting", program, figures=lambda: json.loads(path.read_text()))
    )
    assert outcome.status == "ok"
    assert outcome.figures["rows"] == 3


def test_one_that_crashes_and_keeps_nothing_failed(tmp_path: Path) -> None:
    (outcome,) = run(tmp_path, of("crash", "import os; os.abort()"))
    assert outcome.status == "failed"
    assert outcome.says.startswith("exit status -6")


def test_figures_that_cannot_be_read_are_a_failure(tmp_path: Path) -> None:
    (outcome,) = run(tmp_path, of("garbled", "", figures=lambda: json.loads("{")))
    assert outcome.status == "failed"
    assert outcome.says.startswith("its figures cannot be read: JSONDecodeError")


def test_what_did_not_fit_is_named(tmp_path: Path) -> None:
    cases, steps = run(
        tmp_path,
        of("kernels", "", figures=lambda: {"left_out": ["linear | R1", "moe | R1"]}),
        of("rank", "", figures=lambda: {"steps": [{"step": "decode", "left_out": "spent"}]}),
    )
    assert (cases.status, cases.says) == (
        "cut off",
        "its time was over before linear | R1, moe | R1",
    )
    assert (steps.status, steps.says) == ("cut off", "its time was over before decode")


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LOG_BYTES", 10)
    (outcome,) = run(tmp_path, of("loud", "print('x' * 100_000 + 'the end')"))
    assert outcome.output == "xxthe end\n"
