"""Answers on their way through groups that only decode."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

RowMs = Callable[[int, float], float]
"""Milliseconds until each row has one more token: rows on a rank, their mean context."""


def last_tokens_s(
    answers: Sequence[tuple[float, int, int]],
    *,
    ranks: int,
    kv_tokens: int,
    row_ms: RowMs,
) -> list[float]:
    """When each answer ends. An answer is when its prompt is there in seconds, the prompt's tokens, and its own.

    `ranks` are those of all groups; they share rows evenly, and all rows get on equally fast. An answer begins when
    there is room for its KV to the end, in the order of arrival. `kv_tokens` are those of all ranks.
    """
    assert all(prompt + answer <= kv_tokens for _, prompt, answer in answers)
    order = sorted(range(len(answers)), key=lambda number: answers[number][0])
    ended = [0.0] * len(answers)
    now, tokens = 0.0, 0.0  # tokens that a row has got which ran from the start
    running: list[tuple[float, int]] = []  # at which tokens each ends
    room, context = kv_tokens, 0.0  # context: of all rows, less `tokens` for each
    waiting: deque[int] = deque()
    arrivals = deque(order)

    def admit() -> None:
        nonlocal room, context
        while waiting:
            number = waiting[0]
            _, prompt, answer = answers[number]
            if prompt + answer > room:
                return
            waiting.popleft()
            room -= prompt + answer
            context += prompt - tokens
            heapq.heappush(running, (tokens + answer, number))

    while arrivals or running:
        if not running:
            now = max(now, answers[arrivals[0]][0])
        else:
            rows = len(running)
            ms = row_ms(-(-rows // ranks), context / rows + tokens)
            until_end = (running[0][0] - tokens) * ms / 1e3
            until_next = answers[arrivals[0]][0] - now if arrivals else until_end
            if until_end <= until_next:
                now, tokens = now + until_end, running[0][0]
                _, number = heapq.heappop(running)
                _, prompt, answer = answers[number]
                ended[number] = now
                room += prompt + answer
                context -= prompt - (tokens - answer)
                admit()
                continue
            tokens += until_next * 1e3 / ms
            now = answers[arrivals[0]][0]
        while arrivals and answers[arrivals[0]][0] <= now:
            waiting.append(arrivals.popleft())
        admit()
    return ended
