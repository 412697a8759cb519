"""A few timed steps of a model that has served nobody yet: what routers are told of its speed before they see any.

Two kinds of step tell two costs, that of any step and that of a prompt token. What looking back at a context costs, and
rows beside the first, the router learns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.engine.step.lockstep import Lockstep
from headrace.engine.warm_up import all_begin, made_up_batch
from headrace.wire.frames import StepCost
from headrace_kernels.torch_if_loaded import inference_mode

if TYPE_CHECKING:
    from headrace.models import Model

LIMIT_S = 0.5  # about what the longest of the steps may take
FIRST_TOKENS = 32  # of a prompt of which nothing is known


def time_steps(
    model: Model,
    *,
    num_blocks: int,
    rows: int,
    clock: Callable[[], float] = time.perf_counter,
    lockstep: Lockstep | None = None,
) -> StepCost | None:
    """Two answers of one token, the first of which finds everything cold; a short prompt; and the longest one that is
    done in time and fits a step of `rows` rows. They write into blocks that nobody has yet.

    The ranks of a group call this together: each step is a round. `None` where the clock stood still. Raises what a
    round raises.
    """

    def timed_s(tokens: int, context: int) -> float:
        all_begin(lockstep, begins=True)
        batch = made_up_batch([context], [tokens], model, num_blocks)
        began_s = clock()
        with inference_mode():
            model.forward(batch)
            if fence := model.fence():
                fence.synchronize()
        return clock() - began_s

    most = min(rows, num_blocks * model.block_tokens, model.context_tokens)
    answer_s = min(timed_s(1, min(2, most)), timed_s(1, min(2, most)))
    first = min(FIRST_TOKENS, most)
    first_s = timed_s(first, first)
    tokens = min(most, max(first, int(first * LIMIT_S / max(first_s, 1e-9))))
    prompt_s = timed_s(tokens, tokens)
    if answer_s <= 0 and prompt_s <= 0:
        return None
    prefill_s = max(prompt_s - answer_s, 0.0) / tokens
    return StepCost(answer_s * 1e3, prefill_s * 1e3, 0.0, 0.0, 0.0)
