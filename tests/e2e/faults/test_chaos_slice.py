"""A slice of the chaos suite (`make chaos`) that always runs: the same faults in the same order.

Without --all it leaves out kills at steps that others of its kills stand for: each costs the start of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from chaos.network import ROUTER_HOST, inside, namespaces, no_namespaces
from chaos.plan import Fault, Shape
from chaos.report import passed, report, summary, table
from chaos.suite import Suite, opened
from helpers.require import missing

SEED = 1
CLIENTS = 24
TOGETHER = Shape(prefill=0, decode=0, both=2, hosts=False)
SPLIT = Shape(prefill=2, decode=2, both=0, hosts=False)
ON_WHOLE_REQUESTS = (
    Fault("kill", "both", "chunk"),
    Fault("hang up", "client", "mid-prefill"),
    Fault("cut link", "both", "first token sent"),
    Fault("leave", "both", "decode"),
    Fault("kill", "both", "resumed"),
    Fault("slow", "both", "admitted"),
    Fault("replace", "both", "submit"),
    Fault("hang up", "client", "in the last step"),
)
ON_TWO_LEGS = (
    Fault("kill", "decode", "segment"),
    Fault("kill", "prefill", "chunk"),
    Fault("kill", "decode", "token 3"),
    Fault("hang up", "client", "between legs"),
    Fault("cut link", "prefill", "before ticket"),
    Fault("freeze", "decode", "pulled"),
    Fault("hang up", "client", "during transfer"),
    Fault("drain", "prefill", "segment served"),
    Fault("kill", "decode", "resumed"),
    Fault("freeze briefly", "prefill", "first token"),
    Fault("kill", "decode", "last step"),
)
LEFT_OUT = {
    Fault("kill", "both", "chunk"),
    Fault("kill", "decode", "segment"),
    Fault("kill", "decode", "last step"),
}
WEATHER = (
    Fault("half-open from worker", "decode", "segment"),
    Fault("no way between workers", "decode", "segment"),
)


@pytest.mark.parametrize(
    ("shape", "faults"), [(TOGETHER, ON_WHOLE_REQUESTS), (SPLIT, ON_TWO_LEGS)], ids=["one", "two"]
)
async def test_nobody_notices_what_happens_to_the_workers(
    tmp_path: Path, shape: Shape, faults: tuple[Fault, ...], pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.option.all_cases:
        faults = tuple(fault for fault in faults if fault not in LEFT_OUT)
    async with opened(shape, tmp_path, SEED, CLIENTS) as suite:
        await everything_recovers(suite, faults)


async def test_nobody_notices_what_happens_to_the_network(tmp_path: Path) -> None:
    if why := no_namespaces():
        missing("netns", why)
    names = [ROUTER_HOST, *SPLIT.workers]
    with namespaces(names) as places, inside(places[ROUTER_HOST]):
        async with opened(SPLIT, tmp_path, SEED, CLIENTS, places) as suite:
            await everything_recovers(suite, WEATHER)


async def everything_recovers(suite: Suite, faults: Iterable[Fault]) -> None:
    until_s = time.monotonic() + 240  # far more than it takes
    await suite.run(iter(faults), until_s, print)
    result = report(suite.crowd.tally, suite.outcomes, suite.found, {})
    found = suite.leaks.found + suite.fleet.crashes
    told = f"{table(result['matrix'])}\n\n{summary(result)}\n{found}"
    assert passed(result), told
    assert [outcome.word for outcome in suite.outcomes] == ["ok"] * len(suite.outcomes), told
    assert suite.crowd.tally.equal > 0
