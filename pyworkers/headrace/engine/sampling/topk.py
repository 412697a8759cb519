"""The parts of sampling that look at every logit of a row, on the device where the logits are.

They work with bounds that hold for certain, rounding included, and leave a few tokens of each row, which are then
compared exactly, in float64 on the host. So batch mates may move a bound, never a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.sampling import noise

SLACK = 1e-4  # relative; far above the rounding of float32, far below what would cost time
BLOCK = 64  # tokens whose maximum stands for them when the k-th best is bounded; a guess


@dataclass(slots=True)
class Candidates:
    """Tokens of some rows, most probable first; on a tie the lowest id first."""

    ids: NDArray[np.int64]  # [rows, most]
    logits: NDArray[np.float64]  # [rows, most], -inf behind the last one


@dataclass(slots=True)
class Draws:
    """How to draw a token for each of some rows. All fields are `[rows]`."""

    best: NDArray[np.float32]  # the highest logit
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    key: NDArray[np.uint32]
    key2: NDArray[np.uint32]

    def of(self, rows: NDArray[np.int64] | slice) -> Draws:
        return Draws(
            self.best[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.key[rows],
            self.key2[rows],
        )


@dataclass(slots=True)
class Few:
    """Of rows of logits on a CPU: which tokens alone may be chosen, where they are few enough to list them."""

    of: NDArray[np.int64]  # [rows], place in `starts`, -1 where all tokens may be chosen
    starts: NDArray[np.int64]  # [lists + 1], places in `ids`
    ids: NDArray[np.uint32]  # ascending in each list

    def of_rows(self, rows: NDArray[np.int64]) -> Few:
        return Few(self.of[rows], self.starts, self.ids)


def argmax(
    logits: torch.Tensor, few: Few | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Best token of each row, on a tie the lowest id, and its logit. A NaN counts as best."""
    if few is not None:
        return _argmax_of_few(logits, few)
    if logits.device.type == "cpu":
        values = logits.numpy()
        ids = values.argmax(axis=1)  # ten times as fast as torch's: 0.1 ms for 32 x 49,152
        return ids, values[np.arange(len(ids)), ids]
    on_device = logits.argmax(dim=1)
    best = logits.gather(1, on_device[:, None])[:, 0]
    return on_device.cpu().numpy(), best.cpu().numpy()


def _argmax_of_few(logits: torch.Tensor, few: Few) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    values = logits.numpy()
    ids, best = _core.argmax_of_few(values, few.of, few.starts, few.ids)
    if len(rest := np.flatnonzero(few.of < 0)):
        ids[rest] = values[rest[0] : rest[-1] + 1].argmax(axis=1)[rest - rest[0]]
        best[rest] = values[rest, ids[rest]]
    return ids, best


def log_total(logits: torch.Tensor, best: NDArray[np.float32]) -> NDArray[np.float64]:
    """`log(sum(exp(logits - best)))` of each row, summed the same way however many rows there are."""
    if logits.device.type == "cpu":
        rows = zip(logits.numpy(), best, strict=True)
        return np.log([np.exp(row - high).sum(dtype=np.float64) for row, high in rows])
    # One block of threads sums one row in log_softmax; a plain sum splits rows as it sees fit.
    shifted = torch.log_softmax(logits - _column(best, logits), dim=1)
    return -shifted.amax(dim=1).cpu().double().numpy()


