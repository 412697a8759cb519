"""One Triton's share of the table: a process of its own, as Triton must not interpret there.

    python -m compile_table.measure KNOWN.json ...

Prints JSON: a row for each kernel, kernels that no model launches, and those that steps of other sizes launch anew; in
a server that is a pause of seconds. Kernels that the files know are not compiled again.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

import headrace_kernels
from compile_table.launches import Launch, launches, source
from compile_table.resources import Resources, all_compiled
from compile_table.shapes import FIRST_STEP, MODELS, OTHER_STEPS

TARGETS = (90, 100)  # compute capabilities, times ten


def all_kernels() -> dict[str, Any]:
    """The kernels of the package by name; what they call is not named so."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(headrace_kernels.__path__, "headrace_kernels."):
        members = vars(importlib.import_module(module.name))
        found |= {name: x for name, x in members.items() if isinstance(x, JITFunction)}
    return {name: x for name, x in found.items() if name.endswith("_kernel")}


def known_resources(files: list[Path]) -> dict[str, Resources]:
    """By key, of every file that exists."""
    names = Resources.__dataclass_fields__
    return {
        row["key"]: Resources(**{name: row[name] for name in names})
        for file in files
        if file.exists()
        for row in json.loads(file.read_text())
    }


def row(launch: Launch, models: list[str], resources: Resources) -> dict[str, Any]:
    return {
        "kernel": launch.name,
        "sm": launch.sm,
        "triton": triton.__version__,
        "models": models,
        "types": launch.types,
        "sizes": launch.sizes,
        **asdict(resources),
        "source": source(launch.kernel),
        "key": launch.key,
    }


def measured(found: dict[str, Launch], known: dict[str, Resources]) -> dict[str, Resources]:
    """Of each launch by its key."""
    todo = [launch for key, launch in found.items() if key not in known]
    return known | dict(zip((launch.key for launch in todo), all_compiled(todo), strict=True))


def main() -> None:
    known = known_resources([Path(name) for name in sys.argv[1:]])
    found: dict[str, Launch] = {}
    users: dict[str, list[str]] = {}
    again: set[str] = set()
    for sm in TARGETS:
        for model, step in MODELS.items():
            first = launches(lambda step=step: step(*FIRST_STEP), sm)
            found |= first
            for key in first:
                users.setdefault(key, []).append(model)
            for other in OTHER_STEPS:
                more = launches(lambda step=step, other=other: step(*other), sm)
                again |= {f"{model}: {more[key].name}" for key in more.keys() - first.keys()}
    resources = measured(found, known)
    missing = all_kernels().keys() - {launch.name for launch in found.values()}
    rows = [row(launch, users[key], resources[key]) for key, launch in found.items()]
    compiled = len(found.keys() - known.keys())
    print(
        json.dumps(
            {"rows": rows, "missing": sorted(missing), "again": sorted(again), "compiled": compiled}
        )
    )


if __name__ == "__main__":
    main()
