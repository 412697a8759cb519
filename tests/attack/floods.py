"""Clients that hold on to things: places, windows, connections, unread answers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable

from attack.attack import Attack, Outcome, Scale
from attack.report import percentile
from attack.stack import Router, Stack
from attack.wire import (
    PATIENCE_S,
    PING,
    SETTINGS,
    Reply,
    everything,
    frame,
    greeting,
    h2_request,
    parse,
    post,
    reset,
    send,
    tally,
)

ANOTHER_HOST = "127.0.0.2"  # on Linux all of this network is the own machine
HOLD_S = 12.0  # how long an attacker sits on what it holds


async def many_choices(stack: Stack, scale: Scale) -> Outcome:
    """One tenant's requests with 128 choices each take all places; somebody else wants one."""
    body = {"model": stack.model, "prompt": "hello", "max_tokens": 2_000, "ignore_eos": True}
    greedy = [("X-Headrace-Tenant", "greedy")]

    async def take(n: int) -> Reply:
        request = post(
            stack.router, "/v1/completions", json.dumps({**body, "n": n}).encode(), greedy
        )
        while True:  # until there is a place
            reply = await send(stack.router, request, HOLD_S)
            if n > 1 or reply.status != "429":
                return reply
            await asyncio.sleep(0.02)

    held = [asyncio.create_task(take(n)) for n in [128] * 9 + [1] * scale.of(128)]
    await asyncio.sleep(1.0)
    reply, took = await stack.newcomer()
    ended = [task.result() for task in held if task.done()]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    told = f"newcomer {tally([reply])} after {took:.2f} s; the greedy one: {tally(ended)}"
    return Outcome(told, reply.status == "200" and took < 2)


