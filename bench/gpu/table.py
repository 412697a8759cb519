"""One Markdown table of all that runs on a GPU: measured, or "not run on a GPU yet".

    python -m bench.gpu.table [FOLDER]        # bench/results/gpu by default; prints the table

The files of FOLDER are what `make gpu OUT=FOLDER` wrote. A row that they do not have was not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.gpu.engine_steps import DRY as DRY_ENGINE
from bench.gpu.engine_steps import FULL as FULL_ENGINE
from bench.gpu.engine_steps import case_name
from bench.gpu.slices import DRY as DRY_PLAN
from bench.gpu.slices import FULL as FULL_PLAN
from bench.gpu.slices import Plan, step_names
from bench.gpu.wheel import ROOT
from bench.kernels.measure import all_cases
from bench.kernels.shapes import DRY, FULL

NOT_RUN = "not run on a GPU yet"
DRY_RUN = "dry run: right"
COLUMNS = (
    "what",
    "shape",
    "result",
    "us",
    "GB/s",
    "TFLOP/s",
    "of ceiling",
    "torch us",
    "published us",
)
CEILINGS = {"copy": "copy", "bf16": "bf16 matmul", "fp8": "FP8 matmul", "fp32": "fp32 matmul"}
SUITES = {"kernel tests": "kernel tests", "end to end": "end to end, tiny and default model"}

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The files of a run; {} for one that is not there."""

    run: Figures = field(default_factory=dict[str, Any])
    kernels: Figures = field(default_factory=dict[str, Any])
    layers: Figures = field(default_factory=dict[str, Any])
    rank: Figures = field(default_factory=dict[str, Any])
    engine: Figures = field(default_factory=dict[str, Any])

    @property
    def dry(self) -> bool:
        return bool(self.run.get("dry"))


