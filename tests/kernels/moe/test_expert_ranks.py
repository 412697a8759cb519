"""Experts on several ranks: the bits of one rank where results come back one by one, those of a placement otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import GatedMlp, MlaAttention, MlaStep, Routing, Value
from helpers.kernels.expert_ranks import Threads, ThreadTransport, random_placement
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend

# Rows past the last result mean nothing, and the interpreter computes them too.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
    for what in ("overflow", "invalid value")
]
CPU = torch.device("cpu")
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels
HIDDEN, WIDTH, EXPERTS, TOP_K = 40, 24, 12, 4
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=3, top_groups=2, normalise=True, scale=2.5)
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=64,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GATE, BIAS = noise(EXPERTS, HIDDEN, seed=1) / HIDDEN**0.5, noise(EXPERTS, seed=2) / 4
GATE_UP = noise(EXPERTS, 2 * WIDTH, HIDDEN, seed=3) / HIDDEN**0.5
DOWN = noise(EXPERTS, HIDDEN, WIDTH, seed=4) / WIDTH**0.5
SHARED = noise(2 * WIDTH, HIDDEN, seed=5) / HIDDEN**0.5, noise(HIDDEN, WIDTH, seed=6) / WIDTH**0.5
ROWS = noise(26, 2 * HIDDEN, seed=7)  # [x | residual]


def native(
    dtype: str, rows: torch.Tensor, placement: LayerPlacement | None, dispatch: AllToAll | None
) -> torch.Tensor:
    """What one rank, with the slots of its place, makes of its own rows."""
    backend = TensorBackend(ATTENTION, dtype=dtype)
    backend.allocate_kv(len(rows) // 16 + 1)
    held = _held(placement, dispatch)
    experts = backend.experts(
        GATE,
        BIAS,
        list(GATE_UP[held]),
        list(DOWN[held]),
        ROUTING,
        shared=GatedMlp(gate_up=backend.matrix([SHARED[0]]), down=backend.matrix([SHARED[1]])),
        dispatch=dispatch,
    )
    table = backend.table(torch.cat((rows, ROWS[:1])))

    def describe(step: MlaStep) -> Value:
        e = step.embed(table)
        x, residual = step.columns(e, 0, HIDDEN), step.columns(e, HIDDEN, 2 * HIDDEN)
        return step.wanted_rows(step.moe(x, experts, residual))

    paged = PagedRows([len(rows)] if len(rows) else [])
    return backend.compile(describe)(paged.batch(paged.whole())).clone()


def _held(placement: LayerPlacement | None, dispatch: AllToAll | None) -> list[int]:
    if placement is None or dispatch is None:
        return list(range(EXPERTS))
    return list(placement.ranks[dispatch.transport.rank])


def on_torch(
    reference: bool,
    device: torch.device,
    rows: torch.Tensor,
    placement: LayerPlacement | None,
    dispatch: AllToAll | None,
) -> torch.Tensor:
    """The same by Triton's kernels, or by their references."""
    pytest.importorskip("triton")
    from headrace_kernels.moe.dispatch import SingleRank
    from headrace_kernels.moe.experts import Experts, moe, moe_ref

    held = _held(placement, dispatch)
    experts = Experts(
        gate=GATE.to(device),
        bias=BIAS.to(device),
        counts=torch.zeros(EXPERTS, dtype=torch.int64, device=device),
        gate_up=GATE_UP[held].contiguous().to(device),
        down=DOWN[held].contiguous().to(device),
        routing=ROUTING,
        dispatch=dispatch or SingleRank(),
    )
    x, residual = (half.contiguous() for half in rows.to(device).split(HIDDEN, dim=1))

    def shared(residual: torch.Tensor) -> torch.Tensor:
        return residual + 1.0

    return (moe_ref if reference else moe)(x, experts, residual, shared).cpu()


Kernels = Callable[[torch.Tensor, LayerPlacement | None, AllToAll | None], torch.Tensor]
NATIVE = ("float32", "bfloat16", "int8")
TRITON: Kernels = partial(on_torch, False, GPU)
REFERENCE: Kernels = partial(on_torch, True, CPU)
# What its interpreter takes goes with the rows.
SOME_ROWS = ROWS[:13]


def on_ranks(
    kernels: Kernels, placement: LayerPlacement, combine: Combine, parts: list[torch.Tensor]
) -> torch.Tensor:
    """All rows, each computed by the rank that it is part of."""

    def work(transport: ThreadTransport) -> torch.Tensor:
        dispatch = AllToAll.of(placement, transport, combine, GPU if kernels is TRITON else CPU)
        return kernels(parts[transport.rank], placement, dispatch)

    return torch.cat(Threads(len(parts)).run(work))


def cut(rows: torch.Tensor, ranks: int, seed: int) -> list[torch.Tensor]:
    """Rows of each rank: as many as may be, some ranks have none."""
    bounds = torch.randint(len(rows), (ranks - 1,), generator=torch.Generator().manual_seed(seed))
    return list(rows.tensor_split(sorted(bounds.tolist())))


