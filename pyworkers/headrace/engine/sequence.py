"""One request inside a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pooling import PooledPrompt
from headrace.engine.sampling.penalties import Penalties
from headrace.engine.sampling.token_limits import AnswerLimits
from headrace.engine.step import row_counts
from headrace.engine.step.row_counts import Count, Ints
from headrace.wire.frames import Sampling, TokenLogprob

if TYPE_CHECKING:
    from headrace._core import AnswerRules
    from headrace.engine.cache.kv_export import KvExport
    from headrace.engine.cache.kv_import import KvImport


class Key(NamedTuple):
    """Names a request. Routers number their requests each on their own, so the link is part of the name."""

    link: int
    request: int


class Stage(Enum):
    """Where the scheduler has a sequence, and what the sequence has."""

    OUTSIDE = auto()  # nothing; the scheduler does not know it
    WAITING = auto()  # nothing
    RUNNING = auto()  # blocks and a batch row
    PARKED = auto()  # blocks, which others read or write; it computes nothing
    READY = auto()  # blocks with all KV; it decodes as soon as there is a batch row


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Counts are in tokens. `computed <= total <= limit` and `published <= len(names)` hold.

    A waiting sequence has no blocks and `computed == 0`, also after a preemption: its tokens stay,
    their KV is computed again.

    Steps in flight change nothing of it before they are finished; `pending_*` say what they will bring. Numbers that
    change with each step stand in `counts`, see `Columns`.
    """

    key: Key
    arrival: int  # counts up from 0; with `priority` it orders all sequences
    priority: int
    prompt: NDArray[np.int32]
    listed: list[int]  # what was generated, but for the latest tokens, which only `recent` has
    limit: int  # longest `total`: what max_tokens, the context and the pool allow
    sampling: Sampling
    stop_ids: frozenset[int]  # empty with ignore_eos
    salt: bytes
    deadline_s: float | None  # on the clock of `Engine.step`
    names: list[bytes]  # chained hashes of the full blocks of prompt + generated known so far
    penalties: Penalties | None = None
    rules: AnswerRules | None = None  # what its answer follows
    limits: AnswerLimits | None = None  # tokens that it never wants
    stage: Stage = Stage.OUTSIDE
    blocks: list[int] = field(default_factory=list[int])
    # Named blocks with the same contents, held too.
    twins: list[int] = field(default_factory=list[int])
    batch_row: int | None = None  # row of the block table and of the sampler, while running
    cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
    answered: bool = False  # the first Output went out
    prompt_logprobs: list[TokenLogprob] | None = None  # collected so far; None when not wanted
    pooled: PooledPrompt | None = None  # collected so far; None when not wanted
    export_lease_ms: int | None = (
        None  # lease of its KV, which another worker pulls after the first token
    )
    export_pull_key: bytes = field(default=b"", repr=False)  # of its ticket, with `export_lease_ms`
    export: KvExport | None = None  # from the admission on, with `export_lease_ms`
    lease_end_s: float | None = None  # set once its first token is out
    kv_import: KvImport | None = None  # its KV comes from another worker; None once it runs
    prompt_len: int = field(init=False)
    counts: Ints = field(init=False, repr=False)
    recent: NDArray[np.int32] | None = field(init=False, repr=False, default=None)  # `RowCounts`

    total = Count(row_counts.TOTAL)  # prompt and answer so far
    computed = Count(row_counts.COMPUTED)  # tokens whose KV is in the cache
    # Whose KV the steps in flight compute, but for drafts.
    pending_rows = Count(row_counts.PENDING_ROWS)
    pending_tokens = Count(row_counts.PENDING_TOKENS)  # that they choose, but for accepted drafts
    # That they check: so many tokens more may come.
    pending_drafts = Count(row_counts.PENDING_DRAFTS)
    drafts = Count(row_counts.DRAFTS)  # guesses at the tokens after `total` that there are
    keys_from = Count(row_counts.KEYS_FROM)  # the drafting layer has keys of `keys_from:keys_to`
    keys_to = Count(row_counts.KEYS_TO)
    published = Count(row_counts.PUBLISHED)  # leading blocks whose contents are named in the pool
    held = Count(row_counts.HELD)  # `blocks`
    # Leading blocks that the batch row's row of the block table has.
    blocks_in_table = Count(row_counts.BLOCKS_IN_TABLE)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.counts = np.zeros(row_counts.COUNTS, dtype=np.int64)
        self.counts[row_counts.TOTAL] = self.prompt_len + len(self.listed)
        self.counts[row_counts.LISTED] = self.prompt_len + len(self.listed)
        self.keys_from = self.keys_to = 1

    def add(self, tokens: list[int]) -> None:
        """These were generated."""
        self.list_recent()
        if self.recent is not None and tokens:
            last = np.arange(self.total, self.total + len(tokens))[-len(self.recent) :]
            self.recent[last % len(self.recent)] = tokens[-len(self.recent) :]
        self.listed += tokens
        self.counts[row_counts.TOTAL] += len(tokens)
        self.counts[row_counts.LISTED] = self.total

    def list_recent(self) -> None:
        """`listed` is all that was generated."""
        start = self.prompt_len + len(self.listed)
        if self.recent is not None and start < self.total:
            self.listed += self.recent[np.arange(start, self.total) % len(self.recent)].tolist()
            self.counts[row_counts.LISTED] = self.total

    @property
    def generated(self) -> list[int]:
        """All tokens of the answer so far."""
        self.list_recent()
        return self.listed

    def hold(self, blocks: list[int]) -> None:
        """These are its next blocks."""
        self.blocks += blocks
        self.held += len(blocks)

    @property
    def follows_tokens(self) -> bool:
        """Something of it has to be told each token."""
        return self.penalties is not None or self.limits is not None

    def tell(self, tokens: list[int]) -> None:
        """Tell these generated tokens to what has to follow them."""
        for token in tokens:
            if self.penalties is not None:
                self.penalties.add(token)
            if self.limits is not None:
                self.limits.add(token)

    @property
    def length(self) -> int:
        """`total` after the steps in flight, at least."""
        return self.total + self.pending_tokens

    @property
    def reached(self) -> int:
        """`computed` after the steps in flight, at least."""
        return self.computed + self.pending_rows

    @property
    def remaining(self) -> int:
        """Tokens to compute, after the steps in flight, before the next one can be chosen."""
        return self.length - self.reached

    @property
    def decodes(self) -> bool:
        """Its newest token is all that is left to compute."""
        return self.length > self.prompt_len and self.remaining == 1

    @property
    def ends(self) -> bool:
        """The steps in flight choose its last token for sure."""
        return self.pending_tokens > 0 and self.length >= self.limit

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrival)

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens `start:stop` of prompt + generated. For any thread, where those were listed when the batch row was
        taken.
        """
        prompt_len = self.prompt_len
        if stop <= prompt_len:
            return self.prompt[start:stop]
        if stop > prompt_len + len(self.listed):
            self.list_recent()
        generated = self.listed[max(start - prompt_len, 0) : stop - prompt_len]
        tail = np.asarray(generated, dtype=np.int32)
        return tail if start >= prompt_len else np.concatenate([self.prompt[start:], tail])
