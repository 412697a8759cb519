"""A prefix of etcd for asyncio: the router's client, whose calls wait, on threads.

TLS and login come from the variables HEADRACE_ETCD_CA, HEADRACE_ETCD_CERT, HEADRACE_ETCD_KEY, HEADRACE_ETCD_USER and
HEADRACE_ETCD_PASSWORD.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from headrace import _core


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    """A key and its value; `value` is None where the key went."""

    key: bytes
    value: bytes | None


class EtcdClient:
    """All members of one etcd, `HOST:PORT` each. Raises ConfigError where the variables make no sense.

    All calls raise EtcdFailed, which is an OSError.
    """

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._etcd = _core.Etcd(list(endpoints))

    async def read(self, prefix: bytes, limit: int) -> tuple[list[EtcdEntry], int]:
        """At most `limit` entries, and the revision that they are of."""
        entries, revision = await asyncio.to_thread(self._etcd.read, prefix, limit)
        return [EtcdEntry(key, value) for key, value in entries], revision

    async def watch(self, prefix: bytes, revision: int) -> AsyncGenerator[list[EtcdEntry]]:
        """What changes from `revision` on. The first item, empty, says that the watch stands. Ends only by raising."""
        watch = await asyncio.to_thread(self._etcd.watch, prefix, revision)
        try:
            yield []
            while True:
                changes = await asyncio.to_thread(watch.next)
                yield [EtcdEntry(key, value) for key, value in changes]
        finally:
            watch.close()  # the thread that waits comes back
