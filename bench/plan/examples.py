"""The plans that docs/plan.md shows: one trace at several limits and on several GPUs.

python -m bench.plan.examples [--out FILE] [--picture FILE.png]     prints the table; writes the plans as JSON

Nothing is measured: the result depends on the code, its tables and the trace alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, rounded
from headrace.cli import plan_picture
from headrace.cli.plan import as_json, make_report
from headrace.settings.plan import PlanSettings

TRACE = ROOT / "bench/traces/mooncake_conversation_0-40min.jsonl.gz"
SPEED = 1.0
TTFT_S = 60.0
HIT_RATE = 0.22  # of `kv` routing on this trace: token_hit_rate in routing_conversation.json
# Dollars for an hour of one GPU: round figures of 2026, for comparing plans, not an offer of anybody's.
PRICES = {"h100": 2.0, "h200": 2.5, "b200": 4.0, "gb200": 4.5, "gb300": 5.5}
QUESTIONS = [
    *(("h200", tpot) for tpot in (0.08, 0.04, 0.02, 0.015, 0.014)),
    *((gpu, 0.02) for gpu in ("h100", "b200", "gb200", "gb300")),
]
PICTURED = ("h200", 0.015)


def settings(gpu: str, tpot_s: float) -> PlanSettings:
    return PlanSettings(
        trace=TRACE,
        gpu=gpu,
        limits=(TTFT_S, tpot_s),
        price=PRICES[gpu],
        speed=SPEED,
        hit_rate=HIT_RATE,
    )


def result() -> dict[str, Any]:
    return {
        "command": "python -m bench.plan.examples --out bench/results/plan_examples.json "
        "--picture bench/results/plan_examples.png",
        "plans": [rounded(as_json(make_report(settings(*asked)))) for asked in QUESTIONS],
    }


def table(plans: list[dict[str, Any]]) -> str:
    lines = [
        "| GPU, $ an hour | tpot | GPUs | prefill | decode | drafts | $ a million in | $ a million out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in plans:
        plan, quick, slow = found["plan"], found["if_quick"], found["if_slow"]
        ends = f"{quick['gpus']} to {'more' if slow is None else slow['gpus']}"
        prefill, decode, price = plan["prefill"], plan["decode"], plan["dollars_per_million"]
        lines.append(
            f"| {found['gpu'].upper()}, {found['dollars_per_gpu_hour']:g} | "
            f"{1e3 * found['limits']['tpot_s']:g} ms | {plan['gpus']} ({ends}) | "
            f"{prefill['groups']} x EP{prefill['ep']} | {decode['groups']} x EP{decode['ep']} | "
            f"{decode['mtp']} | {price['input']:.3g} | {price['output']:.3g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the plans")
    parser.add_argument("--picture", type=Path, help="file for a picture of one of them")
    args = parser.parse_args()
    found = result()
    print(table(found["plans"]))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.picture is not None:
        plan_picture.draw(make_report(settings(*PICTURED)), args.picture)


if __name__ == "__main__":
    main()
