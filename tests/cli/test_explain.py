"""`headrace explain`: the table, and what it says when there is nothing to show."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.cli.client import explain


def candidate(worker: str, total_ms: float, excluded: str | None = None) -> dict[str, Any]:
    times = {f"{time}_ms": 0.0 for time in explain.TIMES} | {"total_ms": total_ms, "queue_ms": 2.5}
    return {"worker": worker, "cached_tokens": 1024, "excluded": excluded, **times}


def decision(**changes: Any) -> dict[str, Any]:
    return {
        "at_ms": 12_345.6,
        "prompt_tokens": 4_096,
        "max_tokens": 256,
        "output_tokens": 99.7,
        "policy": "kv",
        "winner": "w1",
        "candidates": [
            candidate("w2", 70.0),
            candidate("w1", 50.25),
            candidate("w0", 10.0, "full"),
        ],
        "shadow": {"policy": "least-loaded", "winner": "w2", "regret_ms": 19.75},
    } | changes


def test_candidates_are_listed_by_cost_and_those_excluded_come_last() -> None:
    text = explain.describe({"request": "req-1", "decisions": [decision()]})
    lines = text.splitlines()
    assert lines[0] == "request req-1"
    assert lines[2].startswith(
        "4,096 prompt tokens, about 100 of at most 256 to generate; 12.346 s"
    )
    assert lines[3] == "kv chose w1"
    assert lines[6].split() == ["worker", "cached", *explain.TIMES]
    rows = [line.split() for line in lines[7:10]]
    assert rows[0][:4] == ["->", "w1", "1,024", "2.5"] and rows[0][-1] == "50.2"
    assert [row[0] for row in rows[1:]] == ["w2", "w0"] and rows[2][-1] == "full"
    assert lines[-1] == "least-loaded would have chosen w2: predicted 19.8 ms longer"


def test_workers_that_the_router_did_not_keep_are_counted() -> None:
    def line(**left_out: Any) -> str:
        document = {"request": "req-1", "decisions": [decision(left_out=left_out)]}
        [line] = [
            line for line in explain.describe(document).splitlines() if "more workers" in line
        ]
        return line

    some = line(candidates=1_200, excluded=3, least_ms=9_000.51)
    assert some == (
        "1,200 more workers are not shown: 1,197 of them were predicted to cost 9,000.5 ms or "
        "more in all; X-Headrace-Explain shows all"
    )
    none = line(candidates=2, excluded=2, least_ms=0.0)
    assert none == "2 more workers are not shown; X-Headrace-Explain shows all"


def test_columns_are_explained_once_in_the_words_of_the_router() -> None:
    words = {"predicted": {"queue_ms": "time before it begins", "cached_tokens": "tokens there"}}
    document = {"request": "req-1", "decisions": [decision(), decision()], "words": words}
    text = explain.describe(document)
    assert text.endswith("\n\ncached: tokens there\nqueue: time before it begins")
    assert text.count("tokens there") == 1


def actual(**changes: Any) -> dict[str, Any]:
    return {
        "outcome": "finished",
        "finish_reason": "stop",
        "waited_ms": 1.25,
        "first_token_ms": 40.0,
        "decode_ms": 1_055.5,
        "total_ms": 1_096.0,
        "cached_tokens": 1_000,
        "output_tokens": 42,
    } | changes


def happened(decision: dict[str, Any]) -> list[str]:
    """The lines about what happened, of the table down to an empty line."""
    lines = explain.describe({"request": "req-1", "decisions": [decision]}).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("what happened")]
    return lines[starts[0] : starts[0] + 6] if starts else []


def test_what_happened_stands_beside_what_was_predicted() -> None:
    lines = happened(decision(actual=actual()))
    assert lines[0] == "what happened, after 1.2 ms in the router's queue: finished (stop)"
    assert [line.split() for line in lines[1:]] == [
        ["predicted", "actual"],
        ["cached", "tokens", "1,024", "1,000"],
        ["first", "token,", "ms", "2.5", "40.0"],
        ["rest", "of", "the", "answer,", "ms", "0.0", "1,055.5"],
        ["output", "tokens", "100", "42"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"


def test_what_is_not_known_yet_is_a_dash_and_an_error_is_named() -> None:
    unknown = dict.fromkeys(("first_token_ms", "decode_ms", "total_ms", "cached_tokens"))
    nothing = actual(outcome="failed", finish_reason=None, error="worker_lost", output_tokens=0)
    lines = happened(decision(actual=nothing | unknown))
    assert lines[0].endswith(": failed (worker_lost)")
    assert [line.split()[-1] for line in lines[2:]] == ["-", "-", "-", "0"]
    running = actual(outcome="running", finish_reason=None)
    assert happened(decision(actual=running))[0].endswith(": running")
    assert happened(decision()) == [], "a router that does not tell"
    assert happened(decision(winner=None, shadow=None, actual=actual())) == []


def test_the_pair_that_was_taken_is_what_is_compared() -> None:
    lines = happened(split_decision(actual=actual()))
    assert lines[2].split() == ["cached", "tokens", "512", "1,000"]


def test_a_prediction_names_its_parts_as_the_router_does() -> None:
    incomplete = decision()
    del incomplete["candidates"][1]["total_ms"]
    with pytest.raises(KeyError):
        explain.describe({"request": "req-1", "decisions": [incomplete]})


def test_no_winner_an_agreeing_shadow_and_several_placements_are_said() -> None:
    nowhere = decision(winner=None, shadow=None)
    same = decision(shadow={"policy": "round-robin", "winner": "w1", "regret_ms": 0.0})
    text = explain.describe({"request": "req-1", "decisions": [nowhere, same]})
    assert "placement 1 of 2" in text and "placement 2 of 2" in text
    assert "kv chose no worker: none could take it" in text
    assert "round-robin would have chosen the same" in text


def test_requests_of_two_tenants_with_one_id_are_apart() -> None:
    decisions = [decision(tenant=name) for name in ("alice", "bob", "alice", None)]
    text = explain.describe({"request": "r1", "decisions": decisions})
    headings = [line for line in text.splitlines() if line.startswith(("request", "placement"))]
    assert headings == [
        "request r1 of tenant alice",
        "placement 1 of 2",
        "placement 2 of 2",
        "request r1 of tenant bob",
        "request r1",
    ]


def split_decision(**changes: Any) -> dict[str, Any]:
    prefill = {**candidate("p0", 30.0), "role": "prefill", "cached_tokens": 512}
    whole = {**candidate("w1", 90.0), "role": "decode"}
    pair = {**candidate("", 50.25), "prefill": "p0", "decode": "w1"}
    changes = {"candidates": [prefill, whole], "prefill": "p0", "pair": pair} | changes
    return decision(**changes)


def test_a_pair_stands_beside_those_that_would_have_done_it_alone() -> None:
    text = explain.describe({"request": "req-1", "decisions": [split_decision()]})
    lines = text.splitlines()
    assert lines[3] == "kv chose p0 for the prompt and w1 for the answer"
    assert lines[7].split()[:5] == ["->", "p0", "+", "w1", "512"]
    assert lines[8].split()[0] == "w1"
    assert lines[-3].split()[:3] == ["->", "p0", "512"]
    assert lines[-1] == "least-loaded would have chosen w2: predicted 19.8 ms longer"

    alone = split_decision(prefill=None, shadow={**decision()["shadow"], "prefill": "p0"})
    lines = explain.describe({"request": "req-1", "decisions": [alone]}).splitlines()
    assert lines[3] == "kv chose w1"
    assert lines[7].split()[0] == "p0" and lines[8].split()[:2] == ["->", "w1"]
    assert "would have chosen p0 for the prompt and w2 for the answer" in lines[-1]

    waits = split_decision(prefill=None, winner=None, shadow=None)
    text = explain.describe({"request": "req-1", "decisions": [waits]})
    assert "kv chose to wait: p0 and its like have long queues" in text


@contextmanager
def server(status: int, document: object) -> Generator[tuple[str, list[str]]]:
    """A server with one answer; its URL, and `PATH KEY` of each request."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", asked
        finally:
            http.shutdown()
            thread.join()


