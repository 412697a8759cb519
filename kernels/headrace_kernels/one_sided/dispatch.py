"""A `Dispatch` whose ranks write straight into each other's windows, by kernels in this rank's queue of work.

Nothing waits on the host but for the counts of rows, without which results would need room for the most there can be.
With `whole` they do have it: then nothing waits, and a layer can be part of a recorded graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace_kernels.dense.fp8_quantise import quantise_rows
from headrace_kernels.moe.dispatch import Combine, Received, Returned, Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import OnLost, RankLost
from headrace_kernels.one_sided.put_rows import put_rows
from headrace_kernels.one_sided.return_rows import return_rows
from headrace_kernels.one_sided.send_places import send_places
from headrace_kernels.one_sided.signal import RESULTS, ROWS, signal
from headrace_kernels.one_sided.wait import MOST_POLLS, wait
from headrace_kernels.one_sided.window import Window

PASSES_OF_A_ROUND = 1 << 12  # of layers: an epoch of a round is never one of another round


class OneSidedGroup:
    """This rank's window and the addresses of all; one for all layers."""

    def __init__(
        self,
        window: Window,
        rank: int,
        buffer: torch.Tensor,
        bases: Sequence[int],
        *,
        whole: bool = False,
        most_polls: int = MOST_POLLS,
    ) -> None:
        """`buffer` is this rank's window, zeros at first; `bases` are the addresses of all windows from here."""
        assert buffer.dtype == torch.uint8 and buffer.shape == (window.nbytes,)
        assert len(bases) == window.ranks and all(base % 16 == 0 for base in bases)
        self.window = window
        self.rank = rank
        self.buffer = buffer
        self.whole = whole
        self.most_polls = most_polls
        self.bases = torch.tensor(bases, dtype=torch.int64, device=buffer.device)
        self.epoch = torch.zeros(1, dtype=torch.int64, device=buffer.device)
        self.late = torch.zeros(window.ranks, dtype=torch.bool, device=buffer.device)
        self.nothing = torch.zeros(window.ranks, dtype=torch.int32, device=buffer.device)
        self.flags = window.view(buffer, "flags", torch.int64, 2, window.ranks)
        self.holds: object = None  # what keeps the windows of other ranks mapped
        self.on_lost: OnLost | None = None

    def begin(self, round_number: int) -> None:
        """A round begins: nothing that is left of rounds before is taken for one of its own."""
        self.epoch.fill_(round_number * PASSES_OF_A_ROUND)

    def arrived(self, kind: int) -> torch.Tensor:
        """Counts of all ranks, 0 of those that did not come; `check` names these."""
        counts = wait(self.flags[kind], self.epoch, self.most_polls)
        self.late |= counts < 0
        return counts.clamp(min=0)

    def check(self) -> None:
        """Raises RankLost for a rank that did not come. Waits for the device."""
        if late := self.late.nonzero().flatten().tolist():
            lost = RankLost(late[0], "its rows or results did not come in time")
            if self.on_lost is not None:
                self.on_lost(lost)
            raise lost

    def dispatch(self, placement: LayerPlacement) -> OneSidedDispatch:
        """That of a layer."""
        home = placement.replicas_for(self.rank, self.buffer.device)
        return OneSidedDispatch(group=self, owner=home.rank.int(), slot=home.slot.contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedDispatch:
    """The `Dispatch` of one layer."""

    group: OneSidedGroup
    owner: torch.Tensor  # [experts], int32; the rank that this rank's rows of an expert go to
    slot: torch.Tensor  # [experts], int32; there

    @property
    def combine(self) -> Combine:
        return self.group.window.combine

    def send(self, routed: Routed) -> OneSidedSent:
        group, window = self.group, self.group.window
        x, ids, weights = routed
        group.epoch += 1
        places, counts = send_places(ids, self.owner, window.ranks)
        rows, scale = quantise_rows(x) if window.e4m3 else (x.contiguous(), None)
        put_rows(
            window,
            group.bases,
            group.rank,
            rows,
            scale,
            ids,
            weights,
            self.owner,
            self.slot,
            places,
        )
        signal(window, group.bases, group.rank, ROWS, group.epoch, counts)
        return OneSidedSent(group, len(x), places)


@dataclass(slots=True)
class OneSidedSent:
    """Rows on their way."""

    group: OneSidedGroup
    rows: int
    places: torch.Tensor
    which: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))

    def receive(self) -> Received:
        group, window = self.group, self.group.window
        counts = group.arrived(ROWS)
        shape = window.ranks, window.most_rows
        at = torch.arange(window.most_rows, device=counts.device)
        came = (at < counts[:, None]).flatten()  # [ranks * most_rows]
        part = {
            name: window.view(group.buffer, name, dtype, shape[0] * shape[1], width)
            for name, dtype, width in (
                ("x", window.row_dtype, window.hidden),
                ("slots", torch.int32, window.top_k),
                ("weights", torch.float32, window.top_k),
                ("scale", torch.float32, window.scale_words),
            )
        }
        if group.whole:
            self.which = torch.arange(len(came), dtype=torch.int32, device=counts.device)
            part["slots"] = part["slots"].masked_fill(~came[:, None], -1)
        else:
            self.which = came.nonzero().flatten().int()
            group.check()
            part = {name: _rows(value, self.which) for name, value in part.items()}
        scale = part["scale"] if window.e4m3 else None
        return Received(part["x"], part["slots"], part["weights"], scale)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        self.give(y, places)
        return self.take()

    def give(self, y: torch.Tensor, places: torch.Tensor) -> None:
        """Results on their way back."""
        group, window = self.group, self.group.window
        rows, columns = (
            window.view(group.buffer, name, torch.int32, window.ranks * window.most_rows)
            for name in ("rows", "columns")
        )
        return_rows(window, group.bases, y, places.contiguous(), self.which, rows, columns)
        signal(window, group.bases, group.rank, RESULTS, group.epoch, group.nothing)

    def take(self) -> Returned:
        """What came back, once it is there."""
        group, window = self.group, self.group.window
        group.arrived(RESULTS)
        if not group.whole:
            group.check()
        shape = window.most_rows * window.answers, window.hidden
        results = window.view(group.buffer, "results", window.dtype, *shape)
        device = group.buffer.device
        column = torch.arange(window.answers, device=device)
        if window.combine == "exact":
            due = torch.full((self.rows, 1), window.answers, device=device)
        else:
            due = (self.places >= 0).sum(1, keepdim=True)  # ranks that a row went to
        home = torch.arange(self.rows, device=device)[:, None] * window.answers + column
        return Returned(results, torch.where(column < due, home, -1).int())


def _rows(part: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Some rows; those of e4m3 as bytes, which every device copies."""
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8)[which.long()].view(part.dtype)
    return part[which.long()]
