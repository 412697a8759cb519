"""What steps cost is timed once for a model and a device, kept in the user's cache, and told to routers.

Whatever is wrong with the cache, a worker serves: it times its steps again, and says why in its log.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headrace.models
from headrace.engine.timed_steps import time_steps
from headrace.settings.worker import WorkerSettings
from headrace.wire.frames import StepCost
from headrace.worker.load_model import load
from headrace.worker.step_prior import MOST_REMEMBERED, StepPriors, device_name, known_or_timed
from helpers.engine.toy import ToyModel
from helpers.models.tiny_model import tiny_llama

OF: dict[str, Any] = {"weights": "a", "device": "cpu", "threads": 2}
COST = StepCost(4.5, 0.25, 0.0, 0.0, 0.0)
OTHER = StepCost(9.0, 0.5, 1e-6, 0.125, 2e-5)


class Clock:
    """Steps as a model would time them; counts how often."""

    def __init__(self, cost: StepCost | None = COST) -> None:
        self.cost = cost
        self.timed = 0

    def __call__(self) -> StepCost | None:
        self.timed += 1
        return self.cost


def kept_files(root: Path) -> list[Path]:
    return sorted((root / "steps").glob("*"))


def test_the_first_start_times_steps_and_the_next_ones_remember(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(3):
        assert known_or_timed(OF, clock, priors=StepPriors(tmp_path)) == COST
    assert clock.timed == 1
    [file] = kept_files(tmp_path)
    assert json.loads(file.read_text())["of"] == OF  # a person can see what it is about


@pytest.mark.parametrize("changed", [{"weights": "b"}, {"device": "gpu"}, {"threads": 1}])
def test_another_model_or_device_is_timed_by_itself(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    priors = StepPriors(tmp_path)
    assert known_or_timed(OF, Clock(), priors=priors) == COST
    assert known_or_timed(OF | changed, Clock(OTHER), priors=priors) == OTHER
    assert priors.recall(OF) == COST
    assert priors.recall(OF | changed) == OTHER


def test_the_order_of_what_it_is_about_makes_no_difference(tmp_path: Path) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, COST)
    assert priors.recall(dict(reversed(OF.items()))) == COST


NO_COSTS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"cost": null}',
    b'{"cost": []}',
    b'{"cost": {"fixed_ms": 1}}',
    b'{"cost": {"fixed_ms": [], "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": "many", "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": NaN, "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": 1e400, "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": -1, "prefill_ms": 2, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": 1e7, "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b'{"cost": {"fixed_ms": 0, "prefill_ms": 0, "context_ms": 0, "row_ms": 0, "kv_ms": 0}}',
    b"\xff\xfe\x00",
    b"[" * 10_000,
    b" " * (1 << 20),
]


@pytest.mark.parametrize("content", NO_COSTS, ids=range(len(NO_COSTS)))
def test_a_file_that_is_no_cost_is_timed_anew_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, OTHER)
    [file] = kept_files(tmp_path)
    file.write_bytes(content)
    clock = Clock()
    with caplog.at_level(logging.WARNING):
        assert known_or_timed(OF, clock, priors=priors) == COST
    assert clock.timed == 1
    assert str(file) in caplog.text
    assert "timed again" in caplog.text
    assert priors.recall(OF) == COST


def test_what_another_program_left_at_the_place_of_a_file_is_no_reason_not_to_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, OTHER)
    [file] = kept_files(tmp_path)
    file.unlink()
    file.mkdir()
    with caplog.at_level(logging.WARNING):
        assert known_or_timed(OF, Clock(), priors=priors) == COST
    assert caplog.text.count(str(file)) == 2  # neither read nor written
    assert kept_files(tmp_path) == [file], "nothing half written is left"


def test_a_file_about_something_else_counts_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Copied by hand from another machine, say: its name is ours and its content is not."""
    priors = StepPriors(tmp_path)
    priors.keep(OF, COST)
    [own] = kept_files(tmp_path)
    priors.keep(OF | {"device": "a hundred times as fast"}, OTHER)
    [foreign] = [file for file in kept_files(tmp_path) if file != own]
    foreign.rename(own)
    with caplog.at_level(logging.WARNING):
        assert known_or_timed(OF, Clock(), priors=priors) == COST
    assert str(own) in caplog.text
    assert priors.recall(OF) == COST


def test_a_key_that_a_later_version_adds_does_not_harm(tmp_path: Path) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, COST)
    [file] = kept_files(tmp_path)
    kept = json.loads(file.read_text())
    kept["cost"]["of_tomorrow"] = 1
    file.write_text(json.dumps(kept | {"more": []}))
    assert priors.recall(OF) == COST


@contextmanager
def not_writable(folder: Path) -> Generator[None]:
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        yield
    finally:
        folder.chmod(stat.S_IRWXU)


def test_a_cache_that_cannot_be_written_is_said_and_read_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, COST)
    if os.geteuid() == 0:  # to whom no folder is read-only

        def refused(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "write_text", refused)
    with not_writable(tmp_path / "steps"), caplog.at_level(logging.WARNING):
        clock = Clock(OTHER)
        assert known_or_timed(OF, clock, priors=priors) == COST, "what is there counts"
        assert not caplog.text
        for _ in range(2):
            assert known_or_timed(OF | {"threads": 9}, clock, priors=priors) == OTHER
    assert clock.timed == 2, "each start has to time them"
    assert "Permission denied; the next start times its steps again" in caplog.text
    assert len(kept_files(tmp_path)) == 1


