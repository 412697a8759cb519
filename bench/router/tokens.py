"""Prompts to tokens: what is written out in Rust against the crate `tokenizers`, in turns, for the default model.

The prompts are cut from the documents of this repository. CPU time of all threads, so it includes the chat template and
the way through the pool. Instructions are counted by callgrind, where it is installed: those of one prompt, and of a
whole short chat in a router with a worker without a model, each the difference of two runs. Build first:

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.tokens --out bench/results/tokens.json
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write
from bench.router.overhead import load, stack
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve

PROMPTS = {
    0: (200, 700),
    1: (2, 6),
    2: (10, 30),
    3: (4, 8),
}  # of each case, in the two runs that callgrind counts


def text_files() -> list[Path]:
    """All documents."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


CALLGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")


def counted(output: str) -> int:
    """What callgrind counted."""
    found = re.search(r"Collected : (\d+)", output)
    assert found is not None, output
    return int(found[1])


def of_prompt(command: Sequence[str | Path], case: int) -> int:
    """Instructions of one prompt."""
    counts: list[int] = []
    for prompts in PROMPTS[case]:
        only = ["--only", str(case), str(prompts)]
        done = subprocess.run(
            [*CALLGRIND, *command, *only], capture_output=True, text=True, check=True
        )
        counts.append(counted(done.stderr))
    few, many = PROMPTS[case]
    return (counts[1] - counts[0]) // (many - few)


# Flags of the load, and how many requests a run has. Their words are few; tokens are measured on real text.
REQUESTS = {
    "short chat": (["--prompt-words", "32"], 10_000),
    "8,000 words, 7,500 shared": (["--prompt-words", "500", "--shared-prefix", "7500"], 2_000),
    "100,000 words, 99,500 shared": (["--prompt-words", "500", "--shared-prefix", "99500"], 200),
}
ONE_TOKEN = ["--chat", "--unary", "--max-tokens", "1"]


def cpu_of_requests(bin_dir: Path, doc: Path, folder: Path, runs: int) -> dict[str, list[float]]:
    """CPU microseconds of a whole router for a request with an answer of one token, in each of some runs."""
    found: dict[str, list[float]] = {name: [] for name in REQUESTS}
    for turn in range(runs):
        for number, (name, (flags, requests)) in enumerate(REQUESTS.items()):
            run = folder / f"{turn}.{number}"
            run.mkdir()
            with stack(bin_dir, doc, 1, 0.0, run) as router:
                same = ["--seed", "1", *ONE_TOKEN, *flags, "-c", "2"]
                load(bin_dir, router, "-n", "20", *same)
                result = load(bin_dir, router, "-n", str(requests), "--first", "1000", *same)
                found[name].append(result["cpu_s"][0] / requests * 1e6)
    return found


def of_request(bin_dir: Path, doc: Path, folder: Path) -> int:
    """Instructions of a whole router for a chat of 32 words with an answer of one token."""
    few, many = 200, 1_000
    counts: list[int] = []
    for requests in (few, many):
        run = folder / str(requests)
        run.mkdir()
        with stack(bin_dir, doc, 1, 0.0, run, CALLGRIND) as router:
            load(bin_dir, router, "-n", str(requests), "-c", "1", *ONE_TOKEN)
        counts.append(counted((run / "router.log").read_text()))
    return (counts[1] - counts[0]) // (many - few)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--tokenizer", type=Path, help="by default the default model's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3, help="of a whole router")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer: Path | None = args.tokenizer
    if tokenizer is None:
        tokenizer = ensure_default_model() / "tokenizer.json"
    command: list[str | Path] = [args.bin / "headrace-bench", "tokens", "--tokenizer", tokenizer]
    command += text_files()
    run = subprocess.run(
        [*command, "--rounds", str(args.rounds)], capture_output=True, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(run.stdout)
    with tempfile.TemporaryDirectory() as name:
        folder, doc = Path(name), json.loads(resolve(None).doc())
        file = folder / "doc.json"
        file.write_text(json.dumps({**doc, "context_tokens": 1 << 20}))
        figures["router_cpu_us_per_request"] = cpu_of_requests(args.bin, file, folder, args.runs)
        if shutil.which(CALLGRIND[0]) is None:
            print("tokens.py: valgrind is not installed: no instructions", file=sys.stderr)
        else:
            for case, report in enumerate(figures["cases"]):
                report["fast_instructions"] = of_prompt(command, case)
            figures["router_instructions_per_short_chat"] = of_request(args.bin, file, folder)
    write(args.out, figures)


if __name__ == "__main__":
    main()
