"""The settings that an engine obeys as they were typed: `WorkerSettings` and `EngineConfig` both inherit these rows.

A setting of the engine is one row here. The row gives the flag of `headrace worker` and `serve`, its check, what
`serve` hands to its workers, and a field of `EngineConfig`, which keeps the same bounds where no flag was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from headrace.settings.table import rows, setting
from headrace.settings.values import Whole, positive

DraftRule: TypeAlias = Literal["noise", "rejection"]
MOST_MTP = 3
MOST_PROMPT_WAIT = 64  # steps. A guess
# Simulated: the first token comes 40 to 80 ms later, and under load steps are a sixth to two fifths shorter
# (bench/results/prompt_balance.json).
PROMPT_WAIT_ROUNDS = 2

MODEL = "Model"
CACHE = "Cache and batch"
MTP = "Multi-token prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What both a worker and its engine are told. None means that the model decides."""

    context_tokens: int | None = setting(
        "--context-tokens",
        also=("--max-model-len",),
        group=MODEL,
        value="TOKENS",
        read=positive,
        shown="the model's own limit",
        help="Longest prompt and answer together, in tokens.",
        in_serve=True,
    )
    max_waiting: int = setting(
        "--max-waiting",
        group=CACHE,
        value="N",
        read=positive,
        default=1024,
        help="Requests that may wait inside one worker.",
        in_serve=True,
    )
    prefix_cache: bool = setting(
        "--no-prefix-cache",
        group=CACHE,
        default=True,
        means=False,
        help="Compute every prompt from its first token, and keep no KV for later prompts.",
        in_serve=True,
    )
    prompt_wait_rounds: int = setting(
        "--prompt-wait-rounds",
        group=CACHE,
        value="STEPS",
        read=Whole(0, MOST_PROMPT_WAIT),
        default=PROMPT_WAIT_ROUNDS,
        help="In an expert-parallel group: steps that new prompts wait at most, so that prompts of all ranks begin "
        f"together, 0 to {MOST_PROMPT_WAIT}. More make the steps of all ranks shorter and the first token later. "
        "0 begins prompts as they come.",
        in_serve=True,
    )
    mtp: int = setting(
        "--mtp",
        group=MTP,
        value="TOKENS",
        read=Whole(0, MOST_MTP),
        default=0,
        shown="0, which drafts none",
        help=f"Tokens that the model drafts ahead at most, 0 to {MOST_MTP}. Fewer are drafted where drafts do not pay. "
        "The model needs a layer for multi-token prediction.",
        in_serve=True,
    )
    mtp_verify: DraftRule = setting(
        "--mtp-verify",
        group=MTP,
        value="RULE",
        choices=get_args(DraftRule),
        default="noise",
        help="Which drafts are kept. noise keeps drafts that equal what is sampled without drafting, so that no text "
        "changes. rejection keeps more, and only the distribution of texts stays the same.",
        in_serve=True,
    )
    mtp_fixed: bool = setting(
        "--mtp-fixed",
        group=MTP,
        default=False,
        help="Always draft as many tokens as --mtp says, also where drafts do not pay. For measurements.",
        in_serve=True,
    )


def engine_values(settings: EngineSettings) -> dict[str, Any]:
    """What an engine is told of the settings of its worker, by the fields of `EngineConfig`."""
    return {name: getattr(settings, name) for name in rows(EngineSettings)}
