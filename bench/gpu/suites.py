"""The project's own tests on this machine's GPU, and what their reports say."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

# Other versions of torch and triton warn of other things; what fails is what is asked here.
PYTEST = [
    *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short"),
    *("-W", "default", "-o", "junit_family=xunit2"),
]
# All kernels of a GPU: every file of the folder takes one where there is one. "slow" compiles for other GPUs.
KERNELS = [
    *("tests/kernels", "tests/engine/sampling/test_sampler.py", "--all"),
    *("--ignore=tests/kernels/native", "-m", "not slow"),
    *("-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"),
]
KERNELS_DRY = ["tests/kernels/bench/test_rooflines.py", "-n", "0"]
# Router, worker and client as processes. The worker takes a GPU where there is one.
E2E = [
    *(f"tests/e2e/test_{name}.py" for name in ("chat", "completions", "many_choices", "mtp")),
    "tests/e2e/api/test_structured_output.py",
    *("-n", "4", "--dist", "loadfile"),
]
E2E_DRY = ["tests/e2e/test_completions.py::test_penalties_change_the_answer", "-n", "0"]


def command(tests: list[str], report: Path) -> list[str]:
    return [*PYTEST, f"--junitxml={report}", *tests]


def read(report: Path) -> dict[str, Any]:
    """Counts, and the name and first line of each test that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed: list[dict[str, str]] = []
    skipped: dict[str, int] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        fault = case.find("failure")
        fault = case.find("error") if fault is None else fault
        skip = case.find("skipped")
        if fault is not None:
            counts["failed"] += 1
            lines = (fault.get("message") or fault.text or "").splitlines()
            failed.append({"test": name, "says": lines[0][:300] if lines else ""})
        elif skip is not None:
            counts["skipped"] += 1
            why = (skip.get("message") or "")[:120]
            skipped[why] = skipped.get(why, 0) + 1
        else:
            counts["passed"] += 1
    return counts | {"failures": failed[:100], "skipped_because": skipped}