def probability(
    logits: torch.Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Of one column of each of some rows, nearly; 0 where the row has a NaN."""
    shares = logits.softmax(dim=1)
    if shares.device.type == "cpu":
        of = shares.numpy()[rows, columns]
    else:
        at = [torch.from_numpy(part).to(shares.device) for part in (rows, columns)]
        of = shares[at[0], at[1]].cpu().numpy()
    return np.fmax(of, 0, dtype=np.float64)


def highest(logits: torch.Tensor, k: NDArray[np.int64]) -> Candidates:
    """At least the `k` most probable tokens of each row, and few more. `1 <= k <= vocab`."""
    most = int(k.max())
    vocab = logits.shape[1]
    width = max(1, min(BLOCK, vocab // (4 * most)))
    blocks = logits[:, : vocab // width * width].unflatten(1, (-1, width)).amax(dim=2)
    best = blocks.topk(most, dim=1).values.cpu().numpy()  # k blocks hold at least k such tokens
    floor = best[np.arange(len(k)), k - 1]
    if logits.device.type == "cpu":
        values = logits.numpy()
        ids = [np.flatnonzero(row >= low) for row, low in zip(values, floor, strict=True)]
        return _sorted_rows(ids, [row[found] for row, found in zip(values, ids, strict=True)])
    mask = logits >= _column(floor, logits)
    rows, columns = (part.cpu().numpy() for part in mask.nonzero(as_tuple=True))
    ends = np.cumsum(np.bincount(rows, minlength=len(logits)))[:-1]
    return _sorted_rows(np.split(columns, ends), np.split(logits[mask].cpu().numpy(), ends))


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


def race(
    logits: torch.Tensor, draws: Draws, tokens: torch.Tensor, few: Few | None = None
) -> NDArray[np.int64]:
    """Draw one token of each row by the exponential race, under top-p and min-p, but not top-k.

    `tokens` are the ids of the columns, ascending, int32, where the logits are; an id is what it returns. A row with
    `few` is drawn as if all other columns were -inf. With v the
    noise in (0, 1) and w a token's weight, its time is -log(1 - v) / w; the first one wins. Where the winner is not in
    the top-p set, nothing less probable is, and the race goes on without them: no row is ever sorted.
    """
    if logits.device.type != "cpu":
        return race_on_device(logits, draws, tokens)
    return _core.race(
        logits.numpy(),
        tokens.numpy().view(np.uint32),
        best=draws.best,
        temperature=draws.temperature,
        top_p=draws.top_p,
        min_p=draws.min_p,
        key=draws.key,
        key2=draws.key2,
        few=None if few is None else (few.of, few.starts, few.ids),
    )


def race_on_device(logits: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> NDArray[np.int64]:
    """`race` with torch.

    `early` is v / w, a bound of the time without a logarithm. No weight is above 1, so the v of the token with the
    least bound is at most that, which bounds its own time too; only tokens with a bound below that can win.
    """
    weight = logits - _column(draws.best, logits)
    weight *= _column(1 / draws.temperature, logits)
    weight.exp_()
    bits = noise.bits_on_device(tokens, _words(draws.key, logits), _words(draws.key2, logits))
    early = bits.float()
    early += 0.5
    early *= 2.0**-noise.NOISE_BITS
    early /= weight
    early.masked_fill_(weight < _column(draws.min_p, logits), math.inf)
    total = weight.sum(dim=1, dtype=torch.float64).cpu().numpy()
    mass_limit = np.where(draws.top_p < 1, draws.top_p * total, np.inf)
    winners = np.full(len(logits), -1)
    while True:
        least = early.amin(dim=1).cpu().double().numpy()
        mask = early <= _column(_latest(least), logits)
        found = mask.nonzero(as_tuple=True)
        rows, columns = (part.cpu().numpy() for part in found)
        ids = tokens[found[1]].cpu().numpy()
        times = _times(logits[mask].cpu().numpy(), ids, draws.of(rows))
        order = np.lexsort((ids, times, rows))
        best = order[np.searchsorted(rows, np.arange(len(logits)))]
        first = ids[best].astype(np.int64)
        if (mass_limit == np.inf).all():
            return first
        column = torch.from_numpy(columns[best]).to(logits.device)[:, None]
        at = logits.gather(1, column)
        before = (logits > at) | ((logits == at) & (tokens < tokens[column]))
        mass = (weight * before).sum(dim=1, dtype=torch.float64).cpu().numpy()
        winners = np.where((winners < 0) & (mass < mass_limit), first, winners)
        if (winners >= 0).all():
            return winners
        early.masked_fill_(logits < at, math.inf)
        early.scatter_(1, column, math.inf)


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


def _column(values: NDArray[np.floating], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]


def _words(words: NDArray[np.uint32], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32)).to(like.device)[:, None]
