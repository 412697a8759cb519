"""Drafts do not change how tokens are distributed: two positions of many answers, by either way to check drafts.

The model says something else after each token, and the drafts are drawn from something else again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.sampling.host_logits import HostLogits
from headrace.engine.sampling.penalties import Penalties
from headrace.engine.sampling.sampler import Sampler, needs_penalties
from headrace.engine.sequence import Key, Sequence
from headrace.engine.speculative.draft_head import DraftHead
from headrace.engine.speculative.rejection import Rejection
from headrace.wire.frames import Ranked, Sampling
from helpers.engine.distribution import chi_squared, cut
from helpers.engine.sampling_rows import one_each, rows_of, take_row

VOCAB = 12
ANSWERS = 200_000
SOME_ANSWERS = 60_000  # without --all
BATCH = 5_000
PROMPT = np.array([1, 2, 3], dtype=np.int32)


@pytest.fixture
def answers(pytestconfig: pytest.Config) -> int:
    return ANSWERS if pytestconfig.option.all_cases else SOME_ANSWERS


def make_sequence(batch_row: int, sampling: Sampling) -> Sequence:
    penalties = Penalties(PROMPT, [], with_prompt=True) if needs_penalties(sampling) else None
    return Sequence(
        key=Key(0, batch_row),
        arrival=batch_row,
        priority=0,
        prompt=PROMPT,
        listed=[],
        limit=100,
        sampling=sampling,
        stop_ids=frozenset(),
        salt=b"",
        deadline_s=None,
        names=[],
        penalties=penalties,
        batch_row=batch_row,
    )


def logits_of(seed: int) -> NDArray[np.float32]:
    """[1 + VOCAB, VOCAB]: of the first position, and of the second after each token."""
    return np.random.default_rng(seed).normal(size=(1 + VOCAB, VOCAB)).astype(np.float32) * 1.5


def two_tokens(
    sampling: Sampling,
    *,
    rejection: bool,
    answers: int = ANSWERS,
    most: int = 1,
    head_ids: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int64], float]:
    """How often each pair of tokens came where `most` were drafted, and the share of first drafts that counted."""
    model, module = logits_of(1), logits_of(1) + logits_of(2) / 2
    head = DraftHead(VOCAB, head_ids)
    pairs = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    right = 0
    sampler = Sampler(VOCAB, BATCH)
    check = Rejection(sampler, head)
    sequences = [make_sequence(batch_row, sampling) for batch_row in range(BATCH)]
    for sequence in sequences:
        take_row(sampler, sequence)
    for start in range(0, answers, BATCH):
        sampler._seed[:] = np.arange(start, start + BATCH)
        drafts = np.zeros((BATCH, 1 + most), dtype=np.int32)
        for depth in range(1, 1 + most):
            rows = rows_of(sequences, np.full(BATCH, depth), drafts[:, :depth].ravel())
            after = np.zeros(BATCH, np.int64) if depth == 1 else drafts[:, depth - 1] + 1
            guess = HostLogits(np.ascontiguousarray(module[after][:, head.ids], dtype=np.float32))
            drafts[:, depth] = sampler.draft(guess, rows, head)
            if rejection:
                check.drafted(guess, rows)
        rows = rows_of(sequences, np.full(BATCH, 1 + most), drafts.ravel())
        after = drafts.astype(np.int64) + 1
        after[:, 0] = 0
        logits = HostLogits(model[after.ravel()])
        sampled = sampler.sample(logits, rows)
        if rejection:
            check.judge(logits, rows, sampled)
        counts, *_ = _core.cut_answers(
            sampled.ids,
            rows=rows.counts,
            drafts=rows.drafts,
            totals=rows.totals,
            limits=rows.totals + 99,
            stops=np.zeros((BATCH, 0), np.int64),
            more_stops={},
        )
        first, second = (sampled.ids[place :: 1 + most].copy() for place in (0, 1))
        # Where the first draft was wrong, the second token comes with the next step.
        rest = np.flatnonzero(counts == 1)
        later = [one_more(sequences[place], int(first[place])) for place in rest]
        next_logits = HostLogits(model[first[rest] + 1])
        second[rest] = sampler.sample(next_logits, one_each(later)).ids
        np.add.at(pairs, (first, second), 1)
        right += int((counts > 1).sum())
    return pairs, right / answers


def one_more(sequence: Sequence, token: int) -> Sequence:
    """The same one, with a token."""
    penalties = None
    if sequence.penalties is not None:
        penalties = Penalties(PROMPT, [token], with_prompt=True)
    return replace(sequence, listed=[token], penalties=penalties)


def textbook(
    row: NDArray[np.float32], sampling: Sampling, generated: list[int]
) -> NDArray[np.float64]:
    """Edit, scale, sort, cut, normalise."""
    logits = row.astype(np.float64)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in {*PROMPT.tolist(), *generated}:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = generated.count(token)
        logits[token] -= sampling.frequency_penalty * count
        logits[token] -= sampling.presence_penalty * (count > 0)
    p = np.exp((logits - logits.max()) / sampling.temperature)
    p /= p.sum()
    return cut(p, sampling)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("rejection", [False, True], ids=["noise", "rejection"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.6, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.1, top_k=9, top_p=0.9, min_p=0.05),
        Sampling(
            temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3
        ),
        Sampling(temperature=0.9, logit_bias=[Ranked(3, 2.0), Ranked(5, -100.0)]),
    ],
    ids=lambda sampling: str(sampling).replace("Sampling", ""),
)
def test_pairs_of_tokens_follow_the_models_distribution(
    sampling: Sampling, rejection: bool, answers: int
) -> None:
    counts, right = two_tokens(sampling, rejection=rejection, answers=answers)
    model = logits_of(1)
    p = np.stack(
        [
            first * textbook(model[token + 1], sampling, [token])
            for token, first in enumerate(textbook(model[0], sampling, []))
        ]
    )
    z = chi_squared(counts, p, answers)
    assert z < 5, f"chi-squared is {z:.1f} deviations above its mean"
    assert 0.2 < right < 0.99


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("rejection", [False, True], ids=["noise", "rejection"])
def test_a_second_draft_changes_nothing_either(rejection: bool, answers: int) -> None:
    counts, _ = two_tokens(Sampling(temperature=0.8), rejection=rejection, answers=answers, most=2)
    model, sampling = logits_of(1), Sampling(temperature=0.8)
    p = np.stack([textbook(row, sampling, []) for row in model])
    assert chi_squared(counts, p[0][:, None] * p[1:], answers) < 5


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("rejection", [False, True], ids=["noise", "rejection"])
def test_a_head_for_some_tokens_leaves_the_others_their_share(
    rejection: bool, answers: int
) -> None:
    ids = np.array([0, 2, 3, 7, 11], dtype=np.int32)
    counts, right = two_tokens(
        Sampling(temperature=1.0), rejection=rejection, answers=answers, head_ids=ids
    )
    model = logits_of(1)
    plain = Sampling(temperature=1.0)
    p = textbook(model[0], plain, [])[:, None] * np.stack(
        [textbook(r, plain, []) for r in model[1:]]
    )
    assert chi_squared(counts, p, answers) < 5
    assert right > 0.1


def test_rejection_accepts_more_than_equal_noise() -> None:
    _, equal = two_tokens(Sampling(temperature=1.0), rejection=False)
    _, more = two_tokens(Sampling(temperature=1.0), rejection=True)
    model, module = logits_of(1)[0], (logits_of(1) + logits_of(2) / 2)[0]
    plain = Sampling(temperature=1.0)
    overlap = np.minimum(textbook(model, plain, []), textbook(module, plain, [])).sum()
    assert abs(more - overlap) < 0.005, "the most that is possible"
    assert equal < more
