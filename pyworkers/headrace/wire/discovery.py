"""Where routers are: a list, the addresses of a DNS name, or what registered under an etcd prefix.

`Discovery.run` follows all sources at once and tells each change of the set of addresses. A source that cannot be asked
says nothing: what it told last stands, and the log says so by name. A fleet goes on without the service that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from headrace.errors import EtcdCompacted, EtcdFailed
from headrace.wire.etcd import EtcdClient, EtcdEntry
from headrace.wire.link import Backoff, parse_address

log = logging.getLogger(__name__)

MAX_ROUTERS = 64  # that one source may name: each is a link with buffers of its own
MAX_ENTRIES = 1024  # under an etcd prefix, those that are no routers included
REFRESH_S = 10.0  # between two questions for a DNS name
LOOK_UP_S = 5.0  # for an answer
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
READ_AGAIN_S = 60.0  # a watch that is silent this long is not believed: the prefix is read again


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """One way to a router."""

    text: str  # HOST:PORT, [IPV6]:PORT or unix:PATH
    tls_name: str | None = None  # whom its certificate names, where that is not the host in `text`


@dataclass(frozen=True, slots=True)
class Change:
    """What came and what went since the last one. Never both empty."""

    added: tuple[RouterAddress, ...]
    removed: tuple[str, ...]  # texts


Report = Callable[[Iterable[RouterAddress]], None]
"""Takes all the addresses that a source knows now."""


class RouterSource(Protocol):
    """Somebody who knows routers."""

    async def run(self, report: Report) -> None:
        """Report once, or again and again with each change, until cancelled."""
        ...


class Fixed:
    """Addresses that stay."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = [RouterAddress(text) for text in addresses]

    async def run(self, report: Report) -> None:
        report(self._addresses)


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The IP addresses of a name. Raises OSError."""


async def resolve(name: str, port: int) -> list[str]:
    """What the system's resolver says: A and AAAA, in its order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class DnsName:
    """All addresses of a name, looked up again and again."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        resolve: Resolve = resolve,
        refresh_s: float = REFRESH_S,
        look_up_s: float = LOOK_UP_S,
        rng: random.Random | None = None,
    ) -> None:
        self._name = name
        self._port = port
        self._resolve = resolve
        self._refresh_s = refresh_s
        self._look_up_s = look_up_s
        self._rng = rng or random.Random()
        self._backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, self._rng)

    async def run(self, report: Report) -> None:
        known = 0
        while True:
            try:
                async with asyncio.timeout(self._look_up_s):
                    found = await self._resolve(self._name, self._port)
            except (OSError, UnicodeError) as error:  # a TimeoutError is an OSError
                delay_s = self._backoff.next()
                reason = str(error) or f"no answer within {self._look_up_s:g} s"
                log.warning(
                    "discovery dns_failed: %s: %s; the %d addresses known stay; again in %.1f s",
                    *(self._name, reason, known, delay_s),
                )
            else:
                self._backoff.reset()
                addresses = first_ones(f"dns:{self._name}", [self._address(ip) for ip in found])
                known = len(addresses)
                report(addresses)
                # not in step with all the others that ask
                delay_s = self._refresh_s * self._rng.uniform(0.8, 1.2)
            await asyncio.sleep(delay_s)

    def _address(self, ip: str) -> RouterAddress:
        host = f"[{ip}]" if ":" in ip else ip
        return RouterAddress(f"{host}:{self._port}", tls_name=self._name)


class EtcdPrefix:
    """All routers that registered under a prefix, as they come and go.

    An entry that goes may mean that its router is gone, or only that it could not reach etcd for longer than its lease.
    So whoever follows this dials it no more, and keeps a link that works.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        prefix: str,
        *,
        read_again_s: float = READ_AGAIN_S,
        rng: random.Random | None = None,
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix.encode()
        self._read_again_s = read_again_s
        self._backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, rng or random.Random())
        self._entries: dict[bytes, RouterAddress] = {}

    async def run(self, report: Report) -> None:
        while True:
            try:
                await self._follow(report)
            except EtcdFailed as error:
                delay_s = self._backoff.next()
                log.warning(
                    "discovery etcd_failed: %s; the %d routers known stay; again in %.1f s",
                    *(error, len(self._entries), delay_s),
                )
                await asyncio.sleep(delay_s)

    async def _follow(self, report: Report) -> None:
        """Read, then watch. Returns when it is time to read again."""
        entries, revision = await self._etcd.read(self._prefix, MAX_ENTRIES)
        self._entries.clear()
        self._take_in(entries, report)
        async with contextlib.aclosing(self._etcd.watch(self._prefix, revision + 1)) as changes:
            changed = await anext(changes)  # the watch stands
            self._backoff.reset()
            with contextlib.suppress(TimeoutError, EtcdCompacted):
                while True:
                    if changed:
                        self._take_in(changed, report)
                    async with asyncio.timeout(self._read_again_s):
                        changed = await anext(changes)

    def _take_in(self, entries: list[EtcdEntry], report: Report) -> None:
        for entry in entries:
            address = None if entry.value is None else self._address(entry)
            if address is None:  # one that makes no sense any more is none either
                self._entries.pop(entry.key, None)
            elif entry.key in self._entries or len(self._entries) <= MAX_ROUTERS:
                self._entries[entry.key] = address
        source = f"etcd prefix {self._prefix.decode(errors='replace')}"
        report(first_ones(source, list(self._entries.values())))

    def _address(self, entry: EtcdEntry) -> RouterAddress | None:
        assert entry.value is not None
        try:
            document: Any = json.loads(entry.value)
            text = cast(dict[str, Any], document)["address"] if isinstance(document, dict) else None
            if (
                not isinstance(text, str)
                or len(text) > 300
                or isinstance(parse_address(text), Path)
            ):
                raise ValueError(f"{entry.value[:80]!r} names no HOST:PORT")
        except (ValueError, KeyError, RecursionError) as error:
            log.warning("discovery bad_entry: etcd key %r: %s; passed over", entry.key, error)
            return None
        return RouterAddress(text)


