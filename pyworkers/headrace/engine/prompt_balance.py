"""When the ranks of a group begin new prompts: together, so that the long steps of a group are the same ones for all.

A step of a group takes as long as that of its slowest rank, and prompts are what makes a step long. Where each rank
begins its prompts as they come, most steps are long ones for all ranks. So new prompts wait for a few rounds, and those
that came meanwhile on any rank begin in the same one. What waits, waits longer for its first token; what decodes never
waits. All ranks decide alike, as all of them see the loads of all; one that planned its step before an agreement is a
round late. Pure: these loads are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.step.lockstep import RankLoad


class PromptBalance:
    """Lets new prompts wait for `most_rounds` at the utmost; they never wait where that is 0."""

    def __init__(self, most_rounds: int) -> None:
        self._most_rounds = most_rounds
        self._waited = (
            0  # rounds in which some rank's prompts waited, since prompts could begin last
        )
        self.open = True  # new prompts may begin in the next round

    def agreed(self, loads: Sequence[RankLoad]) -> None:
        """What all ranks brought to a round.

        Prompts begin at once where no rank decodes, or where prompts that began before make the next step long anyway;
        and as soon as each rank has some.
        """
        if self._most_rounds == 0:
            return
        if self.open:
            self._waited = 0
        self._waited += any(load.waiting_tokens and not load.prompt_tokens for load in loads)
        decodes = any(load.rows > load.prompt_tokens for load in loads)
        goes_on = any(load.prompt_tokens and load.waiting_tokens for load in loads)
        all_have = all(load.prompt_tokens or load.waiting_tokens for load in loads)
        self.open = not decodes or goes_on or all_have or self._waited >= self._most_rounds