def read(folder: Path) -> Results:
    def part(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    return Results(
        run=part("run"),
        kernels=part("kernels"),
        layers=part("layers"),
        rank=part("rank"),
        engine=part("engine"),
    )


def render(results: Results) -> str:
    rows = [*_tests(results), *_ceilings(results), *_kernels(results), *_slices(results)]
    rows += _engine(results)
    lines = [_origin(results), "", _line(COLUMNS), _line(["---"] * 3 + ["---:"] * 6)]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    padded = [*cells, *[""] * (len(COLUMNS) - len(cells))]
    return f"| {' | '.join(cell.replace('|', '/') for cell in padded)} |"


def _origin(results: Results) -> str:
    facts: Figures = results.run.get("facts") or {}
    if results.dry:
        return (
            "**Dry run** on a CPU, in Triton's interpreter, at sizes of a few values: shows that all of it runs. "
            "Nothing here is a measurement."
        )
    gpu = facts.get("gpu")
    if not gpu:
        return f'No GPU has run this: each row says "{NOT_RUN}".'
    driver = cast("Figures", gpu.get("nvidia_smi") or {}).get("driver_version", "unknown")
    return (
        f"{gpu['name']}, driver {driver}, CUDA {gpu['cuda']}, torch {facts['torch']}, triton {facts['triton']}, "
        f"commit {facts['commit']}, `{results.run.get('command', '')}`. Times are medians by CUDA events with a cold "
        "L2; the share is that of the ceiling which bounds the case: bytes by `copy`, flops by the matmul of its type."
    )


def _number(value: Any, digits: int = 3) -> str:
    """With so many significant digits, without an exponent."""
    if value is None:
        return ""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 10**digits else f"{number:.{digits}g}"


def _tests(results: Results) -> Iterator[list[str]]:
    stages = {stage["name"]: stage for stage in results.run.get("stages", [])}
    for name, title in SUITES.items():
        stage = stages.get(name)
        counts = stage and stage.get("figures")
        if stage is None or stage["status"] == "not run":
            says = NOT_RUN
        elif not counts:
            says = f"{stage['status']}: {stage['says']}"
        else:
            says = ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
            says = f"dry run, on a CPU: {says}" if results.dry else says
            says += "" if stage["status"] == "ok" else f" ({stage['status']})"
        yield [title, "", says]


def _ceilings(results: Results) -> Iterator[list[str]]:
    rows = {row["ceiling"]: row for row in results.kernels.get("ceilings") or []}
    for name, title in CEILINGS.items():
        row: Figures = rows.get(name, {})
        yield [
            f"ceiling: {title}",
            row.get("what", ""),
            _result(row, "error"),
            _number(row.get("us")),
            _number(_scaled(row, "bytes_per_s", 1e9)),
            _number(_scaled(row, "flops_per_s", 1e12)),
        ]


def _scaled(row: Figures, name: str, unit: float) -> float | None:
    return row[name] / unit if row.get(name) else None


def _result(row: Figures, fault: str = "failed") -> str:
    if fault in row and isinstance(row[fault], str):
        return f"failed: {row[fault]}"
    if not row:
        return NOT_RUN
    if row.get("left_out"):
        return f"left out: {row['left_out']}"
    return DRY_RUN if row.get("dry") else "measured"


def _kernels(results: Results) -> Iterator[list[str]]:
    done = {row["case"]: row for row in results.kernels.get("cases", [])}
    published = _published()
    for case in all_cases(DRY if results.dry else FULL):
        row: Figures = done.get(case.name, {})
        share = row.get("share")
        known = published.get(case.published or "")
        yield [
            f"{case.wrapper}",
            f"{case.model}: {case.point}",
            _result(row),
            _number(row.get("us")),
            _number(_scaled(row, "bytes_per_s", 1e9)),
            _number(_scaled(row, "flops_per_s", 1e12)),
            f"{share:.0%} of {row['bound']}" if share else "",
            _number(row.get("torch_us")),
            _number(known["us"]) if known else "",
        ]


def _published() -> dict[str, Figures]:
    return json.loads((ROOT / "bench/kernels/published.json").read_text())["rows"]


def _slices(results: Results) -> Iterator[list[str]]:
    plan: Plan = DRY_PLAN if results.dry else FULL_PLAN
    for name, figures in (
        ("R1, some layers", results.layers),
        (f"R1, one rank of {plan.ranks}", results.rank),
    ):
        steps = {step["step"]: step for step in figures.get("steps", [])}
        layers = f", {figures['layers']} layers" if "layers" in figures else ""
        for step_name in step_names(plan):
            step: Figures = steps.get(step_name, {})
            whole = step or ({"failed": figures["failed"]} if "failed" in figures else {})
            shape = f"{step_name}{layers}"
            if "gpu_us" in step:
                shape += f"; GPU {_number(step['gpu_us'])} us, host {_number(step['host_us'])} us"
            for network in step.get("communication", []):
                how = f"{network['combine']}, {network['is']}, {network['network']}"
                shape += f"; exchange {_number(network['step_us'])} us, {how}"
            yield [name, shape, _result(whole), _number(step.get("step_us"))]


def _engine(results: Results) -> Iterator[list[str]]:
    plan = DRY_ENGINE if results.dry else FULL_ENGINE
    steps = {step["step"]: step for step in results.engine.get("steps", [])}
    for sequences, drawn in plan.cases:
        name = case_name(sequences, drawn=drawn)
        step: Figures = steps.get(name, {})
        shape = name
        if "p50_ms" in step:
            shape += f"; mean {_number(step['mean_ms'])} ms, p90 {_number(step['p90_ms'])} ms"
            shape += f", CPU {_number(step['cpu_p50_ms'])} ms, {step['recorded']} of {step['steps']} recorded"
        us = 1e3 * step["p50_ms"] if "p50_ms" in step else None
        yield ["default model's shape, engine", shape, _result(step), _number(us)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "bench/results/gpu")
    sys.stdout.write(render(read(parser.parse_args().folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
