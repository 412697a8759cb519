"""Tokens that a request forbids: all but those it allows, and the last ones of banned words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.errors import RequestError
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits_processors import Context, edit
from headrace.engine.sampling.sampler import Sampler, check_sampling
from headrace.engine.sampling.token_limits import AnswerLimits
from headrace.engine.sequence import Key, Sequence
from headrace.wire.frames import Ranked, Sampling, TokenLimits
from helpers.engine.sampling_rows import one_each, take_row

VOCAB = 16


def limits_of(words: list[list[int]], allowed: list[int] | None = None) -> TokenLimits:
    banned = [token for word in words for token in word]
    return TokenLimits(allowed or [], banned, [len(word) for word in words])


def sequence_of(
    sampling: Sampling, *, generated: list[int] | None = None, batch_row: int = 0
) -> Sequence:
    answer = generated or []
    assert sampling.limits is not None
    return Sequence(
        key=Key(0, batch_row),
        arrival=batch_row,
        priority=0,
        prompt=np.array([1, 2, 3], dtype=np.int32),
        listed=answer,
        limit=1 << 20,
        sampling=sampling,
        stop_ids=frozenset(),
        salt=b"",
        deadline_s=None,
        names=[],
        limits=AnswerLimits(sampling.limits, answer),
        batch_row=batch_row,
    )


def chosen(logits: list[float], sequences: list[Sequence]) -> list[int]:
    sampler = Sampler(VOCAB, len(sequences))
    for sequence in sequences:
        take_row(sampler, sequence)
    rows = torch.tensor([logits] * len(sequences), dtype=torch.float32)
    return sampler.sample(logits_of(rows), one_each(sequences)).ids.tolist()


RISING = [float(token) for token in range(VOCAB)]


def test_only_allowed_tokens_are_chosen_whatever_else_is_asked_for() -> None:
    for sampling in (
        Sampling(limits=limits_of([], [3, 5])),
        Sampling(limits=limits_of([[5]], [3, 5, 4])),
        Sampling(temperature=2.0, seed=7, limits=limits_of([], [3, 5])),
        Sampling(temperature=1.0, top_k=9, seed=7, limits=limits_of([], [3, 5])),
        Sampling(logit_bias=[Ranked(9, 100.0)], limits=limits_of([], [3, 5])),
    ):
        assert sampling.limits is not None
        ids = chosen(RISING, [sequence_of(sampling, batch_row=row) for row in range(3)])
        assert set(ids) <= {3, 4, 5}
    assert chosen(RISING, [sequence_of(Sampling(limits=limits_of([[5]], [3, 5, 4])))]) == [4]


def test_a_word_is_banned_at_its_last_token_and_in_the_answer_alone() -> None:
    sampling = Sampling(limits=limits_of([[14, 15], [9], [1, 2, 3, 15]]))
    for generated, best in (
        ([], 15),
        ([14], 14),  # 15 would complete the word
        ([15, 14], 14),
        ([14, 7], 15),
        ([3], 15),  # the prompt ends with 1, 2, 3, which is no part of the answer
        ([1, 2, 3], 14),
        ([5, 1, 2, 3], 14),
    ):
        assert chosen(RISING, [sequence_of(sampling, generated=generated)]) == [best]
    flat = [0.0] * VOCAB
    flat[9] = 5.0
    assert chosen(flat, [sequence_of(sampling)]) == [0]


def test_drafts_count_as_generated() -> None:
    sequence = sequence_of(Sampling(limits=limits_of([[14, 15]])))
    logits = torch.tensor([RISING, RISING])
    contexts = [Context(sequence, 0, []), Context(sequence, 0, [14])]
    edit(logits_of(logits), np.array([0, 1]), contexts)
    assert logits[0].tolist() == RISING
    assert logits[1, 15] == -math.inf and logits[1, :15].tolist() == RISING[:15]
    # of a drafting head that has columns for some tokens, and for none of those that are allowed
    allowed = sequence_of(Sampling(limits=limits_of([], [3, 5])))
    columns = np.full(VOCAB, -1)
    columns[[5, 7]] = [0, 1]
    some = torch.tensor([[1.0, 2.0]])
    edit(logits_of(some), np.array([0]), [Context(allowed, 0, [])], columns)
    assert some.tolist() == [[1.0, -math.inf]]
    columns[5] = -1
    none = torch.tensor([[1.0, 2.0]])
    edit(logits_of(none), np.array([0]), [Context(allowed, 0, [])], columns)
    assert none.tolist() == [[1.0, 2.0]]


def test_a_row_does_not_feel_those_beside_it() -> None:
    free = Sampling(temperature=0.0, limits=limits_of([[1]]))
    bound = Sampling(limits=limits_of([], [4]))
    alone = chosen(RISING, [sequence_of(free)])
    both = chosen(RISING, [sequence_of(free), sequence_of(bound, batch_row=1)])
    assert both == [*alone, 4]


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)


@given(words, st.lists(st.integers(0, 3), max_size=8), st.integers(0, 8))
def test_what_is_banned_follows_from_the_tokens_however_they_came(
    banned: list[list[int]], answer: list[int], drafted: int
) -> None:
    """An oracle reads the whole answer; the limits are told its tokens one by one, or find some as drafts."""
    kept, drafts = answer[: len(answer) - drafted], answer[max(len(answer) - drafted, 0) :]
    if drafted >= len(answer):
        kept, drafts = [], answer
    limits = AnswerLimits(limits_of(banned), kept)
    ends = {
        word[-1] for word in banned if len(word) == 1 or answer[-(len(word) - 1) :] == word[:-1]
    }
    assert set(limits.banned_after(drafts).tolist()) == ends
    later = AnswerLimits(limits_of(banned), [])
    for token in answer:
        later.add(token)
    assert later.banned_after([]).tolist() == limits.banned_after(drafts).tolist()


@pytest.mark.parametrize(
    "limits",
    [
        TokenLimits(allowed=[VOCAB]),
        TokenLimits(banned=[VOCAB], lengths=[1]),
        TokenLimits(banned=[1, 2], lengths=[1]),
        TokenLimits(banned=[], lengths=[0]),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: TokenLimits) -> None:
    with pytest.raises(RequestError, match="limits"):
        check_sampling(Sampling(limits=limits), VOCAB, prompt_tokens=3)
