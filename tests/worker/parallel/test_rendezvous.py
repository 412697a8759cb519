"""Ranks that find each other, and groups that cannot be: each rank ends with the line that names why."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from headrace.worker.parallel import group_store, rendezvous
from headrace.worker.parallel.control import (
    GroupFailed,
    dial_rank_0,
    named,
)
from headrace.worker.parallel.environment import read_environment
from headrace.worker.parallel.rendezvous import (
    GroupMismatch,
    Introduction,
    Met,
    _verdict,  # pyright: ignore[reportPrivateUsage]
    difference,
    meet,
)
from helpers.ports import held_ports
from helpers.worker.rank_processes import SERVES, Told, processes, variables

EPOCH, TOKEN = 7, bytes(range(32))


@pytest.fixture
def port() -> Iterator[int]:
    """Where nobody listens but a rank of this test."""
    with held_ports(1) as [held]:
        yield held


@pytest.fixture
def agent(port: int) -> TCPStore:
    """The store of torchrun's agent at that port, for ranks that are told of it by `AGENT`."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def of_run(agent: TCPStore) -> PrefixStore:
    """What ranks of the tests see of it."""
    return PrefixStore("headrace/none/0", agent)


def answers(told: list[Told]) -> list[str]:
    with processes(told) as ranks:
        return [str(one.answer()) for one in ranks]


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_learn_one_epoch_and_the_name_of_rank_0(size: int, port: int) -> None:
    told = [Told(variables(rank, size, port), name=f"name-{rank}") for rank in range(size)]
    with processes(told) as ranks:
        found = [one.answer() for one in ranks]
    assert [one["name"] for one in found] == ["name-0"] * size
    assert len({one["epoch"] for one in found}) == 1
    assert all(one["one_host"] for one in found)


def test_groups_at_one_store_are_told_apart_by_run_and_attempt(port: int) -> None:
    """As after a restart by torchrun, whose agent keeps the store."""
    first = [Told(variables(rank, 2, port)) for rank in range(2)]
    later = {"TORCHELASTIC_RESTART_COUNT": "1", **AGENT}
    again = [Told(variables(rank, 2, port, **later), name="again") for rank in range(2)]
    with processes(first) as ranks:
        assert {one.answer()["name"] for one in ranks} == {"worker-0"}
        with processes(again) as others:
            assert {one.answer()["name"] for one in others} == {"again"}


def test_missing_ranks_are_named_on_all_that_came(port: int, agent: TCPStore) -> None:
    told = {rank: Told(variables(rank, 4, port, **AGENT)) for rank in (0, 2)}
    with processes([told[2]]) as [third]:
        of_run(agent).wait(["rank/2"], timedelta(seconds=60))
        [first] = answers([replace(told[0], start_timeout_s=0.5)])
        said = [first, third.answer()]
    assert said == ["GroupFailed: ranks 1 and 3 of 4 did not come within 0.5 s"] * 2


def test_a_group_without_rank_0_says_so(port: int) -> None:
    [found] = answers([Told(variables(1, 2, port), start_timeout_s=0.5)])
    assert (
        f"rank 0 did not come: nobody listens at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}" in found
    )


@pytest.mark.parametrize("what", ["weights", "dtype"])
def test_all_ranks_name_the_one_that_serves_something_else(what: str, port: int) -> None:
    told = [Told(variables(rank, 3, port)) for rank in range(3)]
    told[2] = replace(told[2], serves=SERVES | {what: "other"})
    found = answers(told)
    assert len(set(found)) == 1
    assert found[0].startswith("GroupMismatch: rank 2 (")
    assert found[0].endswith(f"its {what} is 'other', rank 0 has {SERVES[what]!r}")


def test_no_text_makes_a_difference_look_like_a_missing_rank(port: int) -> None:
    """A new start may help where a rank is missing, and does not where one differs."""
    told = [Told(variables(rank, 2, port)) for rank in range(2)]
    told[1] = replace(told[1], serves=SERVES | {"weights": "what did not come within 1 s"})
    assert {one.partition(":")[0] for one in answers(told)} == {"GroupMismatch"}


MET = {"kind": "met", "epoch": 7, "token": TOKEN.hex(), "address": "unix:/x"}


@pytest.mark.parametrize(
    "said",
    [
        b"rank 1 differs",
        b"[]",
        b'{"epoch": 7}',
        b'{"kind": "other", "why": "it is"}',
        b'{"kind": "differs"}',
        b'{"kind": "missing", "why": ["rank 1"]}',
        b'{"kind": ["met"]}',
        b"[" * 30_000,
        *(json.dumps({k: v for k, v in MET.items() if k != name}).encode() for name in MET),
        *(
            json.dumps(MET | wrong).encode()
            for wrong in (
                {"epoch": "7"},
                {"epoch": -1},
                {"epoch": 1 << 64},
                {"epoch": None},
                {"token": 7},
                {"token": "no hexadecimal"},
                {"token": "00"},
                {"address": None},
                {"address": ["unix:/x"]},
            )
        ),
    ],
    ids=lambda said: said[:40].decode(),
)
def test_a_verdict_of_another_version_says_what_to_do(said: bytes) -> None:
    assert _verdict(json.dumps(MET).encode()) == MET
    with pytest.raises(GroupFailed, match="start the same Headrace on all"):
        _verdict(said)
    with (
        store_with("verdict", said.decode()) as (port, _),
        pytest.raises(GroupFailed, match="start the same Headrace on all"),
    ):
        meet_at(port, 1)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "unix:" + "x" * 300, "::1:"])
