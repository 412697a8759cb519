"""What it costs a router to be watched: its log, a scrape of its metrics, an open dashboard, traces.

Workers are `headrace-bench mock`, clients `headrace-bench load`. Build both first:

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.watched --out bench/results/router_watched.json

Each round runs every way of watching once, in an order that turns, since a machine is not the same twice; the ratio of
a way is that of its CPU time to the CPU time of the router that nobody watches, in the same round.
"""

import argparse
import contextlib
import http.server
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, write
from bench.router.overhead import Stack, load
from headrace.models.load.source import resolve

SCRAPE_S = 5.0  # thrice as often as Prometheus does where it is told nothing else


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a router is watched."""

    flags: Sequence[str] = ()
    looked_at: bool = False  # a dashboard is open, and metrics are scraped
    traced: bool = False


WAYS = {
    "nothing": Way(flags=("--log-requests-per-s", "0")),
    "log": Way(),
    "log, metrics and dashboard": Way(looked_at=True),
    "the same and traces": Way(looked_at=True, traced=True),
}
LOADS: dict[str, tuple[float, str, list[str]]] = {
    "a short chat": (
        0.0,
        "requests",
        ["-n", "40000", "-c", "64", "--max-tokens", "1", "--unary", "--chat"],
    ),
    "a token at 512 x 50/s": (
        20.0,
        "completion_tokens",
        ["-n", "1536", "-c", "512", "--max-tokens", "128", "--chat"],
    ),
}


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes traces, and lets go of them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Any path."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nothing is said."""


@contextlib.contextmanager
def collector() -> Generator[str]:
    """The address of a collector of traces, until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def dashboard(address: str) -> Generator[list[int]]:
    """Keeps the dashboard's stream open; the bytes of each event."""
    came: list[int] = []
    ended = threading.Event()

    def read() -> None:
        with urllib.request.urlopen(f"http://{address}/dashboard/events", timeout=60) as stream:
            while not ended.is_set() and (line := stream.readline()):
                if line.startswith(b"data:"):
                    came.append(len(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield came
    finally:
        ended.set()
        reader.join(timeout=10)


@contextlib.contextmanager
def looked_at(address: str) -> Generator[list[int]]:
    """The dashboard is open, and the metrics are scraped; the bytes that came by the dashboard."""
    ended = threading.Event()

    def metrics() -> None:
        while not ended.wait(SCRAPE_S):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
                page.read()

    scraper = threading.Thread(target=metrics, daemon=True)
    scraper.start()
    try:
        with dashboard(address) as came:
            yield came
    finally:
        ended.set()
        scraper.join(timeout=10)


def cost(binaries: Path, doc: Path, folder: Path, way: Way, what: str) -> dict[str, float]:
    """CPU microseconds of a router for each unit of a load."""
    step_ms, unit, flags = LOADS[what]
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as open_things:
        own = list(way.flags)
        if way.traced:
            own += ["--otlp-endpoint", open_things.enter_context(collector())]
        running = Stack(binaries, doc, 2, step_ms, folder, flags=own)
        open_things.callback(running.stop)
        load(binaries, running, "-n", "200", "-c", "8", "--max-tokens", "4", "--chat")
        came: list[int] = []
        if way.looked_at:
            came = open_things.enter_context(looked_at(running.address))
        result = load(binaries, running, *flags)
        if way.looked_at and not came:
            raise RuntimeError("nothing came by the dashboard")
    return {
        "us": result["cpu_s"][0] / result[unit] * 1e6,
        "a_second": result[unit] / result["wall_s"],
        "dashboard_bytes": float(sum(came)),
    }


def main() -> None:
    """Run all rounds and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        what: {way: [] for way in WAYS} for what in LOADS
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doc = folder / "doc.json"
        doc.write_bytes(resolve(None).doc())
        for what, ways in runs.items():
            for i in range(args.rounds):
                names = list(ways)
                turn = i % len(names)
                for way in names[turn:] + names[:turn]:
                    place = folder / f"{what}{i}{way}".replace(" ", "_").replace("/", "_")
                    found = cost(args.bin, doc, place, WAYS[way], what)
                    ways[way].append(found)
                    print(f"watched: {what}: {way}: {found['us']:.2f} us", flush=True)
    figures: dict[str, Any] = {}
    for what, ways in runs.items():
        unwatched = [run["us"] for run in ways["nothing"]]
        figures[what] = {
            way: {
                "us_median": statistics.median(run["us"] for run in found),
                "ratio_median": statistics.median(
                    run["us"] / base for run, base in zip(found, unwatched, strict=True)
                ),
                "runs": found,
            }
            for way, found in ways.items()
        }
    write(args.out, figures)


if __name__ == "__main__":
    main()
