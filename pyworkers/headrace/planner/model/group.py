"""A group of ranks that hold one model together: attention data parallel, experts spread; and what fits its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.planner.model import shape
from headrace.planner.model.assumptions import MEMORY_SHARE, WORKING_BYTES
from headrace.planner.model.gpus import Gpu
from headrace.planner.model.skew import (
    REDUNDANT,
    ExpertLoads,
    balanced,
    drawn_loads,
    slots_of,
    unbalanced,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """What all ranks have in common."""

    gpu: Gpu
    ranks: int
    weights: str  # of the experts: fp8 or nvfp4
    kv: str = "fp8"
    linear: str  # of attention's products
    drafts: int = 0  # tokens drafted for each row
    redundant: int = REDUNDANT  # copies of experts beyond one each
    rebalanced: bool = True  # experts and copies are spread by their load
    loads: ExpertLoads = field(default_factory=drawn_loads, repr=False)
    imbalance: float = field(init=False)  # rows of the busiest rank over the mean, chance apart

    def __post_init__(self) -> None:
        if self.rebalanced:
            imbalance = balanced(self.ranks, self.redundant, self.loads)
        else:
            imbalance = unbalanced(self.ranks, self.loads)
        object.__setattr__(self, "imbalance", imbalance)

    @property
    def slots(self) -> int:
        """Experts that each rank holds."""
        return slots_of(self.ranks, self.redundant)

    @property
    def weight_bytes(self) -> float:
        """Of one rank."""
        layers = shape.MOE_LAYERS + (self.drafts > 0)
        experts = layers * self.slots * shape.expert_bytes(self.weights)
        return experts + shape.own_bytes(drafts=self.drafts > 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV one rank holds; 0 or less: the model does not fit."""
        free = MEMORY_SHARE * self.gpu.memory_bytes - self.weight_bytes - WORKING_BYTES
        return int(free // shape.kv_token_bytes(self.kv, drafts=self.drafts > 0))
