"""What clients must not send: every row of the table gets its status, its name, and harms nobody."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from helpers.serving.server import Server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(server: Server, **changes: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": HELLO, "max_tokens": 2} | changes


@pytest.fixture(autouse=True)
def nobody_was_harmed(tiny: Server) -> Any:
    yield
    assert tiny.post(CHAT, chat(tiny)).status == 200
    tiny.wait_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "m", "messages": [}',
        b'\xff\xfe{"model": "m"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [], "temperature": NaN}',
        b'{"model": "m", "messages": [], "temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_json_is_400(tiny: Server, body: bytes) -> None:
    reply = tiny.post(CHAT, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["message"]
    assert set(reply.error) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"presence_penalty": 99}, "presence_penalty"),
        ({"seed": "x"}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_a_wrong_field_is_named(tiny: Server, changes: dict[str, Any], param: str) -> None:
    reply = tiny.post(CHAT, chat(tiny, **changes))
    assert reply.status == 400
    assert (reply.error["param"] or "").split("[")[0].split(".")[0] == param
    assert reply.error["type"] == "invalid_request_error"


def test_duplicate_keys_are_refused_or_decided(tiny: Server) -> None:
    body = (
        f'{{"model": "{tiny.model}", "messages": [{{"role": "user", "content": "x"}}],'
        '"max_tokens": 1, "max_tokens": 2}'
    )
    assert tiny.post(CHAT, body.encode()).status in (200, 400)


def test_an_unknown_model_is_404(tiny: Server) -> None:
    reply = tiny.post(CHAT, chat(tiny, model="no-such-model"))
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert tiny.model in reply.error["message"]


def test_an_unknown_path_and_a_wrong_method(tiny: Server) -> None:
    assert tiny.get("/v1/nothing").status == 404
    assert tiny.get(CHAT).status == 405


def test_a_prompt_over_the_context_names_both_numbers(tiny: Server) -> None:
    limit = tiny.workers()  # the context length is in the error; the model is small
    assert limit
    reply = tiny.post(CHAT, chat(tiny, messages=[{"role": "user", "content": "word " * 50_000}]))
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    numbers = [w for w in reply.error["message"].replace(",", " ").split() if w.isdigit()]
    assert len(numbers) >= 2


def test_an_answer_over_the_rest_of_the_context(tiny: Server) -> None:
    reply = tiny.post(CHAT, chat(tiny, max_tokens=10_000_000))
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"


def test_a_body_of_100_mb_is_413(tiny: Server) -> None:
    """Refused by its length alone: the server reads no more of it than it must."""
    with socket.create_connection((tiny.host, tiny.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {100 << 20}\r\n\r\n"
        connection.sendall(head.encode() + b"{" * 1000)
        assert connection.recv(4096).split(b"\r\n")[0].split()[1] == b"413"


def test_a_chunked_body_without_end_is_413(tiny: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = b""
    with socket.create_connection((tiny.host, tiny.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        try:
            for _ in range(2_000):  # 131 MB, far over the limit
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server stopped reading, as it should
        try:
            answer = connection.recv(4096)
        except ConnectionResetError:
            return  # closed with our data unread: the kernel may drop the answer on the way
    assert answer.split(b"\r\n")[0].split()[1:2] in ([b"413"], [])


def test_headers_that_come_too_slowly_are_408(tiny: Server) -> None:
    with socket.create_connection((tiny.host, tiny.port), timeout=60) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Slow: ".encode())
        answer = connection.recv(4096)
    assert answer == b"" or answer.split(b"\r\n")[0].split()[1] == b"408"


def test_a_client_that_sends_garbage_is_cut_off(tiny: Server) -> None:
    with socket.create_connection((tiny.host, tiny.port), timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10 + b"\r\n\r\n")
        answer = connection.recv(4096)
    assert answer == b"" or answer.split(b"\r\n")[0].split()[1] == b"400"
