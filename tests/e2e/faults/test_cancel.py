"""A client hangs up, at each point of a request's life: every block and booking is free at once, and it is measured."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from chaos.plan import HANG_UPS, Shape
from chaos.suite import Suite, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPLIT = Shape(prefill=2, decode=2, both=0, hosts=False)
BEFORE_ANY_WORKER = {"tokenising", "before dispatch"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Suite]:
    async with opened(SPLIT, tmp_path_factory.mktemp("cancel"), 1, 2) as suite:
        yield suite


@pytest.mark.parametrize("point", [point for point in HANG_UPS if point != "queued"])
async def test_hung_up(suite: Suite, point: str) -> None:
    fleet = suite.fleet
    measured = await fleet.metric("headrace_hangup_to_freed_seconds_count")
    hung_up = await suite.injector.hang_ups.at(point)
    assert hung_up is not None, "the point was not reached"
    await suite.check()
    assert suite.leaks.found + suite.fleet.crashes == []
    if point not in BEFORE_ANY_WORKER:
        assert hung_up.freed_ms is not None
    if point not in {*BEFORE_ANY_WORKER, "in the last step", "after the last token"}:
        assert await fleet.metric("headrace_hangup_to_freed_seconds_count") > measured


async def test_hung_up_in_the_queue(tmp_path: Path) -> None:
    """Under `kv` requests wait in the router while all workers have much ahead."""
    shape = Shape(prefill=0, decode=0, both=2, hosts=False)
    async with opened(shape, tmp_path, 1, 2, policy="kv") as suite:
        assert await suite.injector.hang_ups.at("queued") is not None
        await suite.check()
        assert suite.leaks.found + suite.fleet.crashes == []
