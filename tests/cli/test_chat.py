"""The terminal conversation, against a small server that plays the router's part."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.client.chat import Answer, Chat, ChatError, Server
from headrace.cli.client.terminal import printable

DATA = Path(__file__).parents[1] / "data"


class Fake(ThreadingHTTPServer):
    """Answers every chat with `script`; notes what it was asked and whether the client left."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.script: list[dict[str, Any] | str] = []
        self.client_left = threading.Event()
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def encrypt(self, ca: Path | None = None) -> None:
        """Speak TLS; with `ca` only to clients that show a certificate of that authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(DATA / "localhost.crt", DATA / "localhost.key")
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )


class Handler(BaseHTTPRequestHandler):
    server: Fake  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.status != 200:
            self._json(self.server.status, {"error": {"message": "prompt too long"}})
            return
        self.send_response(200)
        self.end_headers()
        for event in self.server.script:
            if event == "hang":  # until the client leaves, which ends this read
                self.connection.recv(1)
                self.server.client_left.set()
                return
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())

    def _json(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Requests are expected; nothing else is logged."""


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


@pytest.fixture
def fake() -> Generator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def command(fake: Fake, *flags: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "chat", "--url", fake.url, *flags]


ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_history_and_figures_of_an_answer(fake: Fake) -> None:
    fake.script = [text("Par"), text("is", "stop"), USAGE, "[DONE]"]
    chat = Chat(Server(fake.url), "tiny", system="Be brief.")
    answer = Answer()
    assert list(chat.say("Capital of France?", answer)) == ["Par", "is"]
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (2, 9, 4)
    assert "9 (4 cached)" in answer.stats()
    assert list(chat.say("And of Italy?", Answer())) == ["Par", "is"]
    assert [m["role"] for m in fake.asked[1]["messages"]] == [
        *("system", "user", "assistant", "user"),
    ]
    chat.reset()
    assert chat.messages == []


def test_an_error_leaves_no_trace_in_the_history(fake: Fake) -> None:
    chat = Chat(Server(fake.url), "tiny")
    fake.status = 400
    with pytest.raises(ChatError, match="prompt too long"):
        list(chat.say("x", Answer()))
    fake.status = 200
    fake.script = [{"error": {"message": "worker lost"}}]
    with pytest.raises(ChatError, match="worker lost"):
        list(chat.say("x", Answer()))
    assert chat.messages == []


@pytest.mark.parametrize("status", [401, 403])
def test_where_a_key_is_asked_for_the_error_says_what_gives_it(fake: Fake, status: int) -> None:
    fake.status = status
    with pytest.raises(ChatError, match="--api-key-file FILE or the variable HEADRACE_API_KEY"):
        list(Chat(Server(fake.url), "tiny").say("x", Answer()))


def test_a_stream_without_its_end_is_an_error(fake: Fake) -> None:
    fake.script = [text("Par")]
    with pytest.raises(ChatError, match="broke off"):
        list(Chat(Server(fake.url), "tiny").say("x", Answer()))


def test_lines_of_a_pipe_are_messages(fake: Fake) -> None:
    fake.script = [text("Hello!", "stop"), USAGE, "[DONE]"]
    done = subprocess.run(
        command(fake, "--stats", "--max-tokens", "7"),
        input="hi\n\nagain\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
        check=True,
    )
    assert done.stdout == "Hello!\nHello!\n"
    assert "tok/s" in done.stderr
    assert fake.asked[0]["max_completion_tokens"] == 7
    assert len(fake.asked[1]["messages"]) == 3


STEERING = "a\x1b]0;owned\x07\x9b31m\r\x08b\u202ec\u2066\x7f\ud800\td\ne"
SHOWN = r"a\x1b]0;owned\x07\x9b31m\x0d\x08b\u202ec\u2066\x7f\ud800" "\td\ne"


