"""Who may join: secrets, refusals, TLS, and routers that do not work."""

import asyncio
import random
import re
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace import _core
from headrace.errors import LinkLost, Refused, RouterNotTrusted
from headrace.wire.frames import PROTOCOL, Frame, OtherVersion, Prove, RefuseReason, Welcome
from headrace.wire.link import QUIET_DIALS, Backoff, Link, LinkConfig, parse_address
from headrace.wire.tls import tls_context
from helpers.require import missing
from helpers.worker.frames import refusal
from helpers.worker.link_scene import (
    HEARTBEAT,
    HELLO,
    IN_TIME_S,
    WELCOME,
    Peer,
    Script,
    hold,
    link_to,
    packed,
    router,
)

SECRET = "open sesame"
DATA = Path(__file__).parents[1] / "data"


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
                packed(refusal(RefuseReason.SECRET, differs=("secret", "the fleet's", "another")))
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
        await peer.welcome(refusal(RefuseReason.SECRET, differs=("secret", "a", "b")))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        with pytest.raises(Refused, match="secret"):
            await session.receive()


async def test_a_refused_worker_does_not_dial_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        differs = ("fingerprints.tokenizer", "t-1", "t-2")
        no = refusal(RefuseReason.MISMATCH, differs=differs, message="take the other")
        await peer.write(packed(no))
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
        await peer.write(packed(Welcome(PROTOCOL + 1, "router-0", 250, b"", b"", bytes(32))))
        await peer.gone()

    async with router(script) as at:
        with pytest.raises(Refused) as caught:
            await link_to(at).connect()
    assert (caught.value.field, caught.value.expected, caught.value.got) == (
        "protocol",
        str(PROTOCOL + 1),
        str(PROTOCOL),
    )


async def test_a_router_of_another_version_says_which_side_to_update() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.write(packed(OtherVersion("protocol", "4", "3", "update the worker")))
        await peer.gone()

    async with router(script) as at:
        with pytest.raises(Refused, match="update the worker") as caught:
            await link_to(at).connect()
        assert at.dials == 1
    assert (caught.value.field, caught.value.expected, caught.value.got) == ("protocol", "4", "3")


@pytest.mark.parametrize(
    "body",
    [
        b"\x98\x2b\xa4mood\xa8router-0\xc0\xa0\xa0\xa0\xa0",  # no reason
        b"\x98\x2b\xa7circuit\xa8router-0\xc0\xa0\xa0\xa0\xa0",  # not for good, and not for how long
        b"\x98\x2b\xa7circuit\xa8router-0\xa40.01\xa0\xa0\xa0\xa0",  # a time in words
        b"\x98\x2b\xa6secret\xa8router-0\x05\xa0\xa0\xa0\xa0",  # for good, and for a while
    ],
)
async def test_a_refusal_of_unknown_words_is_none_and_the_worker_dials_again(body: bytes) -> None:
    answers = [len(body).to_bytes(4, "little") + body]

    async def script(peer: Peer) -> None:
        await peer.hello()
        if answers:
            await peer.write(answers.pop())
        else:
            await peer.write(packed(WELCOME))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect():
        assert at.dials == 2


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
        (closes, "hung up instead of answering our Hello"),
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


async def test_a_router_that_is_soon_back_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def once(peer: Peer) -> None:
        await peer.welcome()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    async with router(
        once, *[closes] * QUIET_DIALS, once, *[closes] * QUIET_DIALS, closes, hold
    ) as at:
        link = link_to(at)
        await link.connect()
        await link.connect()
        assert warnings() == []
        async with await link.connect() as session:
            await session.send(HEARTBEAT)
    assert len(warnings()) == 1, "it is gone for longer"


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
        missing("openssl", "the command openssl makes the certificate")
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


async def test_a_router_that_asks_for_a_certificate_is_shown_one() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(DATA / "localhost.crt", DATA / "localhost.key")
    tls.load_verify_locations(DATA / "tls/ca.crt")
    tls.verify_mode = ssl.CERT_REQUIRED
    trusted = DATA / "localhost.crt"
    async with router(hold, tls=tls) as at:
        shown = (DATA / "tls/client.crt", DATA / "tls/client.key")
        async with await link_to(at, tls=tls_context(trusted, shown)).connect() as session:
            await session.send(HEARTBEAT)
        with pytest.raises((OSError, LinkLost)):  # as the alert, or as the end of the connection
            await link_to(at, tls=tls_context(trusted))._open()


@pytest.mark.parametrize(
    ("identity", "ca", "part"),
    [
        (("tls/client.crt", "localhost.key"), None, "client.crt with"),
        (("localhost.key", "localhost.key"), None, "cannot use"),
        (("nothing.crt", "tls/client.key"), None, "nothing.crt"),
        (None, "localhost.key", "localhost.key for TLS"),
        (None, "nothing.crt", "nothing.crt for TLS"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    identity: tuple[str, str] | None, ca: str | None, part: str
) -> None:
    files = None if identity is None else (DATA / identity[0], DATA / identity[1])
    with pytest.raises(ValueError, match=part):
        tls_context(None if ca is None else DATA / ca, files)


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
