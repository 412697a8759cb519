"""Bounds of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings.engine import EngineSettings
from headrace.settings.table import check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """What a worker was told, and sizes that it chose. Counts are in the unit that the name says.

    Raises `ValueError` for a value that the flag of its row would refuse, and where bounds contradict each other.
    """

    num_blocks: int
    block_tokens: int = 16
    max_sequences: int = 32  # running at once
    max_batched_tokens: int = 256  # rows of one step, prompts and answers together

    def __post_init__(self) -> None:
        check_values(self, EngineSettings)
        for name in ("num_blocks", "block_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, less than max_sequences, which is "
                f"{self.max_sequences}: every running sequence decodes one token in each step"
            )