def test_what_would_steer_a_terminal_is_shown(fake: Fake) -> None:
    fake.script = [text(STEERING), text("\x1b"), text("[2J", "stop"), USAGE, "[DONE]"]
    done = subprocess.run(
        command(fake),
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
        check=True,
    )
    assert done.stdout == SHOWN + "\\x1b[2J\n"
    assert printable(STEERING) == SHOWN
    assert printable("naïve 日本語 🙂 é\n\t") == "naïve 日本語 🙂 é\n\t"


def test_errors_and_names_steer_no_terminal_either(fake: Fake) -> None:
    fake.script = [text("x"), {"error": {"message": STEERING}}]
    done = subprocess.run(
        command(fake), input="hi\n", capture_output=True, text=True, timeout=60, env=ENV
    )
    assert done.returncode == 1
    assert done.stderr == f"\nheadrace chat: {SHOWN}\n"


def test_no_server_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "chat", "--url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("headrace chat: cannot reach http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1


def test_interrupt_stops_the_answer_and_keeps_the_session(fake: Fake) -> None:
    import pty

    fake.script = [text("endless"), "hang"]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(fake), stdin=slave, stdout=slave, stderr=slave, env=ENV, start_new_session=True
    )
    os.close(slave)
    with process, os.fdopen(master, "rb+", buffering=0) as terminal:
        seen = b""

        def until(what: bytes) -> None:
            nonlocal seen
            while what not in seen:
                try:
                    chunk = terminal.read(4096)
                except OSError:  # Linux says so when the other side has closed
                    chunk = b""
                assert chunk, f"ended before {what!r}: {seen!r}"
                seen += chunk
            seen = seen.split(what, 1)[1]

        until(b"> ")
        terminal.write(b"talk\n")
        until(b"endless")
        process.send_signal(signal.SIGINT)
        until(b"[stopped]")
        assert fake.client_left.wait(20)
        until(b"> ")
        fake.script = [text("fine", "stop"), USAGE, "[DONE]"]
        terminal.write(b"and now\n")
        until(b"fine")
        until(b"> ")
        terminal.write(b"/exit\n")
        assert process.wait(20) == 0
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["talk", "endless", "and now"]


def run_over_tls(fake: Fake, *flags: str) -> subprocess.CompletedProcess[str]:
    url = fake.url.replace("http://127.0.0.1", "https://localhost")
    command = [sys.executable, "-m", "headrace", "chat", "--url", url, *flags]
    return subprocess.run(
        command, input="hi\n", capture_output=True, text=True, timeout=60, check=False
    )


def test_a_server_is_recognised_by_its_certificate(fake: Fake) -> None:
    fake.encrypt()
    fake.script = [
        {"choices": [{"delta": {"content": "hello"}, "finish_reason": "stop"}]},
        "[DONE]",
    ]
    answered = run_over_tls(fake, "--tls-ca", str(DATA / "localhost.crt"))
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip() == "hello"
    for flags in ([], ["--tls-ca", str(DATA / "stranger.crt")]):
        refused = run_over_tls(fake, *flags)
        assert refused.returncode == 1
        assert "cannot reach https://" in refused.stderr and "certificate" in refused.stderr


def test_a_server_that_asks_for_a_certificate_is_shown_one(fake: Fake) -> None:
    fake.encrypt(DATA / "tls/ca.crt")
    fake.script = [
        {"choices": [{"delta": {"content": "hello"}, "finish_reason": "stop"}]},
        "[DONE]",
    ]
    trusted = ["--tls-ca", str(DATA / "localhost.crt")]
    shown = ["--tls-cert", str(DATA / "tls/client.crt"), "--tls-key", str(DATA / "tls/client.key")]
    answered = run_over_tls(fake, *trusted, *shown)
    assert answered.returncode == 0, answered.stderr
    assert run_over_tls(fake, *trusted).returncode == 1
    for wrong, part in [
        (shown[:2], "go together"),
        ([*shown[:3], str(DATA / "localhost.key")], "cannot use"),
        (["--tls-ca", "/nonexistent"], "cannot use"),
    ]:
        refused = run_over_tls(fake, *wrong)
        assert refused.returncode == 2
        assert part in refused.stderr
