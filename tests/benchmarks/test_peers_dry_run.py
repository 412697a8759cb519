"""`python -m bench.peers --dry`: small loads on Headrace, on no router, and on nginx where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers.cases import OTHER_DESCRIPTORS

ROOT = Path(__file__).parents[2]


def dry(out: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The result and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.peers", "--dry", "--out", str(out), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_the_dry_run_measures_what_is_here(tmp_path: Path) -> None:
    result, printed = dry(tmp_path / "peers.json")
    peers = {"direct", "headrace", *(["nginx"] if shutil.which("nginx") else [])}
    runs = {(run["case"], run["peer"]): run["figures"] for run in result["runs"]}
    assert set(runs) == {(case, peer) for case in "ABDE" for peer in peers}
    for (case, _), figures in runs.items():
        assert figures["errors"] == 0
        assert figures["requests"] == {"A": 40, "B": 12, "D": 12, "E": 3}[case]
    for peer in peers:
        assert runs["A", peer]["events_a_token"] is None
        assert runs["B", peer]["events_a_token"] > 0
        assert 0 <= runs["B", peer]["late_p50_ms"] <= runs["B", peer]["late_p99_ms"]
        assert runs["E", peer]["late_p99_ms"] is None
        assert runs["D", peer]["hit_rate"] > 0, "the warm-up has asked for every beginning"
        stalled = runs["E", peer]["stalled"]
        assert (stalled["streams"], stalled["begun"], stalled["whole"]) == (3, 3, 3)
    assert result["cases"].keys() == set("ABDE")
    assert "Headrace" in printed


def test_streams_that_one_process_has_no_descriptors_for_are_shared_out(tmp_path: Path) -> None:
    few = str(OTHER_DESCRIPTORS + 2)  # of four streams a process has two
    result, _ = dry(tmp_path / "peers.json", "--descriptors", few, "--cases", "B")
    runs = {run["peer"]: run for run in result["runs"]}
    assert runs["headrace"]["note"] == "2 routers, 2 clients"
    assert runs["direct"]["note"] == "2 clients"
    for run in runs.values():
        figures = run["figures"]
        assert (figures["clients"], figures["requests"], figures["errors"]) == (2, 12, 0)
        assert figures["tokens_per_s"] > 0
        assert figures["ttft_p99_ms"] >= figures["ttft_p50_ms"] > 0
        assert figures["late_p99_ms"] >= figures["late_p50_ms"] >= 0
