"""`make bench-routing` fails loudly: it says which process ended, and what it said last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ("-m", "bench.routing.run")
TRACE = (
    '{"trace": "t", "requests": 1, "span_s": 10, "block_tokens": 16, "ideal_hit_rate": 0.1,'
    ' "speed": 1.0, "router_ms": {"worker_queue": 5000}}'
)
# Answers `trace` on standard output and writes what follows --json otherwise.
BENCH = f"""#!/bin/sh
if [ "$1" = mock ]; then echo no room here >&2; exit 4; fi
while [ $# -gt 1 ]; do [ "$1" = --json ] && out=$2; shift; done
echo '{TRACE}' > "${{out:-/dev/stdout}}"
"""
ROUTER = "#!/bin/sh\necho 'http://127.0.0.1:1 for clients, 127.0.0.1:2 for workers'\n"


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ("#!/bin/sh\necho the address is taken\nexit 3\n", ["router", "status 3", "is taken"]),
        (ROUTER + "exec sleep 60\n", ["mock", "status 4", "no room here"]),
    ],
)
def test_a_process_that_dies_is_named(router: str, why: list[str], tmp_path: Path) -> None:
    for name, script in (("headrace-router", router), ("headrace-bench", BENCH)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, *RUN, "some.jsonl", "--policies", "kv", "--bin", tmp_path, "--out", out],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "pyworkers")},
    )
    assert done.returncode == 1, done.stderr
    for part in why:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *RUN, "--policies", "kv,dice"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "pyworkers")},
    )
    assert done.returncode == 2
    assert "there is no dice" in done.stderr
