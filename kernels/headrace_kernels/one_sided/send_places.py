"""Where each row comes to lie in the slices of the ranks that hold its experts.

ids     [rows, top_k]   int32; experts of the group
owner   [experts]       int32; the rank that this rank's rows of an expert go to
places  [rows, ranks]   int32; the row's place among those that go to that rank, -1 where it does not
counts  [ranks]         int32; rows that go to each rank
Cost: each rank's program reads all ids, from cache; a decode step is bound by launch time.
Source: the one-sided exchange of TensorRT-LLM (blog 18) counts with atomics. Prefix sums are ours: a row's place does
not depend on which program comes first. Compiled for compute capability 9.0, not run on a GPU yet.
"""

import torch
import triton
import triton.language as tl

TILE = 1024  # rows; a guess, not tuned yet


@triton.jit(do_not_specialize=["rows"])
def _send_places_kernel(
    ids_ptr, owner_ptr, places_ptr, counts_ptr, rows, RANKS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    rank = tl.program_id(0)
    place = tl.sum(tl.zeros((TILE,), dtype=tl.int32), axis=0)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        inside = row < rows
        goes = tl.zeros((TILE,), dtype=tl.int32)
        for k in range(TOP_K):
            expert = tl.load(ids_ptr + row.to(tl.int64) * TOP_K + k, mask=inside, other=0)
            owner = tl.load(owner_ptr + expert, mask=inside, other=-1)
            goes = goes | (owner == rank).to(tl.int32)
        at = place + tl.cumsum(goes, axis=0) - 1
        at = tl.where(goes == 1, at, -1)
        tl.store(places_ptr + row.to(tl.int64) * RANKS + rank, at, mask=inside)
        place += tl.sum(goes, axis=0)
    tl.store(counts_ptr + rank, place)


def send_places(
    ids: torch.Tensor, owner: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and counts of all ranks."""
    rows, top_k = ids.shape
    assert ids.dtype == owner.dtype == torch.int32 and ids.is_contiguous() and owner.is_contiguous()
    places = torch.empty(rows, ranks, dtype=torch.int32, device=ids.device)
    counts = torch.empty(ranks, dtype=torch.int32, device=ids.device)
    _send_places_kernel[(ranks,)](
        ids, owner, places, counts, rows, RANKS=ranks, TOP_K=top_k, TILE=TILE
    )
    return places, counts


def send_places_ref(
    ids: torch.Tensor, owner: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    goes = torch.zeros(len(ids), ranks, dtype=torch.bool, device=ids.device)
    goes.scatter_(1, owner[ids.long()].long(), True)
    places = goes.cumsum(0) - 1
    return places.masked_fill(~goes, -1).int(), goes.sum(0).int()


def send_places_bytes(rows: int, top_k: int, ranks: int) -> int:
    """Bytes that must move: ids in, places and counts out."""
    return 4 * (rows * (top_k + ranks) + ranks)
