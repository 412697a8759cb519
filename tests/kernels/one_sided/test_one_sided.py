"""Ranks that write into each other's windows: the kernels against torch, and a layer to the bits of one rank.

All windows are in this process, as tensors of the CPU whose addresses the kernels get; the ranks' launches follow one
another, so nothing ever waits for what comes later.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.dense.fp8_linear import fp8_matrix
from headrace_kernels.dense.fp8_quantise import quantise_rows_ref
from headrace_kernels.moe.combine import combine
from headrace_kernels.moe.dispatch import Combine, Routed, SingleRank
from headrace_kernels.moe.experts import Experts, moe
from headrace_kernels.moe.fp8_grouped_linear import Fp8Experts, fp8_experts
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import RankLost
from headrace_kernels.one_sided import dispatch as one_sided_dispatch
from headrace_kernels.one_sided import put_rows as put_rows_file
from headrace_kernels.one_sided import return_rows as return_rows_file
from headrace_kernels.one_sided import send_places as send_places_file
from headrace_kernels.one_sided.dispatch import OneSidedGroup, OneSidedSent
from headrace_kernels.one_sided.put_rows import put_rows, put_rows_ref
from headrace_kernels.one_sided.return_rows import return_rows, return_rows_ref
from headrace_kernels.one_sided.send_places import send_places, send_places_ref
from headrace_kernels.one_sided.signal import RESULTS, ROWS, signal, signal_ref
from headrace_kernels.one_sided.wait import wait, wait_ref
from headrace_kernels.one_sided.window import Window
from headrace_kernels.ops import Routing
from helpers.kernels.e4m3 import NEEDS_E4M3
from helpers.kernels.expert_ranks import Threads, ThreadTransport, random_placement
from helpers.require import needs

# Windows are memory of this process, which a GPU's kernels do not reach.
pytestmark = [
    needs("no-gpu", "windows of a GPU are those of real ranks", here=not torch.cuda.is_available()),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")
HIDDEN, EXPERTS, TOP_K, MOST_ROWS = 40, 12, 4, 6
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=3, top_groups=2, normalise=True, scale=2.5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (send_places_file, put_rows_file, return_rows_file):
        monkeypatch.setattr(module, "TILE", 16)  # several of them


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_window(ranks: int, combine: Combine = "exact", e4m3: bool = False) -> Window:
    return Window(
        ranks=ranks, most_rows=MOST_ROWS, hidden=HIDDEN, top_k=TOP_K, combine=combine, dtype=torch.float32, e4m3=e4m3
    )  # fmt: skip


def buffers_of(window: Window) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Windows of all ranks, filled with what means nothing, and their addresses."""
    buffers = [torch.full((window.nbytes,), 0x5A, dtype=torch.uint8) for _ in range(window.ranks)]
    for buffer in buffers:
        window.view(buffer, "flags", torch.int64, 2, window.ranks).zero_()
    return buffers, torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)


