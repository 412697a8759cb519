"""Who is let in at one listener, and who has to leave for whom; without a socket."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv_transfer.peers.room import MAX_STRANGERS, STRANGERS_OF_ADDRESS, Room


def test_strangers_of_one_address_leave_for_each_other_only() -> None:
    room: Room[int] = Room(max_members=4)
    assert room.enter(-1, "quiet") is None
    for link in range(STRANGERS_OF_ADDRESS):
        assert room.enter(link, "loud") is None
    for link in range(10):  # the oldest first
        assert room.enter(1000 + link, "loud") == link
    assert room.strangers == STRANGERS_OF_ADDRESS + 1
    assert room.admit(-1)


def test_where_all_room_is_taken_the_loudest_address_gives_way() -> None:
    room: Room[int] = Room(max_members=4)
    for link in range(STRANGERS_OF_ADDRESS):
        room.enter(link, "loud")
    for link in range(STRANGERS_OF_ADDRESS, MAX_STRANGERS):
        assert room.enter(link, f"address {link}") is None
    assert room.enter(MAX_STRANGERS, "one more") == 0
    assert room.strangers == MAX_STRANGERS


def test_strangers_take_no_room_from_members_nor_members_from_strangers() -> None:
    room: Room[int] = Room(max_members=2)
    for link in range(2):
        room.enter(link, "a")
        assert room.admit(link)
    for link in range(2, 2 + STRANGERS_OF_ADDRESS):
        assert room.enter(link, "a") is None  # members are no strangers of their address
    assert not room.admit(2)
    assert room.members == 2
    room.leave(0)
    assert room.admit(2)


def test_who_had_to_leave_is_not_admitted() -> None:
    room: Room[int] = Room(max_members=2)
    room.enter(0, "a")
    assert room.evict() == 0
    assert room.evict() is None
    assert not room.admit(0)
    room.leave(0)
    assert (room.strangers, room.members) == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "admit", "leave", "evict"]), st.integers(0, 300)),
        max_size=600,
    )
)
def test_whatever_happens_the_bounds_hold(events: list[tuple[str, int]]) -> None:
    room: Room[int] = Room(max_members=3)
    strangers: dict[int, str] = {}
    members: set[int] = set()
    for at, (what, number) in enumerate(events):
        if what == "enter":
            address = f"address {number % 3}"
            leaves = room.enter(at, address)
            if leaves is not None:
                del strangers[leaves]
            strangers[at] = address
        elif what == "admit":
            if room.admit(number):
                del strangers[number]
                members.add(number)
        elif what == "leave":
            room.leave(number)
            strangers.pop(number, None)
            members.discard(number)
        elif (leaves := room.evict()) is not None:
            assert leaves == min(strangers)
            del strangers[leaves]
        assert (room.strangers, room.members) == (len(strangers), len(members))
        assert room.strangers <= MAX_STRANGERS and room.members <= 3
        assert max(Counter(strangers.values()).values(), default=0) <= STRANGERS_OF_ADDRESS
