"""One request inside a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engine.penalties import Penalties
from headrace.frames import Sampling, TokenLogprob


class Key(NamedTuple):
    """Names a request. Routers number their requests each on their own, so the link is part of the name."""

    link: int
    request: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Counts are in tokens. `computed <= total <= limit` and `published <= len(names)` hold.

    A waiting sequence has no blocks and `computed == 0`, also after a preemption: its tokens stay,
    their KV is computed again.
    """

    key: Key
    arrival: int  # counts up from 0; with `priority` it orders all sequences
    priority: int
    prompt: NDArray[np.int32]
    generated: list[int]
    limit: int  # longest `total`: what max_tokens, the context and the pool allow
    sampling: Sampling
    stop_ids: frozenset[int]  # empty with ignore_eos
    salt: bytes
    deadline_s: float | None  # on the clock of `Engine.step`
    names: list[bytes]  # chained hashes of the full blocks of prompt + generated known so far
    penalties: Penalties | None = None
    computed: int = 0  # tokens whose KV is in the cache
    blocks: list[int] = field(default_factory=list[int])
    published: int = 0  # leading blocks whose contents are named in the pool
    seat: int | None = None  # row of the block table and of the sampler, while running
    cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
    answered: bool = False  # the first Output went out
    prompt_logprobs: list[TokenLogprob] | None = None  # collected so far; None when not wanted

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.prompt) + len(self.generated) - self.computed

    @property
    def decodes(self) -> bool:
        """Its newest token is all that is left to compute."""
        return self.remaining == 1 and bool(self.generated)

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrival)

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens `start:stop` of prompt + generated."""
        prompt_len = len(self.prompt)
        if stop <= prompt_len:
            return self.prompt[start:stop]
        generated = self.generated[max(start - prompt_len, 0) : stop - prompt_len]
        tail = np.asarray(generated, dtype=np.int32)
        return tail if start >= prompt_len else np.concatenate([self.prompt[start:], tail])
