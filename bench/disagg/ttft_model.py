"""Time to the first token at concurrency 1 with the real default model on the CPU: split serving against one worker.

    .venv/bin/python -m bench.disagg.ttft_model --out bench/results/split_ttft_model.json

Two servers stand side by side, one worker that does both and a pair that always splits; each prompt goes to one after
the other, who goes first changes from prompt to prompt, and nobody else asks. No prompt is sent twice to a server.
"""

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.helpers.report import rounded, write

SIDES = {
    "aggregated": ["--workers", "1"],
    # the baselines always split; kv would keep such prompts where they are
    "split": ["--prefill", "1", "--decode", "1", "--policy", "round-robin"],
}
WORDS = ["river", "stone", "lamp", "garden", "winter", "paper", "cloud", "engine", "market"]


@contextmanager
def server(flags: list[str]) -> Generator[str]:
    """`headrace serve`; its host and port once it is ready."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--kv-memory", "512MiB"]
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready after .* http://(\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not become ready")
    finally:
        process.terminate()
        process.wait(60)


def ttft_ms(address: str, number: int, words: int) -> float:
    """From the request to the first event that carries text."""
    text = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))
    body = {"prompt": f"{number} {text}", "max_tokens": 8, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=120)
    began = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"model": "SmolLM2-135M-Instruct"})
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first = next(line for line in response if line.startswith(b"data: "))
    took_ms = (time.perf_counter() - began) * 1e3
    assert b"error" not in first
    response.read()
    connection.close()
    return took_ms


def main() -> None:
    """Ask both in turns and write what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    took: dict[str, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        servers = {side: stack.enter_context(server(flags)) for side, flags in SIDES.items()}
        for number in range(args.requests + 2):
            order = list(servers.items())
            for side, address in order if number % 2 else reversed(order):
                ms = ttft_ms(address, number, args.words)
                if number >= 2:  # the first ones warm up
                    took[side].append(ms)
    pairs = zip(took["split"], took["aggregated"], strict=True)
    write(args.out, rounded({
        "model": "SmolLM2-135M-Instruct, int8", "prompt_words": args.words, "requests": args.requests,
        "ttft_p50_ms": {side: statistics.median(all_ms) for side, all_ms in took.items()},
        "split_adds_ms_median_of_pairs": statistics.median(split - both for split, both in pairs),
        "ttft_ms": took,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
