"""A slice of the chaos of real ranks (`make chaos ARGS="--groups --real"`): the same faults in the same order."""

from __future__ import annotations

import json
import time
from pathlib import Path

from chaos.groups import opened_groups, passed
from chaos.ranks.seam import GroupFault

SEED = 1
CLIENTS = 8
LIMIT_S = 240.0
FAULTS = (
    GroupFault("no-memory draft", 1, 2, 2),
    GroupFault("no-memory agree", 0, 1, 3),
    GroupFault("kill dispatch", 0, 1, 3),
    GroupFault("nap combine", 1, 0, 2),
    GroupFault("wrong weights", 0, 0),
)


async def test_nobody_notices_what_happens_to_real_ranks(tmp_path: Path) -> None:
    async with opened_groups(tmp_path, SEED, CLIENTS, real=True) as suite:
        await suite.run(iter(FAULTS), CLIENTS, time.monotonic() + LIMIT_S)
        result = suite.result()
    assert passed(result), json.dumps(result, indent=1)
    assert result["faults"] == len(FAULTS)
    assert result["requests"] == result["equal"]
