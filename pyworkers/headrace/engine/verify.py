"""Which drafts were right, and so how many tokens a step gives each sequence.

A draft counts if it is the very token that was sampled at its place, each place with its own noise. So the text is the
one that would have come without drafts, however they were made and however many there were. The other way, which may
give another text of the same distribution, is `rejection.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engine.rows import places_of
from headrace.engine.sampler import Rows
from headrace.engine.sequence import Sequence
from headrace.frames import Finish, TokenLogprob


class Chosen(NamedTuple):
    """The tokens that a step gives a sequence; none where the logits were not finite."""

    sequence: Sequence
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish: Finish | None
    drafted: int
    accepted: int  # how many of `ids` were drafts


def kept(rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens of each sequence count: those that equal the next row's draft, and the one after them.

    0 where the first of `ids` is -1: no token at all. Such a token ends the run before it otherwise.
    """
    if len(ids) == len(rows.counts):  # no drafts
        return (ids >= 0).astype(np.int64)
    starts = rows.starts
    wrong = np.ones(len(ids), dtype=np.bool_)
    wrong[:-1] = ids[:-1] != rows.drafts[1:]
    wrong[starts + rows.counts - 1] = True
    ends = places_of(wrong)
    ends = ends[ends.searchsorted(starts)]  # the first of each sequence
    return ends - starts + (ids[ends] >= 0)


def choose(rows: Rows, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Chosen]:
    """The first `counts` tokens of each sequence, cut where its answer ends."""
    chosen: list[Chosen] = []
    every = ids.tolist()
    starts, drafted = rows.starts.tolist(), (rows.counts - 1).tolist()
    totals = rows.totals.tolist()
    for place, (sequence, count) in enumerate(zip(rows.sequences, counts.tolist(), strict=True)):
        start = starts[place]
        tokens = every[start : start + count]
        finish: Finish | None = None
        if sequence.stop_ids and not sequence.stop_ids.isdisjoint(tokens):
            for end, token in enumerate(tokens, 1):
                if token in sequence.stop_ids:
                    tokens, finish = tokens[:end], "stop"
                    break
        if finish is None and totals[place] + len(tokens) >= sequence.limit:
            finish = "length"
        accepted = min(max(count - 1, 0), len(tokens))
        chosen.append(Chosen(sequence, tokens, None, finish, drafted[place], accepted))
    return chosen
