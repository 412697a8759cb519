"""`python -m bench.peers --dry`: small loads on Headrace, on no router, and on nginx where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_dry_run_measures_what_is_here(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.peers", "--dry", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    peers = {"direct", "headrace", *(["nginx"] if shutil.which("nginx") else [])}
    runs = {(run["case"], run["peer"]): run["figures"] for run in result["runs"]}
    assert set(runs) == {(case, peer) for case in "ABDE" for peer in peers}
    for (case, _), figures in runs.items():
        assert figures["errors"] == 0
        assert figures["requests"] == {"A": 40, "B": 12, "D": 12, "E": 3}[case]
    for peer in peers:
        assert runs["A", peer]["events_a_token"] is None
        assert runs["B", peer]["events_a_token"] > 0
        assert runs["D", peer]["hit_rate"] > 0, "the warm-up has asked for every beginning"
        stalled = runs["E", peer]["stalled"]
        assert (stalled["streams"], stalled["begun"], stalled["whole"]) == (3, 3, 3)
    assert result["cases"].keys() == set("ABDE")
    assert "Headrace" in done.stdout
