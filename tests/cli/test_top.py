"""`headrace top`: what a document looks like, what strangers cannot do to a terminal, and streams that end badly."""

from __future__ import annotations

import io
import json
import socket
import threading
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from headrace.cli import main
from headrace.cli.client import top
from headrace.cli.client.chat import ChatError, Server


def worker(**changes: Any) -> dict[str, Any]:
    return {
        "id": "w-0",
        "model": "m",
        "role": "both",
        "state": "ready",
        "group": None,
        "blocks": 200,
        "blocks_used": 50,
        "blocks_cached": 100,
        "running": 3,
        "waiting": 1,
        "sequences": 64,
        "backlog_tokens": 0,
        "step_ms": 12.34,
        "decode_rows": 3,
        "accepted": 1.0,
        "drafts": False,
        "credit_withdrawn": None,
        "speed_doubted": None,
        "heard_ms": 4,
    } | changes


def decision(**changes: Any) -> dict[str, Any]:
    return {
        "request": "req-1",
        "at_ms": 1.0,
        "age_s": 2.5,
        "policy": "kv",
        "worker": "w-0",
        "prefill": None,
        "prompt_tokens": 1_234,
        "predicted": {
            "cached_tokens": 64,
            "first_token_ms": 20.0,
            "decode_ms": 100.0,
            "output_tokens": 9.0,
        },
        "actual": {
            "outcome": "finished",
            "cached_tokens": 64,
            "first_token_ms": 21.5,
            "decode_ms": None,
        },
    } | changes


def document(**changes: Any) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "uptime_s": 61.0,
        "draining": False,
        "models": ["m"],
        "output_tokens_per_s": 123.4,
        "prompt_tokens_per_s": None,
        "requests_per_s": 2.0,
        "failed_per_s": 0.0,
        "finished": 1_000,
        "failed": 3,
        "running": 4,
        "hit_rate": 0.5,
        "ttft_ms": {"count": 10, "p50": 20.0, "p90": 30.0, "p99": 40.5},
        "tpot_ms": None,
        "queue": {"waiting": 2, "classes": {"low": 0, "normal": 2, "high": 0}, "oldest_s": 1.5},
        "kv": {"blocks": 200, "used": 50, "cached": 100},
        "workers_ready": 1,
        "workers_total": 1,
        "workers_left_out": 0,
        "workers": [worker()],
        "groups": [],
        "decisions": [decision()],
    } | changes


def test_a_document_is_told_in_lines() -> None:
    text = "\n".join(top.describe(document()))
    for part in (
        "1 of 1 workers ready, version 0.1.0; m",
        "output 123, prompts -",
        "2 waiting (high 0, normal 2, low 0), oldest for 1.5 s",
        "p50 20 ms, p90 30 ms, p99 40.5 ms, of 10",
        "per token   none in the last minute",
        "###......... 25.0 % held, 50.0 % cached, of 200 blocks",
    ):
        assert part in text, text
    [tile] = [line for line in text.splitlines() if line.startswith("w-0")]
    assert tile.split()[:3] == ["w-0", "both", "ready"] and tile.endswith("full")
    [placed] = [line for line in text.splitlines() if "req-1" in line]
    assert "64 > 64" in placed and "20 > 21.5" in placed and "100 > -" in placed


def test_what_is_wrong_with_a_fleet_is_said() -> None:
    group = {
        "id": "g",
        "model": "m",
        "size": 8,
        "present": 7,
        "whole": False,
        "step_skew": 0.1,
        "waited_share": 0.2,
    }
    lost = worker(credit_withdrawn="wrong_blocks", group={"id": "g", "rank": 3, "size": 8})
    split = decision(prefill="p-0", predicted=None)
    seen = document(
        workers=[lost],
        groups=[group],
        decisions=[split],
        workers_left_out=9,
        draining=True,
        models=[],
        kv={"blocks": 0, "used": 0, "cached": 0},
    )
    text = "\n".join(top.describe(seen))
    for part in (
        "draining",
        "no model",
        "no wrong_blocks",
        "3/8",
        "7 of 8 ranks, NOT WHOLE",
        "9 more",
    ):
        assert part in text, text
    assert "p-0 + w-0" in text and "- > 21.5" in text


