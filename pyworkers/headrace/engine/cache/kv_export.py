"""KV that this worker keeps for another one to pull: which of it is whole, and until when it stays.

An export begins with the admission of its prompt. Its blocks stay the same ones from then to its end. Once the first
token is chosen the sequence takes no further step and its lease runs. It ends when the puller has it all, with the
lease, or with the request; `revoked` is set before the first of its blocks can belong to somebody else, so what was
read before somebody saw `revoked` unset is good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from headrace.engine.sequence import Key, Sequence

if TYPE_CHECKING:
    from headrace.engine.step.work import Work
    from headrace_kernels.ops import Fence, Progress


class KvExport:
    """Plain attributes; any thread may read them at any time.

    The thread of the step writes `step` and `fences`, that of the engine all others.
    """

    __slots__ = (
        "block_tokens",
        "blocks",
        "computed",
        "fences",
        "key",
        "lease_ms",
        "pull_key",
        "released",
        "revoked",
        "step",
        "tokens",
    )

    def __init__(
        self,
        key: Key,
        *,
        blocks: tuple[int, ...],
        tokens: int,
        computed: int,
        block_tokens: int,
        lease_ms: int,
        pull_key: bytes,
    ) -> None:
        self.key = key
        self.blocks = blocks  # in sequence order; the last one may be full in part
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.lease_ms = lease_ms
        self.pull_key = pull_key  # who pulls has to have it
        self.computed = computed  # leading tokens whose KV is whole in all layers
        self.step = (0, 0, 0)  # (start, stop, layer groups done) of the chunk in flight
        self.fences: list[Fence] = []  # one for each of these groups, where the device runs behind
        self.revoked = False
        self.released = False  # the puller had it all before the first token was chosen

    def ready(self, place: int, group: int) -> bool:
        """Whether layer group `group` of the block at `place` is whole. It does not change any more then."""
        end = min((place + 1) * self.block_tokens, self.tokens)
        _, stop, groups = self.step
        fences = self.fences  # of this chunk or of one before, whose groups `groups` does not reach
        if end <= self.computed:
            return True
        if end > stop or group >= groups:
            return False
        return group >= len(fences) or fences[group].query()

    def begin(self, start: int, count: int) -> None:
        """The next `count` tokens, from `start` on, are about to be computed."""
        self.step = (start, start, 0)
        self.fences = []
        self.step = (start, start + count, 0)

    def advance(self, groups: int, fence: Fence | None) -> None:
        """The chunk in flight is written in that many layer groups, once the fence is passed."""
        if fence is not None:
            self.fences.append(fence)
        start, stop, _ = self.step
        self.step = (start, stop, groups)

    def commit(self) -> None:
        """The chunk in flight is computed, and the device has written it: `ready` asks no fence of it any more."""
        self.computed = self.step[1]


class Alarm:
    """Tells the event loop that exports moved on: at once, or when the device has come to a fence."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None  # from any thread
        self._waiter: ThreadPoolExecutor | None = None

    def ring(self, fence: Fence | None = None) -> None:
        if self.call is None:
            return
        if fence is None:
            self.call()
            return
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(1, thread_name_prefix="kv fences")
        self._waiter.submit(self._ring_after, fence)

    def _ring_after(self, fence: Fence) -> None:
        fence.synchronize()
        if self.call is not None:
            self.call()


class KvExports:
    """Begins exports and keeps them up to date."""

    def __init__(self, block_tokens: int) -> None:
        self.alarm = Alarm()
        self._block_tokens = block_tokens
        self._new: deque[KvExport] = deque()

    def take(self) -> list[KvExport]:
        """Those that began since the last call, in order, but for the revoked ones. For any thread, at any time."""
        kv_exports: list[KvExport] = []
        while self._new:
            export = self._new.popleft()
            if not export.revoked:
                kv_exports.append(export)
        return kv_exports

    def admit(self, admitted: list[Sequence]) -> None:
        """Those of them that others will pull begin."""
        for sequence in admitted:
            if sequence.export_lease_ms is not None:
                sequence.export = KvExport(
                    sequence.key,
                    blocks=tuple(sequence.blocks),
                    tokens=sequence.total,
                    computed=sequence.computed,
                    block_tokens=self._block_tokens,
                    lease_ms=sequence.export_lease_ms,
                    pull_key=sequence.export_pull_key,
                )
                self._new.append(sequence.export)

    def progress_of(self, chunks: list[Work]) -> Progress:
        """For the forward pass that is about to compute `chunks`."""
        exports = [_export(chunk) for chunk in chunks]
        for export, chunk in zip(exports, chunks, strict=True):
            export.begin(chunk.start, chunk.count)
        self.alarm.ring()

        def progress(groups: int, fence: Fence | None = None) -> None:
            for export in exports:
                export.advance(groups, fence)
            self.alarm.ring(fence)

        return progress

    def commit(self, chunks: list[Work]) -> None:
        """The step ended well, on the device too."""
        for chunk in chunks:
            _export(chunk).commit()
        if chunks:
            self.alarm.ring()


def _export(chunk: Work) -> KvExport:
    """It stays that of its sequence, which keeps its batch row until its first token is chosen."""
    assert chunk.sequence.export is not None
    return chunk.sequence.export
