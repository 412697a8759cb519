"""KV that this worker pulls from another one: what a sequence waits for before it can decode.

An arriving sequence holds nothing until its ticket is there. Then it waits for blocks in order with all others; once it
has them, a mover writes what the prefix cache lacks. It decodes when the KV is there and the first tokens are. Where
the pull fails, or nothing comes, it computes its prompt like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.cache.publishing import Publishing
from headrace.engine.sequence import Key, Sequence, Stage
from headrace.engine.stages import Stages


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Blocks are reserved: pull them, then say `Engine.pulled` or `Engine.pull_failed`.

    `wanted` may be empty, where the prefix cache has it all; the source still waits for its release.
    """

    key: Key
    wanted: list[tuple[int, int]]  # (place in the sequence, block here), places ascending
    tokens: int  # whose KV the source has; the last block may be full in part


@dataclass(slots=True)
class KvImport:
    """What is known of the pull of one sequence."""

    tokens: int  # whose KV comes: the prompt, and what was generated before this leg
    timeout_s: float  # from `going` on
    ticket: bool = False
    going: bool = False  # the first tokens are there, or none come
    alone: bool = False  # nothing comes, or nothing good: compute it here
    written: bool = False  # a mover may write to its blocks
    arrived: bool = False  # the KV is whole
    pull_by_s: float | None = None  # later than that it is not worth waiting for


class KvImports:
    """Moves arriving sequences from stage to stage."""

    def __init__(self, stages: Stages, publishing: Publishing) -> None:
        self._stages = stages
        self._publishing = publishing
        self._outside: set[Sequence] = set()  # they hold nothing and wait for a frame
        self._reserved: list[Sequence] = []  # their pulls were not taken yet

    @property
    def outside(self) -> int:
        """How many sequences are here that the scheduler does not know."""
        return len(self._outside)

    def expect(self, sequence: Sequence) -> None:
        """A new one."""
        self._outside.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It is over. Its blocks are the caller's business."""
        self._outside.discard(sequence)

    def ticket(self, sequence: Sequence) -> None:
        """The ticket is there: it waits for blocks. Nothing of one that has it, or needs it no more."""
        kv_import = sequence.kv_import
        if kv_import is None or kv_import.ticket or kv_import.alone:
            return
        kv_import.ticket = True
        self._outside.remove(sequence)
        self._stages.wait(sequence)

    def reserved(self, sequences: list[Sequence]) -> None:
        """They have their blocks."""
        self._reserved += sequences

    def take_pulls(self) -> list[PullRequest]:
        """From now on somebody may write to the blocks of these."""
        pulls: list[PullRequest] = []
        for sequence in self._reserved:
            kv_import = sequence.kv_import
            if sequence.stage is not Stage.PARKED or kv_import is None:
                continue  # it ended, or computes its prompt
            kv_import.written = True
            wanted = [*enumerate(sequence.blocks)][sequence.published :]
            pulls.append(PullRequest(sequence.key, wanted, kv_import.tokens))
        self._reserved = []
        return pulls

    def go_on(self, sequence: Sequence, generated: list[int], now_s: float) -> None:
        """These are the first tokens; none means that nothing comes. Nothing of one that has them."""
        kv_import = sequence.kv_import
        if kv_import is None or kv_import.going:
            return
        kv_import.going = True
        kv_import.pull_by_s = now_s + kv_import.timeout_s
        sequence.add(generated)
        if sequence.penalties is not None:
            for token in generated:
                sequence.penalties.add(token)
        if not generated:
            kv_import.alone = True
            if sequence.sampling.prompt_logprobs is not None and not sequence.generated:
                sequence.prompt_logprobs = []  # nobody else gives them
        if kv_import.alone and not kv_import.written:
            self.compute(sequence)
        elif kv_import.arrived:
            self._ready(sequence)

    def pulled(self, sequence: Sequence) -> None:
        """All KV is there."""
        kv_import = sequence.kv_import
        if kv_import is None or not kv_import.written:
            return
        kv_import.written = False
        sequence.computed = sequence.keys_to = kv_import.tokens
        self._publishing.publish(sequence)
        self._stages.changed()  # it may be what somebody lacks
        if kv_import.alone:
            self.compute(sequence)  # it finds in the cache what was pulled
        elif kv_import.going:
            self._ready(sequence)
        else:
            kv_import.arrived = True

    def failed(self, sequence: Sequence) -> None:
        """The KV does not come, or counts for nothing. Until the first tokens are known there is nothing to do."""
        kv_import = sequence.kv_import
        if kv_import is None or kv_import.arrived:
            return
        kv_import.written = False
        kv_import.alone = True
        if kv_import.going:
            self.compute(sequence)
            return
        self._stages.remove(sequence)
        self._outside.add(sequence)

    def compute(self, sequence: Sequence) -> None:
        """From now on it is a sequence like any other, and waits for its turn."""
        self._outside.discard(sequence)
        self._stages.remove(sequence)
        sequence.kv_import = None
        self._stages.wait(sequence)

    def _ready(self, sequence: Sequence) -> None:
        sequence.kv_import = None
        self._stages.unpark(sequence)
