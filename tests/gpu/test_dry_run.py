"""`make gpu DRY=1`: all that a GPU machine will run, on this one, with sizes of a few values."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import OURS
from bench.gpu.wheel import ROOT

LIMIT_BYTES = 16 << 20
RATES = re.compile(r'"(us|host_us|step_us|gpu_us|p50_ms|bytes_per_s|flops_per_s|share)"')


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1200)  # 45 s on a quiet machine
def test_a_dry_run_runs_every_stage_and_measures_nothing(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(out), "--dry"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()
    assert sorted(file.name for file in out.iterdir()) == sorted(OURS)
    assert sum(file.stat().st_size for file in out.iterdir()) < LIMIT_BYTES

    run, kernels, layers, rank, engine = (
        json.loads((out / f"{name}.json").read_text())
        for name in ("run", "kernels", "layers", "rank", "engine")
    )
    assert run["dry"] is True
    assert {stage["name"]: stage["status"] for stage in run["stages"]} == dict.fromkeys(
        ("machine", "engine", "kernel tests", "kernels", "layers", "rank", "end to end"), "ok"
    )
    tests = [stage["figures"] for stage in run["stages"] if "figures" in stage]
    assert [counts["failed"] for counts in tests] == [0, 0]
    assert all(counts["passed"] > 0 for counts in tests)

    # A kernel that is new to the package, and that no case launches, is named here.
    assert kernels["without_case"] == []
    assert kernels["left_out"] == []
    rows: list[dict[str, Any]] = [*kernels["cases"], *layers["steps"], *rank["steps"]]
    rows += engine["steps"]
    assert len(rows) > 100
    assert all(row["dry"] is True and "failed" not in row for row in rows)
    for name in ("kernels", "layers", "rank", "engine"):
        assert RATES.search((out / f"{name}.json").read_text()) is None

    table = (out / "table.md").read_text()
    assert table.startswith("**Dry run**")
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert all("dry run" in row[2] and not "".join(row[3:]).strip(" |") for row in cells)
