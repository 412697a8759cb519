"""All that one worker does about KV of other workers, behind one door for its loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.sequence import Key
from headrace.kv_transfer.consumer import Consumer
from headrace.kv_transfer.migration import Fetches, Migration
from headrace.kv_transfer.producer import Producer, Tell
from headrace.kv_transfer.pulls import Puller
from headrace.wire.frames import Continue, Fetch, Ticket, TransferFailure

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.kv_transfer.peers.client import TransferClient
    from headrace.kv_transfer.peers.members import Members
    from headrace.kv_transfer.peers.server import TransferServer


@dataclass(frozen=True, slots=True)
class Transfer:
    """Both ends of moving KV, made for one pool, and whom they move it to and from."""

    server: TransferServer
    client: TransferClient
    members: Members


class KvConnector:
    """What concerns several sides at once. `producer` and `migration` are for the worker's loop, too: the one is told
    what the engine computed or ended by itself, the other what is to be offered.
    """

    def __init__(
        self, engine: Engine, transfer: Transfer, tell: Tell, wake: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._puller = Puller(transfer.client, wake)
        self.producer = Producer(engine, transfer.server, tell, wake)
        self._consumer = Consumer(engine, self._puller, tell)
        self.migration = Migration(engine, transfer.server)
        self._fetches = Fetches(engine, self._puller, tell)

    def trust(self, hash_keys: Iterable[bytes]) -> None:
        """KV goes to and comes from workers that know one of these keys, and nobody else."""
        self._transfer.members.trust(hash_keys)

    @property
    def idle(self) -> bool:
        """Nothing is offered and nothing is pulled: the engine's blocks are its own."""
        return self._puller.idle and self.migration.until_s is None

    @property
    def next_deadline_s(self) -> float:
        """When `settle` has to be called, at the latest; infinite where there is no such time."""
        return min(self._fetches.next_deadline_s, self.migration.until_s or math.inf)

    def take_in(self, link: int, frame: Ticket | Continue | Fetch, now_s: float) -> None:
        key = Key(link, frame.request)
        match frame:
            case Ticket():
                self._engine.kv_imports.ticket(key, frame.ticket)
            case Continue():
                self._consumer.go_on(key, frame.generated, now_s)
            case Fetch():
                self._fetches.fetch(key, frame, now_s)

    def settle(self, now_s: float) -> None:
        """Bring the engine and the movers of bytes up to date with each other."""
        self._puller.settle()
        self._consumer.settle()
        self.producer.settle()
        self._fetches.settle(now_s)
        self.migration.settle(now_s)

    def cancel(self, key: Key) -> int | None:
        """Stop a request at any stage; returns how many blocks are free now, None if that is told later."""
        self.producer.withdraw(key)
        self._fetches.cancel(key)
        return self._engine.cancel(key)

    def cancel_link(self, link: int) -> int:
        """Cancel all requests of a router that is gone; returns how many there were."""
        self.producer.withdraw_link(link)
        self._fetches.cancel_link(link)
        return self._engine.cancel_link(link)

    def give_up(self) -> None:
        """Time is up: nothing more goes out or comes in."""
        self.migration.end()
        self.producer.withdraw_all()
        self._puller.stop_all(TransferFailure.CANCELLED)

    async def close(self) -> None:
        """Hang up on everybody."""
        await asyncio.gather(self._transfer.client.close(), self._transfer.server.close())
