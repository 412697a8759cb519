"""The fewest GPUs: what must hold of any plan, and a pool worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.planner.errors import DoesNotFit, OutOfReach
from headrace.planner.fleet.choices import Choices
from headrace.planner.fleet.options import EP_SIZES, DecodeOption, PrefillOption, coarse, groups_of
from headrace.planner.fleet.search import FleetPlan, plan_fleet
from headrace.planner.fleet.traffic import SloLimits, Traffic
from headrace.planner.model.gpus import GPUS
from headrace.planner.model.group import ExpertGroup
from headrace.planner.trace import TracedRequest

LIMITS = SloLimits(ttft_s=2.0, tpot_s=0.05)


def base(gpu: str = "h200") -> ExpertGroup:
    weights = GPUS[gpu].weights
    return ExpertGroup(gpu=GPUS[gpu], ranks=8, weights=weights, linear=weights)


def choices(gpu: str = "h200") -> Choices:
    return Choices(base=base(gpu), acceptance=0.7, prefill_sizes=(8, 32), decode_sizes=(8, 32, 72))


def traffic(per_s: float = 60.0, count: int = 400, seed: int = 1) -> Traffic:
    """Answers of chat behind prompts of documents, as a Poisson process."""
    draw, at = random.Random(seed), 0.0
    requests: list[TracedRequest] = []
    for _ in range(count):
        at += draw.expovariate(per_s)
        requests.append(TracedRequest(at, draw.randint(200, 6000), draw.randint(20, 400)))
    return Traffic.at_speed(requests, 1.0, 0.0)


def plan(limits: SloLimits = LIMITS, gpu: str = "h200", of: Traffic | None = None) -> FleetPlan:
    return plan_fleet(of or traffic(), limits, choices(gpu))


def test_a_plan_keeps_its_limits_in_whole_groups() -> None:
    found = plan()
    assert found.prefill.ttft_s <= LIMITS.ttft_s
    assert found.decode.tpot_s <= LIMITS.tpot_s
    assert found.prefill.gpus == found.prefill.groups * found.prefill.option.group.ranks
    assert found.gpus == found.prefill.gpus + found.decode.gpus
    assert found.decode in found.others
    assert found.decode.gpus == min(pool.gpus for pool in found.others)


def test_the_same_question_has_the_same_answer() -> None:
    assert plan() == plan()


def test_looser_limits_never_need_more_gpus() -> None:
    found = [plan(replace(LIMITS, ttft_s=ttft)).prefill.gpus for ttft in (1.2, 2, 4, 8, 30)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    found = [plan(replace(LIMITS, tpot_s=tpot)).decode.gpus for tpot in (0.015, 0.03, 0.06, 0.2)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    found = [plan(replace(LIMITS, percentile=share)).gpus for share in (100, 99, 90, 50)]
    assert found == sorted(found, reverse=True)


def test_more_traffic_never_needs_fewer_gpus() -> None:
    found = [plan(of=traffic(per_s)).gpus for per_s in (5, 20, 60, 120)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_cached_prompts_never_need_more_gpus() -> None:
    requests = list(traffic().requests)
    found = [
        plan(of=Traffic.at_speed(requests, 1.0, share)).prefill.gpus for share in (0, 0.5, 0.9)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_slower_steps_never_need_fewer_gpus() -> None:
    found = [plan_fleet(traffic(), LIMITS, choices(), pace=pace).gpus for pace in (0.8, 1, 1.25)]
    assert found == sorted(found)


def test_a_wider_choice_never_needs_more_gpus() -> None:
    narrow = replace(choices(), decode_sizes=(32,), prefill_sizes=(32,), drafts=(0,))
    assert plan().gpus <= plan_fleet(traffic(), LIMITS, narrow).gpus


def test_faster_memory_never_needs_more_gpus() -> None:
    slow, fast = choices(), choices()
    gpu = replace(GPUS["h200"], bytes_per_s=9.6e12, network_bytes_per_s=100e9)
    fast = replace(fast, base=replace(fast.base, gpu=gpu))
    tight = replace(LIMITS, tpot_s=0.02)
    assert plan_fleet(traffic(), tight, fast).gpus <= plan_fleet(traffic(), tight, slow).gpus


def test_limits_out_of_reach_name_the_best_and_the_best_can_be_asked_for() -> None:
    for limits in (replace(LIMITS, ttft_s=0.01), replace(LIMITS, tpot_s=0.001)):
        with pytest.raises(OutOfReach) as refused:
            plan(limits)
        error = refused.value
        assert error.limit in ("ttft", "tpot")
        assert str(error).startswith(f"{error.limit}=")
        name, best = f"{error.limit}_s", error.best_s * 1.001
        assert plan(replace(LIMITS, **{name: best})).gpus > 0


def test_what_does_not_fit_is_said_with_what_does() -> None:
    with pytest.raises(
        DoesNotFit, match=r"does not fit h100 with EP8: .* of 80 GB.*EP16 is enough"
    ):
        plan_fleet(traffic(), LIMITS, replace(choices("h100"), prefill_sizes=(8,)))


def test_a_request_that_no_rank_holds_does_not_fit() -> None:
    tiny = replace(GPUS["h200"], memory_bytes=32e9)
    with pytest.raises(DoesNotFit) as refused:
        plan_fleet(traffic(), LIMITS, replace(choices(), base=replace(base(), gpu=tiny)))
    assert "is enough" not in str(refused.value)


def test_single_tokens_need_no_decoding() -> None:
    one = Traffic(requests=tuple(TracedRequest(float(n), 1000, 1) for n in range(3)))
    assert plan(of=one).decode.groups == 1


def test_requests_that_come_at_once_are_planned() -> None:
    burst = Traffic(requests=(TracedRequest(0.0, 500, 50),) * 30)
    assert burst.span_s == 1.0
    assert plan(of=burst).gpus >= 16


def test_a_decode_pool_by_hand() -> None:
    # 400 rows of 2,000 tokens at once, 100 tokens each; every group of 8 takes 400 / groups / 8 rows a rank
    rows = Traffic(requests=(TracedRequest(0.0, 2000, 100),) * 400)
    limits = SloLimits(ttft_s=100, tpot_s=0.04, percentile=100)
    only = replace(choices(), decode_sizes=(8,), drafts=(0,))
    found = plan_fleet(rows, limits, only)
    option = DecodeOption(group=found.decode.option.group, accepted=1.0)

    def step_ms(groups: int) -> float:
        return option.row_ms(-(-400 // (8 * groups)), 2050)

    assert found.decode.groups == 1 or step_ms(found.decode.groups - 1) > 40 * 0.9
    assert step_ms(found.decode.groups) < 40 * 1.1


def test_sizes_are_rounded_up_by_at_most_a_twentieth() -> None:
    for size in [*range(1, 300), 1000, 12_345, 163_840]:
        assert size <= coarse(size) <= size * 1.05 + 1
    assert coarse(0) == 0


def test_part_of_a_prompt_alone_takes_its_steps() -> None:
    option = PrefillOption(group=base(), step_tokens=4096)
    parts = [option.step_ms(4096, 4096, 0, 1 / 8), option.step_ms(4096, 4096, 4096, 1 / 8)]
    assert option.alone_s(8192, 0) == pytest.approx(sum(parts) / 1e3, rel=0.12)


def test_no_rank_holds_a_single_expert_alone() -> None:
    assert [group.slots for group in groups_of(base(), EP_SIZES)] == [36, 18, 12, 9, 6, 4, 3, 2, 2]
    plain = replace(base(), rebalanced=False, redundant=0)
    assert [group.slots for group in groups_of(plain, (288,))] == [1]
