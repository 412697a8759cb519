"""`headrace bench`, `headrace mock` and `headrace sim` are the programs of the bench crate, flags and all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import plot
from headrace.exit_status import EXIT_USAGE

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
    )


def test_help_names_the_command_as_it_was_typed() -> None:
    done = headrace("bench", "load", "--help")
    assert done.returncode == 0
    assert "Usage: headrace bench load" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_each_is_in_the_list_of_commands() -> None:
    done = headrace("--help")
    for command in ("bench", "mock", "sim"):
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["bench", "juggle"], 2, "unrecognized subcommand 'juggle'"),
        (["bench", "load", "--no-such-flag"], 2, "--no-such-flag"),
        (
            ["bench", "load", "--target", "127.0.0.1:1", "--start-timeout-s", "0"],
            1,
            "headrace bench load: 127.0.0.1:1 is not ready: nobody listens there",
        ),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], status: int, why: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == status
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_row_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": [1]}')
    done = headrace("bench", "replay", str(trace), "--target", "127.0.0.1:1")
    assert done.returncode == 2
    assert f'{trace}:1: `input_length` is "x"' in done.stderr


def test_compare_says_what_got_worse(tmp_path: Path) -> None:
    for name, mean in (("a", 100.0), ("b", 150.0)):
        (tmp_path / name).write_text(json.dumps(report("kv", mean)))
    done = headrace("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.returncode == 0
    assert "1.500  WORSE" in done.stdout
    checked = headrace("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--check")
    assert checked.returncode == 1


def report(policy: str | None, mean: float, rate: float = 2.0) -> dict[str, Any]:
    return {
        "trace": "a trace",
        "policy": policy,
        "mode": "sim",
        "requests": 3,
        "errors": 0,
        "offered_per_s": rate,
        "ttft_ms": {"mean": mean},
        "token_hit_rate": 0.5,
        "bound_hit_rate": 0.6,
        "goodput": {"slo": {"ttft_ms": 1000.0}, "per_s": rate / 2},
        "ttft_curve_ms": [mean / 2, mean, 2 * mean],
        "hit_rate_over_time": [{"from_s": 0.0, "cached_tokens": 1, "prompt_tokens": 2}],
    }


def test_plots_are_one_file_each_or_one_for_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "reports.json"
    file.write_text(json.dumps([report("kv", 100.0), report("round-robin", 900.0)]))
    assert plot.run([str(file), "--out", str(tmp_path / "pictures")]) == 0
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["a-trace-sim.hits.png", "a-trace-sim.ttft.png"]
    assert plot.run([str(file), "--out", str(tmp_path / "all.png")]) == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_several_loads_of_a_policy_make_curves_over_the_load(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = [report(policy, 100.0 * rate, rate) for policy in ("kv", "b") for rate in (1.0, 2.0)]
    names = [picture.name for picture in plot.draw(sweep, tmp_path)]
    assert names == ["a-trace-sim.goodput.png", "a-trace-sim.ttft-load.png"]


@pytest.mark.parametrize("content", ["{", "[3]", '{"x": 1}', '{"requests": 1}'])
def test_what_is_no_report_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bad.json"
    file.write_text(content)
    assert plot.run([str(file), "--out", str(tmp_path)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("headrace bench plot: ")


def painted(file: Path) -> dict[str, Any]:
    """The pictures of a file, as axes that can be asked, by the end of their names."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    [group] = plot._groups(plot.read(file))
    pictures: dict[str, Any] = {}
    for name, paint in plot._panels(group):
        axes = Figure().add_subplot()
        paint(axes)
        pictures[name.rpartition(".")[2]] = axes
    return pictures


def test_a_lone_run_has_its_name_in_the_title_and_no_legend(tmp_path: Path) -> None:
    file = tmp_path / "monday.json"
    lone = {"trace": None, "mode": None, "tpot_curve_ms": [2.0, 2.5]}
    file.write_text(json.dumps(report(None, 100.0) | lone))
    pictures = painted(file)
    assert pictures.keys() == {"ttft", "tpot", "hits"}
    titles = {name: axes.get_title() for name, axes in pictures.items()}
    assert titles == {
        "ttft": "Time to first token · monday · 3 requests",
        "tpot": "Time per token · monday · 3 requests",
        "hits": "Prompt tokens found in caches · monday · 3 requests",
    }
    for axes in pictures.values():
        assert axes.get_xlabel() and axes.get_ylabel()
        assert axes.get_legend() is None


def test_a_lone_run_shows_the_quantiles_of_its_report_on_plain_axes(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    quantiles = {"ttft_ms": {"mean": 100.0, "p50": 90.0, "p99": 1234.5}}
    file.write_text(json.dumps(report("kv", 100.0) | quantiles))
    axes = painted(file)["ttft"]
    assert [text.get_text() for text in axes.texts] == ["p50 90 ms", "p99 1,234 ms"]
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert "100" in labels and not any("$" in label for label in labels)
    file.write_text(json.dumps([report("kv", 100.0) | quantiles, report("b", 100.0)]))
    assert not painted(file)["ttft"].texts, "runs that are compared have a legend instead"


def test_a_lone_run_that_found_nothing_in_caches_has_no_picture_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    cold = {
        "cached_tokens": 0,
        "hit_rate_over_time": [{"from_s": 0.0, "cached_tokens": 0, "prompt_tokens": 2}],
    }
    file.write_text(json.dumps(report("kv", 100.0) | cold))
    assert painted(file).keys() == {"ttft"}
    file.write_text(json.dumps([report("kv", 100.0) | cold, report("b", 100.0)]))
    assert painted(file).keys() == {"ttft", "hits"}


def test_a_lone_point_is_a_point_and_more_are_a_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report("kv", 100.0)))
    pictures = painted(file)
    [one] = [line for line in pictures["hits"].get_lines() if line.get_label() == "kv"]
    assert (one.get_linestyle(), one.get_marker()) == ("None", "o")
    [curve] = pictures["ttft"].get_lines()
    assert curve.get_linestyle() == "-"
    assert len(curve.get_xdata()) == 3


def test_runs_without_a_name_are_called_after_their_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps([report(None, 100.0, rate) for rate in (1.0, 2.0)]))
    legend = painted(file)["ttft-load"].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["sweep"]


def test_nothing_is_drawn_of_what_a_run_did_not_measure(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report("kv", 100.0) | {"hit_rate_over_time": []}))
    assert painted(file).keys() == {"ttft"}
