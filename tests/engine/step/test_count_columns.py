"""The stages of a step on the engine's counts do what numpy does, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core
from headrace.engine.step import row_counts

BLOCK = 4
WIDTH = 16
ROWS = 6
DEFAULTS: dict[str, Any] = {
    "starts": np.zeros(1, np.int64),
    "counts": np.ones(1, np.int64),
    "drafts": np.zeros(1, np.int64),
    "chooses": np.ones(1, np.bool_),
    "decodes": np.ones(1, np.bool_),
}


class Columns:
    """Counts as no engine has them: any number that a count may be, in every row."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.counts = rng.integers(0, 12, (row_counts.COUNTS, ROWS))
        self.counts[row_counts.TOTAL] += 8
        self.counts[row_counts.PENDING_TOKENS] %= 2
        self.counts[row_counts.PENDING_ROWS] %= 3
        self.counts[row_counts.COMPUTED] = self.counts[row_counts.TOTAL] - rng.integers(0, 4, ROWS)
        self.counts[row_counts.HELD] = self.counts[row_counts.TOTAL] // BLOCK + rng.integers(
            0, 3, ROWS
        )
        self.facts = rng.integers(1, 24, (4, ROWS))
        self.facts[2] = rng.integers(0, 2, ROWS)  # links
        self.flags = rng.random((3, ROWS)) < 0.8
        self.requests = rng.integers(0, 1 << 63, ROWS).astype(np.uint64)
        self.recent = rng.integers(0, 99, (ROWS, WIDTH)).astype(np.int32)
        self.rng = rng
        self.core = _core.CountColumns(
            counts=self.counts,
            facts=self.facts,
            flags=self.flags,
            requests=self.requests,
            recent=self.recent,
            block_tokens=BLOCK,
        )
        self.length = self.counts[row_counts.TOTAL] + self.counts[row_counts.PENDING_TOKENS]
        self.reached = self.counts[row_counts.COMPUTED] + self.counts[row_counts.PENDING_ROWS]
        self.limit = self.facts[1]

    def some(self) -> Any:
        """Batch rows in any order, each at most once."""
        return self.rng.permutation(ROWS)[: self.rng.integers(0, ROWS + 1)]


seeds = st.integers(0, 1 << 32)


