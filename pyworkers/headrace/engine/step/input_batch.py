"""What steps know of the sequences with a batch row: arrays by batch row, so that a step walks no lists.

Steps run one after the other, while the engine does other things with the sequences. What it did reaches a step with
its order (`AddedRow`, `TableUpdate`); what steps did is here at once for the next one, and for the engine once a step
is finished. So a step can be prepared before the one ahead of it has chosen its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.sequence import Sequence
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.rows import places_of

STOPS = 8  # stop tokens of a sequence that are looked at for all batch rows at once. A guess
NO_STOP = -2  # no token, and not what stands for one that could not be chosen


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A sequence took a batch row, with what it was then."""

    sequence: Sequence
    batch_row: int
    computed: int
    total: int
    newest: int
    keys_from: int
    keys_to: int
    generated: list[int]  # where it has rules, which begin with them

    @staticmethod
    def of(sequence: Sequence) -> AddedRow:
        assert sequence.batch_row is not None
        return AddedRow(
            sequence,
            sequence.batch_row,
            sequence.computed,
            sequence.total,
            sequence.generated[-1] if sequence.generated else 0,
            sequence.keys_from,
            sequence.keys_to,
            [] if sequence.rules is None else list(sequence.generated),
        )


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The blocks of a batch row from `place` on are `blocks`: more of them, or others with the same contents."""

    batch_row: int
    place: int
    blocks: list[int]
    keys_from: int  # of those; see `InputBatch`


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends the answers of some sequences."""

    limits: Ints  # [rows], of their tokens
    stops: Ints  # [rows, some]
    more_stops: dict[int, frozenset[int]]  # by row, where these are too few


@dataclass(frozen=True, slots=True)
class GrownTables:
    """The tables of these batch rows have one block more, at `places`. All are `[grown]`."""

    batch_rows: Ints
    places: Ints
    blocks: Ints
    keys_from: Ints


class InputBatch:
    """Counts are in tokens, as in `Sequence`. A step reads and writes the batch rows of its own work only."""

    def __init__(
        self, *, block_tokens: int, max_sequences: int, max_blocks: int, drafts: int
    ) -> None:
        self.block_tokens = block_tokens
        facts = np.zeros((8, max_sequences), dtype=np.int64)
        self.prompt_len, self.limit, self.computed, self.total = facts[:4]
        self.drafted = facts[4]  # how many drafts there are
        self.keys_from, self.keys_to = facts[5:7]  # positions with keys in the drafting layer
        self._filled = facts[7]
        # `answers`: here, and not on another worker. `ended`: it has its last token, or failed.
        flags = np.zeros((3, max_sequences), dtype=np.bool_)
        self.answers, self.ended, self.penalised = flags
        self.newest = np.zeros(max_sequences, dtype=np.int32)  # the last token, where it answers
        self._stops = np.full((max_sequences, STOPS), NO_STOP, dtype=np.int64)
        self._most_stops = 0  # that anybody had, up to `STOPS`
        self._more_stops: dict[
            int, frozenset[int]
        ] = {}  # of the batch rows where these are too few
        self.drafts = np.zeros((max_sequences, max(drafts, 1)), dtype=np.int32)
        self._blocks = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self.core = _core.InputColumns(
            facts=facts,
            flags=flags,
            newest=self.newest,
            stops=self._stops,
            drafts=self.drafts,
            blocks=self._blocks,
            block_tokens=block_tokens,
        )

    def take(self, placed: AddedRow) -> None:
        """Another sequence has this batch row; its table follows."""
        sequence, batch_row = placed.sequence, placed.batch_row
        self.prompt_len[batch_row], self.limit[batch_row] = sequence.prompt_len, sequence.limit
        self.computed[batch_row], self.total[batch_row] = placed.computed, placed.total
        self.newest[batch_row] = placed.newest
        self.answers[batch_row] = sequence.export_lease_ms is None
        self.ended[batch_row] = False
        self.penalised[batch_row] = sequence.follows_tokens
        self._stops[batch_row] = NO_STOP
        self._more_stops.pop(batch_row, None)
        if len(sequence.stop_ids) > STOPS:
            self._more_stops[batch_row] = sequence.stop_ids
        else:
            self._stops[batch_row, : len(sequence.stop_ids)] = list(sequence.stop_ids)
            self._most_stops = max(self._most_stops, len(sequence.stop_ids))
        self.drafted[batch_row] = 0
        self.keys_from[batch_row], self.keys_to[batch_row] = placed.keys_from, placed.keys_to
        self._blocks[batch_row] = 0
        self._filled[batch_row] = 0

    def table(self, table: TableUpdate) -> None:
        """The blocks of a batch row changed."""
        batch_row, stop = table.batch_row, table.place + len(table.blocks)
        self._blocks[batch_row, table.place : stop] = table.blocks
        self._filled[batch_row] = stop
        self.keys_from[batch_row] = max(self.keys_from[batch_row], table.keys_from)

    def grow(self, grown: GrownTables) -> None:
        """What `table` does, for one block of each."""
        if len(grown.batch_rows):
            self.core.grow(grown.batch_rows, grown.places, grown.blocks, grown.keys_from)

    def ends(self, batch_rows: Ints) -> Ends:
        """Of those who have these batch rows now; the batch rows may be others' when it is asked."""
        more = {
            row: stops
            for batch_row, stops in self._more_stops.items()
            for row in places_of(batch_rows == batch_row).tolist()
        }
        limits, stops = self.core.ends(batch_rows, self._most_stops)
        return Ends(limits, stops, more)

    def settle(
        self,
        batch_rows: Ints,
        known: Ints,
        *,
        sampled_of: Ints,
        rows: Ints,
        drafts: NDArray[np.int32],
        ids: Ints,
        put_off: list[int],
    ) -> tuple[tuple[Ints, tuple[Ints, Ints, NDArray[np.int8], Ints, Ints]], list[int]]:
        """All sequences have their new tokens, and the KV of all but the newest. Those at the places `put_off` got no
        token, and compute their newest one again.

        Of `ids` each of `sampled_of` has so many `rows`, all but the first on drafts. Returns how many tokens of each
        count if its answer does not end before; the columns of `ChosenRows`; and the places of those with penalties.
        """
        return self.core.settle(
            batch_rows,
            known,
            sampled_of=sampled_of,
            rows=rows,
            drafts=drafts,
            ids=ids,
            put_off=put_off,
            most_stops=self._most_stops,
            more_stops=self._more_stops,
        )

    def blocks(self, batch_rows: Ints, positions: NDArray[np.integer]) -> Ints:
        """The block of each position of its batch row."""
        return self._blocks[batch_rows, positions // self.block_tokens].astype(np.int64)
