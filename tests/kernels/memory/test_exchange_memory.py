"""The plan of what an exchange without Python takes, against what a process of a rank grows by in the worst step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.models import step_memory
from headrace.models.step_memory import ExpertSpread, StepShape
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import MlaStep, Value
from helpers.kernels.paged_rows import PagedRows
from helpers.ranks.expert_layer import ExpertLayer, PlacedExperts
from helpers.ranks.processes import Place, rank_processes
from helpers.ranks.scenes import opened
from helpers.require import missing

# Rank 0 has all experts but one, so nearly all rows of both ranks ask it for nearly all of their experts.
LAYER = ExpertLayer(hidden=2048, width=32, experts=16, top_k=8, rows=(128, 128))
PLACEMENT = LayerPlacement(16, (tuple(range(15)), (15,)))
SLACK_BYTES = 4 << 20  # pieces in shared memory, and what any program keeps of its rows
MOST_TOO_MUCH = 1.5


def own_memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def grown(place: Place, combine: Combine) -> int:
    """Bytes that the process has more at the worst moment of two layers of all rows."""
    rows, hidden = LAYER.rows_of(place.rank), LAYER.hidden
    with opened(place, "shared_memory") as transport:
        dispatch = AllToAll.of(PLACEMENT, transport, combine, torch.device("cpu"))
        held = PLACEMENT.ranks[place.rank]
        placed = PlacedExperts(LAYER, "float32", held, dispatch)
        table = placed.backend.table(torch.cat((rows, torch.zeros(1, 2 * hidden))))

        def describe(step: MlaStep) -> Value:
            e = step.embed(table)
            x, residual = step.columns(e, 0, hidden), step.columns(e, hidden, 2 * hidden)
            x = step.moe(x, placed.experts, residual)
            return step.wanted_rows(step.moe(x, placed.experts, residual))

        run = placed.backend.compile(describe)
        few, all_rows = PagedRows([1]), PagedRows([len(rows)])
        transport.begin(1)
        run(few.batch(few.whole()))
        batch = all_rows.batch(all_rows.whole())
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = own_memory("VmRSS")
        transport.begin(2)
        run(batch)
        return own_memory("VmHWM") - before


@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_rows_of_other_ranks_take_what_is_planned(combine: Combine) -> None:
    if sys.platform != "linux":
        missing("linux", "/proc tells what a process has")
    with rank_processes() as ranks:
        taken, _ = ranks.run(grown, 2, combine)
    shape = StepShape(
        rows=LAYER.rows[0],
        answers=1,
        context_tokens=512,
        mtp=False,
        element_bytes=4,
        torch=False,
        fp8=False,
        experts=ExpertSpread(ranks=2, slots=15, native=True),
    )
    sizes: Any = SimpleNamespace(
        experts=LAYER.experts, experts_per_token=LAYER.top_k, expert_size=LAYER.width
    )
    plan = step_memory._experts(shape, LAYER.hidden, sizes)  # pyright: ignore[reportPrivateUsage]
    assert taken - SLACK_BYTES <= plan <= taken * MOST_TOO_MUCH, (taken, plan)
