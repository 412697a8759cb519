"""Which sequences get how many tokens in the next step. Pure: no clock, no tensors.

There are no prefill and decode modes. A sequence is its tokens and how many of them are computed; a step hands out
a budget of tokens: one to each sequence that decodes, the rest to prompts, first come first served. Three rules make
that fair and steady:

- A prompt that does not fit in the rest of the budget takes at most half of it while others wait, so a long prompt
  delays short ones by a step or two, and it never delays decoding.
- Where the pool is full, the newest sequence of the lowest priority gives its blocks back and waits again. Its tokens
  stay; computing them again yields the same KV, so its answer is the same.
- A sequence is admitted only if the pool keeps room for what the running ones are still expected to write. The
  expectation is the mean length of the answers so far, so that admission does not lead to preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass

from headrace.engine.block_pool import BlockPool
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Sequence

ANSWER_WEIGHT = 1 / 16  # of the newest answer in the mean length; a guess
LOOK_PAST = 64  # waiting sequences passed over in one step because their prefix is being computed
PROMPT_LOGPROBS_CHUNK = 128  # rows of a step whose logits are kept for one prompt; bounds memory


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of `sequence`, from `sequence.computed` on."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its work, decoding sequences first, and which of them took a seat just now."""

    work: list[Work]
    admitted: list[Sequence]


