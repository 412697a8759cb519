"""The parts of the chaos suite that decide: plan, requests, parsing, comparison, figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.clients import Answer, Failed, Stream
from chaos.crowd import Tally, difference
from chaos.faults import Outcome, Recovery
from chaos.load import KINDS, SEEDS_APART, Request, endless, of_seed, requests, stop_text
from chaos.plan import ON_WORKER, TOKEN_POSITIONS, Fault, Shape, faults, matrix, place
from chaos.ranks.mock import MockRanks
from chaos.ranks.real import RealRanks
from chaos.ranks.seam import GroupFault, plan
from chaos.report import cells, passed, percentile, report, table
from chaos.suite import Leaks

SPLIT = Shape(prefill=2, decode=2, both=0, hosts=True)
TOGETHER = Shape(prefill=0, decode=0, both=2, hosts=False)


@pytest.mark.parametrize("shape", [SPLIT, TOGETHER])
def test_the_first_turn_is_the_whole_matrix(shape: Shape) -> None:
    whole = matrix(shape)
    first = list(itertools.islice(faults(7, shape), 2 * len(whole)))
    assert sorted(first[::2], key=repr) == sorted(whole, key=repr)
    assert {fault.role for fault in first[1::2]} == {"client"}
    assert len({(fault.row, fault.point) for fault in whole}) == len(whole)


def test_the_matrix_has_every_step_and_token_position() -> None:
    whole = {(fault.kind, fault.role, fault.point) for fault in matrix(SPLIT)}
    assert whole >= {(kind, *point) for kind in ON_WORKER for point in SPLIT.points}
    positions = range(1, TOKEN_POSITIONS + 1)
    assert whole >= {("kill", "decode", f"token {k}") for k in positions}


def test_a_seed_decides_plan_and_requests() -> None:
    def start(seed: int) -> list[Fault]:
        return list(itertools.islice(faults(seed, SPLIT), 500))

    assert start(1) == start(1) != start(2)
    assert requests(1, 50) == requests(1, 50) != requests(2, 50)


@pytest.mark.parametrize("fleet", [MockRanks, RealRanks])
def test_a_seed_decides_what_happens_to_ranks_and_every_kind_comes_before_one_comes_again(
    fleet: type[MockRanks | RealRanks], tmp_path: Path
) -> None:
    ranks = fleet(tmp_path)

    def start(seed: int) -> list[GroupFault]:
        return list(itertools.islice(plan(seed, ranks), 4 * len(ranks.kinds)))

    made = start(1)
    assert made == start(1) != start(2)
    assert sorted(fault.kind for fault in made[: len(ranks.kinds)]) == sorted(ranks.kinds)
    assert all(0 <= fault.rank < ranks.sizes[fault.group] for fault in made)


def test_requests_are_of_every_kind_and_their_choices_have_seeds_of_their_own() -> None:
    made = requests(1, 4 * len(KINDS))
    assert {request.kind for request in made} == set(KINDS)
    seeds = [seed for request in made for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)
    assert all(of_seed(seed) == r.seed for r in made for seed in r.seeds)
    assert {request.seed % SEEDS_APART for request in made} == {0}


def test_prompts_of_several_chunks_are_in_no_cache_whenever_they_are_asked() -> None:
    asked = list(itertools.islice(endless(requests(1, 4 * len(KINDS)), 2), 3 * 4 * len(KINDS)))
    several = [(r.seed, r.body["cache_salt"]) for r in asked if r.kind == "several chunks"]
    assert len(several) == len(set(several)) == 3 * 4
    assert not any("cache_salt" in r.body for r in asked if r.kind != "several chunks")


@given(st.text())
def test_a_stop_text_ends_the_answer_where_it_was_found(answer: str) -> None:
    text = stop_text(answer)
    if text is not None:
        assert text in answer
        assert answer.find(text) >= len(answer) // 2


def test_points_are_listed_in_the_order_of_the_protocol() -> None:
    points = ["token 10", "released", "ticket", "token 2", "first token"]
    assert sorted(points, key=place) == ["first token", "ticket", "released", "token 2", "token 10"]


def test_a_token_position_is_a_point_and_other_points_are_none() -> None:
    assert Fault("kill", "decode", "token 12").token == 12
    assert Fault("kill", "decode", "token sent").token is None
    assert Fault("kill", "decode", "chunk").token is None


# --- what clients read ---


def wire(events: list[dict[str, Any] | str], chunk: int) -> bytes:
    """An answer in server-sent events, in chunks of so many bytes."""
    body = b"".join(
        b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
        for event in events
    )
    parts = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def event(text: str, tokens: int, finish: str | None = None) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    choice = {"index": 0, "text": text, "logprobs": {"tokens": [text]}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 9}}}


NOTHING = {"leaked_blocks": 0, "leaked_bookings": 0, "crashed": 0}
WHOLE = [event("a", 1), event("é", 2), event("c", 3, "length"), "[DONE]"]
REQUEST = Request(8, "greedy", "/v1/completions", {})


@given(st.integers(1, 200), st.lists(st.integers(1, 60), min_size=1))
async def test_an_answer_is_the_same_however_it_is_cut(chunk: int, cuts: list[int]) -> None:
    stream = Stream(REQUEST)
    data = wire(WHOLE, chunk)
    sizes = itertools.cycle(cuts)
    while data:
        size = next(sizes)
        stream.data_received(data[:size])
        data = data[size:]
    answer = stream.answer()
    assert answer.choices == (("aéc", json.dumps({"tokens": ["a", "é", "c"]}), "length"),)
    assert dict(answer.usage) == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert stream.tokens == 3


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (WHOLE[:2], "cut off"),
        ([WHOLE[0], {"error": {"message": "worker lost"}}], "worker lost"),
        ([WHOLE[0], {"error": {"message": "worker lost"}}, "[DONE]"], "worker lost"),
    ],
)
async def test_an_unfinished_answer_has_failed(
    events: list[dict[str, Any] | str], why: str
) -> None:
    stream = Stream(REQUEST)
    stream.data_received(wire(events, 50))
    with pytest.raises(Failed, match=why):
        stream.answer()


async def test_a_refusal_has_failed() -> None:
    stream = Stream(REQUEST)
    stream.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\nno worker")
    with pytest.raises(Failed, match=r"503.*no worker"):
        stream.answer()


def test_a_difference_is_shown_where_it_is() -> None:
    def answer(text: str, tokens: int = 3) -> Answer:
        return Answer(((text, "{}", "length"),), (("completion_tokens", tokens),))

    assert "from character 2" in difference(answer("abc"), answer("abd"))
    assert "from character 3" in difference(answer("abc"), answer("abcd"))
    assert "usage" in difference(answer("abc"), answer("abc", 4))


# --- figures ---


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 0.5) is None
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def outcome(fault: Fault, *, reached: bool = True, error: str = "") -> Outcome:
    recoveries = [Recovery(total_ms=30.0, prefill_ms=10.0)]
    return Outcome(fault, reached=reached, error=error, recoveries=recoveries if reached else [])


def test_the_matrix_tells_what_was_not_reached_and_what_went_wrong() -> None:
    kill = Fault("kill", "decode", "chunk")
    slow, cut = Fault("slow", "decode", "chunk"), Fault("cut link", "decode", "submit")
    found = cells([outcome(kill), outcome(kill), outcome(slow, reached=False)])
    assert [(cell["outcome"], cell["injected"]) for cell in found] == [
        ("ok", 2),
        ("not reached", 0),
    ]
    assert found[0]["ms"]["p50"] == 20.0  # without recomputing
    text = table(cells([outcome(kill), outcome(cut, error="gone")]))
    assert "1 ok 20 ms" in text
    assert "BAD" in text


@pytest.mark.parametrize("name", ["mismatched", "failed", "hung"])
def test_one_wrong_answer_is_enough_to_fail(name: str) -> None:
    tally = Tally(requests=5, equal=4)
    assert passed(report(tally, [], NOTHING, {}))
    getattr(tally, name).append("a request")
    assert not passed(report(tally, [], NOTHING, {}))


def test_recovery_counts_killed_decoders_only() -> None:
    outcomes = [outcome(Fault(kind, "decode", "decode")) for kind in ("kill", "freeze", "kill")]
    result = report(Tally(), outcomes, NOTHING, {})
    assert result["recovery_ms"] == {"p50": 20.0, "p99": 20.0, "count": 2}
    assert result["recovery_from_any_fault_ms"]["count"] == 3


def test_what_stays_leaked_is_counted_once() -> None:
    leaks = Leaks()
    for blocks in (0, 4, 4, 6, 0, 1):
        leaks.add(blocks, 0, "")
    assert leaks.blocks == 7
