"""Tokens that a request never wants: all but those it allows, and those that would complete a word it bans."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import FailureKind, RequestError
from headrace.wire.frames import TokenLimits


class AnswerLimits:
    """The limits of one answer, kept up to date token by token.

    A banned word of several tokens forbids its last one wherever the answer ends with the others, as vLLM has it. All
    that is kept of the answer is its end, as long as the longest word needs.
    """

    def __init__(self, limits: TokenLimits, generated: Iterable[int]) -> None:
        self.allowed = np.array(sorted(set(limits.allowed)), dtype=np.int64)
        ends = np.cumsum(np.array(limits.lengths, dtype=np.int64)).tolist()
        starts = [0, *ends][:-1]
        words = {tuple(limits.banned[start:end]) for start, end in zip(starts, ends, strict=True)}
        self._always = np.array(
            sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64
        )
        self._words = sorted(word for word in words if len(word) > 1)
        self._most = max((len(word) - 1 for word in self._words), default=0)
        self._end: list[int] = []
        for token in generated:
            self.add(token)

    def add(self, token: int) -> None:
        """`token` was generated."""
        if self._most:
            self._end.append(token)
            del self._end[: -self._most]

    def banned_after(self, drafts: list[int]) -> NDArray[np.int64]:
        """Tokens that must not come next, if `drafts` were generated."""
        if not self._words:
            return self._always
        end = tuple(self._end + drafts)[-self._most :]
        last = {word[-1] for word in self._words if end[1 - len(word) :] == word[:-1]}
        if not last:
            return self._always
        return np.union1d(self._always, np.fromiter(last, np.int64, len(last)))


def check_limits(limits: TokenLimits, vocab_size: int) -> None:
    """Raises `RequestError` (`bad_sampling`) where a token is not in the vocabulary, or words do not fit the tokens."""
    if any(length == 0 for length in limits.lengths) or sum(limits.lengths) != len(limits.banned):
        raise RequestError(
            FailureKind.BAD_SAMPLING, "limits: the lengths of banned words do not fit their tokens"
        )
    for token in (*limits.allowed, *limits.banned):
        if token >= vocab_size:
            raise RequestError(
                FailureKind.BAD_SAMPLING,
                f"limits: token {token} is not in the vocabulary of {vocab_size}",
            )
