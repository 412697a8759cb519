"""What telling an answer apart costs the router a token: each form of tool calls and of reasoning.

    python -m bench.router.readers --out bench/results/readers.json

Runs `cargo bench -p headrace-router --bench output`, whose file says what is measured. `ns` are nanoseconds a token of
3.6 characters on average, the least of `rounds` rounds, copying the token's text into its part included. "no reader" is
that copy alone: an answer without tools and reasoning has no reader, and not even the copy is made.
"""

import argparse
import json
import subprocess
from pathlib import Path

from bench.helpers.report import ROOT, rounded, write

TARGET_NS = 1_000  # a token


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [
        "cargo",
        "bench",
        "--locked",
        "--quiet",
        "-p",
        "headrace-router",
        "--bench",
        "output",
    ]
    done = subprocess.run(
        [*command, "--", str(args.rounds)], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    cases = json.loads(done.stdout.splitlines()[-1])
    slowest = max(value for case in cases for value in case.values() if isinstance(value, float))
    write(
        args.out,
        {
            "rounds": args.rounds,
            "target_ns": TARGET_NS,
            "slowest_ns": rounded(slowest),
            "cases": rounded(cases),
        },
    )


if __name__ == "__main__":
    main()