def first_ones(source: str, addresses: list[RouterAddress]) -> list[RouterAddress]:
    """At most MAX_ROUTERS of them, the same ones each time."""
    if len(addresses) > MAX_ROUTERS:
        log.error(
            "discovery too_many: %s names %d routers; the first %d are dialled",
            *(source, len(addresses), MAX_ROUTERS),
        )
    return sorted(addresses, key=lambda address: address.text)[:MAX_ROUTERS]


class Discovery:
    """The addresses of all sources together; one that several of them name counts once."""

    def __init__(
        self, sources: Iterable[RouterSource], on_change: Callable[[Change], None]
    ) -> None:
        self._sources = list(sources)
        self._on_change = on_change
        self._told: list[dict[str, RouterAddress]] = [{} for _ in self._sources]
        self._known: dict[str, RouterAddress] = {}

    async def run(self) -> None:
        """Follow all sources until cancelled, or until none of them can change any more."""
        async with asyncio.TaskGroup() as tasks:
            for number, source in enumerate(self._sources):
                tasks.create_task(source.run(self._reporter(number)), name=f"discovery {number}")

    def _reporter(self, number: int) -> Report:
        def report(addresses: Iterable[RouterAddress]) -> None:
            self._told[number] = {address.text: address for address in addresses}
            self._compare()

        return report

    def _compare(self) -> None:
        now: dict[str, RouterAddress] = {}
        for told in self._told:
            for text, address in told.items():
                now.setdefault(text, address)
        added = tuple(address for text, address in now.items() if text not in self._known)
        removed = tuple(text for text in self._known if text not in now)
        self._known = now
        if added or removed:
            self._on_change(Change(added, removed))


def parse_sources(specs: Iterable[str]) -> list[RouterSource]:
    """Sources of `--router`: addresses, `dns:NAME:PORT` and `etcd:HOST:PORT[,HOST:PORT]/PREFIX`.

    Raises ValueError for what is none of these.
    """
    fixed: list[str] = []
    sources: list[RouterSource] = []
    for spec in specs:
        if spec.startswith("dns:"):
            name = parse_address(spec.removeprefix("dns:"))
            if isinstance(name, Path):
                raise ValueError(f"{spec!r} is no name; write dns:NAME:PORT")
            sources.append(DnsName(*name))
        elif spec.startswith("etcd:"):
            sources.append(_etcd(spec))
        else:
            parse_address(spec)
            fixed.append(spec)
    return [Fixed(fixed), *sources] if fixed else sources


def _etcd(spec: str) -> EtcdPrefix:
    endpoints, _, prefix = spec.removeprefix("etcd:").partition("/")
    prefix = prefix.rstrip("/")
    if not prefix:
        raise ValueError(f"{spec!r} names no prefix; write etcd:HOST:PORT[,HOST:PORT]/PREFIX")
    members = [endpoint.strip() for endpoint in endpoints.split(",")]
    if any(isinstance(parse_address(member), Path) for member in members):
        raise ValueError(f"{spec!r}: an etcd is reached at HOST:PORT")
    return EtcdPrefix(EtcdClient(members), f"{prefix}/")
