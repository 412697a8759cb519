"""Compile the kernels of all cases into Triton's cache, in some processes at once: then the measurement need not.

    python -m bench.gpu.compile --processes 8 --budget-s 50

What fails here fails in the measurement, which says so; so this only says how many processes did not end well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    args = parser.parse_args()
    command = [sys.executable, "-m", "bench.kernels", "--out", os.devnull]
    command += ["--budget-s", f"{args.budget_s:.0f}", "--share"]
    started = [subprocess.Popen([*command, f"{i}/{args.processes}"]) for i in range(args.processes)]
    codes = [process.wait() for process in started]
    print(f"{sum(code != 0 for code in codes)} of {len(codes)} processes did not end well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