class Scheduler:
    """Running and waiting sequences over one pool. `running` and `waiting` are sorted by `Sequence.order`."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_sequences: int,
        max_batched_tokens: int,
        max_waiting: int,
        prefix_cache: bool = True,
    ) -> None:
        assert max_batched_tokens >= max_sequences > 0, "each running sequence decodes in each step"
        self.pool = pool
        self.block_tokens = block_tokens
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.max_waiting = max_waiting
        self.prefix_cache = prefix_cache
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self._seats = list(range(max_sequences - 1, -1, -1))
        self._expected_answer = 0.0
        self._computing: Counter[bytes] = (
            Counter()
        )  # names of blocks that running prompts will publish

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Let `sequence` wait. Raises `RequestError` when `max_waiting` already do."""
        if len(self.waiting) >= self.max_waiting:
            raise RequestError(
                FailureKind.QUEUE_FULL,
                f"{len(self.waiting)} requests wait, the limit is {self.max_waiting}",
            )
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> int:
        """Take a sequence out at any stage; returns how many blocks it gave back."""
        if sequence.seat is None:
            _take_out(self.waiting, sequence)
            return 0
        return self._stop(sequence)

    def note_answer(self, tokens: int) -> None:
        """An answer ended after `tokens`; the next ones are expected to be like it."""
        self._expected_answer += (tokens - self._expected_answer) * ANSWER_WEIGHT

    def plan(self) -> Plan:
        """What the next step computes; all blocks for it are allocated.

        There is work as long as something runs or waits.
        """
        preemptions = self.preemptions
        decodes = self._plan_decodes()
        budget = self.max_batched_tokens - len(decodes)
        prefills = [sequence for sequence in self.running if sequence.remaining > 1]
        prompts: list[Work] = []
        for place, sequence in enumerate(prefills):
            contested = place + 1 < len(prefills) or bool(self.waiting)
            count = self._chunk(sequence, budget, contested=contested)
            budget -= count
            if count > 0:
                prompts.append(Work(sequence, count))
        decided = len(prompts)
        if preemptions == self.preemptions:  # what was just preempted would come straight back
            budget = self._admit(prompts, budget)
        admitted = [work.sequence for work in prompts[decided:]]
        for place, work in enumerate(prompts):  # what nobody else wanted
            more = self._chunk(work.sequence, work.count + budget, contested=False)
            if more > work.count:
                budget -= more - work.count
                prompts[place] = Work(work.sequence, more)
        return Plan(decodes + prompts, admitted)

    def _plan_decodes(self) -> list[Work]:
        decodes: list[Work] = []
        place = 0
        while place < len(self.running):  # preemption shortens it from the end
            sequence = self.running[place]
            if sequence.remaining == 1 and self._ensure_block(sequence):
                decodes.append(Work(sequence, 1))
            place += 1
        return decodes

    def _ensure_block(self, sequence: Sequence) -> bool:
        """Make room for one more token. False when the sequence itself had to go."""
        if len(sequence.blocks) * self.block_tokens > sequence.computed:
            return True
        while (blocks := self.pool.allocate(1)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []  # they start again with the prompt
        self.preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _chunk(self, sequence: Sequence, budget: int, *, contested: bool) -> int:
        wanted = sequence.remaining
        if sequence.prompt_logprobs is not None:
            wanted = min(wanted, PROMPT_LOGPROBS_CHUNK)
        if wanted <= budget:
            return wanted
        return (budget + 1) // 2 if contested else budget

    def _admit(self, prompts: list[Work], budget: int) -> int:
        """Let waiting sequences run while seats, budget and pool last; returns the rest of the budget."""
        reserved: int | None = None
        place = 0
        while budget > 0 and self._seats and place < min(len(self.waiting), LOOK_PAST):
            sequence = self.waiting[place]
            names = self._creditable(sequence)
            shared = self.pool.match(names)
            if len(shared) < len(names) and names[len(shared)] in self._computing:
                place += 1  # a running prompt is about to publish the next block: share it then
                continue
            if reserved is None:
                reserved = sum(self._blocks_to_come(other) for other in self.running)
            fresh = self._blocks(sequence.total) - len(shared)
            needed = fresh + self.pool.unreferenced(shared)
            if needed + (reserved if self.running else 0) > self.pool.available:
                break  # a smaller one behind it must not starve it
            self.waiting.pop(place)
            self._start(sequence, shared, fresh)
            reserved += self._blocks_to_come(sequence)
            count = self._chunk(sequence, budget, contested=place < len(self.waiting))
            budget -= count
            prompts.append(Work(sequence, count))
        return budget

    def _creditable(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that may come from the cache: never the one of the last token, whose
        logits choose the next one. With prompt log-probabilities none: every row is wanted.
        """
        if not self.prefix_cache or sequence.prompt_logprobs is not None:
            return []
        return sequence.names[: (sequence.total - 1) // self.block_tokens]

    def _start(self, sequence: Sequence, shared: list[int], fresh: int) -> None:
        self.pool.share(shared)
        blocks = self.pool.allocate(fresh)
        assert blocks is not None, "the caller counted"
        sequence.blocks = shared + blocks
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.block_tokens
        sequence.seat = self._seats.pop()
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)
        if self.prefix_cache:
            self._computing.update(sequence.names[sequence.published :])
        insort(self.running, sequence, key=_order)

    def _stop(self, sequence: Sequence) -> int:
        _take_out(self.running, sequence)
        assert sequence.seat is not None
        self._seats.append(sequence.seat)
        if self.prefix_cache:
            self._no_longer_computing(sequence.names[sequence.published :])
        released = len(sequence.blocks)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.seat = None
        sequence.computed = sequence.published = 0
        return released

    def append_names(self, sequence: Sequence, names: list[bytes]) -> None:
        """The tokens of a running sequence fill more blocks: these are their names."""
        assert sequence.seat is not None
        sequence.names += names
        self._computing.update(names)

    def publish(self, sequence: Sequence) -> bool:
        """Name the blocks that became full. True when `blocks` changed: another's copy is in use now."""
        full = sequence.computed // self.block_tokens
        if not self.prefix_cache or full == sequence.published:
            return False
        replaced = False
        for place in range(sequence.published, full):
            parent = sequence.names[place - 1] if place > 0 else None
            block = self.pool.publish(sequence.blocks[place], sequence.names[place], parent)
            replaced |= block != sequence.blocks[place]
            sequence.blocks[place] = block
        self._no_longer_computing(sequence.names[sequence.published : full])
        sequence.published = full
        return replaced

    def rename(self, sequence: Sequence, names: list[bytes]) -> None:
        """Use other names for the blocks of `sequence`, after `BlockPool.clear_names`."""
        if sequence.seat is not None:
            self._no_longer_computing(sequence.names[sequence.published :])
            if self.prefix_cache:
                self._computing.update(names)
        sequence.names = names
        sequence.published = 0

    def _no_longer_computing(self, names: list[bytes]) -> None:
        for name in names:
            left = self._computing[name] - 1
            if left > 0:
                self._computing[name] = left
            else:
                del self._computing[name]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that a running sequence is expected to ask for; at least one while it may ask at all."""
        expected = max(int(self._expected_answer), len(sequence.generated) + self.block_tokens)
        length = min(sequence.limit, sequence.prompt_len + expected)
        return max(self._blocks(length) - len(sequence.blocks), 0)

    def check(self) -> None:
        """Assert what must hold between steps, and that an idle scheduler holds nothing."""
        self.pool.check()
        assert self.running == sorted(self.running, key=_order), "running is not in order"
        assert self.waiting == sorted(self.waiting, key=_order), "waiting is not in order"
        seats = [sequence.seat for sequence in self.running]
        assert len({*seats, *self._seats}) == self.max_sequences, "a seat is taken twice or lost"
        held = sum(len(sequence.blocks) for sequence in self.running)
        assert held >= self.pool.used, "a block is held by nobody"
        if self.idle:
            assert self.pool.used == 0, "an idle worker holds blocks"
            assert not self._computing, "an idle worker computes blocks"


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    place = bisect_left(sequences, sequence.order, key=_order)
    assert sequences[place] is sequence
    del sequences[place]
