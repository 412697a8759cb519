"""A slice of `make soak` that takes seconds, and its arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from soak.__main__ import grown
from soak.churn import faults
from soak.run import WORKERS, soak
from soak.samples import Sample, gauge, trends


@pytest.mark.timeout(300)
def test_whatever_came_and_went_leaves_nothing(tmp_path: Path) -> None:
    """How many visitors come and how many samples are taken in that time is a matter of the machine."""
    soaked = soak(tmp_path, seconds=8, share=0.2, seed=3)
    assert soaked.left == {}
    assert soaked.visits > 0
    assert soaked.samples
    assert soaked.report["requests"] > 0
    assert all(sample.rss_mb > 1 and sample.tasks > 1 for sample in soaked.samples)


def test_growth_is_seen_and_peaks_are_not() -> None:
    flat = Sample(0, 100, 50, 8, 40, 20, 20, 30, 5000)
    steady = [replace(flat, at_s=float(i), rss_mb=100 + i % 3) for i in range(40)]
    steady[35] = replace(steady[35], rss_mb=400, tasks=4000)
    assert grown(trends(steady)) == []
    leak = [
        replace(sample, rss_mb=100 + sample.at_s, tasks=40 + 3 * sample.at_s) for sample in steady
    ]
    found = trends(leak)
    assert grown(found) == ["rss_mb", "tasks"]
    assert found["rss_mb"].per_hour == pytest.approx(3600)
    assert found["descriptors"].per_hour == 0


def test_gauges_are_summed_over_their_labels_and_must_be_there() -> None:
    page = '# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.5\n# TYPE b gauge\nab 7\n'
    assert gauge(page, "a") == 5.5
    assert gauge(page, "b") == 0
    with pytest.raises(KeyError):
        gauge(page, "c")


def test_faults_follow_from_the_seed_and_end_before_the_run() -> None:
    plan = faults(1, 600, WORKERS, 15)
    assert plan == faults(1, 600, WORKERS, 15) != faults(2, 600, WORKERS, 15)
    assert len(plan) > 30
    assert {fault.split(":")[0] for fault in plan} == {f"w{i}" for i in range(WORKERS)}
    assert all(float(fault.rsplit("-", 1)[1].rstrip("s")) <= 600 for fault in plan)
