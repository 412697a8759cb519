"""Take from measured kernel latencies what `headrace plan` needs, and write the table that it reads.

python -m bench.presets.latencies FOLDER     FOLDER has the tables of aiconfigurator named in derive.py's TABLES
writes pyworkers/headrace/planner/data/latencies.csv.gz, one row for each point, times in microseconds.

Kept: attention of DeepSeek-V3 with all 128 heads on each GPU (data parallel), and experts with a rebalanced load.
An expert row's `x` is the number of experts on the rank, its `y` the token-expert rows on the measured rank: the table
counts distinct tokens there, and a token that reaches a rank brings `8 / P / (1 - (1 - 1/P) ** 8)` rows on average.
"""

import csv
import gzip
import io
import sys
from pathlib import Path

from bench.presets.derive import TABLES, Rows, pick, read

OUT = Path(__file__).parents[2] / "pyworkers/headrace/planner/data/latencies.csv.gz"
COLUMNS = ["table", "system", "weights", "kv", "x", "y", "us"]
TOP_K = 8
SYSTEMS = {"h200_sxm": ["fp8_block"], "b200_sxm": ["fp8_block", "nvfp4"]} | {
    name: ["fp8_block", "nvfp4"] for name in ("gb200", "gb300")
}
EXPERT_WEIGHTS = {"h200_sxm": "fp8_block", "b200_sxm": "nvfp4", "gb200": "nvfp4", "gb300": "nvfp4"}
DISTRIBUTION = "power_law_1.01_eplb"

Point = tuple[str, str, str, str, float, float, float]


def attention(rows: Rows, table: str, length: str) -> list[Point]:
    """`x` sequences, `y` tokens: of each prompt in `prefill`, of each context in `decode`."""
    found: list[Point] = []
    for system, weights in SYSTEMS.items():
        for gemm in weights:
            for row in pick(rows, system=system, gemm_type=gemm, num_heads="128"):
                kv = row["kv_cache_dtype"]
                x, y, ms = (float(row[name]) for name in ("batch_size", length, "latency"))
                found.append((table, system, gemm, kv, x, y, ms * 1e3))
    return found


def experts(rows: Rows) -> list[Point]:
    found: list[Point] = []
    for system, weights in EXPERT_WEIGHTS.items():
        chosen = pick(rows, system=system, moe_dtype=weights, distribution=DISTRIBUTION)
        for row in chosen:
            ranks, slots = int(row["moe_ep_size"]), int(row["num_slots"])
            reached = 1 - (1 - 1 / ranks) ** TOP_K
            here = float(row["rank0_num_tokens"]) * TOP_K / ranks / reached
            us = float(row["latency"]) * 1e3
            found.append(("experts", system, weights, "", slots / ranks, here, us))
    return found


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    tables = {name: read(Path(sys.argv[1]), name) for name in TABLES}
    points = attention(tables["context"], "prefill", "isl")
    points += attention(tables["generation"], "decode", "step")
    points += experts(tables["experts"])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for *names, x, y, us in sorted(points):
        writer.writerow([*names, f"{x:g}", f"{y:.6g}", f"{us:.4g}"])
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    print(f"{OUT}: {len(points)} points, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
