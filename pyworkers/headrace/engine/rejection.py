"""Speculative sampling by rejection: the other way to check drafts, for those who want more of them accepted.

A draft drawn from q stands at a place where the model says p. It counts with probability min(1, p / q); otherwise the
token is drawn from what p has above q (Leviathan et al. 2023). So each token has the model's distribution exactly, but
which one it is depends on what was drafted: with the same seed, an answer may differ from the one without drafts.

Randomness is keyed by seed and position here, too, in streams of their own: one that decides, one for the rest of p.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine import noise
from headrace.engine.draft_head import DraftHead
from headrace.engine.narrow import SLACK, Draws
from headrace.engine.sampler import Rows, Sampled, Sampler

DECIDE = np.uint64(0x9E6C63D0876A9A35)  # added to a seed: other noise for the same position
REST = np.uint64(0xC2B2AE3D27D4EB4F)


class Rejection:
    """Keeps the distributions that the drafts of running sequences were drawn from."""

    def __init__(self, sampler: Sampler, head: DraftHead) -> None:
        self._sampler = sampler
        self._head = head
        self._drawn_from: dict[tuple[int, int], NDArray[np.float64]] = {}  # by seat and depth

    def drafted(self, logits: torch.Tensor, rows: Rows) -> None:
        """Drafts for the last row of each sequence were just drawn from these `logits`."""
        last = rows.starts + rows.counts - 1
        seats, positions = (part[last] for part in rows.places())
        some = np.flatnonzero(self._sampler.draws_tokens(seats))
        if len(some):
            values = logits[torch.from_numpy(some).to(logits.device)].cpu().numpy()
            draws = self._sampler.draws(values.max(axis=1), seats[some], positions[some])
            for place, row in enumerate(some.tolist()):
                key = int(seats[row]), int(rows.counts[row]) - 1
                self._drawn_from[key] = distribution(
                    values[place], draws.of(slice(place, place + 1))
                )

    def judge(self, logits: torch.Tensor, rows: Rows, sampled: Sampled) -> None:
        """Put what the drafts become in place of what was sampled for their rows; `logits` are edited."""
        seats, positions = rows.places()
        drawn = self._sampler.draws_tokens(seats)
        for start, count in zip(rows.starts.tolist(), rows.counts.tolist(), strict=True):
            if count > 1 and drawn[start]:
                for row in range(start, start + count - 1):
                    if sampled.ids[row] < 0 or not self._accept(
                        logits[row], row - start, row, rows, sampled, seats, positions
                    ):
                        break

    def _accept(
        self,
        logits: torch.Tensor,
        depth: int,
        row: int,
        rows: Rows,
        sampled: Sampled,
        seats: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> bool:
        one = slice(row, row + 1)
        draws = self._sampler.draws(sampled.best[one], seats[one], positions[one])
        p = distribution(logits.cpu().numpy(), draws)
        q = np.zeros(len(p))
        q[self._head.ids] = self._drawn_from[int(seats[row]), depth]
        draft = int(rows.drafts[row + 1])
        seed = self._sampler.seeds(seats[one])
        bits = noise.bits(np.array([draft], np.uint32), *noise.keys(seed + DECIDE, positions[one]))
        uniform = (float(bits[0]) + 0.5) * 2.0**-noise.NOISE_BITS
        if uniform * q[draft] < p[draft]:
            sampled.ids[row] = draft
            return True
        rest = np.maximum(p - q, 0)
        if not rest.any():
            rest = p  # they differ by rounding only
        keys = noise.keys(seed + REST, positions[one])
        tokens = np.flatnonzero(rest)
        times = noise.exponential(noise.bits(tokens.astype(np.uint32), *keys)) / rest[tokens]
        sampled.ids[row] = tokens[times.argmin()]
        return False


def distribution(row: NDArray[np.float32], draws: Draws) -> NDArray[np.float64]:
    """What a draw from one row of logits follows: `[columns]`, adds up to 1."""
    weights = np.exp((row.astype(np.float64) - draws.best[0]) / draws.temperature[0])
    top_k, top_p = int(draws.top_k[0]), float(draws.top_p[0])
    if top_k or top_p < 1:
        floor = 0.0 if top_k else (1 - top_p) * weights.sum() / len(row) * (1 - SLACK)
        alive = np.flatnonzero(weights >= floor)
        order = alive[np.argsort(-row[alive], kind="stable")][: top_k or None]
        mass = np.cumsum(weights[order])
        total = mass[-1] if top_k else weights.sum()
        stays = order[(mass - weights[order] < top_p * total) | (top_p == 1)]
        cut = np.zeros_like(weights)
        cut[stays] = weights[stays]
        weights = cut
    weights[weights < draws.min_p[0]] = 0
    return weights / weights.sum()
