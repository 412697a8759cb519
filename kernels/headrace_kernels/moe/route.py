"""Which experts a row goes to, and with what weights: DeepSeek-V3's routing without an auxiliary loss (noaux_tc).

logits   [rows, experts]  float32
bias     [experts]        float32; steers the choice only, never the weights
ids      [rows, top_k]    int32, ascending
weights  [rows, top_k]    float32, of the expert in the same place
counts   [experts]        int64; increased by the rows that chose each expert, where they are counted
Cost: reads the logits, writes a few numbers; launch time is the bound for some hundred rows.
Source: DeepSeek-V3 2024, section 2.1.2; the group limit as in DeepSeek-V2 2024, section 2.2.2.
Run on an H100 and an H200.

Scores are sigmoids. A group's worth is the sum of its two best biased scores; experts outside of the best groups are
never chosen, however low the others score. Equal scores go to the lowest id. Where any of a row's logits is no finite
number, the row still gets its experts, and all of their weights are NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from headrace_kernels.ops import Routing

LAUNCH = {"num_warps": 1}  # so that reductions stay in one warp; a guess, not tuned yet


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr, COUNT: tl.constexpr, GROUP_TILE: tl.constexpr, MEMBER_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    members: tl.constexpr = EXPERTS // GROUPS
    tile: tl.constexpr = GROUP_TILE * MEMBER_TILE
    g = tl.arange(0, GROUP_TILE)
    m = tl.arange(0, MEMBER_TILE)
    expert = g[:, None] * members + m[None, :]
    real = (g[:, None] < GROUPS) & (m[None, :] < members)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=real, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    # What is no number is never better than a number; every row still gets TOP_K experts.
    sound = (tl.abs(logits) < float("inf")) & (tl.abs(choice) < float("inf"))
    broken = tl.max(tl.max((real & ~sound).to(tl.int32), axis=1), axis=0)
    choice = tl.where(real & sound, choice, -float("inf"))

    worth = tl.max(choice, axis=1)  # [groups]
    if members > 1:
        best = tl.reshape(tl.argmax(choice, axis=1), (GROUP_TILE, 1))  # the first of equals
        second = tl.max(tl.where(m[None, :] == best, -float("inf"), choice), axis=1)
        worth = tl.add(worth, second)
    # A group's rank is the number of groups that go before it: better ones, and equal ones with a lower index.
    other = tl.reshape(worth, (1, GROUP_TILE))
    mine = tl.reshape(worth, (GROUP_TILE, 1))
    before = (other > mine) | ((other == mine) & (g[None, :] < g[:, None]))
    before = before & (g[None, :] < GROUPS)
    kept = tl.sum(before.to(tl.int32), axis=1) < TOP_GROUPS
    choice = tl.where(kept[:, None], choice, -float("inf"))

    flat = tl.reshape(choice, (tile,))
    flat_id = tl.reshape(tl.where(real, expert, EXPERTS), (tile,))
    open_ = flat_id < EXPERTS
    chosen = flat_id < 0
    for _ in range(TOP_K):
        top = tl.max(tl.where(open_, flat, -float("inf")), axis=0)
        pick = tl.min(tl.where(open_ & (flat == top), flat_id, EXPERTS), axis=0)
        chosen = chosen | (flat_id == pick)
        open_ = open_ & (flat_id != pick)

    weights = tl.where(chosen, tl.reshape(scores, (tile,)), 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(broken == 1, float("nan"), weights)
    k = tl.cumsum(chosen.to(tl.int32), axis=0) - 1  # ids ascend along the tile
    tl.store(ids_ptr + row * TOP_K + k, flat_id, mask=chosen)
    tl.store(weights_ptr + row * TOP_K + k, weights * scale, mask=chosen)
    if COUNT:  # integers: the same sums in any order of rows
        tl.atomic_add(counts_ptr + flat_id, tl.full((tile,), 1, tl.int64), mask=chosen)


def route(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row and their weights. With `counts` each choice is counted."""
    rows, experts = logits.shape
    assert experts == routing.experts == bias.numel() and experts % routing.groups == 0
    assert routing.top_k <= experts and routing.top_groups <= routing.groups
    assert logits.dtype == bias.dtype == torch.float32 and logits.is_contiguous()
    assert counts is None or (counts.dtype == torch.int64 and counts.numel() == experts)
    ids = torch.empty(rows, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, bias, ids, weights, ids if counts is None else counts, routing.scale,
            EXPERTS=experts, TOP_K=routing.top_k, GROUPS=routing.groups, TOP_GROUPS=routing.top_groups,
            NORMALISE=routing.normalise, COUNT=counts is not None, GROUP_TILE=triton.next_power_of_2(routing.groups),
            MEMBER_TILE=triton.next_power_of_2(experts // routing.groups), **LAUNCH,
        )  # fmt: skip
    return ids, weights


def route_ref(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    scores = logits.float().sigmoid()
    choice = scores + bias.float()
    sound = logits.isfinite() & choice.isfinite()
    choice = choice.masked_fill(~sound, -torch.inf)
    grouped = choice.unflatten(-1, (routing.groups, -1))  # [rows, groups, experts of a group]
    worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = _first_best(worth, routing.top_groups)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, kept, False)
    choice = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = _first_best(choice, routing.top_k).sort(-1).values
    if counts is not None:
        counts += torch.bincount(ids.flatten(), minlength=routing.experts)
    weights = scores.gather(-1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights.masked_fill(~sound.all(-1, keepdim=True), torch.nan)
    return ids.int(), weights * routing.scale


def _first_best(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of each row; of equals the first. `topk` promises no order of them."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route_bytes(rows: int, experts: int, top_k: int) -> int:
    """Bytes that must move: logits in, ids and weights out; the bias stays in cache."""
    return 4 * rows * (experts + 2 * top_k)
