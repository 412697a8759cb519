"""What is set for experts that move, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_kernels.moe.balance import GroupShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """How often loads are gathered, and how much moves at once."""

    shape: GroupShape
    rounds_of_window: int = 1000  # some 30 s of decode steps; a guess
    piece_bytes: int = 4 << 20  # of a slot's image in one turn; a guess

    def __post_init__(self) -> None:
        if self.rounds_of_window < 1 or self.piece_bytes < 1:
            raise ValueError("a window has a round at least, a piece a byte")


@dataclass(slots=True, kw_only=True)
class Rebalanced:
    """What was decided and done so far; seconds are those that were predicted."""

    windows: int = 0
    layers_changed: int = 0
    waves: int = 0  # that all ranks carried out
    layers_declined: int = 0  # uneven ones where a change would not pay
    experts_moved: int = 0
    slots_changed: int = 0  # of this rank
    bytes_sent: int = 0  # by this rank
    cancelled: int = 0  # waves that some rank refused
    diverged: int = 0  # times that ranks knew different things
    gain_s: float = 0.0
    cost_s: float = 0.0
    spent_s: float = 0.0  # measured: between steps, for moves
    trust: float = 1.0  # the part of predicted gains that is counted on, by those that came true
