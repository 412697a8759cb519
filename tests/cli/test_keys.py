"""Keys come from files and the environment; on a command line they are refused, and not repeated."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.client import chat, keys
from headrace.cli.client.unix_http import UnixConnection
from headrace.errors import ConfigError
from headrace.settings import router, table
from headrace.settings.values import SettingsError


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("k\n", "k"),
        ("k", "k"),
        ("# comment\n\n  k  \nother\n", "k"),
        ("alice k\r\nbob l\r\n", "k"),
        ("alice\tk\n", "k"),
        ("k # of production\n", "k"),
        (" #x\nalice k\t#y\n", "k"),
        ("k#9\n", "k#9"),
        ("k rpm=60 name=x\n", "k"),
        ("alice k expires=2027-01-01 # hers\n", "k"),
        ("k only=metrics\n", "k"),
        ("alice c2VzYW1l==\n", "c2VzYW1l=="),
    ],
)
def test_the_first_key_of_a_file_is_sent(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    assert keys.read_key("--api-key-file", tmp_path / "keys", "NO_SUCH_VARIABLE") == key


@pytest.mark.parametrize("data", [b"", b"\n\n", b"# k\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(data)
    for path in (tmp_path / "keys", tmp_path / "nothing", tmp_path):
        with pytest.raises(SettingsError, match=f"--api-key-file: .*{path}"):
            keys.read_key("--api-key-file", path, "NO_SUCH_VARIABLE")


@pytest.mark.parametrize("kind", ["blake3", "sha256"])
def test_a_digest_is_no_key_that_could_be_sent(kind: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {kind}:{'0' * 64} rpm=1\nplain\n")
    with pytest.raises(SettingsError, match="the digest of a key"):
        keys.read_key("--api-key-file", tmp_path / "keys", "NO_SUCH_VARIABLE")


def test_the_environment_is_used_where_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_KEY", "")
    assert keys.read_key("--x", None, "HEADRACE_TEST_KEY") is None
    monkeypatch.setenv("HEADRACE_TEST_KEY", "k")
    assert keys.read_key("--x", None, "HEADRACE_TEST_KEY") == "k"


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (["chat", "--api-key", "sesame"], "--api-key-file"),
        (["chat", "--api-key=sesame"], "HEADRACE_API_KEY"),
        (["explain", "x", "--api-key=sesame"], "--api-key-file"),
        (["drain", "w", "--api-key=sesame"], "--admin-key-file"),
        (["serve", "--api-key=sesame"], "--api-key-file"),
        (["worker", "--secret", "sesame"], "--secret-file"),
        (["router", "--api-key", "sesame"], "--api-key-file"),
        (["router", "--api-key=sesame"], "HEADRACE_API_KEY"),
        (["router", "--secret=sesame"], "--secret-file"),
        (["bench", "load", "--api-key=sesame"], "--api-key-file"),
        (["mock", "--secret=sesame"], "--secret-file"),
    ],
)
def test_a_key_on_the_command_line_is_refused(
    command: list[str], instead: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main.main(command)
    except SystemExit as ended:
        status = ended.code
    error = capfd.readouterr().err
    assert status == 2
    assert instead in error
    assert "command line" in error
    assert "sesame" not in error


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_serving_other_machines_needs_keys_or_the_wish(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    assert main.main(["serve", "--host", host, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --host: {host} can be reached by others")
    assert "--api-key-file" in error and "--allow-anonymous-clients" in error
    assert error.count("Usage: headrace serve [FLAGS] [MODEL]") == 1
    check_host(host, "--allow-anonymous-clients")
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    check_host(host)


def test_addresses_of_this_machine_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    for host in ("127.0.0.1", "::1", "127.1.2.3", "localhost"):
        check_host(host)
    with pytest.raises(ConfigError, match="can be reached by others"):
        check_host("0.0.0.0")


def check_host(host: str, *flags: str) -> None:
    """What `serve` asks the router before anything starts."""
    kept = table.Typed({"--host": [host]})
    kept.texts.update((flag, [None]) for flag in flags)
    router.check_router(kept, "headrace serve")


class UnixServer(socketserver.UnixStreamServer):
    """Takes the place of a router that listens for its operators."""

    def get_request(self) -> tuple[object, object]:  # pyright: ignore[reportIncompatibleMethodOverride]
        request, _ = super().get_request()
        return request, ("unix", 0)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "host": self.headers["Host"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        pass


def test_operators_are_reached_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with UnixServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            answer = chat.Server(f"unix:{path}").request("GET", "/workers")
            assert json.loads(answer.read()) == {"path": "/workers", "host": "localhost"}
        finally:
            server.shutdown()
            thread.join()


def test_a_socket_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(chat.ChatError, match="cannot reach unix:"):
        chat.Server(f"unix:{tmp_path}/nothing").request("GET", "/workers")
    connection = UnixConnection(tmp_path / "nothing", timeout=1)
    with pytest.raises(FileNotFoundError):
        connection.connect()
