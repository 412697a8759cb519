"""The fewest GPUs that serve some traffic within its limits."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planner.fleet.answers import DecodePool, pools_for_answers
from headrace.planner.fleet.choices import Choices
from headrace.planner.fleet.prompts import PrefillPool, fewest_for_prompts
from headrace.planner.fleet.traffic import SloLimits, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Two pools, and what the decode pool would be at other sizes of its groups."""

    prefill: PrefillPool
    decode: DecodePool
    others: tuple[
        DecodePool, ...
    ]  # the best of each size that keeps the limits, the chosen one among them

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus


def plan_fleet(
    traffic: Traffic, limits: SloLimits, choices: Choices, *, pace: float = 1.0
) -> FleetPlan:
    """Each step takes `pace` times as long as modelled. Raises DoesNotFit and OutOfReach."""
    prefill = fewest_for_prompts(traffic, limits, choices, pace)
    return behind(prefill, traffic, limits, choices, pace=pace)


def behind(
    prefill: PrefillPool,
    traffic: Traffic,
    limits: SloLimits,
    choices: Choices,
    *,
    pace: float = 1.0,
) -> FleetPlan:
    """The plan with this pool for prompts. Raises DoesNotFit and OutOfReach."""
    pools = pools_for_answers(traffic, limits, choices, prefill, pace)
    return FleetPlan(prefill=prefill, decode=pools[0], others=tuple(sorted(pools, key=_ranks)))


def _ranks(pool: DecodePool) -> int:
    return pool.option.group.ranks
