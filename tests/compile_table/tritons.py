"""The Tritons that are here, and what each one makes of the kernels."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from compile_table.table import FILE, ROOT, Row

#: Where `make compile-table` installs the oldest Triton that Headrace runs with, apart from the virtual environment.
OLDEST = ROOT / "target" / "triton-3.6"
#: Figures of kernels that the committed table does not have.
CACHE = ROOT / "target" / "kernel-resources"


@dataclass(frozen=True, slots=True)
class Found:
    """What one Triton makes of the kernels."""

    rows: list[Row]
    missing: list[str]  # kernels that no model launches
    again: list[str]  # kernels that steps of other sizes compile anew
    compiled: int  # kernels that neither table nor cache knew


def run(module: str, arguments: list[str], triton: Path | None = None) -> str:
    """Standard output of a module of this package, in a process that compiles; `triton` is where that lies."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("TRITON_")}
    paths = [*([str(triton)] if triton else []), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def measured(triton: Path | None = None) -> Found:
    """With the virtual environment's Triton, or that at `triton`. Compiles only what is not known.

    The cache keeps what this run needed and the table does not have, so that it cannot grow.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    cache = CACHE / f"{triton.name if triton else 'environment'}.json"
    with cache.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        found = Found(
            **json.loads(run("compile_table.measure", [str(FILE), str(cache)], triton=triton))
        )
        known = {row["key"] for row in json.loads(FILE.read_text())} if FILE.exists() else set()
        fresh = cache.with_suffix(".new")
        fresh.write_text(json.dumps([row for row in found.rows if row["key"] not in known]))
        fresh.replace(cache)
    return found
