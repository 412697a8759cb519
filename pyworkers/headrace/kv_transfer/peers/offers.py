"""What may be pulled from this worker: tickets, what they stand for, and the pulls that use them."""

from __future__ import annotations

import hmac
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import HeadraceError
from headrace.kv_transfer.backends.base import TICKET_BYTES, Ending, Extent, KvSource
from headrace.kv_transfer.peers.members import pull_proof
from headrace.wire.frames import PULL_KEY_BYTES, TransferFailure

# Tickets that were withdrawn, so that a late pull hears why. More, and it hears that the ticket is unknown.
REMEMBERED: Final = 1024


class Denied(HeadraceError):
    """A pull that is not to be."""

    def __init__(self, why: Ending, message: str) -> None:
        super().__init__(why, message)
        self.why: Ending = why
        self.message = message


class WrongPullKey(Denied):
    """The ticket is open, and meant for somebody else. It stays open."""

    def __init__(self) -> None:
        super().__init__(TransferFailure.REFUSED, "the proof is not by the ticket's pull key")


@dataclass(frozen=True, slots=True)
class ShownTicket:
    """What a puller shows for a pull, and what its proof has to be about (`members.py`)."""

    ticket: bytes
    pull_proof: bytes
    by_member: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class OfferedTicket:
    """A ticket that who has `pull_key` may pull with, and who is told how that ends."""

    ticket: bytes
    pull_key: bytes = field(repr=False)
    source: KvSource
    on_released: Callable[[], None]
    on_failed: Callable[[], None] | None
    shared: bool  # any number of pulls may use it
    used: bool = False
    withdrawn: Ending | None = None

    @property
    def gone(self) -> Ending | None:
        """Why nothing of it counts any more, if so."""
        return self.withdrawn or (TransferFailure.REVOKED if self.source.revoked else None)


@dataclass(slots=True, eq=False)
class Serving:
    """One pull at the source. Each group is handed over in the order of the wanted blocks."""

    number: int
    offer: OfferedTicket
    places: Sequence[int]
    # Wanted blocks that were handed over, by group.
    cursors: list[int] = field(default_factory=list[int])
    _turn: int = 0

    @property
    def blocks(self) -> list[int]:
        return [self.offer.source.blocks[place] for place in self.places]

    @property
    def complete(self) -> bool:
        """Everything was handed over."""
        return all(cursor == len(self.places) for cursor in self.cursors)

    def next_extent(self, most: Sequence[int]) -> Extent | None:
        """What can be handed over now, at most `most` blocks of the group, groups in turn. None if there is nothing.

        Looks no further than the first segment of a group that is not ready: so a look at a long prompt in flight costs
        no more than what became ready, and what is ready out of order is handed over later.
        """
        ready, wanted = self.offer.source.ready, len(self.places)
        groups = len(self.cursors)
        for group in (*range(self._turn, groups), *range(self._turn)):
            start = stop = self.cursors[group]
            end = min(wanted, start + most[group])
            while stop < end and ready(self.places[stop], group):
                stop += 1
            if stop > start:
                self.cursors[group] = stop
                self._turn = group + 1
                return Extent(group, start, stop)
        return None


class Offers:
    """All tickets of one server. The owner of a source withdraws its ticket before it takes the blocks back."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._open: dict[bytes, OfferedTicket] = {}
        self._withdrawn: OrderedDict[bytes, Ending] = OrderedDict()

    def add(
        self,
        source: KvSource,
        pull_key: bytes,
        on_released: Callable[[], None],
        on_failed: Callable[[], None] | None,
        *,
        shared: bool,
    ) -> bytes:
        assert len(pull_key) == PULL_KEY_BYTES
        ticket = secrets.token_bytes(TICKET_BYTES)
        offer = OfferedTicket(ticket, pull_key, source, on_released, on_failed, shared)
        self._open[ticket] = offer
        return ticket

    def withdraw(self, ticket: bytes, why: Ending) -> None:
        """Nothing of it counts from now on. One that is not there any more is left alone."""
        offer = self._open.pop(ticket, None)
        if offer is not None:
            offer.withdrawn = why
            self._withdrawn[ticket] = why
            if len(self._withdrawn) > REMEMBERED:
                self._withdrawn.popitem(last=False)

    def find(self, shown: ShownTicket) -> OfferedTicket:
        """What may be pulled with it now. Raises Denied."""
        if shown.ticket in self._withdrawn:
            raise Denied(self._withdrawn[shown.ticket], "the ticket was withdrawn")
        offer = self._open.get(shown.ticket)
        if offer is None:
            raise Denied(TransferFailure.REFUSED, "the ticket is unknown")
        if offer.used and not offer.shared:
            raise Denied(TransferFailure.REFUSED, "the ticket was used before")
        if offer.source.revoked:
            raise Denied(TransferFailure.REVOKED, "the source took its blocks back")
        expected = pull_proof(offer.pull_key, shown.by_member, shown.ticket)
        if not hmac.compare_digest(expected, shown.pull_proof):
            raise WrongPullKey
        return offer

    def begin(self, number: int, shown: ShownTicket, places: bytes) -> Serving:
        """A pull uses its ticket. Raises Denied."""
        offer = self.find(shown)
        wanted = array("I", places)
        total = len(offer.source.blocks)
        if (last := max(wanted, default=-1)) >= total:
            raise Denied(TransferFailure.REFUSED, f"place {last} of {total}")
        offer.used = True
        return Serving(number, offer, wanted, [0] * self._num_groups)

    def finish(self, serving: Serving) -> bool:
        """The client has it all. Whether it counts; if so, the ticket of a single pull is done."""
        offer = serving.offer
        intact = offer.gone is None and serving.complete
        if intact:
            self._forget(offer)
            offer.on_released()
        else:
            self.fail(serving)
        return intact

    def fail(self, serving: Serving) -> None:
        """The pull ended some other way. Nobody can pull the ticket of a single pull again: its owner is told."""
        offer = serving.offer
        self._forget(offer)
        if not offer.shared and offer.withdrawn is None and offer.on_failed is not None:
            offer.on_failed()

    def _forget(self, offer: OfferedTicket) -> None:
        if not offer.shared:
            self._open.pop(offer.ticket, None)

    def __len__(self) -> int:
        return len(self._open)
