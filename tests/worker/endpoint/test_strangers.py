"""What strangers may send to the endpoint of a worker: nothing of it is noticed by others, or by the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.worker.endpoint import server
from helpers.worker.watched import WatchedScene, parsed, request, serving_endpoint

MALFORMED: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "zeros": bytes(4096),
    "one word": b"GET\r\n\r\n",
    "another version": b"GET /livez HTTP/9.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no colon": b"GET /livez HTTP/1.1\r\nwhat is this\r\n\r\n",
    "a space in a name": b"GET /livez HTTP/1.1\r\nHo st: x\r\n\r\n",
    "a zero in a value": b"GET /livez HTTP/1.1\r\nHost: a\0b\r\n\r\n",
    "a long line": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET /livez HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    "two lengths": b"GET /livez HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "a negative length": b"GET /livez HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nxyz",
    "a bracket": b"GET http://[::1/livez HTTP/1.1\r\n\r\n",
    "a port of words": b"GET http://h:port/livez HTTP/1.1\r\n\r\n",
}


async def lives(scene: WatchedScene) -> bool:
    return (await scene.get("/livez")).status == 200


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_request_is_refused_and_not_told_to_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="headrace")
    async with serving_endpoint() as scene:
        answer = await scene.raw(MALFORMED[name])
        assert answer == b"" or parsed(answer).status == 400, answer
        assert await lives(scene)
    assert [record for record in caplog.records if record.name != "asyncio"] == []


ODD: dict[str, bytes] = {
    "CONNECT": b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    "chunks": request("/livez", "Transfer-Encoding: chunked", method="POST") + b"not hex\r\n",
    "an upgrade": request("/livez", "Upgrade: websocket", "Connection: upgrade"),
    "gzip": request("/livez", "Content-Encoding: gzip", "Content-Length: 4") + b"abcd",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "HTTP/1.0": b"GET /livez HTTP/1.0\r\n\r\n",
    "100-continue": request("/livez", "Expect: 100-continue", "Content-Length: 9", method="POST"),
    "a query": request("/livez?a=%ff&%00=%zz"),
    "a whole address": request("http://localhost/livez"),
    "an asterisk": request("*", method="OPTIONS"),
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_requests_get_an_answer(name: str) -> None:
    async with serving_endpoint() as scene:
        assert parsed(await scene.raw(ODD[name])).status in {200, 400, 404, 405}
        assert await lives(scene)


async def test_a_body_without_end_is_not_read() -> None:
    async with serving_endpoint() as scene:
        client = await scene.connect()
        head = request("/metrics", "Content-Length: 1000000000000", method="POST")
        await client.send(head + b"x" * 100_000)
        answer = parsed(await client.rest())
        client.hang_up()
        assert (answer.status, await lives(scene)) == (405, True)


async def test_half_a_request_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTION_S", 0.05)
    async with serving_endpoint() as scene:
        for begun in (b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: a\r\n"):
            assert await scene.raw(begun) == b""


async def test_connections_that_say_nothing_make_room_for_others() -> None:
    async with serving_endpoint() as scene:
        silent = [await scene.connect() for _ in range(server.MOST_CONNECTIONS + 3)]
        assert await lives(scene)
        assert [await client.rest() for client in silent[:3]] == [b""] * 3
        last = silent[-1]
        await last.send(request("/livez"))
        assert parsed(await last.rest()).status == 200
        for client in silent:
            client.hang_up()


async def test_hundreds_that_ask_at_once_are_all_answered_or_hung_up_on() -> None:
    async with serving_endpoint() as scene:
        answers = await asyncio.gather(*(scene.raw(request("/metrics")) for _ in range(300)))
        assert all(answer == b"" or b"\r\n\r\n" in answer for answer in answers)
        assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) > 0
        assert await lives(scene)


async def test_those_that_take_nothing_hold_nobody_up() -> None:
    async with serving_endpoint() as scene:
        deaf = [await scene.connect() for _ in range(8)]
        for client in deaf:
            await client.send(request("/debug/stack"))
        assert await lives(scene)
        for client in deaf:
            client.hang_up()
        assert await lives(scene)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("Forwarded: for=192.0.2.1", "a proxy passed it on"),
        ("X-Forwarded-For: 192.0.2.1", "a proxy passed it on"),
        ("Via: 1.1 proxy", "a proxy passed it on"),
        ("Origin: http://localhost:8002", "a page in a browser sent it"),
        ("Sec-Fetch-Site: cross-site", "a page in a browser sent it"),
        ("Host: rebound.example:8002", "Host has to be localhost or an address"),
        ("Host: localhost.rebound.example", "Host has to be localhost or an address"),
        ("Host:", "Host has to be localhost or an address"),
    ],
)
async def test_what_a_process_is_at_is_for_processes_of_its_machine(header: str, why: str) -> None:
    async with serving_endpoint() as scene:
        for path in ("/debug/stack", "/debug/profile?seconds=60"):
            answer = await scene.get(path, header)
            assert answer.status == 403
            assert answer.json["message"].endswith(why)
        assert (await scene.get("/metrics", header)).status == 200


@pytest.mark.parametrize("host", ["localhost:8002", "127.0.0.1", "[::1]:8002", "[::1]"])
async def test_processes_of_the_machine_see_stacks(host: str) -> None:
    async with serving_endpoint() as scene:
        assert (await scene.get("/debug/stack", f"Host: {host}")).status == 200


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("localhost", False),
    ],
)
def test_the_machine_is_known_by_its_loopback_addresses(address: str, local: bool) -> None:
    assert server._is_local(address) is local