@given(seeds)
def test_a_plan(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    remaining = (columns.length - columns.reached)[of]
    pending = columns.counts[row_counts.PENDING_TOKENS][of] > 0
    decode = (remaining == 1) & ~(pending & (columns.length >= columns.limit)[of])
    last = columns.reached + columns.counts[row_counts.PENDING_DRAFTS]
    last = np.minimum(last, columns.limit - 1)
    missing = (last // BLOCK + 1 - columns.counts[row_counts.HELD])[of[decode]]
    decodes, prefills, full, most = columns.core.plan(of)
    assert (decodes is None) == bool(decode.all())
    assert (of if decodes is None else decodes).tolist() == of[decode].tolist()
    assert prefills == of[remaining > 1].tolist()
    assert full.tolist() == of[decode][missing > 0].tolist()
    assert most == max(0, *missing, 0)
    held = columns.counts[row_counts.HELD].copy()
    held[full] += 1
    columns.core.hold(full)
    assert (columns.counts[row_counts.HELD] == held).all()


@given(seeds, st.integers(0, 12), st.integers(1, 3))
def test_room_for_drafts(seed: int, rows: int, most: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    there = columns.counts[row_counts.DRAFTS]
    more = np.maximum(np.minimum(there + 1, columns.limit - columns.length - 1), 0)
    wanted = np.where(columns.counts[row_counts.PENDING_ROWS] == 0, there, more)[of]
    each = most
    while each > 0 and np.minimum(wanted, each).sum() > rows:
        each -= 1
    expected = np.minimum(wanted, each)
    before = (columns.length + columns.counts[row_counts.PENDING_DRAFTS])[of]
    held, exports = columns.counts[row_counts.HELD][of], columns.flags[0][of]
    lacks = (before + expected + most > held * BLOCK) | exports
    missing = -(-np.minimum(before + expected + most, columns.limit[of]) // BLOCK) - held
    missing[exports | ~lacks] = 0
    drafts, lacking, full, greatest = columns.core.lookahead(of, rows, most)
    assert drafts.tolist() == expected.tolist()
    assert lacking.tolist() == lacks.nonzero()[0].tolist()
    assert full.tolist() == of[missing > 0].tolist()
    assert greatest == max(0, *missing, 0)
    room = np.where(exports, 0, held * BLOCK - before)
    fits = np.maximum(np.minimum(expected, room), 0)
    assert columns.core.with_room(of, drafts).tolist() == fits.tolist()


@given(seeds)
def test_one_token_of_each(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    epochs, starts, counts, decodes, chooses, special = columns.core.decoding(of)
    assert epochs.tolist() == columns.facts[3][of].tolist()
    assert starts.tolist() == columns.reached[of].tolist()
    assert counts.tolist() == [1] * len(of)
    assert decodes.tolist() == (starts + 1 > columns.facts[0][of]).tolist()
    assert chooses.tolist() == (starts + 1 < columns.limit[of]).tolist()
    assert special == (~columns.flags[1][of]).nonzero()[0].tolist()


@given(seeds)
def test_work_is_ordered(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    table = columns.counts[row_counts.BLOCKS_IN_TABLE]
    table[:] = columns.counts[row_counts.HELD] - columns.rng.integers(-1, 3, ROWS)
    starts, counts, drafts = columns.rng.integers(0, 9, (3, len(of)))
    chooses, decodes = columns.rng.random((2, len(of))) < 0.5
    expected, more = columns.counts.copy(), (columns.counts[row_counts.HELD] - table)[of]
    expected[row_counts.PENDING_ROWS][of] += counts
    expected[row_counts.PENDING_TOKENS][of] += chooses
    expected[row_counts.PENDING_DRAFTS][of] += drafts
    one = of[more == 1]
    expected[row_counts.BLOCKS_IN_TABLE][one] += 1
    places, keys_from = table[one].tolist(), columns.counts[row_counts.KEYS_FROM][one].tolist()
    grown = columns.core.begin(
        of, starts=starts, counts=counts, drafts=drafts, chooses=chooses, decodes=decodes
    )
    assert [column.tolist() for column in grown[:3]] == [one.tolist(), places, keys_from]
    assert grown[3] == of[more > 1].tolist()
    assert grown[4] == columns.flags[0][of].nonzero()[0].tolist()
    assert grown[5] == np.count_nonzero(decodes)
    assert grown[6] == (starts + counts + drafts).sum()
    assert (columns.counts == expected).all()


@given(seeds)
def test_work_has_ended(seed: int) -> None:
    columns = Columns(seed)
    of, rng = columns.some(), columns.rng
    epochs = columns.facts[3][of] + (rng.random(len(of)) < 0.2)
    places = (rng.random(len(of)) < 0.7).nonzero()[0]
    new_tokens = rng.integers(0, 4, len(places))
    columns.counts[row_counts.LISTED] = columns.counts[row_counts.TOTAL] - rng.integers(0, 17, ROWS)
    is_there = columns.flags[2][of] & (columns.facts[3][of] == epochs)
    there, to_list = columns.core.still_there(of, epochs, places, new_tokens)
    assert (there is None) == bool(is_there.all())
    assert there is None or there.tolist() == is_there.tolist()
    rows, stay = of[places], is_there[places]
    unlisted = (columns.counts[row_counts.TOTAL] - columns.counts[row_counts.LISTED])[rows]
    assert to_list == rows[stay & (unlisted + new_tokens > WIDTH)].tolist()

    counts, drafts, computed, drafted, keys_from, keys_to = rng.integers(0, 30, (6, len(of)))
    chooses = rng.random(len(of)) < 0.5
    ids = rng.integers(0, 1 << 20, new_tokens.sum())
    expected, ring, rest = columns.counts.copy(), columns.recent.copy(), ids.tolist()
    for row, count, stays in zip(rows, new_tokens, stay, strict=True):
        own, rest = rest[:count], rest[count:]
        for token in own if stays else []:
            ring[row, expected[row_counts.TOTAL, row] % WIDTH] = token
            expected[row_counts.TOTAL, row] += 1
    here = of[is_there]
    expected[row_counts.COMPUTED][here] = computed[is_there]
    expected[row_counts.DRAFTS][here] = drafted[is_there]
    expected[row_counts.PENDING_ROWS][here] -= counts[is_there]
    expected[row_counts.PENDING_TOKENS][here] -= chooses[is_there]
    expected[row_counts.PENDING_DRAFTS][here] -= drafts[is_there]
    old = expected[row_counts.KEYS_FROM][here]
    expected[row_counts.KEYS_FROM][here] = np.maximum(old, keys_from[is_there])
    expected[row_counts.KEYS_TO][here] = keys_to[is_there]
    columns.core.take_in(
        of,
        there=there,
        counts=counts,
        chooses=chooses,
        drafts=drafts,
        computed=computed,
        drafted=drafted,
        keys_from=keys_from,
        keys_to=keys_to,
        places=places,
        new_tokens=new_tokens,
        ids=ids,
    )
    assert (columns.counts == expected).all()
    assert (columns.recent == ring).all()


@given(seeds, st.booleans())
def test_blocks_that_are_full(seed: int, prompts_only: bool) -> None:
    columns = Columns(seed)
    of = columns.some()
    columns.counts[row_counts.PUBLISHED] %= 5
    whole = columns.counts[row_counts.COMPUTED]
    if prompts_only:
        whole = np.minimum(whole, columns.facts[0])
    full, published = whole // BLOCK, columns.counts[row_counts.PUBLISHED]
    due = of[(full != published)[of]]
    unread = columns.counts[row_counts.TOTAL] - published * BLOCK
    follows = (full == published + 1) & (published > 0) & (unread <= WIDTH) & ~columns.flags[0]
    rows, places, which = columns.core.filled(of, prompts_only)
    assert rows.tolist() == due.tolist()
    assert places.tolist() == published[due].tolist()
    assert which == follows[due].tolist()


@given(seeds, st.booleans())
def test_who_is_told_what(seed: int, all_there: bool) -> None:
    columns = Columns(seed)
    of, rng = columns.some(), columns.rng
    places = (rng.random(len(of)) < 0.7).nonzero()[0]
    there = None if all_there else rng.random(len(of)) < 0.8
    finish = rng.integers(0, 3, len(places)).astype(np.int8) * (rng.random() < 0.5)
    counts = rng.integers(0, 3, len(places))
    rows = of[places]
    expected = columns.flags[1][rows] & (finish == 0) & (counts > 0)
    if there is not None:
        expected &= there[places]
    drafted, accepted = rng.integers(0, 9, (2, len(places)))
    plain, links, requests, link, sums = columns.core.told(
        of,
        places,
        there,
        finish=finish.astype(np.int8),
        counts=counts,
        drafted=drafted,
        accepted=accepted,
    )
    assert sums == [drafted.sum(), accepted.sum()]
    assert (plain is None) == bool(expected.all())
    assert plain is None or plain.tolist() == expected.tolist()
    assert links.tolist() == columns.facts[2][rows].tolist()
    assert requests.tolist() == columns.requests[rows].tolist()
    assert link == (links[0] if len({*links.tolist()}) == 1 else None)


@given(seeds)
def test_tokens_of_a_block(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    places = columns.rng.integers(0, 99, len(of))
    rings = columns.recent.reshape(ROWS, WIDTH // BLOCK, BLOCK)
    expected = rings[of, places % (WIDTH // BLOCK)]
    assert columns.core.block_at(of, places).tolist() == expected.tolist()


@given(seeds)
def test_tokens_of_prompts(seed: int) -> None:
    columns = Columns(seed)
    of = columns.some()
    total = columns.counts[row_counts.TOTAL][of]
    remaining = total - columns.counts[row_counts.COMPUTED][of]
    decode = (remaining <= 1) & (total > columns.facts[0][of])
    assert columns.core.prompt_tokens(of) == remaining[~decode].sum()


@pytest.mark.parametrize("row", [-1, ROWS, 1 << 40, -(1 << 63)])
def test_a_batch_row_that_is_not_there_is_refused(row: int) -> None:
    columns = Columns(1)
    before, of = columns.counts.copy(), np.array([0, row])
    one, none = np.ones(2, np.int64), np.zeros(0, np.int64)
    flags = np.ones(2, np.bool_)
    after = dict.fromkeys(("computed", "drafted", "keys_from", "keys_to"), one)
    work: dict[str, Any] = {"counts": one, "drafts": one, "chooses": flags}
    calls: list[Any] = [
        lambda: columns.core.plan(of),
        lambda: columns.core.hold(of),
        lambda: columns.core.lookahead(of, 4, 1),
        lambda: columns.core.with_room(of, one),
        lambda: columns.core.decoding(of),
        lambda: columns.core.begin(of, starts=one, decodes=flags, **work),
        lambda: columns.core.still_there(of, one, none, none),
        lambda: columns.core.take_in(
            of, there=None, places=none, new_tokens=none, ids=none, **work, **after
        ),
        lambda: columns.core.filled(of, False),
        lambda: columns.core.told(
            of,
            none,
            None,
            finish=none.astype(np.int8),
            counts=none,
            drafted=none,
            accepted=none,
        ),
        lambda: columns.core.block_at(of, one),
        lambda: columns.core.prompt_tokens(of),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"batch row {row}, of {ROWS}"):
            call()
    assert (columns.counts == before).all()


def test_columns_of_other_lengths_are_refused() -> None:
    columns = Columns(1)
    before = columns.counts.copy()
    of, two = np.zeros(1, np.int64), np.ones(2, np.int64)
    for name in ("starts", "counts", "drafts", "chooses", "decodes"):
        wrong: Any = np.ones(2, DEFAULTS[name].dtype)
        with pytest.raises(ValueError, match=f"{name} has 2 items, not 1"):
            columns.core.begin(of, **{**DEFAULTS, name: wrong})
    with pytest.raises(ValueError, match="epochs has 2 items, not 1"):
        columns.core.still_there(of, two, of, of)
    with pytest.raises(ValueError, match="place 1, of 1"):
        columns.core.still_there(of, of, np.ones(1, np.int64), of)
    with pytest.raises(ValueError, match="drafts has 2 items"):
        columns.core.with_room(of, two)
    work: dict[str, Any] = {name: DEFAULTS[name] for name in ("counts", "drafts", "chooses")}
    work |= dict.fromkeys(("computed", "drafted", "keys_from", "keys_to"), of)
    for new_tokens, ids, says in (
        ([2], [5], "1 ids, but counts of 2"),
        ([-1], [], "-1 ids of one row"),
        ([1 << 62], [], "0 ids, but counts of"),
        ([1, 1], [5, 5], "new_tokens has 2 items, not 1"),
    ):
        with pytest.raises(ValueError, match=says):
            columns.core.take_in(
                of,
                there=None,
                places=of,
                new_tokens=np.array(new_tokens, np.int64),
                ids=np.array(ids, np.int64),
                **work,
            )
    assert (columns.counts == before).all()


def test_arrays_of_other_types_and_orders_are_refused() -> None:
    columns = Columns(1)
    with pytest.raises(TypeError):
        columns.core.plan(np.zeros(1, np.int32))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        columns.core.plan([0])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        columns.core.plan(np.zeros((1, 1), np.int64))
    with pytest.raises((TypeError, ValueError), match="contiguous"):
        columns.core.plan(np.zeros(4, np.int64)[::2])
    columns.counts[0] = np.arange(ROWS)
    with pytest.raises(ValueError, match="array of the step"):
        columns.core.plan(columns.counts[0])  # it is written to


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"counts": np.zeros((11, ROWS), np.int64)}, "counts, facts and flags of"),
        ({"facts": np.zeros((4, ROWS + 1), np.int64)}, "counts, facts and flags of"),
        ({"flags": np.zeros((2, ROWS), np.bool_)}, "counts, facts and flags of"),
        ({"requests": np.zeros(ROWS - 1, np.uint64)}, "requests"),
        ({"recent": np.zeros((ROWS, 6), np.int32)}, "6 tokens a row"),
        ({"recent": np.zeros((ROWS, 0), np.int32)}, "0 tokens a row"),
        ({"counts": np.zeros((ROWS, 12), np.int64).T}, "C-contiguous"),
        ({"block_tokens": 0}, "blocks have 0"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changed: dict[str, Any], says: str) -> None:
    arrays: dict[str, Any] = {
        "counts": np.zeros((12, ROWS), np.int64),
        "facts": np.zeros((4, ROWS), np.int64),
        "flags": np.zeros((3, ROWS), np.bool_),
        "requests": np.zeros(ROWS, np.uint64),
        "recent": np.zeros((ROWS, 8), np.int32),
        "block_tokens": 4,
    }
    _core.CountColumns(**arrays)
    with pytest.raises(ValueError, match=says):
        _core.CountColumns(**arrays | changed)
