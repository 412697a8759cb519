"""Instructions of a placement among many workers, by callgrind, whatever else the machine does. Build first:

cargo build --release -p headrace-bench
.venv/bin/python -m bench.router.scale --out bench/results/scale.json

Each case runs in two lengths, and the difference is divided by how many decisions more the second one makes. Time is
that of `decide --own-clock`, 1,000 decisions a second. `--before` is a program of another commit to compare with.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from bench.helpers.report import ROOT, write

FRAMES = "20 step frames a second from each worker"
# Workers, how many of them only compute prompts, step frames a second of each, and the two lengths.
CASES: dict[str, dict[str, tuple[int, int, int, tuple[int, int]]]] = {
    "no step frames": {
        f"{workers} workers": (workers, 0, 0, (700, 1_000)) for workers in (8, 64, 256, 1_000)
    },
    FRAMES: {
        f"{workers} workers": (workers, 0, 20, (700, 1_000)) for workers in (8, 64, 256, 1_000)
    },
    f"prefill and decode workers, {FRAMES}": {
        f"{prefill} prefill, {workers - prefill} decode": (workers, prefill, 20, (300, 400))
        for workers, prefill in ((250, 50), (1_000, 200))
    },
}


def counted(program: Path, workers: int, prefill: int, steps: int, decisions: int) -> int:
    """Instructions of a run."""
    with tempfile.TemporaryDirectory(prefix="headrace-scale-") as folder:
        command = [
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counts"),
            *(str(program), "decide", "--own-clock", "--blocks", "200", "--tokens", "256"),
            *("--workers", str(workers), "--prefill", str(prefill), "--steps", str(steps)),
            *("--decisions", str(decisions)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def each(program: Path, case: tuple[int, int, int, tuple[int, int]]) -> int:
    """Instructions of one decision more."""
    workers, prefill, steps, (few, many) = case
    more = counted(program, workers, prefill, steps, many)
    return (more - counted(program, workers, prefill, steps, few)) // (many - few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    release = ROOT / "target" / "release" / "headrace-bench"
    parser.add_argument("--bin", type=Path, default=release, help="default: %(default)s")
    parser.add_argument("--before", type=Path, help="the same program of another commit")
    parser.add_argument("--build", default="release", help="how both were built, for the result")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    programs = (
        {"after": args.bin} if args.before is None else {"before": args.before, "after": args.bin}
    )
    figures = {
        group: {
            name: {which: each(program, case) for which, program in programs.items()}
            for name, case in cases.items()
        }
        for group, cases in CASES.items()
    }
    write(args.out, {"build": args.build, "instructions_per_decision": figures})


if __name__ == "__main__":
    main()
