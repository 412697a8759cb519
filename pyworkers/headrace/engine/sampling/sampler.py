"""From logits to tokens, for all rows of a step at once.

In the order of `Sampling`: logit bias, penalties, `min_tokens`, forbidden tokens, temperature, top-k, top-p (of what
top-k left), min-p, then the draw by position-keyed noise (`noise.py`). Greedy takes the most probable token, on a tie
the lowest id. Log-probabilities are those of the raw logits: before bias, penalties and temperature.

A sequence may have several rows, for successive positions: all but the first stand on drafts of the tokens before
them, and are treated as if these had been generated (`verify.py` says which of them count).

A row's result is a function of that row alone, bit for bit. What looks at whole rows is in `logits.py`, for the host
and for devices. The few tokens that it leaves are cut and drawn exactly, in float64 on the host, so that a worker with
a GPU and one without differ only as much as their logits do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sampling import noise
from headrace.engine.sampling.logits import Draws, Few, Logits, TokenIds, stand_together
from headrace.engine.sampling.logits_processors import Context, edit
from headrace.engine.sampling.token_limits import check_limits
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.draft_head import DraftHead
from headrace.engine.step.rows import places_of, spread
from headrace.wire.frames import Ranked, Sampling, TokenLogprob

if TYPE_CHECKING:
    from headrace.engine.sampling.grammar import StepMasks

MAX_LOGPROBS = 128  # alternatives at one place; bounds the size of an answer
MAX_PROMPT_LOGPROBS = 1 << 20  # values of one prompt; about 16 MB on the wire
LARGEST = 1e6  # of what logits are divided by, multiplied with, or changed by: float32 stays finite
GREEDY_BELOW = 1e-6  # a lower temperature only asks float64 for trouble
LEAST_LOGPROB = -9999.0  # of a token that cannot be: JSON has no infinity
# What a sequence asks for beside the most probable tokens.
EDITS = 1  # its logits change before all else
LOGPROBS = 2
DRAWS = 4
TOP_K = 8  # for tokens that are drawn
RULES = 16  # tokens that they do not allow are never chosen
DRAW_ELEMENTS = 1 << 23  # logits looked at in one go when tokens are drawn or scored; bounds memory


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
    if s.limits is not None:
        check_limits(s.limits, vocab_size)
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
class Rows:
    """Rows of logits: `counts[i]` successive positions of `sequences[i]`, the first one after all its tokens."""

    sequences: Items[Sequence] | NDArray[np.object_]  # see `sequence`
    batch_rows: NDArray[np.int64]  # [sequences]
    totals: NDArray[np.int64]  # [sequences], tokens so far
    counts: NDArray[np.int64]  # [sequences]
    drafts: NDArray[np.int32]  # [rows], the draft before each row; means nothing for a first row

    def sequence(self, place: int) -> Sequence:
        return cast("Items[Sequence]", self.sequences)[place]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each sequence."""
        return self.counts.cumsum() - self.counts

    @property
    def owners(self) -> NDArray[np.int64]:
        """[rows], whose row it is, as a place in `sequences`."""
        return np.arange(len(self.counts)).repeat(self.counts)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[rows] each: the batch row, and the position whose token is chosen."""
        if len(self.drafts) == len(self.counts):  # one row each
            return self.batch_rows, self.totals
        return self.batch_rows.repeat(self.counts), spread(self.totals, self.counts)

    def last(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same of the last row of each sequence."""
        return self.batch_rows, self.totals + self.counts - 1


@dataclass(slots=True)
class Sampled:
    """What was chosen for each row; -1 where the logits were not finite."""

    ids: NDArray[np.int64]  # [rows]
    best: NDArray[np.float32]  # [rows], the highest logit after edits
    # Logits before edits, and of each row which of them are its, -1: none; where any request asks for probabilities.
    raw: tuple[Logits, NDArray[np.int64]] | None

    @staticmethod
    def none() -> Sampled:
        return Sampled(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), None)


