"""The stages of a step on what it knows of batch rows do what numpy does, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _core

BLOCK = 4
BLOCKS = 8
ROWS = 5
STOPS = 3
DRAFTS = 3


class Columns:
    """What a step may find in batch rows."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.facts = np.zeros((8, ROWS), np.int64)
        self.prompt_len, self.limit, self.computed, self.total = self.facts[:4]
        self.drafted, self.keys_from, self.keys_to, self.filled = self.facts[4:]
        self.prompt_len[:] = rng.integers(1, 9, ROWS)
        self.total[:] = self.prompt_len + rng.integers(0, 5, ROWS)
        self.computed[:] = np.maximum(self.total - rng.integers(1, 4, ROWS), 0)
        self.limit[:] = self.total + rng.integers(0, 6, ROWS)
        self.drafted[:] = rng.integers(0, DRAFTS + 1, ROWS)
        self.filled[:] = rng.integers(2, BLOCKS + 1, ROWS)
        self.keys_to[:] = np.maximum(self.computed + rng.integers(-2, 2, ROWS), 1)
        self.keys_from[:] = rng.integers(1, 5, ROWS)
        self.flags = rng.random((3, ROWS)) < 0.7
        self.newest = rng.integers(0, 99, ROWS).astype(np.int32)
        self.stops = rng.integers(0, 99, (ROWS, STOPS))
        self.drafts = rng.integers(100, 199, (ROWS, DRAFTS)).astype(np.int32)
        self.blocks = rng.permutation(ROWS * BLOCKS).reshape(ROWS, BLOCKS).astype(np.int32)
        self.core = _core.InputColumns(
            facts=self.facts,
            flags=self.flags,
            newest=self.newest,
            stops=self.stops,
            drafts=self.drafts,
            blocks=self.blocks,
            block_tokens=BLOCK,
        )

    def some(self) -> NDArray[np.int64]:
        """Batch rows in any order, each at most once; at least one."""
        return self.rng.permutation(ROWS)[: self.rng.integers(1, ROWS + 1)]

    def slots(self, batch_rows: Any, positions: Any) -> list[int]:
        blocks = self.blocks[batch_rows, np.array(positions) // BLOCK].astype(np.int64)
        return (blocks * BLOCK + np.array(positions) % BLOCK).tolist()


seeds = st.integers(0, 1 << 32)


@given(seeds, st.booleans())
def test_a_batch(seed: int, on_device: bool) -> None:
    columns = Columns(seed)
    of, rng = columns.some(), columns.rng
    left = (columns.total - columns.computed)[of]
    counts = np.where(rng.random(len(of)) < 0.5, left, rng.integers(1, 4, len(of)))
    wanted = rng.integers(0, DRAFTS + 1, len(of))
    scores = rng.random(len(of)) < 0.3
    arrays, sampled, prompts, scored = columns.core.build(
        of, counts=counts, drafts=wanted, scores=scores, on_device=on_device
    )
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    starts, contexts, logit_rows = [0], [], []
    who, sampled_rows, unfilled = [], [], []
    for place, row in enumerate(of.tolist()):
        first, total = columns.computed[row], columns.total[row]
        stop = first + counts[place]
        newest = counts[place] == 1 and stop == total and total > columns.prompt_len[row]
        drafts = min(wanted[place], columns.drafted[row]) if newest else 0
        token = -1 - row if newest and on_device else columns.newest[row]
        tokens += [token] * counts[place] + columns.drafts[row, :drafts].tolist()
        positions += range(first, stop + drafts)
        owners += [row] * (counts[place] + drafts)
        if not newest:
            unfilled.append((place, first, stop, starts[-1]))
        if stop == total < columns.limit[row]:
            who.append(place)
            sampled_rows.append(1 + drafts)
            last = starts[-1] + counts[place] - 1
            logit_rows += range(last, last + drafts + 1)
        starts.append(len(tokens))
        contexts.append(stop + drafts)
    width = -(-max(contexts) // BLOCK)
    expected = [
        tokens,
        positions,
        columns.slots(owners, positions),
        starts,
        contexts,
        columns.blocks[of, :width].tolist(),
        logit_rows,
        columns.prompt_len[of].tolist(),
    ]
    assert [array.tolist() for array in arrays] == expected
    kinds = [np.int32] * 2 + [np.int64] + [np.int32] * 5
    assert [array.dtype for array in arrays] == kinds
    assert all(array.flags.c_contiguous for array in arrays)
    expected = [
        who,
        of[who].tolist(),
        sampled_rows,
        columns.total[of[who]].tolist(),
        [tokens[row] for row in logit_rows],
    ]
    assert [array.tolist() for array in sampled] == expected
    assert prompts == unfilled
    assert scored == scores.nonzero()[0].tolist()


@given(seeds)
def test_a_step_that_ends(seed: int) -> None:
    columns = Columns(seed)
    of, rng = columns.some(), columns.rng
    known = rng.integers(0, 5, len(of))
    sampled_of = of[rng.random(len(of)) < 0.7]
    rows = rng.integers(1, 4, len(sampled_of))
    ids = rng.integers(-1, 4, rows.sum())
    drafts = rng.integers(0, 4, rows.sum()).astype(np.int32)
    columns.stops[:] = rng.integers(2, 9, columns.stops.shape)
    more_stops = {int(row): frozenset({0, 3}) for row in of if rng.random() < 0.2}
    live = columns.core.live(of)
    assert (live is None) == bool(not columns.flags[1][of].any())
    assert live is None or live.tolist() == (~columns.flags[1][of]).tolist()
    expected_cut = _core.cut_answers(
        ids,
        rows=rows,
        drafts=drafts,
        totals=columns.total[sampled_of],
        limits=columns.limit[sampled_of],
        stops=columns.stops[sampled_of, :2],
        more_stops={
            place: more_stops[row]
            for place, row in enumerate(sampled_of.tolist())
            if row in more_stops
        },
    )
    facts, ended, newest = columns.facts.copy(), columns.flags[1].copy(), columns.newest.copy()
    facts[2][of] += known
    facts[4][of] = 0
    told, counts, finish, *_ = expected_cut[1]
    each = zip(sampled_of, counts, finish, counts.cumsum(), strict=True)
    for row, count, end, last in each:
        facts[3, row] += count
        facts[2, row] += max(count - 1, 0)
        ended[row] = end != 0 or count == 0
        if count:
            newest[row] = told[last - 1]
    put_off = [place for place, count in enumerate(counts.tolist()) if count == 0][::2]
    for row in sampled_of[put_off].tolist():
        facts[2, row] -= 1
        ended[row] = False
    cut, penalised = columns.core.settle(
        of,
        known,
        sampled_of=sampled_of,
        rows=rows,
        drafts=drafts,
        ids=ids,
        put_off=put_off,
        most_stops=2,
        more_stops=more_stops,
    )
    flat = [cut[0], *cut[1]]
    for column, expected in zip(flat, [expected_cut[0], *expected_cut[1]], strict=True):
        assert column.tolist() == expected.tolist()
        assert column.dtype == expected.dtype
    assert penalised == columns.flags[2][sampled_of].nonzero()[0].tolist()
    assert (columns.facts == facts).all()
    assert (columns.flags[1] == ended).all()
    assert (columns.newest == newest).all()
    after = columns.core.after(of)
    wanted = [facts[row][of].tolist() for row in (2, 4, 5, 6)]
    assert [column.tolist() for column in after] == wanted


@given(seeds, st.integers(0, STOPS))
def test_what_ends_answers(seed: int, most: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    limits, stops = columns.core.ends(of, most)
    assert limits.tolist() == columns.limit[of].tolist()
    assert stops.tolist() == columns.stops[of, :most].tolist()


@given(seeds)
def test_tables_grow(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    places, blocks, keys_from = columns.rng.integers(0, BLOCKS, (3, len(of)))
    table, facts = columns.blocks.copy(), columns.facts.copy()
    table[of, places] = blocks
    facts[7][of] = places + 1
    facts[5][of] = np.maximum(facts[5][of], keys_from)
    columns.core.grow(of, places, blocks, keys_from)
    assert (columns.blocks == table).all()
    assert (columns.facts == facts).all()


@given(seeds, st.integers(0, DRAFTS))
def test_who_may_draft(seed: int, most: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    after, total = columns.computed[of], columns.total[of]
    decodes = ~columns.flags[1][of] & columns.flags[0][of]
    decodes &= (total > columns.prompt_len[of]) & (total - after == 1)
    room = columns.filled[of] * BLOCK - after
    each = np.minimum(np.minimum(columns.limit[of] - total - 1, room), most)
    places, mosts = columns.core.drafting(of, most)
    assert places.tolist() == decodes.nonzero()[0].tolist()
    assert mosts.tolist() == np.maximum(each[decodes], 0).tolist()


@given(seeds, st.booleans())
def test_drafting_follows_a_step(seed: int, some_only: bool) -> None:
    columns = Columns(seed)
    of, rng = columns.some(), columns.rng
    before = columns.computed[of]
    counts = rng.integers(1, 4, len(of))
    seq_starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    owners = np.arange(len(of)).repeat(counts)
    positions = before[owners] + np.arange(len(owners)) - seq_starts[owners]
    tokens = rng.integers(200, 299, len(owners)).astype(np.int32)
    columns.computed[of] += counts
    columns.total[of] = columns.computed[of] + rng.integers(0, 3, len(of))
    drafts = rng.integers(0, DRAFTS, len(of))
    follows = rng.random(len(of)) < 0.6 if some_only else None

    facts = columns.facts.copy()
    chosen, stops, keys, rows = [], [], [], []
    expected_tokens: list[Any] = []
    hidden_from: list[Any] = []
    unknown: list[tuple[int, int, int]] = []
    for place, row in enumerate(of.tolist()):
        after, total, start = columns.computed[row], columns.total[row], before[place]
        room = columns.filled[row] * BLOCK
        stop = after + bool(not columns.flags[1][row] and total > after and room > after)
        if not (columns.keys_to[row] == start and start % BLOCK == 0 and start > 0):
            start += 1
        if (follows is not None and not follows[place]) or stop <= start:
            continue
        if columns.keys_to[row] < start:
            facts[5, row] = start
        facts[6, row] = stop
        for position in range(start, stop):
            in_batch = seq_starts[place] + position - before[place]
            if position == after:
                if total <= columns.prompt_len[row] or total - after > 1:
                    unknown.append((len(expected_tokens), place, position))
                expected_tokens.append(columns.newest[row])
            else:
                expected_tokens.append(tokens[in_batch])
            tail = columns.blocks[row, (position - 1) // BLOCK]
            hidden_from.append(-1 - tail if position == before[place] else in_batch - 1)
            rows.append((row, position))
        chosen.append(place)
        stops.append(stop)
        keys.append(facts[5, row])
    got = columns.core.follow(
        of,
        seq_starts=seq_starts,
        positions=positions.astype(np.int32),
        tokens=tokens,
        drafts=drafts,
        follows=follows,
    )
    assert got[0].tolist() == chosen
    assert got[1].tolist() == of[chosen].tolist()
    assert got[2].tolist() == stops
    assert got[3].tolist() == drafts[chosen].tolist()
    assert got[4][0].tolist() == [position for _, position in rows]
    if rows:
        assert got[4][1].tolist() == columns.slots(*zip(*rows, strict=True))
    lengths = np.bincount([row for row, _ in rows], minlength=ROWS)[of[chosen]]
    assert got[4][2].tolist() == [0, *lengths.cumsum()]
    assert got[4][3].tolist() == stops
    width = -(-max(stops, default=0) // BLOCK)
    assert got[4][4].tolist() == columns.blocks[of[chosen], :width].tolist()
    assert got[5].tolist() == expected_tokens
    assert got[6].tolist() == hidden_from
    assert got[7].tolist() == keys
    assert got[8] == unknown
    assert (columns.facts == facts).all()


@given(seeds)
def test_guesses_become_drafts(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    guesses = columns.rng.integers(0, 99, (len(of), DRAFTS))
    made = columns.rng.integers(0, DRAFTS + 1, len(of))
    columns.core.keep_drafts(of, guesses, made)
    assert (columns.drafts[of] == guesses).all()
    assert (columns.drafted[of] == made).all()


@pytest.mark.parametrize("row", [-1, ROWS, 1 << 40])
def test_a_batch_row_that_is_not_there_is_refused(row: int) -> None:
    columns = Columns(1)
    before, of = columns.facts.copy(), np.array([0, row])
    one, flags = np.ones(2, np.int64), np.ones(2, np.bool_)
    short = np.zeros(2, np.int32)

    def settle(computed: Any, sampled: Any) -> None:
        each = one[: len(sampled)]
        columns.core.settle(
            computed,
            one,
            sampled_of=sampled,
            rows=each,
            drafts=np.zeros(len(each), np.int32),
            ids=each,
            put_off=[],
            most_stops=1,
            more_stops={},
        )

    calls: list[Any] = [
        lambda: columns.core.live(of),
        lambda: columns.core.grow(of, one, one, one),
        lambda: columns.core.build(of, counts=one, drafts=one, scores=flags, on_device=False),
        lambda: columns.core.ends(of, 1),
        lambda: settle(of, one[:0]),
        lambda: settle(one, of),
        lambda: columns.core.after(of),
        lambda: columns.core.drafting(of, 1),
        lambda: columns.core.follow(
            of, seq_starts=np.zeros(3, np.int32), positions=short, tokens=short, drafts=one
        ),
        lambda: columns.core.draft_rows(of, one, one + 1),
        lambda: columns.core.keep_drafts(of, np.zeros((2, 1), np.int64), one),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"batch row {row}, of {ROWS}"):
            call()
    assert (columns.facts == before).all()


def test_rows_without_a_place_are_refused() -> None:
    columns = Columns(1)
    of, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    flags = np.zeros(1, np.bool_)
    for count, says in (
        (0, "0 rows from"),
        (-1, "-1 rows from"),
        (BLOCK * BLOCKS + 1, "no place"),
        (2**63 - 1, "no place"),
    ):
        with pytest.raises(ValueError, match=says):
            columns.core.build(of, counts=one * count, drafts=of, scores=flags, on_device=False)
    for start, stop, says in (
        (0, BLOCK * BLOCKS + 1, "no place"),
        (2, 2, "no rows from 2 to 2"),
        (-1, 2, "no rows from -1"),
    ):
        with pytest.raises(ValueError, match=says):
            columns.core.draft_rows(of, one * start, one * stop)
    with pytest.raises(ValueError, match=f"place of a block {BLOCKS}, of {BLOCKS}"):
        columns.core.grow(of, one * BLOCKS, one, one)
    with pytest.raises(ValueError, match="block 4294967296"):
        columns.core.grow(of, one, one << 32, one)
    columns.computed[0] = -3
    with pytest.raises(ValueError, match="from position -3"):
        columns.core.build(of, counts=one, drafts=of, scores=flags, on_device=False)
    columns.computed[0], columns.total[0], columns.prompt_len[0] = 4, 5, 2
    columns.drafted[0] = DRAFTS + 1
    with pytest.raises(ValueError, match="4 drafts, where 3 are kept"):
        columns.core.build(of, counts=one, drafts=one * 4, scores=flags, on_device=False)


def test_rows_of_a_step_that_are_not_there_are_refused() -> None:
    columns = Columns(1)
    of: Any = np.zeros(1, np.int64)
    good: dict[str, Any] = {
        "seq_starts": np.array([0, 1], np.int32),
        "positions": np.zeros(1, np.int32),
        "tokens": np.zeros(1, np.int32),
        "drafts": of,
    }
    columns.core.follow(of, **good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"seq_starts": np.array([1, 1], np.int32)}, "first row 1, of 1"),
        ({"seq_starts": np.array([-1, 1], np.int32)}, "first row -1"),
        ({"seq_starts": np.array([0], np.int32)}, "seq_starts has 1 items, not 2"),
        ({"positions": np.zeros(2, np.int32)}, "positions has 2 items, not 1"),
        ({"positions": np.array([-7], np.int32)}, "position -7"),
        ({"drafts": np.zeros(2, np.int64)}, "drafts has 2 items"),
        ({"follows": np.zeros(2, np.bool_)}, "follows has 2 items"),
    ]
    for changed, says in wrong:
        with pytest.raises(ValueError, match=says):
            columns.core.follow(of, **good | changed)
    with pytest.raises(TypeError):
        columns.core.follow(of, **{**good, "tokens": of})


def test_more_drafts_than_are_kept_are_refused() -> None:
    columns = Columns(1)
    of = np.zeros(1, np.int64)
    for width, made in ((DRAFTS + 1, 0), (2, 3), (2, -1)):
        with pytest.raises(ValueError, match=f"of {width} guesses, where {DRAFTS} are kept"):
            columns.core.keep_drafts(of, np.zeros((1, width), np.int64), of + made)
    with pytest.raises(ValueError, match="guesses has 2 items, not 1"):
        columns.core.keep_drafts(of, np.zeros((2, 1), np.int64), of)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"facts": np.zeros((7, ROWS), np.int64)}, "facts of"),
        ({"facts": np.zeros((8, ROWS + 1), np.int64)}, "facts of"),
        ({"flags": np.zeros((2, ROWS), np.bool_)}, "flags of"),
        ({"newest": np.zeros(ROWS - 1, np.int32)}, "newest, stops and drafts of"),
        ({"stops": np.zeros((ROWS + 1, 2), np.int64)}, "newest, stops and drafts of"),
        ({"drafts": np.zeros((1, 2), np.int32)}, "newest, stops and drafts of"),
        ({"blocks": np.zeros((2, ROWS), np.int32).T}, "C-contiguous"),
        ({"block_tokens": 0}, "blocks of no tokens"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changed: dict[str, Any], says: str) -> None:
    arrays: dict[str, Any] = {
        "facts": np.zeros((8, ROWS), np.int64),
        "flags": np.zeros((3, ROWS), np.bool_),
        "newest": np.zeros(ROWS, np.int32),
        "stops": np.zeros((ROWS, 2), np.int64),
        "drafts": np.zeros((ROWS, 1), np.int32),
        "blocks": np.zeros((ROWS, 2), np.int32),
        "block_tokens": 4,
    }
    _core.InputColumns(**arrays)
    with pytest.raises(ValueError, match=says):
        _core.InputColumns(**arrays | changed)
