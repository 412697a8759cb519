"""Pairs of row and chosen expert, brought into the order of their experts.

ids      [rows, top_k]     int32; -1 where a row asks nothing of these experts
offsets  [experts + 1]     int32; expert e has the places offsets[e] : offsets[e + 1]
pairs    [rows * top_k]    int32; pair (row * top_k + k) that is in each place, row order within an expert; what is
                           past offsets[-1] means nothing
places   [rows, top_k]     int32; the place of each pair, -1 where there is none
"""

from typing import NamedTuple

import torch


class Permutation(NamedTuple):
    """Where the pairs went. `top_k` of them are of one row."""

    offsets: torch.Tensor
    pairs: torch.Tensor
    places: torch.Tensor


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
