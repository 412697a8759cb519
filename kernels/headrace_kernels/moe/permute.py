"""Pairs of row and chosen expert, brought into the order of their experts.

ids      [rows, top_k]     int32; -1 where a row asks nothing of these experts
offsets  [experts + 1]     int32; expert e has the places offsets[e] : offsets[e + 1]
pairs    [rows * top_k]    int32; pair (row * top_k + k) that is in each place, row order within an expert; what is
                           past offsets[-1] means nothing
places   [rows, top_k]     int32; the place of each pair, -1 where there is none
Cost: each expert's program reads all ids twice, from cache; a decode step is bound by launch time.
Source: counting sort; one launch without atomics is ours, so that the order is fixed. Run on an H100 and an H200.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 1024  # pairs; a guess, not tuned yet


class Permutation(NamedTuple):
    """Where the pairs went. `top_k` of them are of one row."""

    offsets: torch.Tensor
    pairs: torch.Tensor
    places: torch.Tensor


@triton.jit(do_not_specialize=["count"])
def _permute_kernel(
    ids_ptr, offsets_ptr, pairs_ptr, places_ptr, count, EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.program_id(0)  # the one after the last stands for pairs that are not ours
    below = tl.zeros((TILE,), dtype=tl.int32)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + pair, mask=pair < count, other=-1)
        below += ((ids >= 0) & (ids < expert)).to(tl.int32)
    place = tl.sum(below, axis=0)
    tl.store(offsets_ptr + expert, place)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + pair, mask=pair < count, other=-1)
        mine = ids == expert
        at = place + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(pairs_ptr + at, pair, mask=mine)
        tl.store(places_ptr + pair, at, mask=mine)
        if expert == EXPERTS:
            tl.store(
                places_ptr + pair, tl.full((TILE,), -1, tl.int32), mask=(ids < 0) & (pair < count)
            )
        place += tl.sum(mine.to(tl.int32), axis=0)


def permute(ids: torch.Tensor, experts: int) -> Permutation:
    """Sort the pairs by expert. All `ids` are below `experts`."""
    assert ids.dim() == 2 and ids.is_contiguous() and ids.dtype == torch.int32
    count = ids.numel()
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(count, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(ids)
    _permute_kernel[(experts + 1,)](ids, offsets, pairs, places, count, EXPERTS=experts, TILE=TILE)
    return Permutation(offsets, pairs, places)


def permute_ref(ids: torch.Tensor, experts: int) -> Permutation:
    """The same in torch."""
    flat = ids.flatten().long()
    keys = torch.where(flat < 0, experts, flat)  # those that are not ours go last
    pairs = keys.sort(stable=True).indices
    counts = torch.bincount(keys, minlength=experts + 1)[:experts]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    places = torch.empty_like(flat)
    places[pairs] = torch.arange(len(flat), device=ids.device)
    places = torch.where(flat < 0, -1, places).view(ids.shape)
    return Permutation(offsets.int(), pairs.int(), places.int())


def permute_bytes(rows: int, top_k: int, experts: int) -> int:
    """Bytes that must move: ids in, pairs, places and offsets out."""
    return 4 * (3 * rows * top_k + experts + 1)