def test_an_address_where_nobody_can_be_is_told(address: str) -> None:
    with pytest.raises(GroupFailed, match="rank 0 cannot be reached at"):
        dial_rank_0(address, 1, EPOCH, TOKEN, time.monotonic() + 1)


@contextlib.contextmanager
def store_with(key: str, said: str) -> Generator[tuple[int, Store]]:
    """As torchrun's agent keeps it, where somebody has written this; its port."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = of_run(kept)
    store.set(key, said)
    yield kept.port, store


def meet_at(port: int, rank: int) -> Met:
    """One rank of two."""
    environment = read_environment(variables(rank, 2, port, **AGENT))
    assert environment is not None
    return meet(environment, "name", SERVES, 10.0)


def test_a_rank_with_another_world_size_ends_the_group(port: int) -> None:
    found = answers([Told(variables(0, 2, port)), Told(variables(1, 3, port))])
    assert len(set(found)) == 1
    assert re.fullmatch(
        r"GroupMismatch: (WORLD_SIZE is 3 on rank 1, and 2 on rank 0|WORLD_SIZE is 2 on rank 0, and 3 on rank 1"
        r"|rank 1 \(.*\) differs from rank 0 \(.*\): its WORLD_SIZE is '3', rank 0 has '2')",
        found[0],
    ), found


def test_a_rank_that_is_slow_to_see_that_its_world_size_differs_is_no_member(
    port: int, agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has read its introduction before."""
    over = threading.Event()

    class SlowStore(PrefixStore):
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            if desired_value == "3 on rank 1":
                assert over.wait(60)
            return super().compare_set(key, expected_value, desired_value)

    monkeypatch.setattr(group_store, "PrefixStore", SlowStore)

    def meeting(rank: int, size: int) -> str:
        environment = read_environment(variables(rank, size, port, **AGENT))
        assert environment is not None
        with pytest.raises(GroupMismatch) as caught:
            meet(environment, "name", SERVES, 60.0)
        return str(caught.value)

    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(meeting, 1, 3)
        try:
            first = meeting(0, 2)
        finally:
            over.set()
        assert slow.result() == first
    assert first.endswith("its WORLD_SIZE is '3', rank 0 has '2'")


