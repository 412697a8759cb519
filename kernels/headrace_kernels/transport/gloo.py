"""Parcels over a process group of torch.distributed: any network, and tensors of the CPU.

An exchange is two `all_to_all_single`: headers of fixed size, then the rows of all columns as one buffer of bytes. Both
happen in the wait, so a rank that posted and then failed owes the others nothing but a header.

*Abort.* A rank that fails sends its next header at once, with a flag instead of rows, and goes on. The others meet that
header where they next exchange, and all leave there. Where no exchange of the round is left, they meet it in a later
round: all see that it is of an older one, and repeat their exchange. So nobody has to know how many exchanges a round
has. What becomes of a round that failed on one rank alone is up to the agreement on the next one. A rank that fails
between headers and rows, inside of this file, leaves the group.

*Lost ranks.* Gloo says that some connection broke, or nothing. `roll_call.py` finds the rank, by the group's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace_kernels.moe.transport import Arrived, Columns, RankLost, Span, StepAborted
from headrace_kernels.transport.host_bytes import back_to, empty_rows, on_host, row_bytes
from headrace_kernels.transport.roll_call import ANSWER_S, RollCall

DEADLINE_S = 10.0
LOOK_S = 0.05
REASON_BYTES = 232
# A header: round, exchange, rows, bytes of a row, whether the round is over, bytes of the reason; then the reason.
ROUND, EXCHANGE, ROWS, WIDTH, OVER, SAID = range(6)
WORDS = 6 + REASON_BYTES // 8


class Gloo:
    """The `Transport` of one rank."""

    def __init__(
        self, store: dist.Store, *, rank: int, ranks: int, deadline_s: float = DEADLINE_S
    ) -> None:
        """Meet the other ranks at `store`, which rank 0 keeps; this group alone uses its prefix."""
        self.rank = rank
        self.ranks = ranks
        # What is on its way to a lost rank holds up the end of a process, until the group gives it up, too.
        limit = timedelta(seconds=deadline_s + ANSWER_S)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, ranks, limit)
        self._deadline_s = deadline_s
        self._calls = RollCall(dist.PrefixStore("roll_call", store), rank, ranks)
        self._round = -1  # none has begun
        self._number = 0  # of the exchange, in this round
        self._aborted: StepAborted | None = None  # this round
        self._lost: RankLost | None = None
        self._owed: tuple[torch.Tensor, dist.Work] | None = (
            None  # the header of an abort, which others are yet to meet
        )
        self._in_rows = False  # of an exchange whose headers were swapped
        self._closed = False

    def begin(self, round_number: int) -> None:
        if round_number <= self._round:
            raise ValueError(f"round {round_number} after round {self._round}")
        self._round, self._number, self._aborted = round_number, 0, None
        self._check()

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        if self._round < 0:
            raise RuntimeError("no round has begun")
        if len(parcels) != self.ranks:
            raise ValueError(f"{len(parcels)} parcels for {self.ranks} ranks")
        rows = len(columns[0])
        for start, end in parcels:
            if not 0 <= start <= end <= rows:
                raise ValueError(f"rows {start} to {end} of {rows}")
        self._check()
        self._number += 1
        return lambda: back_to_sender(self._swap(on_host(columns), parcels), columns)

    def abort(self, reason: str) -> None:
        if self._round >= 0 and not (self._aborted or self._lost or self._closed):
            self._aborted = StepAborted(self.rank, reason)
            if self._in_rows:
                self.close()  # the others wait for rows, and get no others
            elif self._owed is None:
                self._owed = self._send_headers([0] * self.ranks, 0, reason)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._calls.leave(self._lost)

    def _check(self) -> None:
        if self._closed:
            raise RankLost(self.rank, "it has left the group")
        if self._lost is not None:
            raise RankLost(self._lost.rank, self._lost.waited_for)
        if self._aborted is not None:
            raise StepAborted(self._aborted.rank, self._aborted.reason)

    def _swap(self, columns: Columns, parcels: Sequence[Span]) -> Arrived:
        self._check()
        width = sum(map(row_bytes, columns))
        sizes = [end - start for start, end in parcels]
        counts = self._swap_headers(sizes, width)
        self._in_rows = True
        packed = torch.cat([
            column[start:end].contiguous().view(torch.uint8).flatten()
            for start, end in parcels
            for column in columns
        ])  # fmt: skip
        came = torch.empty(sum(counts) * width, dtype=torch.uint8)
        splits = [[rows * width for rows in part] for part in (counts, sizes)]
        work = dist.all_to_all_single(came, packed, *splits, group=self._group, async_op=True)
        self._wait(work)
        self._in_rows = False
        return Arrived(unpacked(came, counts, columns), counts)

    def _swap_headers(self, sizes: list[int], width: int) -> list[int]:
        """Rows from each rank."""
        if self._owed is not None:
            came, work = self._owed
            self._wait(work)
            self._owed = None
            self._read_aborts(came)  # of others, in this round
        while True:
            came, work = self._send_headers(sizes, width)
            self._wait(work)
            self._read_aborts(came)
            if self._all_here(came, width):
                return came[:, ROWS].tolist()

    def _read_aborts(self, came: torch.Tensor) -> None:
        for rank, header in enumerate(came.tolist()):
            if header[OVER] and header[ROUND] == self._round:
                self._aborted = StepAborted(rank, said(came[rank]))
                self._check()

    def _all_here(self, came: torch.Tensor, width: int) -> bool:
        """False where a rank aborted an older round when no exchange of it was left, and that was its header."""
        headers = came.tolist()
        for rank, header in enumerate(headers):
            if header[ROUND] < self._round and header[OVER]:
                continue
            if (header[ROUND], header[EXCHANGE]) != (self._round, self._number):
                what = f"it is in exchange {header[EXCHANGE]} of round {header[ROUND]}"
                raise self._give_up(rank, f"{what}, ranks do not compute the same")
            if header[WIDTH] != width:
                what = f"{header[ROWS]} rows of {header[WIDTH]} bytes, each has {width} here"
                raise self._give_up(rank, what)
        return not any(header[OVER] for header in headers)

    def _send_headers(
        self, sizes: list[int], width: int, reason: str | None = None
    ) -> tuple[torch.Tensor, dist.Work]:
        text = (reason or "").encode()[:REASON_BYTES]
        rest = torch.frombuffer(bytearray(text.ljust(REASON_BYTES, b"\0")), dtype=torch.int64)
        own = torch.tensor([self._round, self._number, 0, width, reason is not None, len(text)])
        headers = torch.cat((own, rest)).repeat(self.ranks, 1)
        headers[:, ROWS] = torch.tensor(sizes)
        came = torch.empty_like(headers)
        work = dist.all_to_all_single(came, headers, group=self._group, async_op=True)
        assert work is not None, "this rank is of the group"
        return came, work

    def _place(self) -> str:
        return f"exchange {self._number} of round {self._round}"

    def _wait(self, work: dist.Work) -> None:
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:  # not yet, or never
                done = work.is_completed()
            if done and work.is_success():
                return
            if self._closed:
                raise RankLost(self.rank, "it has left the group")
            self._lost = self._calls.verdict(self._place())
            if self._lost is None and done:
                self._lost = self._calls.call(self._place(), "a connection broke")
            elif self._lost is None and time.monotonic() >= until:
                self._lost = self._calls.call(self._place(), f"{self._deadline_s:.1f} s")
            self._check()

    def _give_up(self, rank: int, what: str) -> RankLost:
        self._lost = self._calls.settle(RankLost(rank, f"{self._place()}: {what}"))
        return self._lost


def said(header: torch.Tensor) -> str:
    """The reason of an abort."""
    text = header[WORDS - REASON_BYTES // 8 :].contiguous().view(torch.uint8)
    return bytes(text[: int(header[SAID])].tolist()).decode(errors="ignore")


def unpacked(came: torch.Tensor, counts: list[int], columns: Columns) -> Columns:
    """Columns out of the parcels of all ranks, each of which has column after column."""
    arrived = empty_rows(columns, sum(counts))
    row, at = 0, 0
    for rows in counts:
        for column in arrived:
            nbytes = rows * row_bytes(column)
            part = column[row : row + rows].view(torch.uint8).flatten()
            part.copy_(came[at : at + nbytes])
            at += nbytes
        row += rows
    return arrived


def back_to_sender(arrived: Arrived, columns: Columns) -> Arrived:
    return Arrived(back_to(arrived.columns, columns), arrived.counts)
