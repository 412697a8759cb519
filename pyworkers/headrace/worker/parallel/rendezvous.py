"""How the ranks of a group find each other, at torch.distributed's TCPStore, and see that they serve the same.

Each rank publishes what it is and what it serves. Rank 0 compares and publishes a verdict, which all wait for: the
epoch, the token and the address of the control links, or the kind of failure and one line that names the rank. Whoever
sees sooner that the group cannot be, such as a rank with another WORLD_SIZE, publishes that verdict instead. This is
done before weights are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import Store

from headrace.errors import CannotRun
from headrace.worker.parallel.control import (
    ControlLink,
    GroupFailed,
    accept_ranks,
    dial_rank_0,
    listening,
    named,
)
from headrace.worker.parallel.environment import GroupEnvironment
from headrace.worker.parallel.group_store import Patience, open_store, store_errors
from headrace.worker.parallel.messages import TOKEN_BYTES

NAMING_S = 2.0  # after which ranks name the missing ones where rank 0 does not
SEEN_S = 5.0  # that rank 0 keeps the store for those that have yet to read why there is no group
MOST_SAID = 1 << 16  # letters of what a rank publishes


class GroupMismatch(CannotRun):
    """The ranks were not told the same. The line names the rank that differs from rank 0, and both values."""


# By the kind of a verdict that is no group: as JSON beside `why`, so that no text decides whether a new start may help.
NO_GROUP: dict[str, type[Exception]] = {"missing": GroupFailed, "differs": GroupMismatch}


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a rank says of itself. What it `serves` has to be the same on all ranks."""

    rank: int
    host: str  # equal where ranks can share memory and reach each other by loopback
    process: str  # for people: where this rank runs
    name: str  # that the group has where it is that of rank 0
    serves: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A group that came together."""

    ranks: list[Introduction]
    epoch: int
    secret: str  # that only these ranks know; for names that nobody else is to guess
    links: dict[int, ControlLink]
    store: Store  # for what else has to find the other ranks

    @property
    def name(self) -> str:
        return self.ranks[0].name

    @property
    def one_host(self) -> bool:
        return len({one.host for one in self.ranks}) == 1


def meet(
    environment: GroupEnvironment, name: str, serves: Mapping[str, str], timeout_s: float
) -> Met:
    """Find the other ranks. Raises GroupMismatch, GroupFailed and WrongStoreAddress.

    The calls of the store cannot be interrupted, so they are made on a thread that nobody has to wait for.
    """
    result: Future[Met] = Future()

    def run() -> None:
        try:
            result.set_result(_meet(environment, name, serves, timeout_s))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        # Longer than anything else here waits: rank 0 may keep the store for others after its time.
        return result.result(timeout_s + 2 * NAMING_S + SEEN_S)
    except TimeoutError:
        where = f"{environment.host}:{environment.port}"
        raise GroupFailed(
            f"the store of the group at {where} did not answer within {timeout_s:g} s"
        ) from None


def _meet(
    environment: GroupEnvironment, name: str, serves: Mapping[str, str], timeout_s: float
) -> Met:
    give_up_at = time.monotonic() + timeout_s
    with store_errors(environment):
        store = open_store(environment, give_up_at)
        meeting = _Meeting(store, environment, give_up_at, timeout_s)
        mine = Introduction(
            rank=environment.rank,
            host=host_identity(),
            process=f"{socket.gethostname()}, process {os.getpid()}",
            name=name,
            # The size, too: rank 0 may have read all introductions before a rank sees that its own size differs.
            serves={"WORLD_SIZE": str(environment.size), **serves},
        )
        meeting.introduce(mine)
        if environment.rank == 0:
            return meeting.lead()
        return meeting.follow()


class _Meeting:
    def __init__(
        self, store: Store, environment: GroupEnvironment, give_up_at: float, timeout_s: float
    ) -> None:
        self._store = store
        self._environment = environment
        self._rank, self._size = environment.rank, environment.size
        self._give_up_at = give_up_at
        self._timeout_s = timeout_s

    def introduce(self, mine: Introduction) -> None:
        text = json.dumps(asdict(mine))
        assert len(text) <= MOST_SAID, "what a rank serves is told by digests"
        there = self._store.compare_set(f"rank/{self._rank}", "", text)
        if there != text.encode():
            other = _introduction(there, self._rank).process
            raise GroupFailed(
                f"rank {self._rank} is there already, on {other}; this is {mine.process}"
            )
        size = f"{self._size} on rank {self._rank}"
        first = self._store.compare_set("size", "", size).decode(errors="replace")
        if first.split()[:1] != [str(self._size)]:
            self._fail("differs", f"WORLD_SIZE is {size}, and {first}")

    def lead(self) -> Met:
        """Rank 0: wait for all, compare, and publish what came of it."""
        keys = [f"rank/{rank}" for rank in range(self._size)]
        if not self._wait(
            lambda: self._store.check(["verdict"]) or self._store.check(keys), self._absent
        ):
            self._fail("missing", self._missing(self._not_there()))
        if self._store.check(["verdict"]):
            self._raise(_verdict(self._store.get("verdict")))
        try:
            ranks = self._introductions()
        except GroupFailed as error:
            self._fail("differs", str(error))
        if (differs := difference(ranks)) is not None:
            self._fail("differs", differs)
        epoch, token = time.time_ns() // 1_000_000, secrets.token_bytes(TOKEN_BYTES)
        with listening(self._address(ranks)) as (listener, address):
            self._publish({"kind": "met", "epoch": epoch, "token": token.hex(), "address": address})
            links = accept_ranks(listener, self._size, epoch, token, self._give_up_at)
        return self._met(ranks, epoch, token, links)

    def follow(self) -> Met:
        """Any other rank: wait for the verdict, and dial rank 0."""
        self._give_up_at += NAMING_S
        if not self._wait(lambda: self._store.check(["verdict"]), self._absent):
            raise GroupFailed(self._missing(self._not_there() or [0]))
        said = self._store.get("verdict")
        self._store.add("seen", 1)  # after it was read: rank 0, which keeps the store, may now go
        told = _verdict(said)
        if told["kind"] != "met":
            self._raise(told)
        epoch, token = told["epoch"], bytes.fromhex(told["token"])
        link = dial_rank_0(told["address"], self._rank, epoch, token, self._give_up_at)
        ranks = self._introductions()
        return self._met(ranks, epoch, token, {0: link})

    def _met(
        self, ranks: list[Introduction], epoch: int, token: bytes, links: dict[int, ControlLink]
    ) -> Met:
        secret = hashlib.sha256(b"names" + token).hexdigest()
        return Met(ranks=ranks, epoch=epoch, secret=secret, links=links, store=self._store)

    def _introductions(self) -> list[Introduction]:
        return [_introduction(self._store.get(f"rank/{rank}"), rank) for rank in range(self._size)]

    def _address(self, ranks: list[Introduction]) -> str | None:
        """Where rank 0 listens: None for a Unix socket."""
        if len({one.host for one in ranks}) == 1:
            return None
        address = own_address(self._environment.host, self._environment.port)
        if address.startswith("127.") or address == "::1":
            self._fail(
                "differs",
                f"MASTER_ADDR {self._environment.host} is {address} on rank 0, which other machines do not reach; "
                "give an address of rank 0's machine",
            )
        return address

    def _not_there(self) -> list[int]:
        return [rank for rank in range(self._size) if not self._store.check([f"rank/{rank}"])]

    def _absent(self) -> str:
        """Whom this rank waits for, for a person."""
        where = f"{self._environment.host}:{self._environment.port}"
        if missing := self._not_there():
            return f"{named(missing)} of {self._size} to come to {where}"
        return f"the verdict of rank 0 at {where}; all {self._size} ranks are there"

    def _missing(self, ranks: list[int]) -> str:
        return f"{named(ranks)} of {self._size} did not come within {self._timeout_s:g} s"

    def _fail(self, kind: str, why: str) -> NoReturn:
        """Have all ranks end with this line, unless another one was published sooner."""
        told = self._publish({"kind": kind, "why": why})
        if not self._environment.keeps_store:
            self._store.add("seen", 1)  # whoever keeps the store need not wait for this rank
        self._raise(told)

    def _publish(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """What is the verdict now."""
        return _verdict(self._store.compare_set("verdict", "", json.dumps(verdict)))

    def _raise(self, verdict: dict[str, Any]) -> NoReturn:
        if verdict["kind"] == "met":
            raise GroupFailed(f"rank {self._rank} came after its group had begun")
        if self._environment.keeps_store:
            others = [f"rank/{rank}" for rank in range(1, self._size)]
            there = sum(self._store.check([key]) for key in others)
            self._give_up_at = time.monotonic() + SEEN_S
            self._wait(lambda: self._store.add("seen", 0) >= there, lambda: "ranks to leave")
        raise NO_GROUP[verdict["kind"]](verdict["why"])

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> bool:
        patience = Patience(self._rank, self._give_up_at)
        while not done():
            if patience.over():
                return False
            patience.pause(what)
        return True


def difference(ranks: list[Introduction]) -> str | None:
    """What the first rank that differs from rank 0 has otherwise."""
    first = ranks[0].serves
    for one in ranks[1:]:
        for what in [*first, *(key for key in one.serves if key not in first)]:
            here, there = first.get(what, "nothing"), one.serves.get(what, "nothing")
            if here != there:
                return (
                    f"rank {one.rank} ({one.process}) differs from rank 0 ({ranks[0].process}): "
                    f"its {what} is {there!r}, rank 0 has {here!r}"
                )
    return None


def _verdict(published: bytes) -> dict[str, Any]:
    """Raises GroupFailed where no rank of ours can have said this."""
    with contextlib.suppress(ValueError, RecursionError):
        verdict = json.loads(published[: MOST_SAID + 1])
        if _is_verdict(verdict):
            return verdict
    # not what it said: it may hold the token
    raise GroupFailed("a rank's verdict is none of this version's; start the same Headrace on all")


def _is_verdict(told: object) -> bool:
    """Raises ValueError for a token that is not hexadecimal."""
    match told:
        case {"kind": "met", "epoch": int(epoch), "token": str(token), "address": str()}:
            return 0 <= epoch < 1 << 64 and len(bytes.fromhex(token)) == TOKEN_BYTES
        case {"kind": str(kind), "why": str()}:
            return kind in NO_GROUP
        case _:
            return False


def _introduction(said: bytes, rank: int) -> Introduction:
    """What a rank published. Raises GroupFailed where it is none: anybody who reaches the store can write there."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        told: dict[str, Any] = json.loads(said[: MOST_SAID + 1])
        one = Introduction(**told)
        texts = [told["host"], told["process"], told["name"], *told["serves"].values()]
        if one.rank == rank and all(isinstance(text, str) for text in texts):
            return one
    raise GroupFailed(f"rank {rank} introduced itself with {said[:80].decode(errors='replace')!r}")


def own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another one. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def host_identity() -> str:
    """Equal for processes that can share memory and reach each other by loopback, otherwise different."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
        parts.append(f"shm:{Path('/dev/shm').stat().st_dev}")
    if len(parts) == 1:
        parts.append(f"{uuid.getnode():x}")
    return " ".join(parts)