def routed(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of rows, ascending, and weights."""
    draw = random.Random(seed)
    ids = [sorted(draw.sample(range(EXPERTS), TOP_K)) for _ in range(rows)]
    return torch.tensor(ids, dtype=torch.int32).view(rows, TOP_K), noise(rows, TOP_K, seed=seed)


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 16, 37])
def test_send_places(rows: int, ranks: int) -> None:
    ids, _ = routed(rows, rows)
    owner = torch.randint(0, ranks, (EXPERTS,), dtype=torch.int32)
    for found, want in zip(
        send_places(ids, owner, ranks), send_places_ref(ids, owner, ranks), strict=True
    ):
        assert torch.equal(found, want)


@pytest.mark.parametrize("e4m3", [False, pytest.param(True, marks=NEEDS_E4M3)])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_put_rows(ranks: int, e4m3: bool) -> None:
    window = a_window(ranks, e4m3=e4m3)
    placement = random_placement(EXPERTS, ranks, spare=3, seed=ranks)
    (found, bases), (want, _) = buffers_of(window), buffers_of(window)
    for rank in (*range(1, ranks), 0):  # whatever the order
        rows = (MOST_ROWS, 0, 4, 1, 6)[rank]
        x, (ids, weights) = noise(rows, HIDDEN, seed=rank), routed(rows, rank)
        home = placement.replicas_for(rank, CPU)
        owner, slot = home.rank.int(), home.slot
        places, _ = send_places_ref(ids, owner, ranks)
        values, scale = quantise_rows_ref(x) if e4m3 else (x, None)
        put_rows(window, bases, rank, values, scale, ids, weights, owner, slot, places)
        put_rows_ref(window, want, rank, values, scale, ids, weights, owner, slot, places)
    for buffer, reference in zip(found, want, strict=True):
        assert torch.equal(buffer, reference)


def test_more_rows_than_a_window_takes_are_refused() -> None:
    window = a_window(1)
    _, bases = buffers_of(window)
    ids, weights = routed(MOST_ROWS + 1, 0)
    owner = torch.zeros(EXPERTS, dtype=torch.int32)
    places, _ = send_places_ref(ids, owner, 1)
    with pytest.raises(AssertionError, match="7 rows, a window takes 6 of a rank"):
        put_rows(
            window,
            bases,
            0,
            noise(MOST_ROWS + 1, HIDDEN, seed=1),
            None,
            ids,
            weights,
            owner,
            owner,
            places,
        )


@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_return_rows(combine: Combine) -> None:
    window = a_window(3, combine)
    width = TOP_K if combine == "exact" else 1
    (found, bases), (want, _) = buffers_of(window), buffers_of(window)
    which = torch.tensor([0, 2, MOST_ROWS, 3 * MOST_ROWS - 1], dtype=torch.int32)
    places = torch.tensor(
        [[3, -1, 0, -1], [1, -1, -1, -1], [-1, 4, -1, -1], [-1] * 4], dtype=torch.int32
    )
    places = places[:, :width].contiguous()
    rows = (torch.arange(3 * MOST_ROWS) * 5 % MOST_ROWS).int()
    columns = (torch.arange(3 * MOST_ROWS) % window.answers).int()
    y = noise(5, HIDDEN, seed=3)
    return_rows(window, bases, y, places, which, rows, columns)
    return_rows_ref(window, want, y, places, which, rows, columns)
    for buffer, reference in zip(found, want, strict=True):
        assert torch.equal(buffer, reference)


@pytest.mark.parametrize("kind", [ROWS, RESULTS])
def test_signal_and_wait(kind: int) -> None:
    window = a_window(3)
    (found, bases), (want, _) = buffers_of(window), buffers_of(window)
    counts = torch.tensor([7, 0, (1 << 20) - 1], dtype=torch.int32)
    epoch = torch.tensor([1 << 42])
    for rank in (2, 0):
        signal(window, bases, rank, kind, epoch, counts)
        signal_ref(window, want, rank, kind, epoch, counts)
    for to, (buffer, reference) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(buffer, reference)
        flags = window.view(buffer, "flags", torch.int64, 2, 3)[kind]
        told = wait(flags, epoch, most_polls=3)
        assert torch.equal(told, wait_ref(flags, epoch))
        assert told.tolist() == [int(counts[to]), -1, int(counts[to])]
        assert wait(flags, epoch + 1, most_polls=3).tolist() == [-1] * 3
        # A flag never goes back.
        assert wait(flags, epoch - 5, most_polls=0).tolist() == told.tolist()


def groups_of(window: Window, *, whole: bool = False, most_polls: int = 0) -> list[OneSidedGroup]:
    buffers, bases = buffers_of(window)
    return [
        OneSidedGroup(window, rank, buffer, bases.tolist(), whole=whole, most_polls=most_polls)
        for rank, buffer in enumerate(buffers)
    ]


GATE, BIAS = noise(EXPERTS, HIDDEN, seed=1) / HIDDEN**0.5, noise(EXPERTS, seed=2) / 4
GATE_UP, DOWN = noise(EXPERTS, 48, HIDDEN, seed=3) / 6, noise(EXPERTS, HIDDEN, 24, seed=4) / 5
X, RESIDUAL = noise(2 * MOST_ROWS, HIDDEN, seed=5), noise(2 * MOST_ROWS, HIDDEN, seed=6)


def quantised(weights: torch.Tensor) -> Fp8Experts:
    scale = torch.full((1, 1), 1 / 64)
    parts = [((weight * 64).to(torch.float8_e4m3fn), scale) for weight in weights]
    return fp8_experts([fp8_matrix([part]) for part in parts])


ALONE = Experts(
    gate=GATE,
    bias=BIAS,
    counts=torch.zeros(EXPERTS, dtype=torch.int64),
    gate_up=GATE_UP,
    down=DOWN,
    routing=ROUTING,
    dispatch=SingleRank(),
)


def layer(
    monkeypatch: pytest.MonkeyPatch,
    window: Window,
    placement: LayerPlacement,
    passes: int,
    *,
    whole: bool = False,
    fp8: bool = False,
) -> list[torch.Tensor]:
    """All rows of each pass, computed by ranks that are threads; each meets the others before it looks for flags."""
    groups = groups_of(window, whole=whole)
    # The last ranks may have no rows.
    ends = [min(rank * window.most_rows, len(X)) for rank in range(window.ranks + 1)]

    def work(transport: ThreadTransport) -> list[torch.Tensor]:
        group = groups[transport.rank]
        held = list(placement.ranks[group.rank])
        stored = quantised if fp8 else torch.clone
        experts = replace(
            ALONE,
            counts=torch.zeros(EXPERTS, dtype=torch.int64),
            gate_up=stored(GATE_UP[held].contiguous()),
            down=stored(DOWN[held].contiguous()),
            dispatch=group.dispatch(placement),
        )
        group.begin(3)
        mine = slice(*ends[group.rank : group.rank + 2])
        outputs = [
            moe(x[mine].contiguous(), experts, RESIDUAL[mine].contiguous())
            for x in (X, X.flip(0))[:passes]
        ]
        group.check()
        return outputs

    threads = Threads(window.ranks)
    looked = one_sided_dispatch.wait

    def met(flags: torch.Tensor, epoch: torch.Tensor, _polls: int) -> torch.Tensor:
        threads._meet()  # pyright: ignore[reportPrivateUsage]
        return looked(flags, epoch, 0)

    monkeypatch.setattr(one_sided_dispatch, "wait", met)
    found = threads.run(work)
    return [torch.cat(rows) for rows in zip(*found, strict=True)]


@pytest.mark.matrix
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_has_the_bits_of_one_rank(
    ranks: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = a_window(ranks) if ranks > 1 else replace(a_window(1), most_rows=len(X))
    placement = random_placement(EXPERTS, ranks, spare=ranks, seed=ranks)
    found = layer(monkeypatch, window, placement, 2 if ranks == 2 else 1, whole=whole)
    for x, together in zip((X, X.flip(0)), found, strict=False):
        assert torch.equal(together, moe(x, ALONE, RESIDUAL))


@NEEDS_E4M3
@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize("whole", [False, True])
def test_an_fp8_layer_has_the_bits_of_one_rank(
    whole: bool, e4m3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are quantised once, where they come from or where they are multiplied."""
    alone = replace(ALONE, gate_up=quantised(GATE_UP), down=quantised(DOWN))
    placement = random_placement(EXPERTS, 2, spare=2, seed=3)
    (found,) = layer(monkeypatch, a_window(2, e4m3=e4m3), placement, 1, whole=whole, fp8=True)
    assert torch.equal(found, moe(X, alone, RESIDUAL))


def test_sums_of_ranks_are_those_of_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_kernels.moe.all_to_all import AllToAll

    placement = random_placement(EXPERTS, 2, spare=2, seed=5)
    (found,) = layer(monkeypatch, a_window(2, "partial"), placement, 1)

    def by_parcels(transport: ThreadTransport) -> torch.Tensor:
        held = list(placement.ranks[transport.rank])
        experts = replace(
            ALONE,
            gate_up=GATE_UP[held].contiguous(),
            down=DOWN[held].contiguous(),
            dispatch=AllToAll.of(placement, transport, "partial", CPU),
        )
        mine = slice(transport.rank * MOST_ROWS, (transport.rank + 1) * MOST_ROWS)
        return moe(X[mine].contiguous(), experts, RESIDUAL[mine].contiguous())

    assert torch.equal(found, torch.cat(Threads(2).run(by_parcels)))


@NEEDS_E4M3
def test_rows_in_e4m3_come_as_they_were_quantised() -> None:
    window = a_window(2, e4m3=True)
    groups = groups_of(window)
    placement = LayerPlacement.even(EXPERTS, 2)
    x, (ids, weights) = X[:5], routed(5, 1)
    sent: list[OneSidedSent] = [
        group.dispatch(placement).send(Routed(x, ids, weights)) for group in groups
    ]
    values, scale = quantise_rows_ref(x)
    goes = [(ids < 6).any(1), (ids >= 6).any(1)]
    for rank, one in enumerate(sent):
        received = one.receive()
        assert received.scale is not None
        assert torch.equal(received.scale, torch.cat([scale[goes[rank]]] * 2))
        bits = values.view(torch.uint8)[goes[rank]]
        assert torch.equal(received.x.view(torch.uint8), torch.cat([bits] * 2))
        assert received.weights.shape == received.slots.shape == (2 * int(goes[rank].sum()), TOP_K)


@pytest.mark.parametrize("whole", [False, True])
def test_a_rank_that_does_not_come_is_named(whole: bool) -> None:
    groups = groups_of(a_window(3), whole=whole, most_polls=3)
    placement = LayerPlacement.even(EXPERTS, 3)
    sent = [groups[rank].dispatch(placement).send(Routed(X[:2], *routed(2, 0))) for rank in (0, 2)]
    for one in sent:
        if whole:  # the host does not wait, and asks later
            assert int((one.receive().slots[MOST_ROWS : 2 * MOST_ROWS] >= 0).sum()) == 0
        with pytest.raises(
            RankLost, match="rank 1 is lost: its rows or results did not come in time"
        ):
            one.receive() if not whole else one.group.check()


def test_a_round_takes_nothing_of_the_one_before() -> None:
    groups = groups_of(a_window(2), most_polls=3)
    placement = LayerPlacement.even(EXPERTS, 2)
    for group in groups:
        group.begin(1)
    for group in groups[1:]:  # the other one fails in the round, which is over then
        group.dispatch(placement).send(Routed(X[:3], *routed(3, 0)))
    groups[0].begin(2)
    sent = groups[0].dispatch(placement).send(Routed(X[:1], *routed(1, 0)))
    with pytest.raises(RankLost, match="rank 1"):
        sent.receive()


def test_a_window_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="rows of 3 values are not whole words of 4 bytes"):
        replace(a_window(2), hidden=3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="1048576 rows of a rank"):
        replace(a_window(2), most_rows=1 << 20)
    with pytest.raises(ValueError, match="a rank, a row"):
        replace(a_window(2), top_k=0)


def test_parts_do_not_overlap_and_are_aligned() -> None:
    for ranks, how, e4m3 in itertools.product((1, 3), ("exact", "partial"), (False, True)):
        parts = list(a_window(ranks, how, e4m3).parts.values())
        for part, after in itertools.pairwise(parts):
            assert part.offset % 128 == 0 and part.offset + part.nbytes <= after.offset


def test_what_comes_back_is_summed_in_the_order_of_experts() -> None:
    window = a_window(1)
    (group,) = groups_of(window)
    ids, weights = routed(2, 4)
    sent = group.dispatch(LayerPlacement.even(EXPERTS, 1)).send(Routed(X[:2], ids, weights))
    received = sent.receive()
    y = noise(2 * TOP_K, HIDDEN, seed=9)
    places = torch.arange(2 * TOP_K, dtype=torch.int32).flip(0).view(2, TOP_K)
    returned = sent.collect(y, places)
    assert torch.equal(received.x, X[:2])
    found = combine(returned.y, returned.places, weights, RESIDUAL[:2].contiguous())
    assert torch.equal(found, combine(y, places, weights, RESIDUAL[:2].contiguous()))
