"""What a worker tells of requests and of ten seconds: which lines, how many, and that nothing stays behind."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Load, Output, Sampling, Submit
from headrace.wire.output_columns import Outputs
from headrace.worker.log.request_log import LineRate, WorkerLog

SUBMIT = Submit(1, b"\0" * 12, Sampling(), [], 4, request_id="req-1")


def worker_log(lines_per_s: int = 10) -> WorkerLog:
    return WorkerLog(worker="w-0", model="m", blocks=200, lines_per_s=lines_per_s)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def ended(key: Key, **changes: Any) -> EndedSequence:
    figures: dict[str, Any] = {
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 5,
        "finish": "stop",
    }
    figures |= changes
    return EndedSequence(key=key, **figures)


def test_a_request_that_finished_is_a_line_with_its_times(caplog: pytest.LogCaptureFixture) -> None:
    log, key = worker_log(), Key(0, 8)
    log.admitted(key, SUBMIT, "router-a", 100.0)
    log.stepped(StepResult(begun=[key]), 100.25)
    log.stepped(StepResult(ended=[ended(key)]), 100.65)
    [(message, fields)] = told(caplog)
    assert message == "request finished"
    assert fields == {
        "request": "req-1",
        "model": "m",
        "finish": "stop",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 5,
        "ttft_ms": 250.0,
        "tpot_ms": 100.0,
        "total_ms": 650.0,
        "worker": "w-0",
        "leg": 8,
        "router": "router-a",
    }


def test_requests_that_fail_are_refused_or_cancelled_are_told_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = worker_log()
    log.refused(SUBMIT, "r", "queue_full", "too many wait", 5.0)
    log.admitted(Key(0, 2), SUBMIT, "r", 5.0)
    log.stepped(StepResult(ended=[ended(Key(0, 2), finish=None, error="engine", why="no")]), 5.5)
    log.admitted(Key(0, 3), SUBMIT, "r", 5.0)
    log.cancelled(Key(0, 3), 6.0)
    log.cancelled(Key(0, 3), 6.0)  # it is over
    log.cancelled(Key(9, 9), 6.0)  # nobody knows it
    refused, failed, cancelled = told(caplog)
    assert {fields["request"] for _, fields in told(caplog)} == {"req-1"}
    assert refused[0] == failed[0] == "request failed"
    assert (refused[1]["error"], refused[1]["why"], refused[1]["prompt_tokens"]) == (
        "queue_full",
        "too many wait",
        3,
    )
    assert (failed[1]["error"], failed[1]["why"]) == ("engine", "no")
    assert cancelled[1]["finish"] == "cancelled" and cancelled[1]["total_ms"] == 1000.0


def test_ten_seconds_are_summed_up_and_nothing_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    log, key = worker_log(0), Key(0, 1)
    log.sum_up(Load(), 100.0)
    log.sum_up(Load(), 110.0)
    assert told(caplog) == [], "idle"
    log.admitted(key, SUBMIT, "r", 111.0)
    result = StepResult(begun=[key], ended=[ended(key)])
    ids = np.arange(3, dtype=np.int64)
    one = np.ones(3, dtype=np.int64)
    result.of(0).columns = Outputs(one.astype(np.uint64), one, ids, one * 0, one * 0, {})
    result.of(0).said.append(Output(1, [5, 6], finish="stop"))
    log.stepped(result, 112.0)
    log.sum_up(Load(blocks_used=50, running=2, waiting=1), 120.0)
    [(message, fields)] = told(caplog)
    assert message == "the last 10 s"
    assert fields == {
        "requests": 1,
        "failed": 0,
        "running": 2,
        "waiting": 1,
        "output_tokens_per_s": 0.5,
        "prompt_tokens_per_s": 2.0,
        "kv_used": 0.25,
        "hit_rate": 0.8,
        "worker": "w-0",
        "lines_left_out": 1,
    }
    log.sum_up(Load(), 130.0)
    assert len(told(caplog)) == 1
    log.sum_up(Load(running=1), 140.0)
    assert len(told(caplog)) == 2, "something runs, though nothing ended"


def test_a_router_that_leaves_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    log = worker_log()
    for request in range(100):
        log.admitted(Key(0, request), SUBMIT, "r", 1.0)
        log.admitted(Key(1, request), SUBMIT, "s", 1.0)
    log.left(0, 2.0)
    log.stepped(StepResult(ended=[ended(Key(0, 5)), ended(Key(1, 5))]), 2.0)
    [(_, fields)] = told(caplog)
    assert fields["router"] == "s"


def test_a_second_has_so_many_lines_and_failures_have_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = worker_log(3)
    for request in range(50):
        log.refused(SUBMIT, "r", "queue_full", "", 7.0)
        log.admitted(Key(0, request), SUBMIT, "r", 7.0)
        log.stepped(StepResult(ended=[ended(Key(0, request))]), 7.5)
    messages = [message for message, _ in told(caplog)]
    assert (messages.count("request failed"), messages.count("request finished")) == (3, 3)
    log.refused(SUBMIT, "r", "queue_full", "", 8.0)
    assert len(told(caplog)) == 7, "the next second has room again"


def test_no_lines_are_none() -> None:
    assert not any(LineRate(0).admits(second) for second in range(5))


def test_a_request_without_an_id_has_none_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    log, key = worker_log(), Key(0, 8)
    log.admitted(key, Submit(8, b"", Sampling(), [], 4), "r", 1.0)
    log.cancelled(key, 2.0)
    [(_, fields)] = told(caplog)
    assert "request" not in fields
