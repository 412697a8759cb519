"""The worker's link against a router on a real socket: one that works, and ones that do not."""

import asyncio
import dataclasses
import random
import re
import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace import _core, codec
from headrace.errors import FrameTooLong, LinkLost, Refused, RouterNotTrusted, UnknownFrameType
from headrace.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Bye,
    Capacity,
    Fingerprints,
    Frame,
    Hello,
    Load,
    ModelPart,
    Ping,
    Prove,
    Refuse,
    Sampling,
    Step,
    Submit,
    Welcome,
)
from headrace.link import Backoff, Link, LinkConfig, Session, parse_address, tls_context

HELLO = Hello(
    PROTOCOL,
    "worker-0",
    1,
    "both",
    "model",
    Fingerprints("w", "t", "c", "kv", _core.HASH_SCHEME, 16),
    Capacity(1, 1, 1, 1),
    128,
)
WELCOME = Welcome(PROTOCOL, "router-0", 250, b"", b"", bytes(range(32)))
HEARTBEAT = Step(0, 0.0, 0, 0, 0, 0, 0, 0, 0, Load(), [])
SECRET = "open sesame"
IN_TIME_S = 20.0


def packed(*messages: Frame) -> bytes:
    bodies = [codec.encode(message) for message in messages]
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


@dataclass
class Peer:
    """The router's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> Frame:
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return codec.decode(await self.reader.readexactly(size))

    async def hello(self) -> Hello:
        hello = await self.read()
        assert isinstance(hello, Hello)
        return hello

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def welcome(self, *more: Frame) -> Hello:
        hello = await self.hello()
        await self.write(packed(WELCOME, *more))
        return hello

    async def gone(self) -> None:
        """Returns when the worker hung up."""
        with suppress(ConnectionError):
            await self.reader.read()


@dataclass
class FakeRouter:
    """Connection number n is handled by script n, the last one again and again."""

    address: str = ""
    dials: int = 0
    failures: list[BaseException] = field(default_factory=list[BaseException])


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def router(
    *scripts: Script, unix: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[FakeRouter]:
    state = FakeRouter()
    tasks: set[asyncio.Task[Any]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        script = scripts[min(state.dials, len(scripts) - 1)]
        state.dials += 1
        try:
            await script(Peer(reader, writer))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            state.failures.append(error)
        finally:
            writer.close()
            tasks.discard(task)

    if unix is not None:
        server = await asyncio.start_unix_server(accept, str(unix), ssl=tls)
        state.address = f"unix:{unix}"
    else:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        state.address = f"localhost:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(IN_TIME_S):
            yield state
            await asyncio.gather(*tasks)  # every script ends when its worker hangs up
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not state.failures


def link_to(at: FakeRouter, **config: Any) -> Link:
    quick = LinkConfig(address=at.address, first_backoff_s=0.001, max_backoff_s=0.002)
    return Link(dataclasses.replace(quick, **config), lambda: HELLO, random.Random(1))


async def hold(peer: Peer) -> None:
    """Welcome the worker and wait until it hangs up."""
    await peer.welcome()
    await peer.gone()


# --- the usual course ---


async def test_frames_go_both_ways_in_order() -> None:
    got: list[Frame] = []
    done = asyncio.Event()

    async def script(peer: Peer) -> None:
        got.append(await peer.welcome(Ping(1), Ping(2)))
        got.extend([await peer.read() for _ in range(3)])
        await peer.write(packed(Ping(3)))
        await peer.gone()
        done.set()

    async with router(script) as at:
        async with await link_to(at).connect() as session:
            assert (session.router, session.heartbeat_s) == ("router-0", 0.25)
            assert session.hash_key == bytes(range(32))
            assert [await session.receive(), await session.receive()] == [Ping(1), Ping(2)]
            await session.send(HEARTBEAT, Bye("one"))
            await session.send(Bye("two"))
            async for frame in session:
                assert frame == Ping(3)
                break
        await done.wait()
    assert isinstance(got[0], Hello)
    assert len(got[0].nonce) == 16
    assert got[1:] == [HEARTBEAT, Bye("one"), Bye("two")]


async def test_work_may_come_in_the_same_bytes_as_the_welcome() -> None:
    long = Submit(1, bytes(200_000), Sampling(), [], 1)  # more than a stranger may send

    async def script(peer: Peer) -> None:
        await peer.welcome(Ping(1), long)
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        assert [await session.receive(), await session.receive()] == [Ping(1), long]


async def test_frames_may_come_in_single_bytes() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        for byte in packed(WELCOME, Ping(2**40), Ping(5)):
            await peer.write(bytes([byte]))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        assert [await session.receive(), await session.receive()] == [Ping(2**40), Ping(5)]


async def test_close_sends_what_was_handed_over() -> None:
    got: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.welcome()
        got.append(len(await peer.reader.read()))

    message = ModelPart("f", 0, True, bytes(4 << 20))
    async with router(script) as at:
        session = await link_to(at).connect()
        await session.send(message)
        await session.close()
        with pytest.raises(LinkLost, match="was closed"):
            await session.send(HEARTBEAT)
    assert got == [len(packed(message))]


async def test_a_unix_socket_works_too(tmp_path: Path) -> None:
    async with (
        router(hold, unix=tmp_path / "router.sock") as at,
        await link_to(at).connect() as session,
    ):
        await session.send(HEARTBEAT)


async def test_tcp_sends_at_once_and_notices_a_vanished_peer() -> None:
    async with router(hold) as at, await link_to(at, dead_after_s=7.0).connect() as session:
        transport = session._connection._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


# --- who may join ---


def guarded(secret: str, got: list[Frame] | None = None) -> Script:
    """A router with a secret, which sends workers that do not know it away."""

    async def script(peer: Peer) -> None:
        hello = await peer.hello()
        proof = _core.auth_proof(secret.encode(), "router", hello.nonce)
        await peer.write(packed(Welcome(PROTOCOL, "router-0", 250, b"c" * 16, proof, b"")))
        try:
            prove = await peer.read()
        except asyncio.IncompleteReadError:
            return  # the worker did not trust us
        assert isinstance(prove, Prove)
        if got is not None:
            got.append(prove)
        if prove.proof != _core.auth_proof(secret.encode(), "worker", b"c" * 16):
            await peer.write(
                packed(Refuse("secret", "the fleet's", "another", "give the right one"))
            )
        await peer.gone()

    return script


async def test_both_sides_prove_the_secret() -> None:
    got: list[Frame] = []
    async with (
        router(guarded(SECRET, got)) as at,
        await link_to(at, secret=SECRET).connect() as session,
    ):
        assert session.hash_key == _core.derive_hash_key(SECRET.encode())
        await session.send(HEARTBEAT)
    assert got == [Prove(_core.auth_proof(SECRET.encode(), "worker", b"c" * 16))]


@pytest.mark.parametrize(
    ("secret", "script", "message"),
    [
        ("another one", guarded(SECRET), "does not know the secret"),
        (None, guarded(SECRET), "wants a secret"),
        (SECRET, hold, "wants none"),
    ],
)
async def test_no_session_without_a_common_secret(
    secret: str | None, script: Script, message: str
) -> None:
    async with router(script) as at:
        with pytest.raises(RouterNotTrusted, match=message):
            await link_to(at, secret=secret).connect()
        assert at.dials == 1


async def test_a_router_may_refuse_a_session_that_has_begun() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(Refuse("secret", "a", "b", "c"))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        with pytest.raises(Refused, match="secret"):
            await session.receive()


async def test_a_refused_worker_does_not_dial_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.write(packed(Refuse("fingerprints.tokenizer", "t-1", "t-2", "take the other")))
        await peer.gone()

    async with router(script) as at:
        with pytest.raises(Refused) as caught:
            await link_to(at).connect()
        assert at.dials == 1
    refused = caught.value
    assert (refused.field, refused.expected, refused.got) == (
        "fingerprints.tokenizer",
        "t-1",
        "t-2",
    )
    for part in ("fingerprints.tokenizer", "t-1", "t-2", "take the other"):
        assert part in str(refused)


async def test_another_protocol_is_named_with_both_numbers() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.write(packed(Welcome(9, "router-0", 250, b"", b"", bytes(32))))
        await peer.gone()

    async with router(script) as at:
        with pytest.raises(Refused) as caught:
            await link_to(at).connect()
    assert (caught.value.field, caught.value.expected, caught.value.got) == ("protocol", "9", "1")


# --- routers that do not work ---


async def silent(peer: Peer) -> None:
    await peer.hello()
    await peer.gone()


async def closes(peer: Peer) -> None:
    await peer.hello()


async def answers_http(peer: Peer) -> None:
    await peer.hello()
    await peer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.gone()


async def sends_garbage(peer: Peer) -> None:
    await peer.hello()
    await peer.write(b"\x02\0\0\0\xc1\xc1")
    await peer.gone()


async def is_a_worker(peer: Peer) -> None:
    await peer.hello()
    await peer.write(packed(HEARTBEAT))
    await peer.gone()


async def forgets_the_key(peer: Peer) -> None:
    await peer.hello()
    await peer.write(packed(Welcome(PROTOCOL, "router-0", 250, b"", b"", b"")))
    await peer.gone()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (silent, "no answer to our Hello within"),
        (closes, "closed the link"),
        (answers_http, "frame of .* bytes, the limit is 65536"),
        (sends_garbage, "garbage"),
        (is_a_worker, "one of a router, got Step"),
        (forgets_the_key, "welcome.hash_key"),
    ],
)
async def test_the_worker_dials_until_a_router_works(
    broken: Script, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with router(broken, broken, hold) as at:
        link = link_to(at, handshake_timeout_s=0.3 if broken is silent else 10.0)
        async with await link.connect() as session:
            await session.send(HEARTBEAT)
        assert at.dials == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    for warning in warnings:
        assert warning.startswith(f"router {at.address}: ")
        assert re.search(reason, warning), warning


async def test_the_worker_dials_until_a_router_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = LinkConfig(address=f"127.0.0.1:{port}", first_backoff_s=0.001, max_backoff_s=0.01)
    dial = asyncio.create_task(Link(config, lambda: HELLO).connect())

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold(Peer(reader, writer))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    async with asyncio.timeout(IN_TIME_S), server, await dial as session:
        await session.send(HEARTBEAT)


# --- sessions that end ---


async def lost(session: Session) -> LinkLost:
    """How the session ended; sending must say the same."""
    with pytest.raises(LinkLost) as receiving:
        async for _ in session:
            pass
    with pytest.raises(LinkLost) as sending:
        await session.send(HEARTBEAT)
    assert str(receiving.value) == str(sending.value)
    return receiving.value


@pytest.mark.parametrize(
    ("data", "reason", "cause"),
    [
        (b"", "closed the link", None),
        (packed(Ping(1))[:3], "closed the link inside a frame", None),
        (packed(Ping(1))[:5], "closed the link inside a frame", None),
        (b"\x02\0\0\0\x91\x63", "garbage: unknown frame type 99", UnknownFrameType),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "garbage: frame of", FrameTooLong),
    ],
)
async def test_a_lost_link_says_why(
    data: bytes, reason: str, cause: type[Exception] | None
) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(Ping(7))
        await peer.write(data)

    async with router(script) as at:
        session = await link_to(at).connect()
        assert await session.receive() == Ping(7)  # what came before counts
        error = await lost(session)
        assert reason in str(error)
        assert type(error.__cause__) is (cause or type(None))
        await session.close()  # no harm


async def test_each_session_begins_anew() -> None:
    hellos: list[Hello] = []

    async def once(peer: Peer) -> None:
        hellos.append(await peer.welcome())

    async def stay(peer: Peer) -> None:
        hellos.append(await peer.welcome())
        await peer.gone()

    async with router(once, stay) as at:
        link = link_to(at)
        first = await link.connect()
        await lost(first)
        async with await link.connect() as second:
            await second.send(HEARTBEAT)
    assert len({hello.nonce for hello in hellos}) == 2


async def send_until(session: Session, message: ModelPart, most: int) -> None:
    for _ in range(most):
        await session.send(message)
    pytest.fail("send() never waited")


async def test_a_router_that_takes_nothing_is_lost() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await release.wait()

    big = ModelPart("f", 0, False, bytes(1 << 20))
    async with router(script) as at:
        link = link_to(at, write_timeout_s=0.2, max_unsent_bytes=1 << 16)
        session = await link.connect()
        with pytest.raises(LinkLost, match="took nothing for"):
            await send_until(session, big, 100)
        release.set()


async def test_sending_waits_for_a_slow_router_and_goes_on() -> None:
    go_on = asyncio.Event()
    total = 0

    async def script(peer: Peer) -> None:
        nonlocal total
        await peer.welcome()
        await go_on.wait()
        total = len(await peer.reader.read())

    big = ModelPart("f", 0, False, bytes(1 << 20))
    async with (
        router(script) as at,
        await link_to(at, max_unsent_bytes=1 << 16).connect() as session,
    ):
        transport = session._connection._transport
        assert transport is not None
        sent = 0
        while session._connection._has_room.is_set():  # until socket and buffer are full
            await session.send(big)
            await asyncio.sleep(0)  # the loop may write
            sent += 1
        waiter = asyncio.create_task(session.send(big))
        held = transport.get_write_buffer_size()
        done, _ = await asyncio.wait([waiter], timeout=0.05)
        assert not done
        assert transport.get_write_buffer_size() == held  # nothing piles up
        go_on.set()
        await waiter
    assert total == (sent + 1) * len(packed(big))


async def test_frames_that_nobody_takes_stay_in_the_socket() -> None:
    count = 30_000  # 210 kB
    flooded = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        peer.writer.write(packed(*[Ping(n % 100) for n in range(count)]))
        flooded.set()
        await peer.gone()

    async with (
        router(script) as at,
        await link_to(at, max_unread_frames=50).connect() as session,
    ):
        await flooded.wait()
        connection = session._connection
        most = 0
        for n in range(count):
            assert await session.receive() == Ping(n % 100)
            most = max(most, len(connection._inbox))
        assert 10 < most <= 50


# --- cancelling ---


async def test_a_cancelled_receive_loses_no_frame() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await go_on.wait()
        await peer.write(packed(Ping(1)))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        waiting = asyncio.create_task(session.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await session.receive() == Ping(1)


@pytest.mark.parametrize("stage", ["handshake", "backoff"])
async def test_dialling_can_be_cancelled(stage: str) -> None:
    dialled, hung_up = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.hello()
        dialled.set()
        if stage == "handshake":
            await peer.gone()
        hung_up.set()

    async with router(script) as at:
        dial = asyncio.create_task(link_to(at, first_backoff_s=3600, max_backoff_s=3600).connect())
        await dialled.wait()
        if stage == "backoff":
            await hung_up.wait()
        dial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dial
        await hung_up.wait()


async def test_an_error_inside_a_session_hangs_up_at_once() -> None:
    hung_up = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.gone()
        hung_up.set()

    async with router(script) as at:
        with pytest.raises(ZeroDivisionError):
            async with await link_to(at).connect():
                raise ZeroDivisionError
        await hung_up.wait()


# --- TLS ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make a certificate")
    return cert, key


async def test_tls_is_checked_against_the_ca(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with router(hold, tls=tls) as at:
        async with await link_to(at, tls=tls_context(cert)).connect() as session:
            await session.send(HEARTBEAT)
        with pytest.raises(ssl.SSLCertVerificationError):
            await link_to(at, tls=tls_context())._open()
        # an address that came from a name is checked against the name
        with pytest.raises(ssl.SSLCertVerificationError):
            await link_to(at, tls=tls_context(cert), tls_name="other.test")._open()


# --- the same on the loop that workers use ---


@pytest.mark.parametrize(
    "test",
    [
        test_frames_go_both_ways_in_order,
        test_work_may_come_in_the_same_bytes_as_the_welcome,
        test_frames_may_come_in_single_bytes,
        test_close_sends_what_was_handed_over,
        test_tcp_sends_at_once_and_notices_a_vanished_peer,
        test_each_session_begins_anew,
        test_a_router_that_takes_nothing_is_lost,
        test_sending_waits_for_a_slow_router_and_goes_on,
        test_frames_that_nobody_takes_stay_in_the_socket,
        test_a_cancelled_receive_loses_no_frame,
        test_an_error_inside_a_session_hangs_up_at_once,
    ],
    ids=lambda test: test.__name__,
)
def test_on_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


# --- pure parts ---


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:8001", ("localhost", 8001)),
        ("[::1]:65535", ("::1", 65535)),
        ("unix:/run/headrace.sock", Path("/run/headrace.sock")),
        ("unix:relative", Path("relative")),
    ],
)
def test_addresses_are_read(text: str, address: Any) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":80", "h:", "h:0", "h:65536", "h:x", "h:-1", "::1:80", "unix:", "h:٣"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_delays_grow_to_their_bound_and_differ() -> None:
    backoff = Backoff(1.0, 10.0, random.Random(1))
    bounds = [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    delays = [backoff.next() for _ in bounds]
    for delay, bound in zip(delays, bounds, strict=True):
        assert bound / 2 <= delay <= bound
    assert delays[4] != delays[5]
    backoff.reset()
    assert backoff.next() <= 1.0
    again = Backoff(1.0, 10.0, random.Random(1))
    assert [again.next() for _ in bounds] == delays
