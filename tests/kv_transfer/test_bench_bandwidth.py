"""The bandwidth experiment runs, both of its processes, and compares every way at its smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.transfer.bandwidth", *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "pyworkers")},
    )


def test_every_way_moves_the_smallest_size(tmp_path: Path) -> None:
    out = tmp_path / "transfer.json"
    done = run("--mib", "1", "--rounds", "1", "--out", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert [(case["mib"], case["block_kib"]) for case in figures["cases"]] == [(1, 64), (1, 1024)]
    for case in figures["cases"]:
        speeds = {way["way"]: way["gb_per_s"] for way in case["ways"]}
        assert {"memcpy", "socket", "shm", "tcp"} <= speeds.keys()
        assert all(speed > 0 for speed in speeds.values())
    assert {way["way"] for way in figures["one_block_of_64_kib"]} >= {"socket", "shm", "tcp"}


def test_a_size_that_is_not_measured_is_refused() -> None:
    done = run("--mib", "2")
    assert done.returncode == 2
    assert "invalid choice: 2" in done.stderr
