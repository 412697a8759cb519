"""What sampling asks of whole rows of logits, on the host and by the rule of a device."""

from __future__ import annotations

import numpy as np
import torch

from headrace.engine.sampling.host_logits import logits_of

VOCAB = 300


def test_a_probability_is_that_of_softmax_in_the_rows_that_are_asked_for() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 4, (5, VOCAB)).astype(np.float32))
    rows, columns = np.array([4, 0, 2]), np.array([7, 299, 0])
    want = logits.double().softmax(dim=1).numpy()[rows, columns]
    np.testing.assert_allclose(logits_of(logits).probability(rows, columns), want, rtol=1e-5)


def test_it_is_zero_for_what_is_forbidden_and_for_rows_that_are_no_numbers() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = -torch.inf
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    found = logits_of(logits).probability(np.arange(3), np.array([5, 9, 9]))
    assert found.tolist() == [0, 0, 0]


def test_one_column_takes_it_all() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 200.0
    found = logits_of(logits).probability(np.zeros(1, np.int64), np.array([3]))
    assert found.tolist() == [1.0]
    assert logits[0, 3] == 200.0, "logits stay what they are"