def test_rank_0_says_why_there_is_no_group_though_a_rank_never_reads_it(
    port: int, agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that died once it had come: rank 0 keeps the store for it, in vain."""
    monkeypatch.setattr(rendezvous, "open_store", lambda *_: of_run(agent))
    monkeypatch.setattr(rendezvous, "NAMING_S", 0.1)
    monkeypatch.setattr(rendezvous, "SEEN_S", 1.0)
    of_run(agent).set("rank/1", json.dumps(INTRODUCTION))
    environment = read_environment(variables(0, 3, port))
    assert environment is not None and environment.keeps_store
    with pytest.raises(GroupFailed, match=r"rank 2 of 3 did not come within 0\.1 s"):
        meet(environment, "name", SERVES, 0.1)


def test_a_second_process_of_one_rank_is_refused_by_name(port: int, agent: TCPStore) -> None:
    told = {rank: Told(variables(rank, 3, port, **AGENT)) for rank in (0, 1)}
    with processes([told[1]]) as [there]:
        of_run(agent).wait(["rank/1"], timedelta(seconds=60))
        [second] = answers([told[1]])
        assert "rank 1 is there already, on " in second
        [first] = answers([replace(told[0], start_timeout_s=0.5)])
        others = [first, there.answer()]
    assert others == ["GroupFailed: rank 2 of 3 did not come within 0.5 s"] * 2, "they wait on"


INTRODUCTION = asdict(Introduction(rank=1, host="h", process="p", name="n", serves={}))


@pytest.mark.parametrize(
    ("key", "said", "told"),
    [
        ("rank/1", json.dumps(INTRODUCTION | {"serves": "x"}), "rank 1 introduced itself with"),
        ("rank/1", json.dumps(INTRODUCTION | {"serves": {"a": 1}}), "rank 1 introduced itself"),
        ("rank/1", json.dumps(INTRODUCTION | {"rank": 0}), "rank 1 introduced itself with"),
        ("rank/1", json.dumps(INTRODUCTION | {"later": 1}), "rank 1 introduced itself with"),
        ("rank/1", "[" * 30_000, "rank 1 introduced itself with '[[["),
        ("rank/1", "x" * 100_000, "rank 1 introduced itself with 'xxx"),
        ("size", " ", "WORLD_SIZE is 2 on rank 0, and  "),
    ],
)
def test_what_no_rank_would_publish_is_told_by_name(key: str, said: str, told: str) -> None:
    """At a store that somebody else writes to; the other ranks read the same line."""
    with (
        store_with(key, said) as (port, store),
        pytest.raises((GroupFailed, GroupMismatch)) as caught,
    ):
        meet_at(port, 0)
    assert told in str(caught.value)
    verdict = json.loads(store.get("verdict"))
    assert verdict == {"kind": "differs", "why": str(caught.value)}


def test_rank_0_that_cannot_listen_says_where() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [found] = answers([Told(variables(0, 2, port))])
    assert f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}" in found


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this machine; give one that is, on all ranks"),
        ("no.such.host.invalid", "no.such.host.invalid has no address here ("),
        ("a" * 70, " has no address here ("),
    ],
)
def test_rank_0_with_the_address_of_another_machine_says_so(
    address: str, why: str, port: int
) -> None:
    [found] = answers([Told(variables(0, 2, port, MASTER_ADDR=address))])
    assert found.startswith("WrongStoreAddress: rank 0 cannot listen at MASTER_ADDR:MASTER_PORT ")
    assert why in found


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(group_store, "time", clock)
    return clock


def test_who_waits_for_a_store_says_where_and_why_and_looks_ever_more_rarely(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", resolve)
    environment = read_environment(variables(1, 2, 29500, MASTER_ADDR="node-7"))
    assert environment is not None
    with pytest.raises(GroupFailed, match=r"rank 0 did not come: nobody listens at .*node-7:29500"):
        group_store.open_store(environment, 600.0)
    assert 600 <= clock.now < 602
    assert clock.naps < 700, "not 50 in a second"
    where = (
        "rank 0: nobody listens at MASTER_ADDR:MASTER_PORT node-7:29500 (Name or service not known)"
    )
    said = [record.getMessage() for record in caplog.records]
    assert [where in line for line in said] == [True] * 4, "after 3, 12, 48 and 192 s"
    assert said[0].startswith("rank 1 has waited 3 s for rank 0: ")


def test_who_waits_for_ranks_names_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "time", clock)
    store = HashStore()
    environment = read_environment(variables(0, 4, 29500))
    assert environment is not None
    meeting = rendezvous._Meeting(store, environment, 20.0, 20.0)  # pyright: ignore[reportPrivateUsage]
    store.set("rank/2", "")
    with pytest.raises(GroupFailed, match="ranks 0, 1 and 3 of 4 did not come within 20 s"):
        meeting.lead()
    [first, *_] = (record.getMessage() for record in caplog.records)
    waits = (
        "rank 0 has waited 3 s for ranks 0, 1 and 3 of 4 to come to 127.0.0.1:29500; it gives up"
    )
    assert first.startswith(waits)


def test_what_is_no_store_is_named() -> None:
    """A port where something else listens, which hangs up."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        def hang_up() -> None:
            while True:
                try:
                    other.accept()[0].close()
                except OSError:
                    return

        hanging = threading.Thread(target=hang_up)
        hanging.start()
        [found] = answers([Told(variables(1, 2, port), start_timeout_s=1.0, seen_s=0.2)])
        other.shutdown(socket.SHUT_RDWR)
        hanging.join()
    assert found == (
        f"GroupFailed: rank 0 did not come: what listens at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port} is not the store "
        "of a group, or stands still"
    )


def test_the_first_difference_is_told_with_both_values() -> None:
    def rank(number: int, **serves: str) -> Introduction:
        return Introduction(rank=number, host="h", process=f"p{number}", name="n", serves=serves)

    assert difference([rank(0, a="1"), rank(1, a="1")]) is None
    told = difference([rank(0, a="1"), rank(1, a="1"), rank(2, a="1", b="2")])
    assert told == "rank 2 (p2) differs from rank 0 (p0): its b is '2', rank 0 has 'nothing'"


@pytest.mark.parametrize(("hosts", "one"), [("aa", True), ("ab", False), ("aab", False)])
def test_ranks_are_on_one_host_where_all_say_the_same(hosts: str, one: bool) -> None:
    ranks = [
        Introduction(rank=number, host=host, process="p", name="n", serves={})
        for number, host in enumerate(hosts)
    ]
    assert Met(ranks=ranks, epoch=1, secret="s", links={}, store=HashStore()).one_host is one


def test_ranks_are_named_as_a_person_would() -> None:
    assert named([3]) == "rank 3"
    assert named([1, 2, 5]) == "ranks 1, 2 and 5"
    assert named(list(range(30))).endswith("18, 19 and 10 more")
