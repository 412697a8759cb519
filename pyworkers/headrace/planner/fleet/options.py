"""What a pool of GPUs may be made of, and how fast it is: one kind of group, and how its steps are filled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.step import decode_step, prefill_step

EP_SIZES = (
    8,
    16,
    24,
    32,
    48,
    72,
    96,
    144,
    288,
)  # machines of 8, and 288 slots that divide among the ranks
STEP_TOKENS = (2048, 4096, 8192, 16_384)
MOST_DRAFTS = 3
# Sizes are rounded up to steps of this share, so that few of them have to be computed.
GRAIN = 1.05


def coarse(value: float) -> int:
    """The next larger of sizes that lie `GRAIN` apart; small ones stay as they are."""
    if value <= 1 / (GRAIN - 1):
        return math.ceil(value)
    return math.ceil(GRAIN ** math.ceil(math.log(value, GRAIN) - 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOption:
    """A kind of group that computes prompts."""

    group: ExpertGroup
    step_tokens: int  # of a rank, at most
    _known: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    _alone: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def step_ms(self, tokens: int, prompt: int, behind: int, balance: float = 1.0) -> float:
        """Of so many tokens on the busiest rank; the mean of the ranks' is its `balance` times."""
        eighths = math.ceil(8 * balance - 1e-9)
        sizes = (max(coarse(tokens), 1), max(coarse(prompt), 1), coarse(behind), eighths)
        if sizes not in self._known:
            tokens, prompt, behind, _ = sizes
            step = prefill_step(
                self.group, tokens, min(prompt, tokens), cached=behind, balance=eighths / 8
            )
            self._known[sizes] = step.ms
        return self._known[sizes]

    def alone_s(self, tokens: int, behind: int) -> float:
        """A prompt in a group that has nothing else to do."""
        sizes = (coarse(tokens), coarse(behind))
        if sizes not in self._alone:
            self._alone[sizes] = self._chunks_s(*sizes)
        return self._alone[sizes]

    def _chunks_s(self, tokens: int, behind: int) -> float:
        whole, rest = divmod(tokens, self.step_tokens)
        parts = [self.step_tokens] * whole + [rest] * (rest > 0)
        before = (behind + n * self.step_tokens for n in range(len(parts)))
        balance = 1 / self.group.ranks
        return (
            sum(self.step_ms(n, n, old, balance) for n, old in zip(parts, before, strict=True))
            / 1e3
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOption:
    """A kind of group that generates answers."""

    group: ExpertGroup
    accepted: float  # tokens that a row gets from a step
    _known: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def row_ms(self, rows: int, context: float) -> float:
        """Until each row has one more token."""
        sizes = (max(coarse(rows), 1), max(coarse(context), 1))
        if sizes not in self._known:
            self._known[sizes] = decode_step(self.group, *sizes).ms / self.accepted
        return self._known[sizes]


def groups_of(base: ExpertGroup, sizes: tuple[int, ...]) -> Iterator[ExpertGroup]:
    """One of each size. Where a rank would hold a single expert it holds two: a popular one alone would slow all."""
    for ranks in sizes:
        group = replace(base, ranks=ranks)
        if group.rebalanced and group.slots == 1:
            group = replace(group, redundant=group.redundant + ranks)
        yield group
