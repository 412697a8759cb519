"""Experts on ranks that are processes: the bits of one rank, over each transport and with each `Dispatch`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine, Dispatch, Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import MlaAttention, MlaStep, Routing, Value
from headrace_kernels.transport.all_gather import AllGather
from helpers.kernels.expert_ranks import Threads, ThreadTransport, random_placement
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend
from helpers.ranks.processes import Place, RankProcesses, rank_processes
from helpers.ranks.scenes import opened

CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS, TOP_K = 32, 16, 12, 4
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=3, top_groups=2, normalise=True, scale=2.5)
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=64,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip
WAYS = {"all to all": AllToAll, "all gather": AllGather}


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(rank: int, ranks: int) -> torch.Tensor:
    """The rows of each rank are as many as may be; the second one has none."""
    bounds = {1: [], 2: [19], 4: [7, 7, 15]}[ranks]
    return noise(19, 2 * HIDDEN, seed=7).tensor_split(bounds)[rank]  # [x | residual]


def layers(rows: torch.Tensor, held: list[int], dispatch: Dispatch | None) -> torch.Tensor:
    """Two layers of experts, one on the other's results."""
    backend = TensorBackend(ATTENTION, dtype="float32")
    backend.allocate_kv(len(rows) // 16 + 1)
    gate_up, down = noise(EXPERTS, 2 * WIDTH, HIDDEN, seed=3), noise(EXPERTS, HIDDEN, WIDTH, seed=4)
    experts = backend.experts(
        noise(EXPERTS, HIDDEN, seed=1),
        noise(EXPERTS, seed=2) / 4,
        list(gate_up[held] / HIDDEN**0.5),
        list(down[held] / WIDTH**0.5),
        ROUTING,
        dispatch=dispatch,
    )
    table = backend.table(torch.cat((rows, torch.zeros(1, 2 * HIDDEN))))

    def describe(step: MlaStep) -> Value:
        e = step.embed(table)
        x, residual = step.columns(e, 0, HIDDEN), step.columns(e, HIDDEN, 2 * HIDDEN)
        x = step.moe(x, experts, residual)
        return step.wanted_rows(step.moe(x, experts, residual))

    paged = PagedRows([len(rows)] if len(rows) else [])
    return backend.compile(describe)(paged.batch(paged.whole())).clone()


def on_rank(place: Place, kind: str, way: str, combine: Combine) -> list[list[float]]:
    placement = random_placement(EXPERTS, place.ranks, spare=3, seed=place.ranks)
    with opened(place, kind) as transport:
        transport.begin(1)
        dispatch = WAYS[way].of(placement, transport, combine, CPU)
        rows = rows_of(place.rank, place.ranks)
        return layers(rows, list(placement.ranks[place.rank]), dispatch).tolist()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_exact_is_the_bits_of_one_rank(
    ranks: RankProcesses, number: int, way: str, kind: str
) -> None:
    alone = layers(rows_of(0, 1), list(range(EXPERTS)), None).tolist()
    parts = ranks.run(on_rank, number, kind, way, "exact")
    assert [row for part in parts for row in part] == alone


def on_threads(placement: LayerPlacement, way: str, transport: ThreadTransport) -> torch.Tensor:
    dispatch = WAYS[way].of(placement, transport, "partial", CPU)
    rows = rows_of(transport.rank, transport.ranks)
    return layers(rows, list(placement.ranks[transport.rank]), dispatch)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_partial_sums_do_not_depend_on_the_way_of_rows(number: int) -> None:
    placement = random_placement(EXPERTS, number, spare=3, seed=number)
    found = [torch.cat(Threads(number).run(partial(on_threads, placement, way))) for way in WAYS]
    assert torch.equal(*found)
    alone = layers(rows_of(0, 1), list(range(EXPERTS)), None)
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=1e-4)


def test_all_gather_knows_replicas_of_each_rank() -> None:
    placement = LayerPlacement(3, ((0, 1), (1, 2)))

    def work(transport: ThreadTransport) -> tuple[list[list[int]], list[int]]:
        dispatch = AllGather.of(placement, transport, "exact", CPU)
        rows = 2 - transport.rank
        ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)[:rows]
        sent = dispatch.send(Routed(torch.zeros(rows, 4), ids, torch.ones(rows, 2)))
        received = sent.receive()
        here = int((received.slots >= 0).sum())
        places = torch.full_like(received.slots, -1)
        places[received.slots >= 0] = torch.arange(here, dtype=torch.int32)
        returned = sent.collect(torch.ones(here, 4), places)
        assert len(returned.y) == 2 * rows
        return received.slots.tolist(), returned.places.flatten().tolist()

    first, second = Threads(2).run(work)
    # Expert 1 is on both: each rank's rows use its own.
    assert first[0] == [[0, 1], [1, -1], [0, -1]]
    assert second[0] == [[-1, -1], [-1, 1], [-1, 0]]
