"""What ends an exchange that a program makes by itself comes out of its step unchanged."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import _core
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import NativeTransport, RankLost, Span, StepAborted, Transport
from headrace_kernels.transport.shared_memory import SharedMemory
from helpers.ranks.expert_layer import ExpertLayer, PlacedExperts
from helpers.ranks.processes import Ended, Place, RankProcesses, end, rank_processes, stop
from helpers.ranks.scenes import opened, together

CPU = torch.device("cpu")
# So many rows that parcels of rows and of results go in pieces.
LAYER = ExpertLayer(hidden=96, width=16, experts=6, top_k=3, rows=(60, 60, 60))
LONG_S, SHORT_S = 60.0, 2.0  # deadlines that are not passed, and that are


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def dispatch_on(transport: Transport) -> AllToAll:
    return AllToAll.of(LayerPlacement.even(LAYER.experts, transport.ranks), transport, "exact", CPU)


def experts_on(transport: Transport) -> PlacedExperts:
    held = LayerPlacement.even(LAYER.experts, transport.ranks).ranks[transport.rank]
    return PlacedExperts(LAYER, "float32", held, dispatch_on(transport))


def run_on(transport: Transport) -> list[list[float]]:
    return experts_on(transport).run(LAYER.rows_of(transport.rank))


def routed(rows: int) -> Routed:
    ids = torch.tensor([[0, 2, 4]] * rows, dtype=torch.int32)  # an expert of each rank
    return Routed(torch.ones(rows, LAYER.hidden), ids, torch.ones(rows, 3))


# --- what rank 1 does instead of its part; the others run the layer ---


def at_once(transport: Transport, then: Callable[[], None]) -> None:
    del transport
    then()


def after_rows(transport: Transport, then: Callable[[], None]) -> None:
    """Its rows have gone, and it has those of the others: they wait for results."""
    dispatch_on(transport).send(routed(2)).receive()
    then()


def half_way(transport: Transport, then: Callable[[], None]) -> None:
    """The first pieces of its rows have gone."""
    dispatch_on(transport).send(routed(90))
    then()


WHERE = [at_once, half_way, after_rows]


def aborting(place: Place, where: Callable[..., None]) -> list[Any]:
    """Round 1 is aborted by rank 1. Round 2 is as if nothing had been."""
    said: list[Any] = []
    with opened(place, "shared_memory", slice_bytes=4096, deadline_s=LONG_S) as transport:
        transport.begin(1)
        if place.rank == 1:
            where(transport, lambda: transport.abort("no memory for 512 rows"))
        else:
            with pytest.raises(StepAborted) as aborted:
                run_on(transport)
            said.append((aborted.value.rank, aborted.value.reason))
        transport.begin(2)
        said.append(run_on(transport))
    return said


@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_fails_ends_the_step_and_the_next_one_works(
    ranks: RankProcesses, where: Callable[..., None]
) -> None:
    answers = ranks.run(aborting, 3, where)
    for rank in (0, 2):
        assert answers[rank][0] == (1, "no memory for 512 rows"), answers[rank]
    assert [row for answer in answers for row in answer[-1]] == LAYER.alone("float32")


def losing(place: Place, where: Callable[..., None], deadline_s: float, kill: bool) -> str:
    with opened(place, "shared_memory", slice_bytes=4096, deadline_s=deadline_s) as transport:
        experts, rows = experts_on(transport), LAYER.rows_of(place.rank)

        def part() -> None:
            transport.begin(1)  # a rank that comes late may learn of it here
            if place.rank == 1:
                where(transport, end if kill else stop)
            experts.run(rows)

        together(place, "built")  # before anybody waits for anybody
        with pytest.raises(RankLost) as lost:
            part()
        with pytest.raises(RankLost):
            transport.begin(2)
        return str(lost.value)


@pytest.mark.parametrize(("where", "exchange"), [(at_once, 1), (half_way, 1), (after_rows, 2)])
def test_a_rank_that_dies_is_named(
    ranks: RankProcesses, where: Callable[..., None], exchange: int
) -> None:
    first, dead, third = ranks.run(losing, 3, where, LONG_S, True)
    assert isinstance(dead, Ended)
    due = f"rank 1 is lost: its process has ended, exchange {exchange} of round 1"
    assert first == third == due


@pytest.mark.parametrize(("where", "exchange"), [(at_once, 1), (after_rows, 2)])
def test_a_rank_that_stands_still_is_named_at_the_deadline(
    ranks: RankProcesses, where: Callable[..., None], exchange: int
) -> None:
    first, _, third = ranks.run(losing, 3, where, SHORT_S, False, stopped=1)
    assert first == third == f"rank 1 is lost: exchange {exchange} of round 1, {SHORT_S:.1f} s"


# --- a rank that says something else ---


def other_rows(transport: Transport) -> None:
    """Rows of another width."""
    transport.post((torch.zeros(3, 10),), [Span(0, 1), Span(1, 2), Span(2, 3)])()


def other_exchanges(transport: Transport) -> None:
    """One more exchange than the others have."""
    sent = dispatch_on(transport).send(routed(2))
    sent.receive()
    transport.post((torch.zeros(1, LAYER.hidden),), [Span(0, 0)] * 3)()


def other_slots(transport: Transport) -> None:
    """Rows for a slot that no rank has."""
    rows, slots = torch.ones(3, LAYER.hidden), torch.full((3, LAYER.top_k), 2, dtype=torch.int32)
    each = [Span(0, 1), Span(1, 2), Span(2, 3)]
    transport.post((rows, slots, torch.ones(3, LAYER.top_k)), each)()


def other_protocol(place: Place, of: Callable[[Transport], None]) -> str:
    with opened(place, "shared_memory", slice_bytes=4096, deadline_s=LONG_S) as transport:
        try:
            transport.begin(1)  # a rank that comes late may learn of it here
            if place.rank == 1:
                of(transport)
            else:
                run_on(transport)
        except (RankLost, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "went on"


def test_rows_of_another_form_end_the_group(ranks: RankProcesses) -> None:
    """Two ranks cannot know which of them is right: the first to see it names the other one, and all say the same."""
    first, _, third = ranks.run(other_protocol, 3, other_rows)
    assert first == third
    by_others = r"rank 1 is lost: exchange 1 of round 1: 1 rows of 40 bytes"
    by_rank_1 = r"rank [02] is lost: exchange 1 of round 1: \d+ rows of \d+ bytes together, each of which has 40 here"
    assert re.match(rf"RankLost: ({by_others}|{by_rank_1})", first), first


def test_a_rank_that_returns_other_results_is_named(ranks: RankProcesses) -> None:
    first, _, third = ranks.run(other_protocol, 3, other_exchanges)
    for said in (first, third):
        assert "rank 1 returned 0 results where" in said, said


def test_a_rank_that_asks_a_slot_that_is_none_computes_nothing(ranks: RankProcesses) -> None:
    first, _, third = ranks.run(other_protocol, 3, other_slots)
    for said in (first, third):
        assert said.kind == "ValueError", said
        assert said.text == "received slots holds 2, which is not below 2"


# --- this rank ---


def test_a_placement_with_more_slots_than_this_rank_has_is_refused(tmp_path: Path) -> None:
    """As where a move of experts was announced and not carried out."""
    alone = SharedMemory.join(tmp_path / "memory", rank=0, ranks=1)
    try:
        alone.begin(1)
        experts = PlacedExperts(LAYER, "float32", range(LAYER.experts - 1), dispatch_on(alone))
        with pytest.raises(ValueError, match="slots of own rows holds 5, which is not below 5"):
            experts.run(LAYER.rows_of(0))
    finally:
        alone.close()


def closed_meanwhile(place: Place) -> str:
    with opened(place, "shared_memory", deadline_s=LONG_S) as transport:
        transport.begin(1)
        flag = place.folder / "learnt"
        if place.rank == 1:
            while not flag.exists():
                threading.Event().wait(0.01)
            return "stood by"
        threading.Timer(0.1, transport.close).start()
        try:
            run_on(transport)
        except RankLost as lost:
            return str(lost)
        finally:
            flag.touch()
    return "not closed"


def test_a_program_that_waits_learns_that_its_transport_was_closed(ranks: RankProcesses) -> None:
    first, second = ranks.run(closed_meanwhile, 2)
    assert first == "rank 0 is lost: it has left the group"
    assert second == "stood by"


class Named(SharedMemory):
    """A transport in a group that knows better who is lost."""

    def layer_exchange(self, home: Any, combine: Any, on_lost: Any = None) -> Any:
        def found(lost: RankLost) -> None:
            assert lost.rank == 1
            raise RankLost(7, "its control link ended")

        return super().layer_exchange(home, combine, on_lost or found)


def another_named(place: Place) -> str:
    named = Named.join(place.memory, rank=place.rank, ranks=place.ranks, deadline_s=LONG_S)
    named.begin(1)
    met = place.folder / "met"
    if place.rank == 1:
        while not met.exists():
            threading.Event().wait(0.01)
        named.close()
        return "left"
    met.touch()
    assert isinstance(named, NativeTransport)
    try:
        run_on(named)
    except RankLost as lost:
        return str(lost)
    finally:
        named.close()
    return "went on"


def test_the_group_says_who_is_lost(ranks: RankProcesses) -> None:
    first, _ = ranks.run(another_named, 2)
    assert first == "rank 7 is lost: its control link ended"


def aborted_in_a_group(place: Place) -> str:
    named = Named.join(place.memory, rank=place.rank, ranks=place.ranks, deadline_s=LONG_S)
    try:
        named.begin(1)
        if place.rank == 1:
            named.abort("no memory for 512 rows")
            together(place, "learnt")
            return "stood by"
        with pytest.raises(StepAborted) as aborted:
            run_on(named)
        together(place, "learnt")
        return str(aborted.value.reason)
    finally:
        named.close()


def test_a_step_that_was_aborted_is_no_lost_rank(ranks: RankProcesses) -> None:
    """The group is not asked who it was."""
    assert ranks.run(aborted_in_a_group, 2) == ["no memory for 512 rows", "stood by"]


def test_experts_that_have_ranks_and_no_slots_are_refused(tmp_path: Path) -> None:
    alone = SharedMemory.join(tmp_path / "memory", rank=0, ranks=1)
    owners, slots = np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.int32)
    with pytest.raises(ValueError, match="3 experts have ranks, 2 have slots"):
        _core.SharedExchange(
            alone._parcels,  # pyright: ignore[reportPrivateUsage]
            owners=owners,
            slots=slots,
            partial=False,
        )
    alone.close()
