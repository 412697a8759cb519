"""What one router has to hear about the block cache: a snapshot, then numbered deltas.

A slow router gets a smaller delta, never a gap: changes that undo each other vanish, and when the delta would be longer
than a snapshot, it becomes one. A router that lost track gets a snapshot too (`BlockLog.restart`). Keys are the first 8
bytes of a block's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from headrace.engine.cache.block_pool import BlockEvent, Cleared, Removed, Stored
from headrace.wire.frames import NAME_BYTES, Blocks, Snapshot, StoredRun
from headrace.wire.run_columns import SingleRuns

SNAPSHOT_KEYS = 1 << 17  # in one frame: 1 MiB
SHORT_DELTA = 1024  # changes; below it a delta is never traded for a snapshot. A guess
DEVICE_TIER = 0


def block_key(name: bytes) -> int:
    return int.from_bytes(name[:8], "little")


def _keys(names: list[bytes]) -> list[int]:
    """`block_key` of each."""
    return np.frombuffer(b"".join(names), dtype="<u8").tolist()[:: NAME_BYTES // 8]


class CacheView:
    """The keys in the cache, parents before children, kept up to date by events.

    It lives beside the links, so that they never look into the pool while a step changes it.
    """

    def __init__(self) -> None:
        # Insertion order has parents first: a parent is stored before and evicted after its children.
        self.parents: dict[int, int | None] = {}

    def apply(self, events: Iterable[BlockEvent], logs: Iterable[BlockLog]) -> None:
        """Bring the view and the logs of all links up to date."""
        logs = list(logs)
        for event in events:
            match event:
                case Stored(names, parents):
                    keys = _keys(names)
                    self.parents.update(zip(keys, _parent_keys(parents), strict=True))
                    for log in logs:
                        log.stored(keys)
                case Removed(name):
                    key = block_key(name)
                    self.parents.pop(key, None)
                    for log in logs:
                        log.removed(key)
                case Cleared():
                    self.parents.clear()
                    for log in logs:
                        log.cleared()


class BlockLog:
    """Changes that one router has not heard of yet. It begins with a snapshot.

    Snapshots and deltas are numbered as one series: a snapshot takes the place of the delta that was due. So the router
    can tell a new snapshot from an old one, and a delta that the snapshot contains from the one after it.
    """

    def __init__(self, view: CacheView, epoch: int) -> None:
        self._view = view
        self._epoch = epoch
        self._sequence = -1  # of the last snapshot or delta sent
        self._snapshot = True  # the next thing to send is one
        self._cleared = False
        self._stored: dict[int, None] = {}  # in order
        self._removed: set[int] = set()

    @property
    def pending(self) -> bool:
        return bool(self._snapshot or self._cleared or self._stored or self._removed)

    def restart(self) -> None:
        """The router lost track of what it heard: the next thing to send is a snapshot."""
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        self._snapshot = True

    def stored(self, keys: list[int]) -> None:
        if self._snapshot:
            return
        new = dict.fromkeys(keys)
        if not self._removed.isdisjoint(keys):  # the router never heard that these had gone
            back = self._removed.intersection(keys)
            self._removed -= back
            new = dict.fromkeys(key for key in keys if key not in back)
        self._stored.update(new)
        self._bound()

    def removed(self, key: int) -> None:
        if self._snapshot:
            return
        if key in self._stored:
            del self._stored[key]  # the router never heard of it
        else:
            self._removed.add(key)
        self._bound()

    def cleared(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._cleared = not self._snapshot

    def _bound(self) -> None:
        changes = len(self._stored) + len(self._removed)
        if changes > len(self._view.parents) + SHORT_DELTA:
            self.restart()

    def take(self) -> list[Snapshot | Blocks]:
        """The frames that bring the router up to date; nothing is pending afterwards."""
        if not self.pending:
            return []
        self._sequence += 1
        if self._snapshot:
            self._snapshot = False
            return list(self._snapshot_frames())
        delta = Blocks(
            epoch=self._epoch,
            sequence=self._sequence,
            stored=self._runs(),
            removed=_pack(self._removed),
            cleared=self._cleared,
            tier=DEVICE_TIER,
        )
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return [delta]

    def _snapshot_frames(self) -> Iterator[Snapshot]:
        keys = list(self._view.parents)
        for start in range(0, max(len(keys), 1), SNAPSHOT_KEYS):
            part = keys[start : start + SNAPSHOT_KEYS]
            yield Snapshot(
                epoch=self._epoch,
                sequence=self._sequence,
                hashes=_pack(part),
                last=start + SNAPSHOT_KEYS >= len(keys),
            )

    def _runs(self) -> Sequence[StoredRun]:
        parents = list(map(self._view.parents.__getitem__, self._stored))
        if None not in parents and self._stored.keys().isdisjoint(parents):
            keys = np.fromiter(self._stored, dtype=np.uint64)
            return SingleRuns(np.array(parents, dtype=np.uint64), keys)
        runs: list[tuple[int | None, list[int]]] = []
        for key, parent in zip(self._stored, parents, strict=True):
            if runs and parent is not None and runs[-1][1][-1] == parent:
                runs[-1][1].append(key)
            else:
                runs.append((parent, [key]))
        return [
            StoredRun(parent, keys[0].to_bytes(8, "little") if len(keys) == 1 else _pack(keys))
            for parent, keys in runs
        ]


def _parent_keys(parents: list[bytes | None]) -> list[int | None]:
    if None in parents:
        return [None if parent is None else block_key(parent) for parent in parents]
    return [*_keys(cast("list[bytes]", parents))]


def _pack(keys: Iterable[int]) -> bytes:
    return np.fromiter(keys, dtype="<u8").tobytes()