def test_an_empty_fleet_is_told_too() -> None:
    text = "\n".join(top.describe(document(workers=[], decisions=[], workers_total=0)))
    assert "placements" not in text and "worker " in text


def test_a_terminal_gets_what_it_has_room_for_and_no_names_that_steer_it() -> None:
    evil = document(models=["\x1b[2J\u202eevil"], workers=[worker(id=f"w-{i}") for i in range(500)])
    out = io.StringIO()
    top._draw(top.describe(evil), "http://x", out)  # pyright: ignore[reportPrivateUsage]
    drawn = out.getvalue()
    assert "\x1b[2J" not in drawn and "\u202e" not in drawn and "\\x1b[2J" in drawn
    lines = drawn.split("\r\n")
    assert len(lines) == 24 and "more lines" in lines[-1], "as high as a terminal is taken for"


@contextmanager
def serving(*streams: tuple[int, bytes]) -> Generator[tuple[str, list[str]]]:
    """A server that gives these answers, one after the other; its URL, and the paths that were asked for."""
    answers, asked = list(streams), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(seen: Any) -> bytes:
    return b"data: " + json.dumps(seen).encode() + b"\n\n"


def test_once_asks_for_one_event(capsys: pytest.CaptureFixture[str]) -> None:
    with serving((200, event(document()))) as (url, asked):
        assert main.main(["top", "--once", "--url", url]) == 0
    assert asked == ["/dashboard/events?once=true"]
    assert "w-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, b""), "the router sent nothing"),
        ((200, b"data: {\n\n"), "not a document"),
        ((200, b"data: [1]\n\n"), "not a document"),
        ((200, event({})), "not a document"),
        ((200, event(document(workers="many"))), "not a document"),
        ((200, b"data: " + b"[" * 100_000 + b"\n\n"), "not a document"),
        ((429, b'{"error": {"message": "too many \\u001b[2J"}}'), "too many \\x1b[2J"),
        (
            (404, b"<html>"),
            "status 404; a router with --admin-listen-only has it at --admin-listen",
        ),
    ],
)
def test_a_stranger_at_the_other_end_is_an_error_in_a_line(
    answer: tuple[int, bytes], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answer) as (url, _):
        assert main.main(["top", "--once", "--url", url]) == 1
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1, said


def test_a_line_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "MOST_EVENT_BYTES", 1_000)
    with serving((200, b"data: " + b"x" * 5_000)) as (url, _):
        assert main.main(["top", "--once", "--url", url]) == 1


def test_a_stream_that_ends_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", pause)
    one = event(document()) + event(document(finished=7))
    with serving((200, one), (200, one), (503, b""), (503, b""), (200, one)) as (url, asked):
        assert main.main(["top", "--json", "--url", url]) == 0, "Ctrl-C is a good end"
    assert len(asked) == 5 and pauses == [top.AGAIN_S] * 5
    said = capsys.readouterr()
    assert [json.loads(line)["finished"] for line in said.out.splitlines()] == [1_000, 7] * 3
    ended = "headrace top: the stream ended"
    assert said.err.splitlines() == [ended, ended, "headrace top: status 503", ended], "each once"


def test_a_terminal_shows_that_the_router_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(top.time, "sleep", stop)
    monkeypatch.setattr(top.sys, "stdout", terminal := Terminal())
    with serving((200, event(document()))) as (url, _):
        assert main.main(["top", "--url", url]) == 0
    last = terminal.getvalue().split(top.HOME)[-1]
    assert "away: the stream ended" in last and "w-0" not in last, "no figures of before"


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_later_is_the_end(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top.time, "sleep", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    with serving((200, event(document())), (status, b"")) as (url, _):
        assert main.main(["top", "--url", url]) == 1
    assert f"status {status}; the key comes from" in capsys.readouterr().err


def test_a_router_that_says_nothing_for_long_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(ChatError, match="timed out"):
            server.request("GET", "/")


def test_where_the_first_stream_cannot_be_had_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot reach" in capsys.readouterr().err


def test_who_reads_a_pipe_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(top, "_watch", left)
    monkeypatch.setattr(top.sys, "stdout", io.StringIO())
    words = Namespace(
        url="http://x",
        once=False,
        json=False,
        admin_key_file=None,
        tls_ca=None,
        tls_cert=None,
        tls_key=None,
    )
    assert top.run(words) == 0
