"""Which cached contents are used most: those that a leaving worker hands to others first.

Storing contents is their first use, each sequence that finds them is one more. All counts are halved now and then, so
that what was popular long ago gives way. Only contents in the cache have a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HotBlock:
    """Cached contents, the name of the block before them (`None` at the root), and their faded number of uses."""

    name: bytes
    parent: bytes | None
    hits: int


class Uses:
    """Counts of uses. They are halved after every `fade_after` uses."""

    def __init__(self, fade_after: int) -> None:
        self._fade_after = fade_after
        self._noted = 0
        self._hits: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes | None] = {}

    def stored(self, names: Sequence[bytes], parents: Sequence[bytes | None]) -> None:
        self._hits.update(dict.fromkeys(names, 1))
        self._parent.update(zip(names, parents, strict=True))

    def removed(self, name: bytes) -> None:
        del self._hits[name], self._parent[name]

    def clear(self) -> None:
        self._hits.clear()
        self._parent.clear()

    def hit(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._hits[name] += 1
        self._noted += len(names)
        if self._noted >= self._fade_after:
            self._noted = 0
            for name in self._hits:
                self._hits[name] //= 2

    def hottest(self, count: int) -> list[HotBlock]:
        """At most `count`, each after its parent; those that hang on nothing in the cache are left out."""
        chosen: dict[bytes, None] = {}
        # Of equally used ones the newest first: a conversation goes on sooner than one that ended.
        newest = reversed(list(self._hits.items()))
        for name, _ in sorted(newest, key=lambda item: -item[1]):
            if len(chosen) >= count:
                break
            chain: list[bytes] = []
            at: bytes | None = name
            while at is not None and at not in chosen and at in self._parent:
                chain.append(at)
                at = self._parent[at]
            whole = at is None or at in chosen
            if whole and len(chosen) + len(chain) <= count:
                chosen.update(dict.fromkeys(reversed(chain)))
        return [HotBlock(name, self._parent[name], self._hits[name]) for name in chosen]
