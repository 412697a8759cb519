"""The adapter to DeepEP against a stand-in that does what DeepEP documents, with threads as ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.moe.all_to_all import AllToAll, spans
from headrace_kernels.moe.dispatch import Dispatch, Routed
from headrace_kernels.moe.experts import Experts, moe_ref
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import Routing
from headrace_kernels.transport.deep_ep import DeepEpDispatch, open_buffer
from helpers.kernels.expert_ranks import Threads, ThreadTransport, random_placement

CPU = torch.device("cpu")
HIDDEN, EXPERTS, TOP_K, RANKS = 32, 12, 4, 3
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=1, top_groups=1, normalise=True, scale=1.0)


class StandIn:
    """`deep_ep.Buffer` of one rank."""

    def __init__(self, transport: ThreadTransport) -> None:
        self._transport = transport
        self._per_rank = 0

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> Sequence[Any]:
        assert topk_idx.dtype == torch.int64 and num_experts % self._transport.ranks == 0
        self._per_rank = num_experts // self._transport.ranks
        owner = topk_idx // self._per_rank
        goes = torch.stack([(owner == rank).any(1) for rank in range(self._transport.ranks)], 1)
        to_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return goes.sum(0).int(), None, to_expert.int(), goes, None

    def dispatch(self, x: torch.Tensor, **given: Any) -> Sequence[Any]:
        goes, numbers = given["is_token_in_rank"], given["topk_idx"]
        row = goes.T.nonzero(as_tuple=True)[1]  # rank after rank
        assert goes.sum(0).tolist() == given["num_tokens_per_rank"].tolist()
        columns = (x[row], numbers[row], given["topk_weights"][row], row)
        sent = self._transport.post(columns, spans(goes.sum(0).tolist()))()
        (rows, experts, weights, rows_there), counts = sent
        local = experts - self._transport.rank * self._per_rank
        here = (local >= 0) & (local < self._per_rank)
        handle = rows_there, counts, len(x)
        return rows, torch.where(here, local, -1), torch.where(here, weights, 0.0), [], handle, None

    def combine(self, x: torch.Tensor, handle: Any) -> Sequence[Any]:
        rows, counts, most = handle
        (values, back), _ = self._transport.post((x, rows), spans(counts))()
        sums = torch.zeros(most, x.shape[1])
        for value, row in zip(values, back.tolist(), strict=True):  # rank after rank
            sums[row] += value.float()
        return sums.to(x.dtype), None, None


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GATE = noise(EXPERTS, HIDDEN, seed=1)
GATE_UP, DOWN = noise(EXPERTS, 16, HIDDEN, seed=2) / 6, noise(EXPERTS, HIDDEN, 8, seed=3) / 3
X, RESIDUAL = (noise(11, HIDDEN, seed=seed).bfloat16() for seed in (4, 5))


def equal_slots(seed: int) -> LayerPlacement:
    """Any experts on each rank, as many on all."""
    placement = random_placement(EXPERTS, RANKS, 0, seed)
    spare = [next(e for e in range(EXPERTS) if e not in held) for held in placement.ranks]
    return LayerPlacement(
        EXPERTS, tuple((*h, e) for h, e in zip(placement.ranks, spare, strict=True))
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_layer_gets_the_sums_of_all_ranks(seed: int) -> None:
    placement = equal_slots(seed)
    parts = list(X.tensor_split([5, 5])), list(RESIDUAL.tensor_split([5, 5]))  # one rank has none

    def run(deep: bool) -> torch.Tensor:
        def work(transport: ThreadTransport) -> torch.Tensor:
            rank = transport.rank
            dispatch: Dispatch = AllToAll.of(placement, transport, "partial", CPU)
            if deep:
                dispatch = DeepEpDispatch.of(placement, StandIn(transport), rank, CPU)
            held = list(placement.ranks[rank])
            experts = Experts(
                gate=GATE,
                bias=torch.zeros(EXPERTS),
                counts=torch.zeros(EXPERTS, dtype=torch.int64),
                gate_up=GATE_UP[held].bfloat16(),
                down=DOWN[held].bfloat16(),
                routing=ROUTING,
                dispatch=dispatch,
            )
            return moe_ref(parts[0][rank], experts, parts[1][rank])

        return torch.cat(Threads(RANKS).run(work))

    # DeepEP rounds the sum of a row to bfloat16 once more before the residual comes on top.
    torch.testing.assert_close(run(True), run(False), rtol=2e-2, atol=2e-2)


def test_what_deep_ep_does_not_take_is_named() -> None:
    transport = ThreadTransport(Threads(1), 0)
    with pytest.raises(ValueError, match=r"as many experts on each rank, these have \[1, 2\]"):
        DeepEpDispatch.of(LayerPlacement(3, ((0,), (1, 2))), StandIn(transport), 0, CPU)
    one = DeepEpDispatch.of(LayerPlacement(2, ((0, 1),)), StandIn(transport), 0, CPU)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows in bfloat16, not in torch\.float32"):
        one.send(Routed(torch.ones(1, 4), ids, torch.ones(1, 1)))


def test_a_machine_without_deep_ep_is_told_so() -> None:
    group: Any = None
    with pytest.raises(ValueError, match="deep_ep is not installed"):
        open_buffer(group, HIDDEN)
