"""A worker is lost at every token of an answer: the stream goes on, byte for byte the one of the undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from chaos.clients import Answer, send
from chaos.fleet import Fleet, Worker
from chaos.load import Request
from chaos.plan import Shape
from chaos.suite import Suite, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
PROMPT = list(range(40, 75))  # two blocks and a part of one
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded with penalties": {
        "temperature": 1.1,
        "top_p": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "two choices": {"n": 2, "temperature": 0.9},
    "log-probabilities": {"temperature": 0.8, "logprobs": 3},
    "in a grammar": {"temperature": 1, "guided_regex": "[a-z ]{200,300}"},
    "biased": {"temperature": 1, "logit_bias": {"70": 3, "71": -100}},
}


FLEETS = {
    "one leg": Shape(prefill=0, decode=0, both=2, hosts=False),
    "two legs": Shape(prefill=1, decode=2, both=0, hosts=False),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FLEETS)
async def suite(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncGenerator[Suite]:
    folder = tmp_path_factory.mktemp("resume")
    async with opened(FLEETS[request.param], folder, 1, 2) as suite:
        yield suite


def request_of(seed: int, more: dict[str, Any]) -> Request:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, **more}
    return Request(seed, "resume", "/v1/completions", body)


async def ask(fleet: Fleet, request: Request) -> Answer:
    stream = await send(fleet.port, request, fleet.model)
    async with asyncio.timeout(60):
        await stream.ended
    return stream.answer()


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("name", CASES)
async def test_killed_at_every_token(suite: Suite, name: str) -> None:
    fleet, request = suite.fleet, request_of(8_000, CASES[name])
    expected = await ask(fleet, request)
    for position in range(1, TOKENS + 1):
        trap = await fleet.trap(f"token {position}", "kill", request.seeds[-1])
        answer = asyncio.create_task(ask(fleet, request))
        await trap.sprung()
        assert await answer == expected, f"{name}, killed at token {position}"
        await fleet.ready()
    await nothing_is_left(suite)


async def test_killed_in_the_middle_of_an_answer_in_a_grammar(suite: Suite) -> None:
    """Where the answer stands in its grammar follows from its tokens, on whatever worker."""
    fleet, request = suite.fleet, request_of(8_400, CASES["in a grammar"])
    expected = await ask(fleet, request)
    for position in (1, 4, 7):
        trap = await fleet.trap(f"token {position}", "kill", request.seeds[-1])
        answer = asyncio.create_task(ask(fleet, request))
        await trap.sprung()
        assert await answer == expected, f"killed at token {position}"
        await fleet.ready()
    await nothing_is_left(suite)


async def test_killed_at_every_token_before_a_stop_string(suite: Suite) -> None:
    """The string may be split between two workers."""
    fleet = suite.fleet
    text = (await ask(fleet, request_of(9_000, {"temperature": 0.9}))).choices[0][0]
    stop = text[len(text) // 2 :][:2]
    request = request_of(9_000, {"temperature": 0.9, "stop": [stop]})
    expected = await ask(fleet, request)
    assert expected.choices[0][2] == "stop"
    for position in range(1, dict(expected.usage)["completion_tokens"] + 1):
        trap = await fleet.trap(f"token {position}", "kill", request.seed)
        answer = asyncio.create_task(ask(fleet, request))
        await trap.sprung()
        assert await answer == expected, f"killed at token {position}"
        await fleet.ready()
    await nothing_is_left(suite)


async def test_killed_again_and_again(suite: Suite) -> None:
    fleet, request = suite.fleet, request_of(10_000, {"temperature": 1})
    expected = await ask(fleet, request)
    traps = [await fleet.trap(f"token {position}", "kill", request.seed) for position in (1, 3)]
    answer = asyncio.create_task(ask(fleet, request))
    for trap in traps:
        await trap.sprung()
    assert await answer == expected
    await nothing_is_left(suite)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("position", [1, 4, TOKENS])
async def test_frozen_and_noticed(suite: Suite, position: int) -> None:
    fleet, request = suite.fleet, request_of(11_000, CASES["log-probabilities"])
    expected = await ask(fleet, request)
    trap = await fleet.trap(f"token {position}", "freeze", request.seed)
    answer = asyncio.create_task(ask(fleet, request))
    worker, _ = await trap.sprung()
    try:
        await until_not_ready(fleet, worker)
        assert await answer == expected
    finally:
        fleet.thaw(worker)
    await fleet.ready()
    await nothing_is_left(suite)


async def until_not_ready(fleet: Fleet, worker: Worker) -> None:
    async def suspect() -> bool:
        return (await fleet.listed()).get(worker.name, {}).get("state") != "ready"

    await fleet.poll(suspect, "nobody noticed", 30)


async def nothing_is_left(suite: Suite) -> None:
    await suite.check()
    assert suite.leaks.found + suite.fleet.crashes == []
