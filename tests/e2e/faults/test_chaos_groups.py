"""A slice of the chaos of groups (`make chaos ARGS=--groups`) that always runs: the same faults in the same order."""

from __future__ import annotations

import time
from pathlib import Path

from chaos.groups import opened_groups, passed
from chaos.ranks.seam import GroupFault

SEED = 1
CLIENTS = 16
LIMIT_S = 240.0
FAULTS = (
    GroupFault("kill", 0, 1),
    GroupFault("stall combine", 1, 2),
    GroupFault("freeze", 0, 0),
    GroupFault("late", 1, 3),
    GroupFault("wrong size", 0, 2),
    GroupFault("wrong weights", 1, 0),
    GroupFault("stall agree", 0, 3),
)


async def test_nobody_notices_what_happens_to_the_ranks_of_a_group(tmp_path: Path) -> None:
    async with opened_groups(tmp_path, SEED, CLIENTS) as suite:
        await suite.run(iter(FAULTS), CLIENTS, time.monotonic() + LIMIT_S)
        result = suite.result()
    assert passed(result), result
    assert result["faults"] == len(FAULTS)
    assert result["requests"] == result["equal"]
