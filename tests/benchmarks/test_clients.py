"""Clients that run at the same time, and what their reports say together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.helpers.clients import LoadFailedError, merged, reports


def report(**fields: Any) -> dict[str, Any]:
    return {
        "requests": 12,
        "errors": 2,
        "errors_by_kind": {"503": 2},
        "requests_per_s": 5.0,
        "tokens_per_s": 40.0,
        "wall_s": 2.0,
        "chunks": 40,
        "prompt_tokens": 100,
        "completion_tokens": 80,
        "cached_tokens": 25,
        "token_hit_rate": 0.25,
        "cpu_s": [0.5, 1.0],
        "client_cpu_s": 0.4,
        "client_cpu_share": 0.2,
        "ttft_ms": {"p50": 1.0, "p99": 9.0},
        "itl_ms": {"p50": 3.0, "p99": 4.0},
    } | fields


def nothing(**fields: Any) -> dict[str, Any]:
    """Of a client that got no answer, before the others were done."""
    none = {"chunks": 0, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": None}
    rates = {"requests_per_s": 0.0, "tokens_per_s": 0.0, "token_hit_rate": None, "wall_s": 0.1}
    quantiles = {"ttft_ms": None, "itl_ms": None}
    failed = {"requests": 3, "errors": 3, "errors_by_kind": {"503": 1, "connect": 2}}
    return report(**none, **rates, **quantiles, **failed, cpu_s=[0.0, 0.1]) | fields


def test_one_report_is_what_it_was() -> None:
    assert merged([report()]) == report()


def test_counts_add_up_and_rates_are_over_the_longest_run() -> None:
    counts = {"requests": 10, "errors": 0, "chunks": 60, "completion_tokens": 120}
    other = report(**counts, errors_by_kind={}, wall_s=4.0, client_cpu_s=1.2)
    found = merged([report(), other])
    assert (found["requests"], found["errors"], found["chunks"]) == (22, 2, 100)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (200, 200)
    assert found["wall_s"] == 4.0
    assert found["requests_per_s"] == 20 / 4.0
    assert found["tokens_per_s"] == 200 / 4.0
    assert found["client_cpu_s"] == pytest.approx(1.6)
    assert found["client_cpu_share"] == pytest.approx(1.6 / 4.0)


def test_processes_that_all_clients_watch_are_not_counted_twice() -> None:
    found = merged([report(), report(cpu_s=[0.7, 0.9])])
    assert found["cpu_s"] == [0.7, 1.0]


def test_errors_add_up_by_kind() -> None:
    found = merged([report(), nothing()])
    assert found["errors"] == 5
    assert found["errors_by_kind"] == {"503": 3, "connect": 2}


def test_a_quantile_is_the_greatest_of_those_there_are() -> None:
    other = report(ttft_ms={"p50": 2.0, "p99": 5.0}, itl_ms=None)
    found = merged([nothing(), report(), other])
    assert found["ttft_ms"] == {"p50": 2.0, "p99": 9.0}
    assert found["itl_ms"] == {"p50": 3.0, "p99": 4.0}
    assert merged([nothing(), nothing()])["ttft_ms"] is None


def test_hits_are_of_the_tokens_of_all_prompts() -> None:
    found = merged([report(), report(prompt_tokens=300, cached_tokens=0)])
    assert (found["cached_tokens"], found["token_hit_rate"]) == (25, 25 / 400)
    unknown = merged([report(), nothing()])
    assert (unknown["cached_tokens"], unknown["token_hit_rate"]) == (25, 0.25)
    none = merged([nothing(), nothing()])
    assert (none["cached_tokens"], none["token_hit_rate"]) == (None, None)


def test_a_client_whose_cpu_time_is_not_known_adds_none() -> None:
    found = merged([report(), report(client_cpu_s=None, client_cpu_share=None)])
    assert (found["client_cpu_s"], found["client_cpu_share"]) == (0.4, 0.2)
    nobody = merged([report(client_cpu_s=None), report(client_cpu_s=None)])
    assert (nobody["client_cpu_s"], nobody["client_cpu_share"]) == (None, None)


def client(out: str, status: int = 0, before: str = "") -> list[str]:
    """The command of a client that says so much, fails or not, and has something to do before."""
    program = f"import sys; {before}\nprint({out!r}); print('because', file=sys.stderr); sys.exit({status})"
    return [sys.executable, "-c", program]


def meet(mine: Path, other: Path) -> str:
    """Waits for another client to run."""
    wait = f"while not os.path.exists({str(other)!r}): time.sleep(0.01)"
    return f"import os, time; open({str(mine)!r}, 'w')\n{wait}"


def test_clients_run_at_the_same_time(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    commands = [client("[1]", before=meet(one, two)), client("[2]", before=meet(two, one))]
    assert reports(commands, limit_s=60.0) == [[1], [2]]


def test_a_client_without_answers_has_its_report_beside_others() -> None:
    assert reports([client("[1]", status=1), client("[2]")], limit_s=60.0) == [[1], [2]]


@pytest.mark.parametrize(
    "commands",
    [
        [client("[1]", status=1)],
        [client("[1]", status=1), client("[2]", status=1)],
        [client("[1]"), [sys.executable, "-c", "import sys; sys.exit('because')"]],
    ],
    ids=["one without answers", "all without answers", "one without a report"],
)
def test_a_load_without_answers_or_a_report_fails(commands: list[list[str]]) -> None:
    with pytest.raises(LoadFailedError, match="because"):
        reports(commands, limit_s=60.0)


def test_no_client_outlives_the_time() -> None:
    slow = client("[1]", before="import time; time.sleep(60)")
    before = psutil.Process().children()
    with pytest.raises(subprocess.TimeoutExpired):
        reports([slow, slow], limit_s=0.2)
    assert psutil.Process().children() == before