def check_exact(kernels: Kernels, rows: torch.Tensor, ranks: int, seeds: range) -> None:
    alone = kernels(rows, None, None)
    for seed in seeds:
        placement = random_placement(EXPERTS, ranks, spare=2 * seed, seed=seed)
        found = on_ranks(kernels, placement, "exact", cut(rows, ranks, seed))
        assert torch.equal(found, alone), placement


@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_exact_is_the_bits_of_one_rank(ranks: int, dtype: str) -> None:
    check_exact(partial(native, dtype), ROWS, ranks, range(6))


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("ranks", [4, 1, 2, 8])
def test_exact_is_the_bits_of_one_rank_with_triton(ranks: int) -> None:
    check_exact(TRITON, SOME_ROWS, ranks, range(1, 2))


def test_the_references_sum_in_the_same_order() -> None:
    # Their products depend on the rows beside a row, so all rows are of one rank.
    alone = REFERENCE(ROWS, None, None)
    for seed in range(4):
        placement = random_placement(EXPERTS, 4, spare=seed, seed=seed)
        parts = [ROWS, ROWS[:0], ROWS[:0], ROWS[:0]]
        found = on_ranks(REFERENCE, placement, "exact", parts)
        assert torch.equal(found, alone)


def check_partial(kernels: Kernels, rows: torch.Tensor, ranks: int) -> None:
    alone, parts = kernels(rows, None, None), cut(rows, ranks, 0)
    placement = random_placement(EXPERTS, ranks, spare=3, seed=ranks)
    run = partial(on_ranks, kernels, placement, "partial")
    found = run(parts)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(run(parts), found)
    # A row's bits do not depend on the rows beside it, nor on the order of slots.
    halves = [part[: len(part) // 2] for part in parts]
    mine = torch.cat([torch.arange(len(part)) < len(part) // 2 for part in parts])
    assert torch.equal(run(halves), found[mine])
    turned = replace(placement, ranks=tuple(held[::-1] for held in placement.ranks))
    assert torch.equal(on_ranks(kernels, turned, "partial", parts), found)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_partial_sums_have_the_bits_of_a_placement(ranks: int, dtype: str) -> None:
    check_partial(partial(native, dtype), ROWS, ranks)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("ranks", [2, 1, 4])
def test_partial_sums_have_the_bits_of_a_placement_with_triton(ranks: int) -> None:
    check_partial(TRITON, SOME_ROWS, ranks)


def test_a_row_is_sent_once_to_a_rank_and_its_results_as_the_mode_says() -> None:
    placement = LayerPlacement.even(EXPERTS, 2)
    sent: dict[str, list[int]] = {}
    for combine in ("exact", "partial"):

        def work(transport: ThreadTransport, combine: Combine = combine) -> int:
            native("float32", ROWS[:5], placement, AllToAll.of(placement, transport, combine, CPU))
            return transport.sent_bytes

        sent[combine] = Threads(2).run(work)
    assert sum(sent["partial"]) < sum(sent["exact"])
    # At most each of 5 rows with its slots and weights there, and one sum back.
    assert max(sent["partial"]) <= 5 * (4 * HIDDEN + 8 * TOP_K) + 5 * 4 * HIDDEN


class Failing:
    """A group whose other rank went away, at one of the three calls."""

    combine: Combine = "exact"

    def __init__(self, at: str) -> None:
        self._at = at

    def send(self, routed: object) -> Any:
        self._call("send")
        self._routed = routed
        return self

    def receive(self) -> Any:
        self._call("receive")
        return self._routed

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Any:
        self._call("collect")
        return (y, places) if self._at == "wrong type" else wrong(self._at, y, places)

    def _call(self, name: str) -> None:
        if name == self._at:
            raise ConnectionError(f"rank 1 did not {name}")


def wrong(what: str, y: torch.Tensor, places: torch.Tensor) -> Any:
    from headrace_kernels.moe.dispatch import Returned

    match what:
        case "a place too high":
            return Returned(y, places + len(y))
        case "a place below":
            return Returned(y, places - 2)
        case "places of fewer rows":
            return Returned(y, places[:-1])
        case _:
            return Returned(y.double(), places)


@pytest.mark.parametrize("at", ["send", "receive", "collect"])
def test_a_lost_rank_fails_the_step_with_what_was_raised(at: str) -> None:
    dispatch: Any = Failing(at)
    with pytest.raises(ConnectionError, match=f"rank 1 did not {at}"):
        native("float32", ROWS, None, dispatch)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("a place too high", ValueError, "returned places holds"),
        ("a place below", ValueError, "returned places holds -2"),
        ("places of fewer rows", ValueError, "returned places has 100 entries"),
        ("results of another type", TypeError, "ndarray"),
        ("wrong type", AttributeError, "no attribute 'y'"),
    ],
)
def test_what_does_not_fit_is_not_added(what: str, error: type[Exception], text: str) -> None:
    dispatch: Any = Failing(what)
    with pytest.raises(error, match=text):
        native("float32", ROWS, None, dispatch)
