"""From logits to tokens, for all rows of a step at once.

In the order of `Sampling`: logit bias, penalties, `min_tokens`, temperature, top-k, top-p (of what top-k left), min-p,
then the draw by position-keyed noise (`noise.py`). Greedy takes the most probable token, on a tie the lowest id.
Log-probabilities are those of the raw logits: before bias, penalties and temperature.

A row's result is a function of that row alone, bit for bit. `narrow.py` finds the few tokens that can be chosen; here
they are cut and drawn exactly, in float64 on the host, so that a worker with a GPU and one without differ only as much
as their logits do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine import narrow, noise
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.narrow import Draws
from headrace.engine.sequence import Sequence
from headrace.frames import Ranked, Sampling, TokenLogprob

MAX_LOGPROBS = 128  # alternatives at one place; bounds the size of an answer
MAX_PROMPT_LOGPROBS = 1 << 20  # values of one prompt; about 16 MB on the wire
LARGEST = 1e6  # of what logits are divided by, multiplied with, or changed by: float32 stays finite
GREEDY_BELOW = 1e-6  # a lower temperature only asks float64 for trouble
LEAST_LOGPROB = -9999.0  # of a token that cannot be: JSON has no infinity
DRAW_ELEMENTS = 1 << 23  # logits looked at in one go when tokens are drawn; bounds memory


def check_sampling(sampling: Sampling, vocab_size: int, *, prompt_tokens: int) -> None:
    """Raises `RequestError` (`bad_sampling`) and names the field that is out of range."""
    s = sampling
    ranges = [
        ("temperature", s.temperature, 0.0, LARGEST),
        ("top_p", s.top_p, 1e-9, 1.0),
        ("min_p", s.min_p, 0.0, 1.0),
        ("repetition_penalty", s.repetition_penalty, 1 / LARGEST, LARGEST),
        ("presence_penalty", s.presence_penalty, -LARGEST, LARGEST),
        ("frequency_penalty", s.frequency_penalty, -LARGEST, LARGEST),
        ("logprobs", s.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", s.prompt_logprobs or 0, 0, MAX_LOGPROBS),
    ]
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            raise RequestError(
                FailureKind.BAD_SAMPLING, f"{name} is {value}, allowed is {low} to {high}"
            )
    entries = 0 if s.prompt_logprobs is None else prompt_tokens * (s.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            FailureKind.BAD_SAMPLING,
            f"prompt_logprobs asks for {entries} values, the limit is {MAX_PROMPT_LOGPROBS}",
        )
    for token, bias in s.logit_bias:
        if token >= vocab_size or not -LARGEST <= bias <= LARGEST:
            raise RequestError(
                FailureKind.BAD_SAMPLING,
                f"logit_bias of token {token} is {bias}; the vocabulary has {vocab_size} tokens, "
                f"and a bias is {-LARGEST:g} to {LARGEST:g}",
            )


def needs_penalties(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


@dataclass(slots=True)
class Sampled:
    """`ids[i]` and `logprobs[i]` are for the i-th sequence; an id is `None` where the logits were not finite."""

    ids: list[int | None]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Keeps the parameters of the running sequences by seat."""

    def __init__(self, vocab_size: int, max_sequences: int) -> None:
        self.vocab_size = vocab_size
        self._temperature = np.zeros(max_sequences)
        self._top_k = np.zeros(max_sequences, dtype=np.int64)
        self._top_p = np.ones(max_sequences)
        self._min_p = np.zeros(max_sequences)
        self._seed = np.zeros(max_sequences, dtype=np.uint64)
        self._edits = np.zeros(max_sequences, dtype=np.bool_)  # logits change before all else
        self._logprobs = np.zeros(max_sequences, dtype=np.bool_)
        self._tokens: torch.Tensor | None = None  # all ids, where the logits are

    def seat(self, sequence: Sequence) -> None:
        """`sequence` took its seat: `sample` may meet it from now on."""
        s, seat = sequence.sampling, sequence.seat
        assert seat is not None
        self._temperature[seat] = s.temperature if s.temperature >= GREEDY_BELOW else 0
        self._top_k[seat] = s.top_k if s.top_k < self.vocab_size else 0
        self._top_p[seat] = s.top_p
        self._min_p[seat] = s.min_p
        self._seed[seat] = s.seed
        masks = s.min_tokens > 0 and len(sequence.stop_ids) > 0
        self._edits[seat] = masks or sequence.penalties is not None or len(s.logit_bias) > 0
        self._logprobs[seat] = s.logprobs is not None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
        """Choose the next token of each sequence. `logits` is `[sequences, vocab]` and may be overwritten."""
        assert logits.shape == (len(sequences), self.vocab_size)
        seats = np.fromiter((s.seat for s in sequences), dtype=np.int64, count=len(sequences))
        with_logprobs = np.flatnonzero(self._logprobs[seats])
        raw = _rows(logits, with_logprobs, copy=True) if len(with_logprobs) else None
        edited = np.flatnonzero(self._edits[seats])
        if len(edited):
            _edit(logits, edited, [sequences[row] for row in edited])
        ids, best = narrow.argmax(logits)
        finite = np.isfinite(best)
        drawn = np.flatnonzero((self._temperature[seats] > 0) & finite)
        for rows in np.array_split(drawn, -(-len(drawn) * self.vocab_size // DRAW_ELEMENTS) or 1):
            if len(rows):
                positions = np.fromiter((sequences[r].total for r in rows), np.int64, len(rows))
                ids[rows] = self._draw(logits, rows, best[rows], seats[rows], positions)
        sampled = Sampled(ids.tolist(), [None] * len(sequences))
        for row in np.flatnonzero(~finite):
            sampled.ids[row] = None
        if raw is not None:
            tops = [sequences[row].sampling.logprobs or 0 for row in with_logprobs]
            entries = token_logprobs(raw, ids[with_logprobs], tops)
            for row, entry in zip(with_logprobs, entries, strict=True):
                sampled.logprobs[row] = entry
        return sampled

    def _draw(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        best: NDArray[np.float32],
        seats: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Tokens for `rows` of `logits`, whose highest logits are `best`, at `positions`."""
        draws = Draws(
            best,
            self._temperature[seats],
            self._top_k[seats],
            self._top_p[seats],
            self._min_p[seats],
            *noise.keys(self._seed[seats], positions),
        )
        ids = np.zeros(len(rows), dtype=np.int64)
        if (some := np.flatnonzero(draws.top_k)).size:
            ids[some] = _draw_top_k(_rows(logits, rows[some]), draws.of(some))
        if (some := np.flatnonzero(draws.top_k == 0)).size:
            if self._tokens is None or self._tokens.device != logits.device:
                self._tokens = torch.arange(
                    self.vocab_size, dtype=torch.int32, device=logits.device
                )
            ids[some] = narrow.race(_rows(logits, rows[some]), draws.of(some), self._tokens)
        return ids


def _draw_top_k(logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
    """Draw among the tokens that top-k, then top-p, then min-p leave."""
    found = narrow.highest(logits, draws.top_k)
    scaled = (found.logits - found.logits[:, :1]) / draws.temperature[:, None]  # [rows, most]
    weights = np.exp(scaled)
    weights[np.arange(weights.shape[1]) >= draws.top_k[:, None]] = 0
    up_to = np.cumsum(weights, axis=1)
    before = np.concatenate([np.zeros((len(weights), 1)), up_to[:, :-1]], axis=1)
    stays = weights > 0
    stays &= (before < draws.top_p[:, None] * up_to[:, -1:]) | (draws.top_p == 1)[:, None]
    stays &= weights >= draws.min_p[:, None]
    bits = noise.bits(found.ids.astype(np.uint32), draws.key[:, None], draws.key2[:, None])
    time = np.log(noise.exponential(bits)) - scaled
    winner = np.where(stays, time, np.inf).argmin(axis=1)
    return found.ids[np.arange(len(winner)), winner]


def token_logprobs(
    logits: torch.Tensor, tokens: NDArray[np.int64], tops: Items[int]
) -> list[TokenLogprob]:
    """For each row the log-probability of its token, and its `tops` most probable ones."""
    if not len(tokens):
        return []
    rows = np.arange(len(tokens))
    _, best = narrow.argmax(logits)
    with np.errstate(invalid="ignore"):  # rows that are not finite: their request fails anyway
        normaliser = best + narrow.log_total(logits, best)
    at_token = logits[torch.from_numpy(rows), torch.from_numpy(tokens)].cpu().numpy()
    counts = np.clip(np.asarray(tops, dtype=np.int64), 1, logits.shape[1])
    highest = narrow.highest(logits, counts)
    return [
        TokenLogprob(
            logprob=_logprob(at_token[row] - normaliser[row]),
            top=[
                Ranked(int(token), _logprob(logit - normaliser[row]))
                for token, logit in zip(
                    highest.ids[row, :top], highest.logits[row, :top], strict=True
                )
            ],
        )
        for row, top in enumerate(tops)
    ]


def _edit(logits: torch.Tensor, rows: NDArray[np.int64], sequences: list[Sequence]) -> None:
    """Add the bias, apply the penalties, mask stop tokens that come too early."""
    vocab = logits.shape[1]
    flat = logits.view(-1)
    places = [row * vocab for row in rows.tolist()]

    def at(indices: list[NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(indices)).to(logits.device)

    def values(parts: list[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logits.device)

    biased = [
        (place, np.array(s.sampling.logit_bias))
        for place, s in zip(places, sequences, strict=True)
        if s.sampling.logit_bias
    ]
    if biased:
        index = at([place + bias[:, 0].astype(np.int64) for place, bias in biased])
        amount = values([bias[:, 1].astype(np.float32) for _, bias in biased])
        flat.index_add_(0, index, amount)

    penalised = [
        (place, s.sampling, s.penalties)
        for place, s in zip(places, sequences, strict=True)
        if s.penalties is not None and len(s.penalties.ids)
    ]
    if penalised:
        index = at([place + p.ids for place, _, p in penalised])
        repetition = values(
            [np.full(len(p.ids), s.repetition_penalty, np.float32) for _, s, p in penalised]
        )
        subtract = values(
            [
                np.float32(s.frequency_penalty) * p.counts
                + np.float32(s.presence_penalty) * (p.counts > 0)
                for _, s, p in penalised
            ]
        )
        seen = flat[index]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        flat[index] = seen - subtract

    masked = [
        place + np.fromiter(s.stop_ids, np.int64, len(s.stop_ids))
        for place, s in zip(places, sequences, strict=True)
        if s.stop_ids and len(s.generated) < s.sampling.min_tokens
    ]
    if masked:
        flat[at(masked)] = -math.inf


def _rows(logits: torch.Tensor, rows: NDArray[np.int64], *, copy: bool = False) -> torch.Tensor:
    """Rows of `logits`; all of them without a copy unless one is asked for."""
    if len(rows) == len(logits) and not copy:
        return logits
    return logits[torch.from_numpy(rows).to(logits.device)]


def _logprob(value: float) -> float:
    return max(float(value), LEAST_LOGPROB)