def test_a_file_where_the_cache_is_to_be_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "steps").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert known_or_timed(OF, Clock(), priors=StepPriors(tmp_path)) == COST
    assert "the next start times its steps again" in caplog.text


def test_of_many_the_oldest_are_forgotten(tmp_path: Path) -> None:
    priors = StepPriors(tmp_path)
    for number in range(MOST_REMEMBERED):
        priors.keep(OF | {"threads": number}, COST)
    for age, file in enumerate(kept_files(tmp_path)):
        os.utime(file, ns=(age, age))
    oldest = kept_files(tmp_path)[0]
    priors.keep(OF | {"threads": -1}, OTHER)
    assert len(kept_files(tmp_path)) == MOST_REMEMBERED
    assert not oldest.exists()
    assert priors.recall(OF | {"threads": -1}) == OTHER


@pytest.mark.parametrize(
    "cost",
    [
        None,
        StepCost(0.0, 0.0, 0.0, 0.0, 0.0),
        StepCost(math.nan, 1.0, 0.0, 0.0, 0.0),
        StepCost(math.inf, 1.0, 0.0, 0.0, 0.0),
        StepCost(-1.0, 2.0, 0.0, 0.0, 0.0),
        StepCost(1e9, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_timed_steps_that_say_nothing_are_neither_kept_nor_told(
    tmp_path: Path, cost: StepCost | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert known_or_timed(OF, Clock(cost), priors=StepPriors(tmp_path)) is None
    assert "routers learn what steps cost" in caplog.text
    assert kept_files(tmp_path) == []


def test_a_failure_of_a_timed_step_is_that_of_the_start(tmp_path: Path) -> None:
    def fails() -> StepCost:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        known_or_timed(OF, fails, priors=StepPriors(tmp_path))
    assert kept_files(tmp_path) == []


def test_ranks_time_steps_together_where_one_of_them_does_not_know(tmp_path: Path) -> None:
    priors = StepPriors(tmp_path)
    priors.keep(OF, COST)
    asked: list[bool] = []

    def nobody(known: bool) -> bool:
        asked.append(known)
        return False

    clock = Clock(OTHER)
    assert known_or_timed(OF, clock, all_know=nobody, priors=priors) == OTHER
    assert (asked, clock.timed, priors.recall(OF)) == ([True], 1, OTHER)
    # and one that does not know times with the others
    other = OF | {"threads": 7}
    assert known_or_timed(other, clock, all_know=nobody, priors=priors) == OTHER
    assert asked == [True, False]


def test_a_device_has_a_name() -> None:
    assert device_name("cpu")


SETTINGS = WorkerSettings(
    model=None,
    name="w",
    routers=("unix:/nowhere",),
    served_model_name=None,
    device="cpu",
    dtype="auto",
    kv_memory_bytes=64 * 50,
    context_tokens=100,
    block_tokens=4,
    max_sequences=4,
    max_batched_tokens=16,
    max_waiting=10,
    prefix_cache=True,
    secret=None,
    router_ca=None,
    router_tls=False,
    log_level="info",
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """For a real checkpoint whose weights are a toy's, and a cache of its own."""

    def load_toy(checkpoint: Any, *, block_tokens: int, **_: object) -> ToyModel:
        return ToyModel(vocab_size=checkpoint.config.vocab_size, block_tokens=block_tokens)

    monkeypatch.setattr(headrace.models, "load_model", load_toy)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return replace(SETTINGS, model=str(tiny_llama(tmp_path / "tiny")))


def test_hello_says_what_was_timed_and_the_next_start_says_the_same(
    settings: WorkerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = load(settings).hello.step_prior
    assert told is not None
    assert told.fixed_ms > 0
    [file] = kept_files(tmp_path / "cache")
    about = json.loads(file.read_text())["of"]
    assert about["rows"] == 16
    assert about["ranks"] == 1

    def no_time(*_: object, **__: object) -> StepCost:
        raise AssertionError("it is known")

    monkeypatch.setattr("headrace.worker.load_model.time_steps", no_time)
    assert load(settings).hello.step_prior == told


def test_hello_says_what_the_cache_says(settings: WorkerSettings, tmp_path: Path) -> None:
    load(settings)
    [file] = kept_files(tmp_path / "cache")
    kept = json.loads(file.read_text())
    kept["cost"]["fixed_ms"] = 321.0
    file.write_text(json.dumps(kept))
    told = load(settings).hello.step_prior
    assert told is not None
    assert told.fixed_ms == 321.0


def test_a_start_with_other_steps_times_them(settings: WorkerSettings, tmp_path: Path) -> None:
    for rows in (16, 8):
        load(replace(settings, max_batched_tokens=rows))
    kept = [json.loads(file.read_text())["of"]["rows"] for file in kept_files(tmp_path / "cache")]
    assert sorted(kept) == [8, 16]


def test_a_worker_whose_clock_stands_still_serves_and_says_nothing(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = partial(time_steps, clock=lambda: 1.0)
    monkeypatch.setattr("headrace.worker.load_model.time_steps", stopped)
    assert load(settings).hello.step_prior is None
