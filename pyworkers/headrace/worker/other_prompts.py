"""What each router is told of the prompts that a worker has of the others."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.wire.frames import MOST_OTHER_PROMPTS, OtherPrompt, OtherPrompts


def of_others(prompts: Iterable[tuple[int, int, int]], own: int) -> OtherPrompts:
    """For the router of link `own`, those of other links. Each of `prompts`: a link, a prompt's tokens, and those left.

    The last entry stands for all behind it.
    """
    told: list[OtherPrompt] = []
    behind = 0
    for link, tokens, left in prompts:
        if link == own:
            behind += 1
        elif len(told) < MOST_OTHER_PROMPTS:
            told.append(OtherPrompt(behind, tokens, left))
        else:
            last = told[-1]
            told[-1] = OtherPrompt(
                last.behind, last.tokens + tokens, last.left + left, last.prompts + 1
            )
    return OtherPrompts(told)
