"""One scheduling decision, from token ids to a booked placement, at 1,000 a second on one core. Build first:

cargo build --release -p headrace-bench
.venv/bin/python -m bench.router.decide --out bench/results/decision.json
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write

RUNS = {
    "64 workers": [],
    "256 workers": ["--workers", "256"],
    "32 prefill and 32 decode workers": ["--prefill", "32"],
    "64 workers, 16 tokens a block": ["--block-tokens", "16"],
    "64 workers, least-loaded": ["--policy", "least-loaded"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10, help="of each run")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    binary = ROOT / "target" / "release" / "headrace-bench"
    figures: dict[str, Any] = {}
    for name, flags in RUNS.items():
        command = [str(binary), "decide", "--seconds", str(args.seconds), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[name] = json.loads(done.stdout)
    write(args.out, {"decisions": figures})


if __name__ == "__main__":
    main()
