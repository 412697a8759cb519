"""One run: a router, mock workers that fail in turn, a load at a share of their capacity, and samples all the while."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.serving.server import Running, Server, eventually
from soak.churn import faults, visitors
from soak.samples import Sample, Trend, gauge, take, trends

WORKERS = 4
VISITORS = 4
CALIBRATION_S = 5
PROGRAM = (sys.executable, "-m", "headrace")
# Steps of 2 ms, so that the router is what works most.
STEP_COSTS = "2,0.001,0,0.01,0"
# Full within seconds: what grows after that is no cache. The default takes 80,000 of these requests to fill.
CACHE_BYTES = 8 << 20
_HELD = (
    "headrace_booked_legs",
    "headrace_streams",
    "headrace_queue_requests",
    "headrace_http_body_bytes",
)


@dataclass(frozen=True, slots=True)
class Soaked:
    """`left` is what was still held, and of which measure, once nobody asked any more."""

    rate: float
    visits: int
    report: dict[str, Any]
    samples: list[Sample]
    trends: dict[str, Trend]
    left: dict[str, float]


def soak(folder: Path, *, seconds: float, share: float, seed: int) -> Soaked:
    """`share` is of the requests a second that as many clients as find room get answered.

    `folder` is its own. Raises AssertionError if router or workers do not come up, or something is not given back.
    """
    socket = folder / "workers.sock"
    listen = ("--port", "0", "--worker-listen", f"unix:{socket}")
    router = Server("router", *listen, "--tokenizer-cache-bytes", str(CACHE_BYTES))
    mock: Running | None = None
    try:
        router.set_url(router.wait_line(r"headrace-router: (http:\S+) for clients")[1])
        plan = faults(seed, seconds, WORKERS, every_s=max(10.0, seconds / 40))
        flags = [flag for fault in plan for flag in ("--fault", fault)]
        mock = Running(
            *(
                "mock",
                "--router",
                f"unix:{socket}",
                "--workers",
                str(WORKERS),
                "--cost",
                STEP_COSTS,
            ),
            *("--model", "mock", *flags),
            program=PROGRAM,
        )
        eventually(lambda: router.get("/ready").status == 200, router.tail)
        rate = share * _capacity(router.url)
        return asyncio.run(_loaded(router, rate, seconds, seed))
    finally:
        if mock is not None:
            mock.close()
        router.close()


def _load(url: str, *flags: str) -> list[str]:
    words = ("--prompt-words", "64", "--shared-prefix", "32", "--prefixes", "50")
    return [
        *PROGRAM,
        "bench",
        "load",
        "--target",
        url,
        "--chat",
        "--max-tokens",
        "24",
        *words,
        *flags,
    ]


def _capacity(url: str) -> float:
    """Requests a second of a closed loop."""
    flags = ("-c", "64", "--duration", f"{CALIBRATION_S}s", "--seed", "1", "--json", "-")
    ran = subprocess.run(_load(url, *flags), check=True, capture_output=True, text=True)
    report = json.loads(ran.stdout)
    return report["requests_per_s"]


async def _loaded(router: Server, rate: float, seconds: float, seed: int) -> Soaked:
    process = psutil.Process(router.process.pid)
    flags = ("--rate", f"{rate:.2f}", "--duration", f"{seconds:.0f}s", "--seed", str(seed))
    began = time.monotonic()
    load = await asyncio.create_subprocess_exec(
        *_load(router.url, *flags, "--json", "-"), stdout=subprocess.PIPE
    )
    samples: list[Sample] = []
    async with visitors(router.port, seed, VISITORS) as visits:
        reading = asyncio.create_task(load.communicate())
        while not reading.done():
            await asyncio.wait([reading], timeout=max(0.5, seconds / 120))
            page = (await asyncio.to_thread(router.get, "/metrics")).body.decode()
            samples.append(take(time.monotonic() - began, process, page))
    stdout, _ = await reading
    left = await asyncio.to_thread(_given_back, router)
    return Soaked(rate, visits[0], json.loads(stdout), samples, trends(samples), left)


def _given_back(router: Server) -> dict[str, float]:
    """What is held a while after the last client has gone; all of it should be 0."""

    def held() -> dict[str, float]:
        page = router.get("/metrics").body.decode()
        return {name: value for name in _HELD if (value := gauge(page, name)) > 0}

    eventually(lambda: not held(), lambda: f"still held: {held()}", 60)
    return held()
