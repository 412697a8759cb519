"""What a streamed chat without tools costs the router a token, before and after it learned to read answers.

    git archive 5c1553a^ | tar x -C OLD && (cd OLD && cargo build --release -p headrace-router -p headrace-bench)
    cargo build --release -p headrace-router -p headrace-bench
    python -m bench.router.plain_text --old OLD/target/release --out bench/results/plain_text.json

Instructions of a whole router under callgrind, which other programs on the machine do not change: those of streams of
many tokens less those of as many streams of few, over the tokens between. Each commit has its own mock worker. The two
take turns. `one by one` is a token a step of 20 ms, each its own event; `together` is tokens as fast as they go.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write
from bench.router.overhead import load, stack
from bench.router.tokens import CALLGRIND, counted
from headrace.models.load.source import resolve

STREAMS = 4
STEP_MS = {"one by one": 20.0, "together": 0.0}
FEW, MANY = 50, 450  # tokens of a stream


def of_token(bin_dir: Path, doc: Path, folder: Path, step_ms: float) -> int:
    counts: list[int] = []
    for tokens in (FEW, MANY):
        run = folder / str(tokens)
        run.mkdir()
        with stack(bin_dir, doc, 1, step_ms, run, CALLGRIND) as router:
            streams = str(STREAMS)
            same = ["--seed", "1", "--chat", "--prompt-words", "32"]
            load(bin_dir, router, "-n", streams, "-c", streams, "--max-tokens", str(tokens), *same)
        counts.append(counted((run / "router.log").read_text()))
    return (counts[1] - counts[0]) // (STREAMS * (MANY - FEW))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="folder of its two programs")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    programs = {"before": args.old, "after": args.bin}
    found: dict[str, Any] = {case: {name: list[int]() for name in programs} for case in STEP_MS}
    with tempfile.TemporaryDirectory() as folder:
        doc = Path(folder) / "doc.json"
        doc.write_bytes(resolve(None).doc())
        for turn in range(args.rounds):
            for case, step_ms in STEP_MS.items():
                for name, bin_dir in programs.items():
                    run = Path(folder) / f"{turn} {case} {name}"
                    run.mkdir()
                    found[case][name].append(of_token(bin_dir, doc, run, step_ms))
    write(args.out, {"streams": STREAMS, "tokens": [FEW, MANY], "instructions_a_token": found})


if __name__ == "__main__":
    main()
