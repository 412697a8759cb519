"""Which tokens count, where answers end, how tokens are drawn and blocks named: against the same one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core

WORD = (1 << 64) - 1
seeds = st.integers(0, 1 << 32)


def finalised(x: int) -> int:
    """splitmix64, as it is published."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@given(st.lists(st.tuples(st.integers(0, WORD), st.integers(0, 2**63 - 1)), max_size=9))
def test_keys_are_those_of_splitmix64(pairs: list[tuple[int, int]]) -> None:
    seed = np.array([seed for seed, _ in pairs], np.uint64)
    position = np.array([position for _, position in pairs], np.int64)
    mixed = [finalised((finalised(seed) + position) & WORD) for seed, position in pairs]
    key, key2 = _core.noise_keys(seed, position)
    assert key.tolist() == [word & 0xFFFFFFFF for word in mixed]
    assert key2.tolist() == [word >> 32 for word in mixed]


@given(seeds)
def test_how_rows_are_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.random((3, 5)) * (rng.random((3, 5)) < 0.7)
    top_k = rng.integers(0, 9, 5)
    own_seeds = rng.integers(0, 1 << 63, 5).astype(np.uint64)
    columns = _core.SamplingColumns(numbers=numbers, top_k=top_k, seeds=own_seeds)
    of = rng.integers(0, 5, rng.integers(0, 9))
    positions = rng.integers(0, 999, len(of))
    best = np.where(rng.random(len(of)) < 0.2, np.inf, 1).astype(np.float32)
    best[rng.random(len(of)) < 0.1] = np.nan
    expected = ((numbers[0][of] > 0) & np.isfinite(best)).nonzero()[0].tolist()
    drawn = columns.drawn(of, best)
    assert (drawn is None) == (len(expected) == len(of))
    assert drawn is None or drawn.tolist() == expected
    draws = columns.draws(of, positions)
    temperature, top_p, min_p = numbers
    for column, of_rows in zip(draws[:4], (temperature, top_k, top_p, min_p), strict=True):
        assert column.tolist() == of_rows[of].tolist()
    keys = _core.noise_keys(own_seeds[of], positions)
    assert [draws[4].tolist(), draws[5].tolist()] == [key.tolist() for key in keys]


@given(seeds, st.integers(0, 9))
def test_answers_end_where_they_would_token_by_token(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 4, most)
    ids = rng.integers(-1, 5, rows.sum())
    drafts = rng.integers(0, 5, rows.sum()).astype(np.int32)
    totals = rng.integers(5, 9, most)
    limits = totals + rng.integers(1, 5, most)
    stops = rng.integers(3, 12, (most, int(rng.integers(0, 3))))
    more_stops: dict[int, frozenset[int]] = {
        row: frozenset({1, 2}) for row in range(most) if rng.random() < 0.2
    }
    kept, cut = _core.cut_answers(
        ids,
        rows=rows,
        drafts=drafts,
        totals=totals,
        limits=limits,
        stops=stops,
        more_stops=more_stops,
    )
    counts, told, finish, accepted = [], [], [], []
    for row, last in enumerate(rows.cumsum()):
        own, guessed = ids[last - rows[row] : last].tolist(), drafts[last - rows[row] : last]
        tokens: list[int] = []
        for place, token in enumerate(own):
            if token < 0:
                break
            tokens.append(token)
            if place + 1 == len(own) or guessed[place + 1] != token:
                break
        assert kept[row] == len(tokens)
        ends = more_stops.get(row, frozenset(stops[row].tolist()))
        stopped = next((i for i, token in enumerate(tokens) if token in ends), None)
        accepted.append(max(len(tokens) - 1, 0))
        if stopped is not None:
            tokens = tokens[: stopped + 1]
        accepted[-1] = min(accepted[-1], len(tokens))
        is_long = totals[row] + len(tokens) >= limits[row]
        finish.append(1 if stopped is not None else 2 if is_long else 0)
        told += tokens
        counts.append(len(tokens))
    assert cut[0].tolist() == told
    assert cut[1].tolist() == counts
    assert cut[2].tolist() == finish
    assert cut[2].dtype == np.int8
    assert cut[3].tolist() == (rows - 1).tolist()
    assert cut[4].tolist() == accepted


@given(st.integers(0, 5), st.integers(1, 5), seeds)
def test_blocks_are_named_as_one_by_one(blocks: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-(1 << 31), 1 << 31, (blocks, width)).astype(np.int32)
    key, parents = rng.bytes(32), [rng.bytes(16) for _ in range(blocks)]
    each = zip(tokens, parents, strict=True)
    expected = [
        _core.hash_blocks(own.astype("<i4").tobytes(), width, key, None, parent)[0]
        for own, parent in each
    ]
    assert _core.hash_next_blocks(tokens, key, parents) == expected


ONE = np.ones(1, np.int64)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ids": np.zeros(2, np.int64)}, "2 ids, but counts of 1"),
        ({"rows": -ONE}, "-1 ids of one row"),
        ({"rows": np.ones(2, np.int64)}, "1 ids, but counts of 2"),
        ({"drafts": np.zeros(2, np.int32)}, "drafts has 2 items, not 1"),
        ({"totals": np.zeros(0, np.int64)}, "totals has 0 items"),
        ({"limits": np.zeros(2, np.int64)}, "limits has 2 items"),
        ({"stops": np.zeros((2, 1), np.int64)}, "stops has 2 items"),
    ],
)
def test_answers_that_do_not_fit_together_are_refused(changed: dict[str, Any], says: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(("ids", "rows", "totals", "limits"), ONE)
    fields["drafts"] = np.zeros(1, np.int32)
    fields |= {"stops": np.zeros((1, 1), np.int64), "more_stops": {}}
    _core.cut_answers(**fields)
    with pytest.raises(ValueError, match=says):
        _core.cut_answers(**fields | changed)


def test_rows_and_lengths_that_are_wrong_are_refused() -> None:
    numbers, seed = np.zeros((3, 2)), np.zeros(2, np.uint64)
    columns = _core.SamplingColumns(numbers=numbers, top_k=np.zeros(2, np.int64), seeds=seed)
    best = np.zeros(1, np.float32)
    for row in (-1, 2):
        with pytest.raises(ValueError, match=f"batch row {row}, of 2"):
            columns.draws(ONE * row, ONE)
        with pytest.raises(ValueError, match=f"batch row {row}, of 2"):
            columns.drawn(ONE * row, best)
    with pytest.raises(ValueError, match="positions has 0 items, not 1"):
        columns.draws(ONE, ONE[:0])
    with pytest.raises(ValueError, match="best has 0 items, not 1"):
        columns.drawn(ONE, best[:0])
    with pytest.raises(ValueError, match="numbers of 3 x 2, but top_k and seeds of"):
        _core.SamplingColumns(numbers=numbers, top_k=ONE, seeds=seed)
    with pytest.raises(ValueError, match="positions has 1 items, not 2"):
        _core.noise_keys(seed, ONE)
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="parents has 2 items, not 1"):
        _core.hash_next_blocks(tokens, bytes(32), [bytes(16)] * 2)
    with pytest.raises(ValueError, match="parent must have 16 bytes, not 15"):
        _core.hash_next_blocks(tokens, bytes(32), [bytes(15)])
    with pytest.raises(ValueError, match="key must have 32 bytes, not 31"):
        _core.hash_next_blocks(tokens, bytes(31), [bytes(16)])
    with pytest.raises(ValueError, match="no tokens"):
        _core.hash_next_blocks(tokens[:, :0], bytes(32), [bytes(16)])
