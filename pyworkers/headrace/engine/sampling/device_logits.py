"""Logits on a device: a tensor of torch, of which few numbers of a row come to the host."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.sampling import noise
from headrace.engine.sampling.logits import (
    SLACK,
    Candidates,
    Draws,
    Edits,
    Few,
    TokenIds,
    stand_together,
)
from headrace_kernels.token_masks import mask_logits

BLOCK = 64  # tokens whose maximum stands for them when the k-th best is bounded; a guess


class DeviceLogits:
    """`Logits` as they are: operations that change them change the tensor."""

    on_host = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.rows, self.columns = tensor.shape
        self._tensor = tensor

    def take(self, rows: NDArray[np.int64], *, copy: bool = False) -> DeviceLogits:
        if copy or not stand_together(rows):
            return DeviceLogits(self._tensor[self._here(rows)])
        return self if len(rows) == self.rows else self.part(int(rows[0]), int(rows[-1]) + 1)

    def part(self, start: int, stop: int) -> DeviceLogits:
        return DeviceLogits(self._tensor[start:stop])

    def values(self) -> NDArray[np.float32]:
        return self._tensor.cpu().numpy()

    def at(self, columns: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._tensor.gather(1, self._here(columns)[:, None])[:, 0].cpu().numpy()

    def argmax(self, few: Few | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        assert few is None, "masks are written here"
        ids = self._tensor.argmax(dim=1)
        best = self._tensor.gather(1, ids[:, None])[:, 0]
        return ids.cpu().numpy(), best.cpu().numpy()

    def log_total(self, best: NDArray[np.float32]) -> NDArray[np.float64]:
        # One block of threads sums one row in log_softmax; a plain sum splits rows as it sees fit.
        shifted = torch.log_softmax(self._tensor - self._column(best), dim=1)
        return -shifted.amax(dim=1).cpu().double().numpy()

    def probability(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        shares = self._tensor.softmax(dim=1)
        of = shares[self._here(rows), self._here(columns)].cpu().numpy()
        return np.fmax(of, 0, dtype=np.float64)

    def highest(self, k: NDArray[np.int64]) -> Candidates:
        logits, most = self._tensor, int(k.max())
        width = max(1, min(BLOCK, self.columns // (4 * most)))
        blocks = logits[:, : self.columns // width * width].unflatten(1, (-1, width)).amax(dim=2)
        best = blocks.topk(most, dim=1).values.cpu().numpy()  # k blocks hold at least k such tokens
        mask = logits >= self._column(best[np.arange(len(k)), k - 1])
        rows, columns = (part.cpu().numpy() for part in mask.nonzero(as_tuple=True))
        ends = np.cumsum(np.bincount(rows, minlength=len(logits)))[:-1]
        return _sorted_rows(np.split(columns, ends), np.split(logits[mask].cpu().numpy(), ends))

    def race(self, draws: Draws, tokens: TokenIds, few: Few | None = None) -> NDArray[np.int64]:
        """As in Rust, with other bounds.

        `early` is v / w, a bound of the time without a logarithm. No weight is above 1, so the v of the token with the
        least bound is at most that, which bounds its own time too; only tokens with a bound below that can win.
        """
        assert few is None, "masks are written here"
        logits, of_columns = self._tensor, self._tokens(tokens)
        weight = logits - self._column(draws.best)
        weight *= self._column(1 / draws.temperature)
        weight.exp_()
        bits = bits_on_device(of_columns, self._words(draws.key), self._words(draws.key2))
        early = bits.float()
        early += 0.5
        early *= 2.0**-noise.NOISE_BITS
        early /= weight
        early.masked_fill_(weight < self._column(draws.min_p), math.inf)
        total = weight.sum(dim=1, dtype=torch.float64).cpu().numpy()
        mass_limit = np.where(draws.top_p < 1, draws.top_p * total, np.inf)
        winners = np.full(len(logits), -1)
        while True:
            least = early.amin(dim=1).cpu().double().numpy()
            mask = early <= self._column(_latest(least))
            found = mask.nonzero(as_tuple=True)
            rows, columns = (part.cpu().numpy() for part in found)
            ids = tokens.ids[columns]
            times = _times(logits[mask].cpu().numpy(), ids, draws.of(rows))
            order = np.lexsort((ids, times, rows))
            best = order[np.searchsorted(rows, np.arange(len(logits)))]
            first = ids[best].astype(np.int64)
            if (mass_limit == np.inf).all():
                return first
            column = self._here(columns[best])[:, None]
            at = logits.gather(1, column)
            before = (logits > at) | ((logits == at) & (of_columns < of_columns[column]))
            mass = (weight * before).sum(dim=1, dtype=torch.float64).cpu().numpy()
            winners = np.where((winners < 0) & (mass < mass_limit), first, winners)
            if (winners >= 0).all():
                return winners
            early.masked_fill_(logits < at, math.inf)
            early.scatter_(1, column, math.inf)

    def edit(self, edits: Edits) -> None:
        flat = self._tensor.view(-1)
        places, amount = map(self._here, edits.added)
        flat.index_add_(0, places, amount)
        places, repetition, subtract = map(self._here, edits.penalised)
        seen = flat[places]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        flat[places] = seen - subtract
        flat[self._here(edits.forbidden)] = -math.inf
        for row, columns in edits.kept:
            own, index = self._tensor[row], self._here(columns)
            kept = own[index]
            own.fill_(-math.inf)
            own[index] = kept

    def mask(self, rows: NDArray[np.int64], masks: NDArray[np.uint32]) -> None:
        mask_logits(self._tensor, rows, masks)

    def _here(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._tensor.device)

    def _column(self, values: NDArray[np.floating]) -> torch.Tensor:
        return self._here(values.astype(np.float32))[:, None]

    def _words(self, words: NDArray[np.uint32]) -> torch.Tensor:
        return self._here(words.view(np.int32))[:, None]

    def _tokens(self, tokens: TokenIds) -> torch.Tensor:
        kept = cast("torch.Tensor | None", tokens.on_device)
        if kept is None or kept.device != self._tensor.device:
            kept = tokens.on_device = self._here(tokens.ids)
        return kept


def bits_on_device(tokens: torch.Tensor, key: torch.Tensor, key2: torch.Tensor) -> torch.Tensor:
    """`noise.bits` with torch, for int32 tensors; the words of the keys are reinterpreted as int32."""
    x = tokens ^ key
    shifted = x >> 16  # drags the sign along, so it is masked
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= noise.MULTIPLY_1
    torch.bitwise_right_shift(x, 15, out=shifted)
    x ^= shifted.bitwise_and_(0x1FFFF)
    x += key2
    x *= noise.MULTIPLY_2 - (1 << 32)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x ^= shifted.bitwise_and_(0x1FFFF)
    return x.bitwise_and_(0x7FFFFFFF)


def _sorted_rows(ids: list[NDArray[np.intp]], values: list[NDArray[np.float32]]) -> Candidates:
    lengths = np.array([len(row) for row in ids])
    there = np.arange(lengths.max()) < lengths[:, None]  # [rows, most]
    padded_ids = np.zeros(there.shape, dtype=np.int64)
    padded_ids[there] = np.concatenate(ids)
    logits = np.full(there.shape, -np.inf)
    logits[there] = np.concatenate(values)
    order = np.argsort(-logits, axis=1, kind="stable")  # ids came in rising order
    return Candidates(
        np.take_along_axis(padded_ids, order, axis=1), np.take_along_axis(logits, order, axis=1)
    )


def _latest(least: NDArray[np.float64]) -> NDArray[np.float64]:
    """No token whose bound is above this can win, where `least` is the least bound."""
    v = np.minimum(least, 1 - 2.0 ** -(noise.NOISE_BITS + 1))
    return least * (-np.log1p(-v) / v) * (1 + SLACK)


def _times(
    logits: NDArray[np.float32], ids: NDArray[np.integer], draws: Draws
) -> NDArray[np.float64]:
    """Logarithm of the time at which each token arrives, exactly."""
    bits = noise.bits(ids.astype(np.uint32), draws.key, draws.key2)
    scaled = (logits.astype(np.float64) - draws.best) / draws.temperature
    return np.log(noise.exponential(bits)) - scaled
