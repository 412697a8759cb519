"""Published throughput of DeepSeek-R1 beside what the model of `headrace plan` makes of the same settings.

python -m bench.plan.reproduce [--out FILE]     prints the table of docs/plan.md; writes the rows as JSON

Nothing is measured: the result depends on the code and its tables alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.helpers.report import rounded
from headrace.planner.published import SOURCES, PublishedRate, error_range, published_rates

WITHIN = 0.25


def row(rate: PublishedRate) -> dict[str, Any]:
    modelled = rate.modelled()
    return {
        "name": rate.name,
        "gpu": rate.gpu,
        "phase": rate.phase,
        "published": rate.published,
        "modelled": modelled,
        "error": modelled / rate.published - 1,
        "assumed": list(rate.assumed),
        "note": rate.note,
        "source": SOURCES[rate.source],
    }


def result() -> dict[str, Any]:
    rows = [row(rate) for rate in published_rates()]
    known = [abs(one["error"]) for one in rows if not one["assumed"]]
    low, high = error_range()
    return {
        "command": "python -m bench.plan.reproduce --out bench/results/plan_published.json",
        "unit": "tokens per second and GPU; of prompts in prefill, of answers elsewhere",
        "fitted": "nothing",
        "settings_published": {
            "rows": len(known),
            "within_25_percent": sum(error <= WITHIN for error in known),
            "median_error": sorted(known)[len(known) // 2],
        },
        "published_over_modelled": {"p10": low, "p90": high},
        "rows": [rounded(one) for one in rows],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; rows whose settings are published in full come first."""
    lines = [
        "| GPU | what | published | modelled | error | not published |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(rows, key=lambda one: bool(one["assumed"])):
        note = f" ({one['note']})" if one["note"] else ""
        lines.append(
            f"| {one['gpu'].upper()} | {one['phase']}: {one['name']}{note} | {figure(one['published'])} | "
            f"{figure(one['modelled'])} | {one['error']:+.0%} | {', '.join(one['assumed'])} |"
        )
    return "\n".join(lines)


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the rows")
    args = parser.parse_args()
    found = result()
    print(table(found["rows"]))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
