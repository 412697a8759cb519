"""Who is at one listener: strangers, of whom the oldest leaves for the newest, and those that were let in.

A link is a stranger's until its proof and its ticket were right. Strangers take no room from the others, those at one
address none from strangers at other addresses, and who comes now never waits for those who came before and say nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Generic, TypeVar

# Strangers at a time, of which a worker is one for some milliseconds. So many workers of one host may dial at once.
MAX_STRANGERS: Final = 128
STRANGERS_OF_ADDRESS: Final = 64

Link = TypeVar("Link")


class Room(Generic[Link]):
    """The links of one listener."""

    def __init__(self, max_members: int) -> None:
        self._max_members = max_members
        self._strangers: dict[Link, str] = {}  # their addresses, in the order in which they came
        self._at: Counter[str] = Counter()
        self._members: set[Link] = set()

    def enter(self, link: Link, address: str) -> Link | None:
        """A stranger came. Returns the one who has to leave for it."""
        crowded: str | None = None
        if self._at[address] >= STRANGERS_OF_ADDRESS:
            crowded = address
        elif len(self._strangers) >= MAX_STRANGERS:
            crowded = self._at.most_common(1)[0][0]
        leaves = None if crowded is None else self.evict(crowded)
        self._strangers[link] = address
        self._at[address] += 1
        return leaves

    def evict(self, address: str | None = None) -> Link | None:
        """The oldest stranger, of that address or of all, has left; None where there is none."""
        for link, its in self._strangers.items():
            if address in {None, its}:
                self.leave(link)
                return link
        return None

    def admit(self, link: Link) -> bool:
        """Let a stranger in. False where there is no room, or it had to leave meanwhile."""
        if link not in self._strangers or len(self._members) >= self._max_members:
            return False
        self.leave(link)
        self._members.add(link)
        return True

    def leave(self, link: Link) -> None:
        """It is gone. A second call changes nothing."""
        self._members.discard(link)
        address = self._strangers.pop(link, None)
        if address is not None:
            self._at -= Counter([address])  # drops what is at 0

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    @property
    def members(self) -> int:
        return len(self._members)
