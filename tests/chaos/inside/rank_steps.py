"""The named phases of a step inside a real rank of a group: functions of the product, wrapped from outside.

Ranks that share memory exchange rows without Python, where no phase can be told. Some of them do it in Python here, to
the same bytes, and faults in an exchange strike these: what the others make of it is what they make of it anywhere.
"""

from __future__ import annotations

import os
import time
from typing import Any

from chaos.inside.seams import Seams
from chaos.inside.steps import wrap

LATE_S = "CHAOS_LATE_S"  # seconds that this rank starts later
PHASES = ("agree", "dispatch", "combine", "draft")
IN_EXCHANGE = ("dispatch", "combine")
IN_PYTHON = (0, 3)  # ranks whose exchange is


def is_rank() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def install_rank(seams: Seams) -> None:
    """Wrap the group, its rounds and its exchange. Before the worker is made."""
    from headrace.engine.engine import Engine
    from headrace.engine.step.rounds import Rounds
    from headrace.worker.parallel.group import RankGroup
    from headrace_kernels.moe.all_to_all import AllToAll, AllToAllSent

    time.sleep(float(os.environ.get(LATE_S, "0")))

    def init(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        original(engine, *args, **kwargs)
        seams.engine = engine

    def reaching(phase: str) -> Any:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            seams.reach(phase, None)
            return original(*args, **kwargs)

        return around

    wrap(Engine, "__init__", init)
    wrap(RankGroup, "agree", reaching("agree"))
    wrap(Rounds, "draft", reaching("draft"))
    wrap(AllToAll, "send", reaching("dispatch"))
    wrap(AllToAllSent, "collect", reaching("combine"))
    if int(os.environ["RANK"]) in IN_PYTHON:
        wrap(AllToAll, "native", lambda *_: None)
