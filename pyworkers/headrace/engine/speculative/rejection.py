"""Speculative sampling by rejection: the other way to check drafts, for those who want more of them accepted.

A draft drawn from q stands at a place where the model says p. It counts with probability min(1, p / q); otherwise the
token is drawn from what p has above q (Leviathan et al. 2023). So each token has the model's distribution exactly, but
which one it is depends on what was drafted: with the same seed, an answer may differ from the one without drafts.

Randomness is keyed by seed and position here, too, in streams of their own: one that decides, one for the rest of p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling import noise
from headrace.engine.sampling.logits import SLACK, Draws, Logits
from headrace.engine.sampling.sampler import DRAW_ELEMENTS, Rows, Sampled, Sampler
from headrace.engine.speculative.draft_head import DraftHead

DECIDE = np.uint64(0x9E6C63D0876A9A35)  # added to a seed: other noise for the same position
REST = np.uint64(0xC2B2AE3D27D4EB4F)


class Rejection:
    """Keeps the distributions that the drafts of running sequences were drawn from."""

    def __init__(self, sampler: Sampler, head: DraftHead) -> None:
        self._sampler = sampler
        self._head = head
        self._drawn_from: dict[tuple[int, int], NDArray[np.float32]] = {}  # by batch row and depth

    def drafted(self, logits: Logits, rows: Rows) -> None:
        """Drafts for the last row of each sequence were just drawn from these `logits`."""
        batch_rows, positions = rows.last()
        drawn = np.flatnonzero(self._sampler.draws_tokens(batch_rows))
        for some in _parts(drawn, logits.columns):
            own = logits.take(some)
            draws = self._sampler.draws(own.argmax()[1], batch_rows[some], positions[some])
            for row, q in zip(some.tolist(), distributions(own, draws), strict=True):
                key = int(batch_rows[row]), int(rows.counts[row]) - 1
                self._drawn_from[key] = q.astype(np.float32)

    def judge(self, logits: Logits, rows: Rows, sampled: Sampled) -> None:
        """Put what the drafts become in place of what was sampled for their rows; `logits` are edited."""
        batch_rows, positions = rows.places()
        starts = rows.starts
        going = np.flatnonzero(self._sampler.draws_tokens(batch_rows[starts]))
        depth = 0
        while len(going := going[rows.counts[going] > depth + 1]):
            at = starts[going] + depth
            whole = sampled.ids[at] >= 0
            going, at = going[whole], at[whole]
            right = np.zeros(len(going), dtype=np.bool_)
            for part in _parts(np.arange(len(at)), logits.columns):
                some = at[part]
                draws = self._sampler.draws(sampled.best[some], batch_rows[some], positions[some])
                p = distributions(logits.take(some), draws)
                q = np.zeros_like(p)
                kept = [
                    self._drawn_from[batch_row, depth] for batch_row in batch_rows[some].tolist()
                ]
                q[:, self._head.ids] = np.stack(kept)
                drafts = rows.drafts[some + 1].astype(np.int64)
                seeds = self._sampler.seeds(batch_rows[some])
                right[part], ids = decide(p, q, drafts, seeds, positions[some])
                sampled.ids[some] = ids
            going = going[right]
            depth += 1


def decide(
    p: NDArray[np.float64],
    q: NDArray[np.float64],
    drafts: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which `drafts`, drawn from the rows of `q`, count; and the tokens, which then follow `p`."""
    every = np.arange(len(drafts))
    bits = noise.bits(drafts.astype(np.uint32), *noise.keys(seeds + DECIDE, positions))
    uniform = (bits + 0.5) * 2.0**-noise.NOISE_BITS
    right = uniform * q[every, drafts] < p[every, drafts]
    ids = drafts.copy()
    if len(wrong := np.flatnonzero(~right)):
        rest = np.maximum(p[wrong] - q[wrong], 0)
        empty = ~rest.any(axis=1)  # p and q differ by rounding only
        rest[empty] = p[wrong][empty]
        key, key2 = noise.keys(seeds[wrong] + REST, positions[wrong])
        tokens = np.arange(p.shape[1], dtype=np.uint32)
        times = noise.exponential(noise.bits(tokens, key[:, None], key2[:, None]))
        with np.errstate(divide="ignore", over="ignore"):
            ids[wrong] = (times / rest).argmin(axis=1)
    return right, ids


def distributions(logits: Logits, draws: Draws) -> NDArray[np.float64]:
    """What a draw from each row follows: `[rows, columns]`, each row adds up to 1."""
    scaled = logits.values() - draws.best[:, None].astype(np.float64)
    scaled /= draws.temperature[:, None]
    weights = np.exp(scaled)
    total = weights.sum(axis=1)
    cut = np.flatnonzero((draws.top_k > 0) | (draws.top_p < 1))
    if len(cut):
        # All tokens below this, put together, are lighter than what top-p leaves out.
        floor = (1 - draws.top_p[cut]) * total[cut] / weights.shape[1] * (1 - SLACK)
        # One at least: a row of which nothing is a finite number is no draw, and must not stop the others.
        alive = np.maximum(np.count_nonzero(weights[cut] >= floor[:, None], axis=1), 1)
        top_k = draws.top_k[cut]
        found = logits.take(cut).highest(np.where(top_k > 0, top_k, alive))
        own = np.take_along_axis(weights[cut], found.ids, axis=1)
        own[np.isneginf(found.logits)] = 0
        own[(np.arange(own.shape[1]) >= top_k[:, None]) & (top_k > 0)[:, None]] = 0
        mass = np.where(top_k > 0, own.sum(axis=1), total[cut])
        before = np.cumsum(own, axis=1) - own
        top_p = draws.top_p[cut]
        own[(before >= (top_p * mass)[:, None]) & (top_p < 1)[:, None]] = 0
        weights[cut] = 0
        rows, columns = np.nonzero(own)
        weights[cut[rows], found.ids[rows, columns]] = own[rows, columns]
    weights[weights < draws.min_p[:, None]] = 0
    return weights / weights.sum(axis=1, keepdims=True)


def _parts(rows: NDArray[np.int64], columns: int) -> list[NDArray[np.int64]]:
    """`rows` in parts whose logits are few enough to be looked at in one go."""
    parts = np.array_split(rows, -(-len(rows) * columns // DRAW_ELEMENTS) or 1)
    return [part for part in parts if len(part)]
