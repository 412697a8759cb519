"""The table that is committed: one line of JSON a kernel, and what in it is too much."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "results" / "kernel_resources.json"

#: Bytes a thread may spill: four registers, stored and loaded once.
SPILL_BYTES = 16
#: That a block of threads can have, by compute capability.
SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024}


def too_much(rows: Iterable[Row]) -> list[str]:
    """A line for each kernel that spills, or that does not fit."""
    faults: list[str] = []
    for row in rows:
        name = f"{row['kernel']} for sm_{row['sm']} with Triton {row['triton']} {row['sizes']}"
        if max(row["spill_bytes"], row["stack_bytes"]) > SPILL_BYTES:
            spilled, stack = row["spill_bytes"], row["stack_bytes"]
            faults.append(f"{name} spills {spilled} bytes a thread, its stack has {stack}")
        if row["shared_bytes"] > SHARED_BYTES[row["sm"]]:
            faults.append(f"{name} takes {row['shared_bytes']} bytes of shared memory")
    return faults


def load() -> list[Row]:
    return json.loads(FILE.read_text()) if FILE.exists() else []


def save(rows: Iterable[Row]) -> None:
    def order(row: Row) -> Any:
        return row["kernel"], row["triton"], row["sm"], json.dumps([row["sizes"], row["types"]])

    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=order))
    FILE.write_text(f"[\n{lines}\n]\n")


def markdown(rows: Iterable[Row]) -> str:
    """The kernels with the most registers first."""
    lines = [
        "| kernel | models | types | sm | Triton | registers | spill B | shared B | threads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (-row["registers"], row["kernel"], row["sm"])):
        types = " ".join(sorted({x for x in row["types"].values() if x[0] in "bf"}))
        cells = (
            row["kernel"], ", ".join(row["models"]), types, row["sm"], row["triton"], row["registers"],
            row["spill_bytes"], row["shared_bytes"], row["threads"],
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
