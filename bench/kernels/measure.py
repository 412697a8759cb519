"""Measure one case: is it right, what does it launch, how long does it take, and how far is that from the ceilings?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bench.kernels import attention, dense, elementwise, experts
from bench.kernels.case import Bench, Case, Work, error_of
from bench.kernels.launched import recorded
from bench.kernels.shapes import Sizes
from bench.kernels.timing import Clock

Row = dict[str, Any]


class WrongResultError(ValueError):
    """A kernel's result is not that of its reference."""


def all_cases(sizes: Sizes) -> list[Case]:
    """Those of the first model first, so that a budget cuts what matters least."""
    cases = [
        case for family in (attention, experts, dense, elementwise) for case in family.cases(sizes)
    ]
    order = {shape.model: i for i, shape in enumerate(sizes.shapes)}
    return sorted(cases, key=lambda case: order[case.model])


def measure(case: Case, clock: Clock, device: torch.device) -> Row:
    """The row of `case`. Raises whatever goes wrong with ours; of torch's it is noted."""
    row = head(case)
    with torch.inference_mode():
        work = case.build(Bench(device))
        row |= {"bytes": work.nbytes, "flops": work.flops, "torch": work.theirs_is}
        with recorded() as launched:
            found, expected = work.check()
        row["kernels"] = sorted(launched)
        row["error"] = error = error_of(found, expected)
        del found, expected
        if math.isnan(error) or error > work.limit:
            raise WrongResultError(
                f"differs from the reference by {error:.2e} of its size, more than {work.limit:.0e}"
            )
        row |= _times(work, clock)
    return row


def head(case: Case) -> Row:
    """What is known of a case before it is run."""
    return {
        "case": case.name,
        "wrapper": case.wrapper,
        "model": case.model,
        "point": case.point,
        "peak": case.peak,
        "published": case.published,
    }


def _times(work: Work, clock: Clock) -> Row:
    ours = clock.time(work.ours)
    theirs_failed: Row = {}
    theirs = None
    try:
        theirs = clock.time(work.theirs)
    except Exception as error:
        if breaks_the_device(error):
            raise
        theirs_failed = {"torch_failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    if clock.dry:
        return {"dry": True} | theirs_failed
    times: Row = {
        "us": ours.us,
        "least_us": ours.least_us,
        "most_us": ours.most_us,
        "host_us": ours.host_us,
        "calls": ours.calls,
    }
    if theirs is not None:
        times |= {"torch_us": theirs.us, "torch_host_us": theirs.host_us}
    return times | theirs_failed


def with_shares(row: Row, ceilings: Mapping[str, float]) -> Row:
    """The row with its rates, and the share of the ceiling that bounds it. `ceilings` are bytes or flops a second."""
    if "us" not in row:
        return row
    seconds = row["us"] / 1e6
    rates: Row = {"bytes_per_s": row["bytes"] / seconds, "flops_per_s": row["flops"] / seconds}
    floors = {
        name: amount / ceilings[name]
        for name, amount in (("copy", row["bytes"]), (row["peak"], row["flops"]))
        if name in ceilings
    }
    if floors:
        bound = max(floors, key=lambda name: floors[name])
        rates |= {"bound": bound, "share": floors[bound] / seconds}
    return row | rates


def breaks_the_device(error: Exception) -> bool:
    """Whether the device is of no more use to this process: every later call would fail as well."""
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