async def hold(router: Router, first: bytes, hold_s: float) -> bytes:
    """Send, then read nothing but what the kernel takes, until the time is over or the router hangs up."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(loop.sock_connect(client, (router.host, router.port)), 10)
            await asyncio.wait_for(loop.sock_sendall(client, first), 10)
            await asyncio.sleep(hold_s)
        return b""


async def zero_windows(stack: Stack, scale: Scale) -> Outcome:
    """HTTP/2 with windows of zero: finished answers that nobody reads hold every place."""
    connections, each = 5, 200
    asked = {"model": stack.model, "prompt": "hello", "max_tokens": 1, "stream": True}
    body = json.dumps(asked).encode()
    first = greeting(0) + b"".join(
        h2_request(stack.router, 2 * i + 1, "POST", "/v1/completions", body) for i in range(each)
    )
    held = [asyncio.create_task(hold(stack.router, first, HOLD_S)) for _ in range(connections)]
    await asyncio.sleep(2.0)
    waits: list[float] = []
    replies: list[Reply] = []
    for _ in range(5):
        reply, took = await stack.newcomer()
        replies.append(reply)
        waits.append(took)
        await asyncio.sleep(1.0)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    fine = all(reply.status == "200" for reply in replies) and max(waits) < 2
    return Outcome(f"newcomers {tally(replies)}, at most {max(waits):.2f} s", fine)


async def newcomers_beside(
    stack: Stack, attackers: Iterable[Coroutine[None, None, object]], wait_s: float
) -> Outcome:
    """Five short requests of somebody else, a second apart, while they attack."""
    held = [asyncio.create_task(attacker) for attacker in attackers]
    await asyncio.sleep(wait_s)
    found: list[tuple[Reply, float]] = []
    for _ in range(5):
        found.append(await stack.newcomer())
        await asyncio.sleep(1.0)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    longest = max(took for _, took in found)
    fine = all(reply.status == "200" for reply, _ in found) and longest < 2
    told = f"newcomers {tally(reply for reply, _ in found)}, at most {longest:.2f} s"
    return Outcome(told, fine)


async def drip(router: Router, first: bytes, byte: bytes) -> None:
    """Send `first` at once, then a byte each 100 ms until the router hangs up."""
    reader, writer = await asyncio.open_connection(router.host, router.port)
    with contextlib.suppress(OSError), contextlib.closing(writer):
        writer.write(first)
        while not reader.at_eof():
            writer.write(byte)
            await writer.drain()
            await asyncio.sleep(0.1)


async def flood(router: Router, first: bytes, again: Callable[[int], bytes]) -> None:
    """Send `first`, then one lot after the other, and read all that comes, until the router hangs up."""
    reader, writer = await asyncio.open_connection(router.host, router.port)
    reading = asyncio.create_task(everything(reader))
    with contextlib.suppress(OSError), contextlib.closing(writer):
        writer.write(first)
        for lot in itertools.count():
            if reading.done():
                break
            writer.write(again(lot))
            await writer.drain()
            await asyncio.sleep(0)
    reading.cancel()


async def flood_on_and_on(router: Router, first: bytes, again: Callable[[int], bytes]) -> None:
    """The same on one connection after the other, as the router ends them."""
    while True:
        with contextlib.suppress(OSError):
            await flood(router, first, again)


async def slow_heads(stack: Stack, scale: Scale) -> Outcome:
    """Heads of requests that come byte by byte."""
    first = b"POST /v1/completions HTTP/1.1\r\nX: "
    dripping = (drip(stack.router, first, b"a") for _ in range(scale.of(300, 20)))
    return await newcomers_beside(stack, dripping, 1.0)


async def slow_bodies(stack: Stack, scale: Scale) -> Outcome:
    """Bodies of requests that come byte by byte."""
    first = post(stack.router, "/v1/completions", b" " * 1_000_000)[:-999_999]
    dripping = (drip(stack.router, first, b" ") for _ in range(scale.of(300, 20)))
    return await newcomers_beside(stack, dripping, 1.0)


async def pipelined(stack: Stack, scale: Scale) -> Outcome:
    """Requests one behind the other without waiting, on connections that go on for ever."""
    host = f"{stack.router.host}:{stack.router.port}"
    lot = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() * 50
    flooding = (flood(stack.router, b"", lambda _: lot) for _ in range(scale.of(16, 4)))
    return await newcomers_beside(stack, flooding, 1.0)


async def stalled_readers(stack: Stack, scale: Scale) -> Outcome:
    """Streams of 2,000 tokens that nobody reads."""
    body = {"model": stack.model, "prompt": "hello", "max_tokens": 2_000, "ignore_eos": True}
    asks = post(
        stack.router,
        "/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        [("X-Headrace-Tenant", "greedy")],
    )
    holding = (hold(stack.router, asks, HOLD_S) for _ in range(scale.of(100, 10)))
    return await newcomers_beside(stack, holding, 1.0)


async def multiplexed(stack: Stack, scale: Scale) -> Outcome:
    """HTTP/2 requests side by side without waiting, on connections that go on for ever."""

    def lot(number: int) -> bytes:
        streams = range(100 * number + 1, 100 * number + 101, 2)
        return b"".join(h2_request(stack.router, i, "GET", "/health", b"") for i in streams)

    flooding = (
        flood_on_and_on(stack.router, greeting(65_535), lot) for _ in range(scale.of(16, 4))
    )
    return await newcomers_beside(stack, flooding, 1.0)


async def rapid_resets(stack: Stack, scale: Scale) -> Outcome:
    """HTTP/2 requests that are taken back at once, as many as connections take."""
    body = json.dumps({"model": stack.model, "prompt": "hello", "max_tokens": 64}).encode()

    def lot(number: int) -> bytes:
        streams = range(100 * number + 1, 100 * number + 101, 2)
        return b"".join(
            h2_request(stack.router, i, "POST", "/v1/completions", body) + reset(i) for i in streams
        )

    flooding = (flood_on_and_on(stack.router, greeting(65_535), lot) for _ in range(scale.of(8, 2)))
    return await newcomers_beside(stack, flooding, 1.0)


async def pings(stack: Stack, scale: Scale) -> Outcome:
    """HTTP/2 pings and settings, each of which asks for an answer."""
    lot = (frame(PING, 0, 0, bytes(8)) + frame(SETTINGS, 0, 0)) * 200
    flooding = (
        flood_on_and_on(stack.router, greeting(0), lambda _: lot) for _ in range(scale.of(8, 2))
    )
    return await newcomers_beside(stack, flooding, 1.0)


async def compressed(stack: Stack, scale: Scale) -> Outcome:
    """Bodies that are 16 MiB once they are unpacked, which nobody does."""
    count = scale.of(16, 4)
    bomb = gzip.compress(bytes(16 << 20))
    coding = [("Content-Encoding", "gzip")]
    request = post(stack.router, "/v1/completions", bomb, coding)
    replies = await asyncio.gather(*(send(stack.router, request, 10) for _ in range(count)))
    return Outcome(tally(replies), all(reply.status == "415" for reply in replies))


async def unread_metrics(stack: Stack, scale: Scale) -> Outcome:
    """200 x GET /metrics on each of 100 HTTP/2 connections that read nothing."""
    connections = scale.of(100, 5)
    first = greeting(0) + b"".join(
        h2_request(stack.router, 2 * i + 1, "GET", "/metrics") for i in range(200)
    )
    await asyncio.gather(*(hold(stack.router, first, 5.0) for _ in range(connections)))
    return Outcome(f"{connections} connections", True)


async def idle_connections(stack: Stack, scale: Scale) -> Outcome:
    """1,500 connections that say nothing at a router that may have 1,024 descriptors; then a newcomer."""
    loop = asyncio.get_running_loop()
    silent: list[socket.socket] = []
    try:
        for _ in range(scale.of(1_500, 1_100)):
            client = socket.socket()
            client.setblocking(False)
            silent.append(client)
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(
                    loop.sock_connect(client, (stack.router.host, stack.router.port)), 2
                )
        reply, took = await stack.newcomer()
    finally:
        for client in silent:
            client.close()
    return Outcome(
        f"newcomer {tally([reply])} after {took:.2f} s", reply.status == "200" and took < 2
    )


async def resting_connections(stack: Stack, scale: Scale) -> Outcome:
    """As many kept-alive connections as descriptors, hard limit and all; then newcomers."""
    loop = asyncio.get_running_loop()
    resting: list[socket.socket] = []
    request = (
        f"GET /health HTTP/1.1\r\nHost: {stack.router.host}:{stack.router.port}\r\n\r\n".encode()
    )
    try:
        for _ in range(400):
            client = socket.socket()
            client.setblocking(False)
            resting.append(client)
            with contextlib.suppress(OSError, TimeoutError):
                address = (stack.router.host, stack.router.port)
                await asyncio.wait_for(loop.sock_connect(client, address), 2)
                await asyncio.wait_for(loop.sock_sendall(client, request), 2)
                await asyncio.wait_for(loop.sock_recv(client, 4096), 2)
        reply, took = await stack.newcomer()
    finally:
        for client in resting:
            client.close()
    return Outcome(
        f"newcomer {tally([reply])} after {took:.2f} s", reply.status == "200" and took < 2
    )


async def unfinished_bodies(stack: Stack, scale: Scale) -> Outcome:
    """Bodies that another host does not end, more than there are descriptors, each begun anew when it is closed."""
    first = post(stack.router, "/v1/completions", b" " * 1_000)[:-500]

    async def hold_on() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    stack.router.host, stack.router.port, local_addr=(ANOTHER_HOST, 0)
                )
                with contextlib.closing(writer):
                    writer.write(first)
                    await everything(reader)
            await asyncio.sleep(0.1)

    held = [asyncio.create_task(hold_on()) for _ in range(400)]
    await asyncio.sleep(1.0)
    found = [await stack.newcomer() for _ in range(5)]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    longest = max(took for _, took in found)
    fine = all(reply.status == "200" for reply, _ in found) and longest < 2
    return Outcome(f"newcomers {tally(reply for reply, _ in found)}, at most {longest:.2f} s", fine)


async def nothing(stack: Stack, scale: Scale) -> Outcome:
    """What the others see where nobody attacks: what the figures of the other rows may be by chance."""
    await asyncio.sleep(0.1)
    return Outcome("", True)


async def connects(stack: Stack, scale: Scale) -> Outcome:
    """512 clients that connect at the same moment, and ask at the same moment."""
    count = scale.of(512, 64)
    body = json.dumps({"model": stack.model, "prompt": "hello", "max_tokens": 1}).encode()
    request = post(stack.router, "/v1/completions", body)

    loop = asyncio.get_running_loop()

    async def answer(client: socket.socket) -> tuple[Reply, float]:
        parts: list[bytes] = []
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while part := await loop.sock_recv(client, 1 << 16):
                    parts.append(part)
        return parse(b"".join(parts)), time.monotonic() - began

    with contextlib.ExitStack() as open_clients:
        address = (stack.router.host, stack.router.port)
        began = time.monotonic()
        # nothing else is done meanwhile: the kernel takes all of them before they are accepted
        clients = [
            open_clients.enter_context(socket.create_connection(address, 10)) for _ in range(count)
        ]
        for client in clients:
            client.sendall(request)
            client.setblocking(False)
        pairs = await asyncio.gather(*map(answer, clients))
        lost = sum(sent_again(client) for client in clients)
    p99 = percentile([took for _, took in pairs], 0.99)
    replies = [reply for reply, _ in pairs]
    fine = all(reply.status == "200" for reply in replies) and lost == 0 and p99 < 1.0
    return Outcome(f"{tally(replies)}, p99 {p99:.2f} s, {lost} segments sent again", fine)


def sent_again(client: socket.socket) -> int:
    """Segments that the kernel sent more than once, as it does a second after a full backlog dropped a SYN."""
    if sys.platform != "linux":
        return 0
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[100:104], sys.byteorder)  # tcpi_total_retrans of linux/tcp.h


async def half_closed(stack: Stack, scale: Scale) -> Outcome:
    """Clients that shut down their writing side after the request, which is their right."""
    replies: list[Reply] = []
    for streamed in (False, True):
        body = {
            "model": stack.model,
            "prompt": "hello",
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": streamed,
        }
        reader, writer = await asyncio.open_connection(stack.router.host, stack.router.port)
        writer.write(post(stack.router, "/v1/completions", json.dumps(body).encode()))
        writer.write_eof()
        try:
            async with asyncio.timeout(30):
                replies.append(parse(await everything(reader)))
        except TimeoutError:
            replies.append(Reply("no answer"))
        finally:
            writer.close()
    whole = replies[0].status == "200" and b"[DONE]" in replies[1].body
    return Outcome(tally(replies), whole)


SMUGGLED = {
    "gzip, chunked": "{host}Transfer-Encoding: gzip, chunked\r\n",
    "two Transfer-Encoding": "{host}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "two lengths": "{host}Content-Length: {length}\r\nContent-Length: 5\r\n",
    "two Host": "{host}{host}Content-Length: {length}\r\n",
    "no Host": "Content-Length: {length}\r\n",
}


async def smuggling(stack: Stack, scale: Scale) -> Outcome:
    """Heads that two servers may read differently, over bodies that would be served."""
    router = stack.router
    body = json.dumps({"model": stack.model, "prompt": "hello", "max_tokens": 1}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    found: list[str] = []
    for name, lines in SMUGGLED.items():
        head = lines.format(host=f"Host: {router.host}:{router.port}\r\n", length=len(body))
        start = f"POST /v1/completions HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
        reply = await send(router, start + (chunks if "chunked" in head else body), 10)
        if reply.status != "400":
            found.append(f"{name}: {reply.status}")
    return Outcome(", ".join(found) or f"{len(SMUGGLED)} x 400", not found)


ATTACKS = [
    Attack(name="nothing (a control)", run=nothing, most_mb=16),
    Attack(
        name="one tenant with n 128, ten times",
        run=many_choices,
        most_mb=256,
        flags=("--max-streams=1024",),
    ),
    Attack(
        name="HTTP/2 windows of zero, 1,000 finished answers",
        run=zero_windows,
        most_mb=256,
        flags=("--max-streams=900",),
    ),
    Attack(name="200 x /metrics unread on 100 HTTP/2 connections", run=unread_metrics, most_mb=256),
    Attack(
        name="1,500 silent connections, soft limit of 1,024 descriptors",
        run=idle_connections,
        most_mb=128,
        prefix=("prlimit", "--nofile=1024:8192"),
    ),
    Attack(
        name="400 resting connections, hard limit of 256 descriptors",
        run=resting_connections,
        most_mb=64,
        prefix=("prlimit", "--nofile=256:256"),
    ),
    Attack(
        name="400 bodies that do not end, hard limit of 256 descriptors",
        run=unfinished_bodies,
        most_mb=64,
        prefix=("prlimit", "--nofile=256:256"),
    ),
    Attack(name="300 heads that come byte by byte", run=slow_heads, most_mb=64),
    Attack(name="300 bodies that come byte by byte", run=slow_bodies, most_mb=64),
    Attack(name="requests without end, none waits for its answer", run=pipelined, most_mb=64),
    Attack(name="HTTP/2 requests without end, side by side", run=multiplexed, most_mb=64),
    Attack(name="100 streams of 2,000 tokens that nobody reads", run=stalled_readers, most_mb=128),
    Attack(
        name="HTTP/2 requests that are reset at once, without end", run=rapid_resets, most_mb=128
    ),
    Attack(name="HTTP/2 pings and settings without end", run=pings, most_mb=64),
    Attack(name="16 compressed bodies", run=compressed, most_mb=64),
    Attack(name="512 connects at once", run=connects, most_mb=128),
    Attack(name="half-closed clients", run=half_closed, most_mb=64),
    Attack(name="request heads with two meanings", run=smuggling, most_mb=64),
]
