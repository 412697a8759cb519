"""What the router costs: time to first token over the bare worker link, CPU a request and a streamed token.

Workers are `headrace-bench mock` (no model, real protocol); clients are `headrace-bench load`. Build both first:

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.overhead --out bench/results/router_overhead.json

The workers hand the router the tokenizer and chat template of the default model, so that text costs what it costs in
earnest.
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write
from headrace.models.load.source import resolve

START_LIMIT_S = 180


def mock_worker(
    bin_dir: Path, socket: Path, doc: Path, name: str, step_ms: float
) -> list[str | Path]:
    """The command of one worker whose steps all take `step_ms`, with room for everybody."""
    room = ["--sequences", "8192", "--batched-tokens", "65536", "--waiting", "65536"]
    pool = ["--block-tokens", "16", "--blocks", "1048576"]
    time = ["--cost", f"{step_ms},0,0,0,0", "--noise", "0"]
    link = ["--router", f"unix:{socket}", "--once", "--name", name, "--doc", doc]
    return [bin_dir / "headrace-bench", "mock", "--workers", "1", *link, *time, *room, *pool]


class Stack:
    """A router and its workers without a model."""

    def __init__(
        self,
        bin_dir: Path,
        doc: Path,
        workers: int,
        step_ms: float,
        folder: Path,
        under: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """`under` is a command that runs the router, such as a profiler; `flags` are more of the router's."""
        socket = folder / f"w{step_ms}.sock"
        self.log = (folder / "router.log").open("a")
        self.router = subprocess.Popen(
            [
                *under,
                bin_dir / "headrace-router",
                "--port",
                "0",
                "--worker-listen",
                f"unix:{socket}",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.router.stdout is not None
        line = self.router.stdout.readline()
        self.address = line.strip().rsplit("http://", 1)[-1].split()[0].rstrip("/")
        self.workers = [
            subprocess.Popen(
                mock_worker(bin_dir, socket, doc, f"mock-{i}-", step_ms),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for i in range(workers)
        ]
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # under a profiler an answer may be late
                urllib.request.urlopen(f"http://{self.address}/ready", timeout=5).close()
                return
            time.sleep(0.05)
        raise TimeoutError("the router did not become ready")

    def stop(self) -> None:
        """End the router; its workers follow."""
        self.router.terminate()
        for process in (self.router, *self.workers):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        self.log.close()


@contextlib.contextmanager
def stack(*args: Any) -> Generator[Stack]:
    """A `Stack` that ends with the block."""
    running = Stack(*args)
    try:
        yield running
    finally:
        running.stop()


def load(bin_dir: Path, running: Stack, *args: str) -> dict[str, Any]:
    """One load run against a stack."""
    command = [bin_dir / "headrace-bench", "load", "--json", "-", "--target", running.address]
    command += ["--pids", str(running.router.pid), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    if result["errors"]:
        raise RuntimeError(f"load had errors: {result['error_samples']}")
    return result


def bare_link(bin_dir: Path, doc: Path, folder: Path, requests: int) -> dict[str, Any]:
    """Time to first token with nothing between."""
    socket = folder / "bare.sock"
    bench = bin_dir / "headrace-bench"
    link = subprocess.Popen(
        [bench, "link", "--socket", socket, "-n", str(requests)], stdout=subprocess.PIPE, text=True
    )
    while not socket.exists():
        time.sleep(0.01)
    worker = subprocess.Popen(
        mock_worker(bin_dir, socket, doc, "mock", 0.0),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    output, _ = link.communicate(timeout=120)
    worker.wait(timeout=10)
    return json.loads(output)


def main() -> None:
    """Run all cases and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", help="whose tokenizer and template; the default model where left out"
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=3, help="runs of each case; all are kept")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doc = folder / "doc.json"
        doc.write_bytes(resolve(args.model).doc())
        first_token: list[dict[str, float]] = []
        for i in range(args.runs):
            run = folder / str(i)
            run.mkdir()
            bare = bare_link(args.bin, doc, run, 300)["ttft_ms"]
            with stack(args.bin, doc, 1, 0.0, run) as one:
                load(args.bin, one, "-n", "50", "-c", "1", "--max-tokens", "8")  # warm
                routed = load(args.bin, one, "-n", "300", "-c", "1", "--max-tokens", "8", "--chat")
            first_token.append(
                {
                    "bare_p50_ms": bare["p50"],
                    "bare_p99_ms": bare["p99"],
                    "routed_p50_ms": routed["ttft_ms"]["p50"],
                    "routed_p99_ms": routed["ttft_ms"]["p99"],
                    "added_p50_ms": routed["ttft_ms"]["p50"] - bare["p50"],
                }
            )
        figures["first_token_concurrency_1"] = first_token

        def cpu(result: dict[str, Any]) -> dict[str, float]:
            router_s = result["cpu_s"][0]
            return {
                "requests_per_s": result["requests_per_s"],
                "tokens_per_s": result["tokens_per_s"],
                "chunks": result["chunks"],
                "router_cpu_s": router_s,
                "router_cpu_s_per_1000_requests": router_s / result["requests"] * 1e3,
                "router_cpu_s_per_1000000_tokens": router_s / result["completion_tokens"] * 1e6,
                "router_cpu_us_per_chunk": router_s / result["chunks"] * 1e6,
                "ttft_p50_ms": result["ttft_ms"]["p50"],
                "ttft_p99_ms": result["ttft_ms"]["p99"],
                "client_cpu_s": result["client_cpu_s"],
            }

        # A is unary and short, B streams at full speed, C512 at a pace.
        cases = {
            "A_unary_c64_1_token": (0.0, ["-n", "10000", "-c", "64", "--max-tokens", "1", "--unary", "--chat"]),
            "B_stream_c64_64_tokens_full_speed": (0.0, ["-n", "2000", "-c", "64", "--max-tokens", "64", "--chat"]),
            "C512_stream_128_tokens_20_ms": (20.0, ["-n", "1024", "-c", "512", "--max-tokens", "128", "--chat"]),
        }  # fmt: skip
        for case, (step_ms, flags) in cases.items():
            runs: list[dict[str, float]] = []
            for i in range(args.runs):
                run = folder / f"{case}{i}"
                run.mkdir()
                with stack(args.bin, doc, 2, step_ms, run) as two:
                    # Warm.
                    load(args.bin, two, "-n", "100", "-c", "8", "--max-tokens", "4", "--chat")
                    runs.append(cpu(load(args.bin, two, *flags)))
            figures[case] = runs
    write(args.out, figures)


if __name__ == "__main__":
    main()
