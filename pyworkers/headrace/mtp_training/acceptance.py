"""How many drafts the model would have accepted, on text that it wrote: by position, and tokens for each forward pass.

The text was written with noise keyed by (sequence, position), so what the model says at every place is known. A draft
counts if it is that very token; a sampled one is drawn with the same noise (drafter-invariant sampling). Drafts past
the first are looked at only where those before them are right, so the rows that they were drafted from are the text's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.sampling import noise
from headrace.mtp_training.batches import Vocabulary, make_batch
from headrace.mtp_training.module import HeadModule
from headrace.mtp_training.writer import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAcceptance:
    """`by_position[m]` is the share of right m-th drafts among those whose predecessors are all right."""

    answers: int
    tokens: int  # places at which a draft was made
    by_position: list[float]
    tokens_per_forward: list[
        float
    ]  # by how many drafts at a time, 1 ..; the model's own token counts
    drafted_vocabulary: float  # share of the answers' tokens that can be drafted at all


def measure(
    head: HeadModule,
    embedding: torch.Tensor,
    draft_head: torch.Tensor,
    sequences: Sequence[Written],
    vocabulary: Vocabulary,
    *,
    drafts: int,
) -> HeadAcceptance:
    right = [_right(head, embedding, draft_head, s, vocabulary, drafts) for s in sequences]
    tries, hits = np.zeros(drafts), np.zeros(drafts)
    for each in right:
        alive = np.ones(len(each), np.bool_)
        for m in range(drafts):
            alive = alive[: len(each) - m] if m else alive
            tries[m] += alive.sum()
            alive = alive & each[: len(alive), m]
            hits[m] += alive.sum()
    written = np.concatenate([s.tokens[s.prompt_len :] for s in sequences])
    return HeadAcceptance(
        answers=len(sequences),
        tokens=int(tries[0]),
        by_position=(hits / np.maximum(tries, 1)).tolist(),
        tokens_per_forward=[_tokens_per_forward(right, k) for k in range(1, drafts + 1)],
        drafted_vocabulary=float((vocabulary.place[written] >= 0).mean()),
    )


def by_group(
    measured: Callable[[Sequence[Written]], HeadAcceptance], sequences: Sequence[Written]
) -> dict[str, HeadAcceptance]:
    """`measured` for each kind of text and temperature, and for all."""
    groups: dict[str, list[Written]] = {}
    for s in sequences:
        if len(s.tokens) - s.prompt_len >= 2:
            how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:.2g}"
            groups.setdefault(f"{s.kind}, {how}", []).append(s)
    return {name: measured(groups[name]) for name in sorted(groups)}


def _right(
    head: HeadModule,
    embedding: torch.Tensor,
    draft_head: torch.Tensor,
    s: Written,
    vocabulary: Vocabulary,
    drafts: int,
) -> NDArray[np.bool_]:
    """`[start, m]`: whether draft m from there is the text's token. Start c: the answer's token c is the newest one."""
    batch = make_batch([s], vocabulary, str(draft_head.device))
    with torch.inference_mode():
        embedded = torch.nn.functional.embedding(batch.tokens, embedding)
        outputs = head.unroll(embedded, batch.hidden, drafts)
    first = s.prompt_len - 1  # the row whose token is the answer's first
    starts = len(s.tokens) - 2 - first
    right = np.zeros((starts, drafts), np.bool_)
    for m, out in enumerate(outputs):
        rows = np.arange(first + m, first + starts)  # the row of draft m from start 0, 1, ..
        if not len(rows):
            break
        logits = out[0, rows].float() @ draft_head.float().T
        drafted = vocabulary.ids[_choose(logits, vocabulary.ids, rows + 2, s)]
        right[: len(rows), m] = drafted == s.tokens[rows + 2]
    return right


def _choose(
    logits: torch.Tensor, ids: NDArray[np.int32], positions: NDArray[np.int64], s: Written
) -> NDArray[np.int64]:
    """Columns: the likeliest, or the one drawn with the noise of the drafted token's position."""
    if not s.temperature:
        return logits.argmax(1).cpu().numpy()
    scaled = logits.double().cpu().numpy() / s.temperature
    key, key2 = noise.keys(np.full(len(positions), s.index, np.uint64), positions)
    bits = noise.bits(ids.astype(np.uint32)[None], key[:, None], key2[:, None])
    return (np.log(noise.exponential(bits)) - scaled).argmin(1)


def _tokens_per_forward(right: Sequence[NDArray[np.bool_]], drafts: int) -> float:
    """Each forward pass checks up to `drafts` drafts and adds a token of the model's own."""
    forwards = tokens = 0
    for each in right:
        at = 0
        while at < len(each):
            ahead = each[at, : min(drafts, len(each) - at)]
            accepted = len(ahead) if ahead.all() else int(ahead.argmin())
            forwards += 1
            tokens += accepted + 1
            at += accepted + 1
    return tokens / max(1, forwards)
