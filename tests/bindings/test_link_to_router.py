"""The Python link and the Rust router shake hands: the two sides of the protocol, nothing faked."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import _core
from headrace.errors import Refused, RouterNotTrusted
from headrace.wire import frames
from headrace.wire.frames import Capacity, Describe, Fingerprints, Hello
from headrace.wire.link import Link, LinkConfig

SECRET = "open sesame"
HELLO = Hello(
    frames.PROTOCOL,
    "worker-0",
    1,
    "both",
    "model",
    Fingerprints("w", "t", "c", "kv", _core.HASH_SCHEME, 16),
    Capacity(8, 8, 64, 8),
    128,
    dtype="float32",
)
IN_TIME_S = 20.0


@pytest.fixture(params=["tcp", "unix"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/router.sock"


@pytest.fixture
def guarded(listen: str) -> Iterator[_core.Router]:
    args = {"port": 0, "worker_listen": listen, "secret": SECRET, "log_level": "error"}
    yield from running(args)


@pytest.fixture
def open_to_all(listen: str) -> Iterator[_core.Router]:
    yield from running({"port": 0, "worker_listen": listen, "log_level": "error"})


def running(args: dict[str, Any]) -> Iterator[_core.Router]:
    router = _core.Router(args)
    router.start()
    yield router
    router.stop(0.0)


def link_to(router: _core.Router, secret: str | None, hello: Hello = HELLO) -> Link:
    return Link(LinkConfig(address=router.worker_address, secret=secret), lambda: hello)


async def test_both_sides_derive_one_hash_key(guarded: _core.Router) -> None:
    async with asyncio.timeout(IN_TIME_S), await link_to(guarded, SECRET).connect() as session:
        assert session.hash_key == _core.derive_hash_key(SECRET.encode())
        assert session.welcome.hash_key == b""  # who listens on the wire does not get it
        assert await session.receive() == Describe("t/c")


async def test_without_a_secret_the_router_hands_out_a_key(open_to_all: _core.Router) -> None:
    async with asyncio.timeout(IN_TIME_S):
        async with await link_to(open_to_all, None).connect() as session:
            first = session.hash_key
        # The router may not have seen the first one go.
        another = dataclasses.replace(HELLO, worker="worker-1")
        async with await link_to(open_to_all, None, another).connect() as session:
            assert session.hash_key == first
    assert len(first) == 32
    assert any(first)


@pytest.mark.parametrize("secret", ["another one", None])
async def test_a_wrong_secret_does_not_join(guarded: _core.Router, secret: str | None) -> None:
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(RouterNotTrusted):
            await link_to(guarded, secret).connect()


async def test_another_protocol_is_refused_with_both_numbers(open_to_all: _core.Router) -> None:
    hello = dataclasses.replace(HELLO, protocol=frames.PROTOCOL + 1)
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(Refused) as caught:
            await link_to(open_to_all, None, hello).connect()
    refused = caught.value
    numbers = (str(frames.PROTOCOL), str(frames.PROTOCOL + 1))
    assert (refused.field, refused.expected, refused.got) == ("protocol", *numbers)