def test_the_command_asks_for_the_request_and_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("alice k\nbob l\n")
    monkeypatch.delenv("HEADRACE_ADMIN_KEY", raising=False)
    document = {"request": "a/b c", "decisions": [decision()]}
    with server(200, document) as (url, asked):
        flags = ["--url", url, "--api-key-file", f"{tmp_path}/keys"]
        assert main.main(["explain", "a/b c", *flags]) == 0
        # Sees more, so it is sent where there is one.
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", "op")
        assert main.main(["explain", "a/b c", *flags, "--json"]) == 0
    assert asked == [f"/decisions/a%2Fb%20c Bearer {key}" for key in ("k", "op")]
    text, _, rest = capsys.readouterr().out.partition("{")
    assert text.startswith("request a/b c\n")
    assert json.loads("{" + rest) == document


@pytest.mark.parametrize(
    ("status", "document", "says"),
    [
        (404, {"error": {"message": "no decision about it"}}, "no decision about it"),
        (
            401,
            {"error": {"message": "a key is asked for"}},
            "for; the key comes from --admin-key-file",
        ),
        (401, {"error": {"message": "a key is asked for"}}, "HEADRACE_API_KEY"),
        (200, {"request": "x"}, "not a decision"),
        (200, [], "not a decision"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    status: int, document: object, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(status, document) as (url, _):
        assert main.main(["explain", "x", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace explain: ") and says in error and error.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "x", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot reach" in capsys.readouterr().err
