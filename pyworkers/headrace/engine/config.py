"""Bounds of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

MOST_DRAFTS = 3  # tokens drafted ahead for one sequence

Verify: TypeAlias = Literal["noise", "rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Counts are in the unit that the name says. Raises `ValueError` where bounds contradict each other."""

    num_blocks: int
    block_tokens: int = 16
    max_sequences: int = 32  # running at once
    max_batched_tokens: int = 256  # rows of one step, prompts and answers together
    max_waiting: int = 1024
    context_tokens: int | None = None  # longest prompt and answer; None is the model's limit
    prefix_cache: bool = True
    mtp: int = 0  # tokens that the model drafts ahead for one sequence at most; 0 is off
    mtp_verify: Verify = "noise"
    mtp_fixed: bool = False  # always `mtp` tokens, whether that pays or not: to measure and to test

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 <= self.mtp <= MOST_DRAFTS:
            raise ValueError(f"mtp is {self.mtp}, it must be 0 to {MOST_DRAFTS}")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, less than max_sequences, which is "
                f"{self.max_sequences}: every running sequence decodes one token in each step"
            )
