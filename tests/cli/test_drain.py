"""`headrace drain` against a server that answers what a router does, and what none does."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.cli.client import drain


def state(phase: str, **change: Any) -> dict[str, Any]:
    over = {
        "outcome": "done",
        "blocks_offered": 10,
        "blocks_handed_over": 8,
        "blocks_kept": 9,
        "hits_offered": 40,
        "hits_kept": 39,
        "hit_rate_kept": 0.975,
        "successors": [
            {"worker": "w2", "pulled": 8, "bytes": 8 << 20, "backend": "shm", "error": None},
            {"worker": "w3", "pulled": 0, "bytes": 0, "backend": None, "error": "timeout"},
        ],
    }
    return {
        "worker": "w1",
        "phase": phase,
        "seconds": 1.25,
        "left_in_time": True if phase == "done" else None,
        "hand_over": over | change.pop("hand_over", {}),
        "requests": {"running": 3, "finished": 2, "moved": 1},
    } | change


class Router(ThreadingHTTPServer):
    """Gives `answers` one after the other, and notes what it was asked."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.asked: list[tuple[str, str, Any, str | None]] = []


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        assert isinstance(self.server, Router)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.headers.get("Authorization")
        self.server.asked.append((self.command, self.path, json.loads(body or b"null"), key))
        status, answer = self.server.answers.pop(0)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def router(*answers: tuple[int, Any]) -> Generator[Router]:
    server = Router(list(answers))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(server: Router, *arguments: str) -> int:
    return main.main(["drain", "my worker", "--url", f"127.0.0.1:{server.server_port}", *arguments])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    monkeypatch.delenv("HEADRACE_ADMIN_KEY", raising=False)
    monkeypatch.setenv("HEADRACE_API_KEY", "a key of clients is not sent")


def test_a_drain_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("# of operators\n\nk\n")
    answers = [(202, state("offering")), (200, state("finishing")), (200, state("done"))]
    with router(*answers) as server:
        assert (
            run(
                server, "--budget", "1500ms", "--hand-over", "7", f"--admin-key-file={tmp_path}/key"
            )
            == 0
        )
    path = "/workers/my%20worker/drain"
    assert server.asked == [
        ("POST", path, {"budget_ms": 1500, "hand_over": 7}, "Bearer k"),
        ("GET", path, None, "Bearer k"),
        ("GET", path, None, "Bearer k"),
    ]
    out = capsys.readouterr().out
    assert "w1 left after 1.2 s" in out
    assert "3 were running, 2 finished, 1 went on elsewhere" in out
    assert "9 of 10 blocks offered are kept (8 handed over), 97.5% of their hits\n" in out
    assert "w2: 8 blocks, 8.0 MiB by shm" in out
    assert "w3: timeout" in out


def test_a_worker_that_did_not_leave_in_time_fails_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over = {"outcome": "no_offer", "hit_rate_kept": None}
    late = state("done", left_in_time=False, hand_over=over)
    with router((202, late)) as server:
        assert run(server, "--json") == 1
        server.answers.append((202, late))
        assert run(server) == 1
    text = capsys.readouterr().out
    assert json.loads(text[: text.rindex("}") + 1]) == late
    assert "hung up on" in text
    assert "cache: the worker offered nothing in time" in text


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (404, {"error": {"message": "no worker here is called `my worker`"}}, "is called"),
        (409, {"error": {"message": "the worker leaves already"}}, "leaves already"),
        (
            401,
            {"error": {"message": "a key is asked for"}},
            "for; the key comes from --admin-key-file FILE",
        ),
        (403, {"error": {"message": "for operators"}}, "HEADRACE_ADMIN_KEY"),
        (500, b"oops", "status 500"),
        (202, b"oops", "not a drain"),
        (202, {}, "not a drain"),
        (202, [], "not a drain"),
    ],
)
def test_what_is_no_drain_is_said_in_one_line(
    status: int, answer: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with router((status, answer)) as server:
        assert run(server) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace drain: ")
    assert says in error
    assert error.count("\n") == 1


def test_a_drain_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "GRACE_S", 0.0)
    with router((202, state("finishing"))) as server:
        assert run(server, "--budget", "0s") == 1
    assert "it is still finishing" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["", "s", "-1s", "1 day", "2h", "inf", "nan", "1e3"])
def test_a_budget_that_is_no_time_is_refused(budget: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["drain", "w", f"--budget={budget}"])
    assert caught.value.code == 2
