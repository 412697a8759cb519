"""A slice of the chaos suite (`make chaos`) that always runs: the same faults in the same order."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from chaos.network import ROUTER_HOST, inside, missing, namespaces
from chaos.plan import Fault, Shape
from chaos.report import passed, report, summary, table
from chaos.suite import Suite, opened

SEED = 1
CLIENTS = 24
SHAPE = Shape(prefill=0, decode=0, both=2, hosts=False)
FAULTS = (
    Fault("kill", "both", "chunk"),
    Fault("kill", "both", "token 3"),
    Fault("hang up", "client", "mid-prefill"),
    Fault("cut link", "both", "first token sent"),
    Fault("kill", "both", "last step"),
    Fault("drain", "both", "decode"),
    Fault("freeze", "both", "first decode step"),
    Fault("hang up", "client", "mid-decode"),
    Fault("kill", "both", "resumed"),
    Fault("slow", "both", "admitted"),
    Fault("replace", "both", "submit"),
    Fault("hang up", "client", "in the last step"),
)
WEATHER = (
    Fault("half-open from worker", "both", "decode"),
    Fault("loss", "both", "submit"),
    Fault("partition", "both", "decode"),
)


async def test_nobody_notices_what_happens_to_the_workers(tmp_path: Path) -> None:
    async with opened(SHAPE, tmp_path, SEED, CLIENTS) as suite:
        await everything_recovers(suite, FAULTS)


async def test_nobody_notices_what_happens_to_the_network(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    names = [ROUTER_HOST, *SHAPE.workers]
    with namespaces(names) as places, inside(places[ROUTER_HOST]):
        async with opened(SHAPE, tmp_path, SEED, CLIENTS, places) as suite:
            await everything_recovers(suite, WEATHER)


async def everything_recovers(suite: Suite, faults: Iterable[Fault]) -> None:
    until_s = time.monotonic() + 120  # far more than it takes
    await suite.run(iter(faults), until_s, print)
    result = report(suite.crowd.tally, suite.outcomes, suite.found, {})
    found = suite.leaks.found + suite.fleet.crashes
    told = f"{table(result['matrix'])}\n\n{summary(result)}\n{found}"
    assert passed(result), told
    assert [outcome.word for outcome in suite.outcomes] == ["ok"] * len(suite.outcomes), told
    assert suite.crowd.tally.equal > 0