class Sampler:
    """Keeps the parameters of the running sequences by batch row."""

    def __init__(self, vocab_size: int, max_sequences: int, *, whole_masks: bool = False) -> None:
        """With `whole_masks` logits that were sampled from have -inf wherever a mask forbids a token."""
        self.vocab_size = vocab_size
        self._whole_masks = whole_masks
        numbers = np.zeros((3, max_sequences))
        self._temperature, self._top_p, self._min_p = numbers
        self._top_k = np.zeros(max_sequences, dtype=np.int64)
        self._seed = np.zeros(max_sequences, dtype=np.uint64)
        self._asks = np.zeros(max_sequences, dtype=np.uint8)
        self._core = _core.SamplingColumns(numbers=numbers, top_k=self._top_k, seeds=self._seed)
        self._tokens = TokenIds(np.arange(vocab_size, dtype=np.int32))

    def take_row(self, sequence: Sequence, batch_row: int) -> None:
        """`sequence` took this batch row: `sample` may meet it from now on."""
        s = sequence.sampling
        self._temperature[batch_row] = s.temperature if s.temperature >= GREEDY_BELOW else 0
        self._top_k[batch_row] = s.top_k if s.top_k < self.vocab_size else 0
        self._top_p[batch_row] = s.top_p
        self._min_p[batch_row] = s.min_p
        self._seed[batch_row] = s.seed
        masks = s.min_tokens > 0 and len(sequence.stop_ids) > 0
        edits = masks or sequence.follows_tokens or len(s.logit_bias) > 0
        drawn = self._temperature[batch_row] > 0
        self._asks[batch_row] = (
            EDITS * edits
            + LOGPROBS * (s.logprobs is not None)
            + DRAWS * drawn
            + TOP_K * (drawn and self._top_k[batch_row] > 0)
            + RULES * (sequence.rules is not None)
        )

    def sample(self, logits: Logits, rows: Rows, masks: StepMasks | None = None) -> Sampled:
        """Choose a token for each row. `logits` has all tokens as columns, and may be overwritten.

        `masks` are those of all rows with rules.
        """
        assert logits.columns == self.vocab_size
        asks = self._asked(rows.batch_rows)
        if not asks:  # a lone step feels each of the calls that this spares
            ids, best = logits.argmax()
            return Sampled(_where_finite(ids, best), best, None)
        batch_rows, positions = rows.places()
        raw = None
        if asks & LOGPROBS:
            with_logprobs = places_of(self.wants_logprobs(batch_rows))
            raw_rows = np.full(len(batch_rows), -1)
            raw_rows[with_logprobs] = np.arange(len(with_logprobs))
            raw = logits.take(with_logprobs, copy=True), raw_rows
        if asks & EDITS:
            self._edit(logits, rows, batch_rows, None)
        few = None
        if asks & RULES:
            assert masks is not None, "they were begun before the forward pass"
            # The k best of a row are looked for in all of it.
            few = masks.apply(logits, whole=self._whole_masks or asks & TOP_K > 0)
        ids, best = logits.argmax(few)
        if asks & DRAWS:
            drawn = self._core.drawn(batch_rows, best)
            whole = logits.on_host and not asks & TOP_K
            if whole and drawn is None:  # spares the copies of all that says how to draw
                draws = self.draws(best, batch_rows, positions)
                return Sampled(logits.race(draws, self._tokens, few), best, raw)
            drawn = np.arange(len(ids)) if drawn is None else drawn
            if len(drawn):
                for some in _parts(drawn, logits, whole=whole):
                    ids[some] = self._draw(
                        logits.take(some),
                        best[some],
                        batch_rows[some],
                        positions[some],
                        self._tokens,
                        None if few is None else few.of_rows(some),
                    )
        return Sampled(_where_finite(ids, best), best, raw)

    def logprobs(
        self, sampled: Sampled, rows: Rows, wanted: NDArray[np.bool_]
    ) -> list[TokenLogprob | None]:
        """Of the chosen tokens of the rows that are `wanted`; `None` for those whose request asked for none."""
        found: list[TokenLogprob | None] = [None] * len(wanted)
        if sampled.raw is None:
            return found
        raw, raw_rows = sampled.raw
        some = np.flatnonzero(wanted & (raw_rows >= 0) & (sampled.ids >= 0))
        tops = [rows.sequence(owner).sampling.logprobs or 0 for owner in rows.owners[some]]
        entries = token_logprobs(raw.take(raw_rows[some]), sampled.ids[some], tops)
        for row, entry in zip(some, entries, strict=True):
            found[row] = entry
        return found

    def draft(self, logits: Logits, rows: Rows, head: DraftHead) -> NDArray[np.int64]:
        """Guess what `sample` will choose for the last row of each sequence; `logits` is `[sequences, drafts]`.

        The noise is that of the same position, so that a good guess of the logits is a good guess of the draw.
        """
        if self.takes_best(rows.batch_rows):
            return head.ids[logits.argmax()[0]]
        batch_rows, positions = rows.last()
        self._edit(logits, rows, batch_rows, head)
        columns, best = logits.argmax()
        ids = head.ids[columns]
        drawn = self._core.drawn(batch_rows, best)
        drawn = np.arange(len(ids)) if drawn is None else drawn
        if len(drawn):
            ids[drawn] = self._draw(
                logits.take(drawn),
                best[drawn],
                batch_rows[drawn],
                positions[drawn],
                head.tokens,
            )
        return ids

    def _edit(
        self,
        logits: Logits,
        rows: Rows,
        batch_rows: NDArray[np.int64],
        head: DraftHead | None,
    ) -> None:
        """Change the rows of those who ask for it. With `head`, `logits` are its, for the last row of each sequence."""
        edited = places_of((self._asks[batch_rows] & EDITS) > 0)
        if not len(edited):
            return
        first = rows.starts
        last = first + rows.counts - 1
        owners = np.arange(len(first)) if head is not None else rows.owners
        contexts: list[Context] = []
        for row in edited.tolist():
            owner = int(owners[row])
            stop = row if head is None else int(last[owner])
            drafts = rows.drafts[int(first[owner]) + 1 : stop + 1]
            sequence = rows.sequence(owner)
            generated = int(rows.totals[owner]) - sequence.prompt_len
            contexts.append(Context(sequence, generated, drafts.tolist()))
        edit(logits, edited, contexts, None if head is None else head.columns)

    def takes_best(self, batch_rows: NDArray[np.int64]) -> bool:
        """Whether all tokens there are simply the most probable ones, and nothing more is asked of them."""
        return not self._asked(batch_rows)

    def _asked(self, batch_rows: NDArray[np.int64]) -> int:
        """All that is asked for there."""
        return int(np.bitwise_or.reduce(self._asks[batch_rows]))

    def wants_logprobs(self, batch_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the log-probabilities of answers are asked for there."""
        return (self._asks[batch_rows] & LOGPROBS) > 0

    def draws_tokens(self, batch_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether tokens are drawn there, rather than the most probable ones taken."""
        return self._temperature[batch_rows] > 0

    def seeds(self, batch_rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._seed[batch_rows]

    def draws(
        self, best: NDArray[np.float32], batch_rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Draws:
        """How rows with these highest logits are drawn from."""
        return Draws(best, *self._core.draws(batch_rows, positions))

    def _draw(
        self,
        logits: Logits,
        best: NDArray[np.float32],
        batch_rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: TokenIds,
        few: Few | None = None,
    ) -> NDArray[np.int64]:
        """One token for each row, whose highest logit is `best`, at `positions`; `tokens` are the columns' ids.

        There is no `few` where any row asks for its k best.
        """
        draws = self.draws(best, batch_rows, positions)
        if draws.top_k.any():
            draws.top_k[draws.top_k >= logits.columns] = 0
        else:
            return logits.race(draws, tokens, few)
        ids = np.zeros(len(best), dtype=np.int64)
        if (some := np.flatnonzero(draws.top_k)).size:
            ids[some] = _draw_top_k(logits.take(some), draws.of(some), tokens)
        if (some := np.flatnonzero(draws.top_k == 0)).size:
            ids[some] = logits.take(some).race(draws.of(some), tokens)
        return ids


def _draw_top_k(logits: Logits, draws: Draws, tokens: TokenIds) -> NDArray[np.int64]:
    """Draw among the tokens that top-k, then top-p, then min-p leave."""
    found = logits.highest(draws.top_k)
    scaled = (found.logits - found.logits[:, :1]) / draws.temperature[:, None]  # [rows, most]
    weights = np.exp(scaled)
    weights[np.arange(weights.shape[1]) >= draws.top_k[:, None]] = 0
    up_to = np.cumsum(weights, axis=1)
    before = np.concatenate([np.zeros((len(weights), 1)), up_to[:, :-1]], axis=1)
    stays = weights > 0
    stays &= (before < draws.top_p[:, None] * up_to[:, -1:]) | (draws.top_p == 1)[:, None]
    stays &= weights >= draws.min_p[:, None]
    ids = tokens.ids[found.ids]
    bits = noise.bits(ids.astype(np.uint32), draws.key[:, None], draws.key2[:, None])
    time = np.log(noise.exponential(bits)) - scaled
    winner = np.where(stays, time, np.inf).argmin(axis=1)
    return ids[np.arange(len(winner)), winner].astype(np.int64)


def token_logprobs(
    logits: Logits, tokens: NDArray[np.int64], tops: Items[int]
) -> list[TokenLogprob]:
    """For each row the log-probability of its token, and its `tops` most probable ones."""
    if not len(tokens):
        return []
    most = max(1, DRAW_ELEMENTS // logits.columns)
    if len(tokens) > most:  # of a prompt
        return [
            entry
            for start in range(0, len(tokens), most)
            for entry in token_logprobs(
                logits.part(start, start + most),
                tokens[start : start + most],
                tops[start : start + most],
            )
        ]
    _, best = logits.argmax()
    with np.errstate(invalid="ignore"):  # rows that are not finite: their request fails anyway
        normaliser = best + logits.log_total(best)
    at_token = logits.at(tokens)
    counts = np.clip(np.asarray(tops, dtype=np.int64), 1, logits.columns)
    highest = logits.highest(counts)
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


def _where_finite(ids: NDArray[np.int64], best: NDArray[np.float32]) -> NDArray[np.int64]:
    """`ids`, -1 where the highest logit is no finite number."""
    finite = np.isfinite(best)
    if not finite.all():
        ids[~finite] = -1
    return ids


def _parts(rows: NDArray[np.int64], logits: Logits, *, whole: bool) -> list[NDArray[np.int64]]:
    """`rows` in parts that bound the memory of a draw. A `whole` draw, on a CPU and without any top-k, takes none."""
    if whole and stand_together(rows):
        return [rows]
    return np.array_split(rows, -(-len(rows) * logits.columns // DRAW_ELEMENTS))


def _logprob(value: float) -> float:
    return max(float(value), LEAST_LOGPROB)
