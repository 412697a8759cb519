"""From written sequences to padded batches: which sequences come together, and the arrays that a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.mtp_training.writer import Written

POOL = 64  # batches' worth of sequences that are sorted by length before they are cut into batches


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that can be drafted, ascending. `place` maps a token to its column, or to -1."""

    ids: NDArray[np.int32]
    place: NDArray[np.int64]

    @staticmethod
    def of(ids: NDArray[np.int32], vocab_size: int) -> Vocabulary:
        place = np.full(vocab_size, -1, np.int64)
        place[ids] = np.arange(len(ids))
        return Vocabulary(ids, place)


def frequent_tokens(sequences: Sequence[Written], vocab_size: int, count: int) -> Vocabulary:
    """The `count` tokens that the model writes most often; a tie goes to the lower id."""
    seen = np.zeros(vocab_size)
    for s in sequences:
        rows = slice(s.prompt_len - 1, None)
        np.add.at(seen, s.tokens[s.prompt_len :], 1.0)
        np.add.at(seen, s.top_ids[rows], np.exp(s.top_logits[rows].astype(np.float32)))
    most = np.argsort(-seen, kind="stable")[:count]
    return Vocabulary.of(np.sort(most).astype(np.int32), vocab_size)


def batch_plan(lengths: NDArray[np.int64], rows: int, seed: int) -> list[NDArray[np.int64]]:
    """Every sequence once, in batches of at most `rows` padded rows (or one sequence), neighbours alike in length."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    per_batch = max(1, rows // max(1, int(lengths.mean())))
    plan: list[NDArray[np.int64]] = []
    for at in range(0, len(order), POOL * per_batch):
        pool = order[at : at + POOL * per_batch]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        start = 0
        for end in range(1, len(pool) + 1):
            if end == len(pool) or (end + 1 - start) * lengths[pool[end]] > rows:
                plan.append(pool[start:end])
                start = end
    return [plan[i] for i in rng.permutation(len(plan))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Row t of a sequence is its position t + 1."""

    tokens: torch.Tensor  # [sequences, rows]
    hidden: torch.Tensor  # [sequences, rows, hidden], of the position before
    target: torch.Tensor  # [sequences, rows, hidden], of this position
    ids: torch.Tensor  # [sequences, rows, k], likely next tokens as columns of the draft vocabulary
    # [sequences, rows, k], what the model gives them; 0 outside the draft vocabulary.
    p: torch.Tensor
    answers: torch.Tensor  # [sequences, rows], bool: its token is part of an answer


def make_batch(sequences: Sequence[Written], vocabulary: Vocabulary, device: str) -> TrainBatch:
    rows = max(len(s.tokens) for s in sequences) - 2
    width, kept = sequences[0].hidden.shape[1], sequences[0].top_ids.shape[1]
    tokens = np.zeros((len(sequences), rows), np.int64)
    hidden = np.zeros((len(sequences), rows, width), np.float32)
    target = np.zeros_like(hidden)
    ids = np.zeros((len(sequences), rows, kept), np.int64)
    p = np.zeros((len(sequences), rows, kept), np.float32)
    answers = np.zeros((len(sequences), rows), np.bool_)
    for i, s in enumerate(sequences):
        n = len(s.tokens) - 2
        tokens[i, :n] = s.tokens[1:-1]
        hidden[i, :n] = s.hidden[:-1]
        target[i, :n] = s.hidden[1:]
        places = vocabulary.place[s.top_ids[1:]]
        likely = np.exp(s.top_logits[1:].astype(np.float32))
        ids[i, :n] = np.maximum(places, 0)
        p[i, :n] = np.where(places >= 0, likely, 0) / likely.sum(1, keepdims=True)
        answers[i, s.prompt_len - 1 : n] = True
    arrays = (tokens, hidden, target, ids, p, answers)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    return TrainBatch(
        tokens=tensors[0],
        hidden=tensors[1],
        target=tensors[2],
        ids=tensors[3],
        p=tensors[4],
        answers=tensors[5],
    )
