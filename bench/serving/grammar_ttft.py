"""What a JSON schema of 50 fields adds to the time to first token: one seen before, and one that nobody has seen.

    python -m bench.serving.grammar_ttft --out bench/results/grammar_ttft.json

One client asks `headrace serve` with the default model, over one connection and one request at a time, with streaming.
Requests without a schema, with one that router and worker know, and with one that neither knows take turns, so that a
busy machine is busy for all. No two requests have the same question. `added_ms` is the difference to the request
without a schema of the same turn. Compile times are those of the metrics of router and worker.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from bench.engine.grammar_masks import SCHEMA, spread
from bench.helpers.report import rounded, write

WORDS = ["river", "stone", "cloud", "lamp", "winter", "garden", "paper", "music", "bread", "horse"]


def schema_of(turn: int) -> dict[str, Any]:
    """With names of its own, so that it was never seen."""
    fields: dict[str, Any] = SCHEMA["properties"]
    renamed = {f"turn_{turn}_{name}": kind for name, kind in fields.items()}
    return {**SCHEMA, "properties": renamed, "required": list(renamed)}


class Client:
    """One connection to a server."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self._random = random.Random(5)

    def get(self, path: str) -> str:
        self._connection.request("GET", path)
        return self._connection.getresponse().read().decode()

    def first_ms(self, model: str, schema: dict[str, Any] | None) -> float:
        """Milliseconds from the request to the first text of its answer."""
        question = " ".join(self._random.choices(WORDS, k=24))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": f"Say something of these: {question}."}],
            "stream": True,
            "max_tokens": 4,
            "temperature": 1,
            "seed": 7,
        }
        if schema is not None:
            named = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        text = json.dumps(body)
        began = time.perf_counter()
        self._connection.request(
            "POST", "/v1/chat/completions", text, {"Content-Type": "application/json"}
        )
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
        first = None
        while line := answer.readline():
            if first is None and b'"content":"' in line and b'"content":""' not in line:
                first = time.perf_counter()
        assert first is not None, "an answer has text"
        return (first - began) * 1e3


def total(metrics: str, name: str) -> float:
    """The sum of a metric over its labels."""
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


def measure(client: Client, turns: int) -> dict[str, Any]:
    model = json.loads(client.get("/v1/models"))["data"][0]["id"]
    for _ in range(3):
        client.first_ms(model, None)
        client.first_ms(model, SCHEMA)
    time.sleep(3)  # more than a heartbeat
    before = client.get("/metrics")
    took: dict[str, list[float]] = {"without": [], "seen": [], "unseen": []}
    for turn in range(turns):
        order = list(took)
        for name in order[turn % 3 :] + order[: turn % 3]:
            schema = {"without": None, "seen": SCHEMA, "unseen": schema_of(turn)}[name]
            took[name].append(client.first_ms(model, schema))
    compiled = "headrace_worker_grammar_compiled_total"
    while total(after := client.get("/metrics"), compiled) < total(before, compiled) + turns:
        time.sleep(0.1)  # told with a heartbeat

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    def added(name: str) -> dict[str, float]:
        return spread([a - b for a, b in zip(took[name], took["without"], strict=True)])

    return {
        "turns": turns,
        "first_ms": {name: spread(times) for name, times in took.items()},
        "added_ms": {name: added(name) for name in ("seen", "unseen")},
        "router_check_ms": 1e3
        * grown("headrace_grammar_check_seconds_sum")
        / grown("headrace_grammar_check_seconds_count"),
        "worker_compile_ms": 1e3
        * grown("headrace_worker_grammar_compile_seconds_total")
        / grown(compiled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = ""
        for line in cast("Any", server.stdout):
            if ready := re.search(r"Headrace is ready after .* s: (\S+)", line):
                address = ready[1]
                break
            print(line, end="")
        if not address:
            raise RuntimeError("the server did not start")
        found = measure(Client(address), options.turns)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    write(options.out, rounded(found))


if __name__ == "__main__":
    main()
