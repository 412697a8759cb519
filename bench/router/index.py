"""The block index: lookups against Dynamo's `RadixTree` in one run, and its own figures from Rust.

32 workers hold 80,000 blocks each; a prompt has 768. Both indexes get the same events and the same prompts, in turns,
each through its Python binding; the peer takes a list of ints, ours also bytes, which is how frames carry keys. They
must agree on the answers. A worker stores a conversation in runs of 1 to 64 blocks, as steps and chunks of prefill make
them; `whole` is the same with one event for each conversation, the peer's best case, since its tree keeps the blocks of
one event in one node. Build first:

    make setup RUST_PROFILE=release && cargo build --release -p headrace-bench
    .venv/bin/pip install ai-dynamo-runtime    # optional: without it the peer is left out, and the result says so
    .venv/bin/python -m bench.router.index --out bench/results/index.json
"""

import argparse
import importlib
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write
from headrace._core import BlockIndex

PEER = "ai-dynamo-runtime"
WORKERS = 32
BLOCKS = 80_000
PROMPT = 768
CHAIN = 800  # blocks of one conversation
LONGEST_RUN = 64  # blocks that one event stores
SHARED = 8  # prompts of which every worker holds another length
QUERIES = 1_000  # of each kind


class Fleet:
    """Which worker holds which chains of blocks: `(worker, chain, blocks from its beginning)`."""

    def __init__(self, in_runs: bool) -> None:
        self.in_runs = in_runs
        rng = random.Random(1)

        def chain() -> list[int]:
            return list(memoryview(rng.randbytes(8 * CHAIN)).cast("Q"))

        self.shared = [chain() for _ in range(SHARED)]
        self.held: list[tuple[int, list[int], int]] = []
        self.own: list[list[int]] = []
        for worker in range(WORKERS):
            left = BLOCKS
            for number, prompt in enumerate(self.shared):
                depth = PROMPT * ((worker + number * 5) % WORKERS + 1) // WORKERS
                self.held.append((worker, prompt, depth))
                left -= depth
            while left:
                depth = min(CHAIN, left)
                left -= depth
                self.held.append((worker, chain(), depth))
                if depth == CHAIN:
                    self.own.append(self.held[-1][1])
        self.unknown = [chain()[:PROMPT] for _ in range(QUERIES)]
        rng.shuffle(self.own)
        self.held.sort(key=lambda _: rng.random())

    def events(self) -> Generator[tuple[int, int | None, list[int]]]:
        """`(worker, block before, blocks)`, in the order in which they are stored."""
        rng = random.Random(2)
        for worker, chain, depth in self.held:
            at = 0
            while at < depth:
                run = rng.randint(1, LONGEST_RUN) if self.in_runs else CHAIN
                end = min(at + run, depth)
                yield worker, chain[at - 1] if at else None, chain[at:end]
                at = end

    def prompts(self) -> dict[str, list[list[int]]]:
        """Prompts by who holds them."""
        own = [chain[:PROMPT] for chain in self.own[:QUERIES]]
        shared = [self.shared[turn % SHARED][:PROMPT] for turn in range(QUERIES)]
        return {"every_worker": shared, "one_worker": own, "nobody": self.unknown}


class Ours:
    """Our index, `headrace._core.BlockIndex`, with the fleet's workers in it."""

    def __init__(self, fleet: Fleet) -> None:
        self.index = BlockIndex()
        places = [self.index.join(BLOCKS) for _ in range(WORKERS)]
        assert places == list(range(WORKERS))
        for worker, _, keys in fleet.events():
            self.index.store(worker, array("Q", keys))

    def answer(self, prompt: list[int]) -> dict[int, int]:
        """Overlap by worker, without zeros."""
        return {
            worker: blocks for worker, blocks in enumerate(self.index.overlaps(prompt)) if blocks
        }


class Peer:
    """`dynamo.llm.RadixTree`. A block's own hash and the hash of its tokens are the same number here."""

    def __init__(self, fleet: Fleet) -> None:
        self.tree = importlib.import_module("dynamo.llm").RadixTree()
        for number, (worker, parent, keys) in enumerate(fleet.events()):
            blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
            event = {"event_id": number, "dp_rank": 0, "data": data}
            self.tree.apply_event(worker, json.dumps(event).encode())

    def answer(self, prompt: list[int]) -> dict[int, int]:
        """Overlap by worker, without zeros."""
        scores: dict[tuple[int, int], int] = self.tree.find_matches(prompt).scores
        return {worker: blocks for (worker, _), blocks in scores.items() if blocks}


def quantiles(samples_ns: list[int]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    cuts = statistics.quantiles(samples_ns, n=100)
    return {"p50_us": round(cuts[49] / 1e3, 3), "p99_us": round(cuts[98] / 1e3, 3)}


def timed(call: Callable[[Any], Any], prompt: Any, samples_ns: list[int]) -> None:
    """Call once and note how long it took."""
    start = time.perf_counter_ns()
    call(prompt)
    samples_ns.append(time.perf_counter_ns() - start)


def compare(fleet: Fleet, ours: Ours, peer: Peer | None) -> dict[str, Any]:
    """Latency of a lookup by who holds the prompt. Ours takes each prompt in two forms; the peer answers in between."""
    results: dict[str, Any] = {}
    for kind, prompts in fleet.prompts().items():
        samples: dict[str, list[int]] = {"headrace_list": [], "headrace_bytes": []}
        if peer is not None:
            for prompt in prompts[:100]:
                assert ours.answer(prompt) == peer.answer(prompt), kind
            samples["dynamo_list"] = []
        for form in ("headrace_list", "headrace_bytes"):
            for prompt in prompts:
                same = array("Q", prompt).tobytes() if form == "headrace_bytes" else prompt
                timed(ours.index.overlaps, same, samples[form])
                if peer is not None:
                    timed(peer.tree.find_matches, prompt, samples["dynamo_list"])
        results[kind] = {name: quantiles(times) for name, times in samples.items()}
        if peer is not None:
            p50 = {name: results[kind][name]["p50_us"] for name in samples}
            results[kind]["times_faster_p50"] = {
                name: round(p50["dynamo_list"] / p50[name], 1)
                for name in ("headrace_list", "headrace_bytes")
            }
    return results


def peer_version() -> str | None:
    """Version of the peer; `None` where it is not installed."""
    try:
        return importlib.metadata.version(PEER)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rust = subprocess.run(
        [args.bin / "headrace-bench", "index"], capture_output=True, text=True, check=True
    )
    version = peer_version()
    skipped = f"{PEER} is not installed (pip install {PEER}): the comparison was left out"
    if version is None:
        print(f"index.py: {skipped}", file=sys.stderr)
    lookups: dict[str, Any] = {}
    for name, in_runs in (("runs", True), ("whole", False)):
        fleet = Fleet(in_runs)
        lookups[name] = compare(fleet, Ours(fleet), Peer(fleet) if version else None)
    write(
        args.out,
        {
            "setup": {"workers": WORKERS, "blocks_per_worker": BLOCKS, "prompt_blocks": PROMPT},
            "peer": f"{PEER} {version}, dynamo.llm.RadixTree" if version else skipped,
            "python_lookups": lookups,
            "rust": json.loads(rust.stdout),
        },
    )


if __name__ == "__main__":
    main()
