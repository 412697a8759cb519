"""Traces and recorded loads: what is read, and what is refused with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrace.planner.errors import BadLoads, BadTrace
from headrace.planner.loads import read_loads
from headrace.planner.trace import TracedRequest, read_trace

TRACES = Path(__file__).parents[2] / "bench/traces"


def line(timestamp: object = 0, prompt: object = 10, answer: object = 5) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": prompt, "output_length": answer, "hash_ids": []}
    )


def test_the_traces_of_the_repository_are_read() -> None:
    read = {path.name.partition(".")[0]: read_trace(path) for path in TRACES.glob("*.gz")}
    tau = read["tau_airline_tasks0-32"]
    assert (len(tau.requests), tau.too_long) == (1863, 0)  # bench/traces/README.md
    assert round(sum(one.prompt for one in tau.requests) / 1863) == 3122
    assert read["mooncake_synthetic_first65pct"].too_long > 0


def test_times_count_from_the_first_and_are_seconds(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join([line(500), "", line(1500, 3, 4)]))
    assert read_trace(file).requests == [TracedRequest(0.0, 10, 5), TracedRequest(1.0, 3, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "timestamp_ms,input_length,output_length\n0,10,5\n1000,3,4\n",
        """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,10,5
2023-11-16 18:15:47.5000000,3,4
""",
    ],
)
def test_csv_is_read_packed_or_not(tmp_path: Path, text: str) -> None:
    for name, data in (("t.csv", text.encode()), ("t.csv.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert read_trace(tmp_path / name).requests == [
            TracedRequest(0.0, 10, 5),
            TracedRequest(1.0, 3, 4),
        ]


def test_requests_beyond_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join([line(0, 163_840, 1), line(10), line(20, 163_839, 1)]))
    trace = read_trace(file)
    assert (len(trace.requests), trace.too_long) == (2, 1)
    assert trace.requests[0].at_s == 0
    file.write_text(line(0, 200_000, 1))
    with pytest.raises(BadTrace, match="holds no request"):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the trace is empty"),
        ("\n \n", "the trace is empty"),
        ("timestamp_ms,input_length,output_length\n", "the trace is empty"),
        ("{", "t:1: not JSON"),
        (line() + "\n[1]", "t:2: not a JSON object"),
        ("[" * 100_000, "t:1: neither JSON nor the columns"),
        ('{"timestamp": 1}', "t:1: `input_length` is missing"),
        ('{"messages": []}', "a trace of messages"),
        (line(-1), "`timestamp` is not a number of ms from 0 on"),
        (line(True), "`timestamp` is not a number"),
        (line("0"), "`timestamp` is not a number"),
        (line(float("nan")), "`timestamp` is not a number"),
        (line(0, 1.5), "`input_length` is not a whole number"),
        (line(0, 10, True), "`output_length` is not a whole number"),
        (line(0, 0), "both are at least 1"),
        (line(0, 5, -1), "both are at least 1"),
        (line(5) + "\n" + line(4), "t:2: its time is before"),
        ("a,b,c\n1,2,3", "neither JSON nor the columns"),
        ("timestamp_ms,input_length,output_length\n1,2", "t:2: 2 columns instead of 3"),
        ("timestamp_ms,input_length,output_length\nx,2,3", "`x` is not a time"),
        ("timestamp_ms,input_length,output_length\n-1,2,3", "is not a time from 0 on"),
        ("timestamp_ms,input_length,output_length\n1,-2,3", "lengths are whole numbers"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3", "`yesterday` is not a time"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(BadTrace) as refused:
        read_trace(file)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"x" * 1000)[:20])
    noise = tmp_path / "noise"
    noise.write_bytes(bytes(range(128, 256)))
    for file in (cut, noise, tmp_path, tmp_path / "absent"):
        with pytest.raises(BadTrace):
            read_trace(file)


def test_recorded_loads_are_shares(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([[1] * 255 + [257], [2] * 256]))
    first, second = read_loads(file)
    assert (first[0], first[255]) == (1 / 512, 257 / 512)
    assert set(second) == {1 / 256}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "not JSON"),
        ("{}", "not a list of 1 to 64 layers"),
        ("[]", "not a list of 1 to 64 layers"),
        ("[[1, 2]]", "layer 0 is not a list of 256 counts"),
        (json.dumps([[1] * 256, [-1] * 256]), "layer 1: -1 is not a count"),
        (json.dumps([[True] * 256]), "True is not a count"),
        (json.dumps([["1"] * 256]), "'1' is not a count"),
        (json.dumps([[0] * 256]), "layer 0 has no rows"),
        (json.dumps([[float("inf")] * 256]), "inf is not a count"),
    ],
)
def test_bad_loads_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "loads.json"
    file.write_text(text)
    with pytest.raises(BadLoads) as refused:
        read_loads(file)
    assert why in str(refused.value)
