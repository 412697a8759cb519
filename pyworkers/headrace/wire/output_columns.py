"""Outputs of many requests in columns: written to a frame in one go, and objects only where somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace.wire.frames import Output, Step, TokenLogprob


class Outputs(Sequence[Output]):
    """A row for each output. What says more than tokens is in `special`, by row, and has no tokens in the columns."""

    __slots__ = ("accepted", "counts", "drafted", "ids", "requests", "special")

    def __init__(
        self,
        requests: NDArray[np.uint64],
        counts: NDArray[np.int64],
        ids: NDArray[np.int64],
        drafted: NDArray[np.int64],
        accepted: NDArray[np.int64],
        special: dict[int, Output],
    ) -> None:
        assert len(requests) == len(counts) == len(drafted) == len(accepted)
        self.requests = requests
        self.counts = counts
        self.ids = ids  # of all rows, one after the other
        self.drafted = drafted
        self.accepted = accepted
        self.special = special  # in the order of the rows

    @staticmethod
    def of(outputs: list[Output]) -> Outputs:
        """These, whatever they say."""
        requests = np.array([output.request for output in outputs], dtype=np.uint64)
        none = np.zeros(len(outputs), dtype=np.int64)
        return Outputs(requests, none, none[:0], none, none, dict(enumerate(outputs)))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return len(self.ids) + sum(len(output.ids) for output in self.special.values())

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Output: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Output]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Output | list[Output]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Output]:
        columns = (self.requests, self.counts, self.drafted, self.accepted)
        rows = zip(*[column.tolist() for column in columns], strict=True)
        ids: list[int] = self.ids.tolist()
        start = 0
        for row, (request, count, drafted, accepted) in enumerate(rows):
            special = self.special.get(row)
            own = ids[start : start + count]
            start += count
            yield special or Output(request, own, drafted=drafted, accepted=accepted)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Outputs)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it is equal to lists

    def encode_rows(self, one: Callable[[Output, int], bytes]) -> bytes:
        """The field `outputs` of a `Step`; `one` writes what is special, of a row."""
        return _core.encode_outputs(
            self.requests,
            self.counts,
            self.ids,
            drafted=self.drafted,
            accepted=self.accepted,
            special=[(row, one(output, row)) for row, output in self.special.items()],
        )

    def encode_step(self, step: Step) -> bytes | None:
        """The body of `step`, whose outputs these are; `None` where one says more than tokens, or a field is wrong."""
        load = step.load
        if self.special or type(step.ms) is not float:
            return None
        try:
            return _core.encode_step(
                (
                    step.step,
                    step.waited_us,
                    step.prefill_tokens,
                    step.prefill_context,
                    step.decode_rows,
                    step.kv_tokens,
                    step.waiting_tokens,
                    step.drafted,
                    step.accepted,
                ),
                step.ms,
                (
                    load.blocks_used,
                    load.blocks_cached,
                    load.running,
                    load.waiting,
                    load.preemptions,
                ),
                self.requests,
                self.counts,
                self.ids,
                drafted=self.drafted,
                accepted=self.accepted,
            )
        except (TypeError, ValueError, OverflowError):
            return None

    def where(self, mask: NDArray[np.bool_]) -> Outputs:
        """The rows of `mask`."""
        places = mask.cumsum() - 1
        special = {int(places[row]): it for row, it in self.special.items() if mask[row]}
        return Outputs(
            self.requests[mask],
            self.counts[mask],
            self.ids[mask.repeat(self.counts)],
            self.drafted[mask],
            self.accepted[mask],
            special,
        )

    def without(self, request: int) -> Outputs:
        """All but those of `request`."""
        kept = self.requests != np.uint64(request)
        return self if kept.all() else self.where(kept)

    def parts(self, most_values: int) -> list[Outputs]:
        """These in their order, cut so that no part has more than `most_values` ids and log-probabilities, unless in
        one row; at least one part.
        """
        special = {row: _values(output) for row, output in self.special.items()}
        if len(self.ids) + sum(special.values()) <= most_values:
            return [self]
        values = self.counts.copy()
        for row, more in special.items():
            values[row] = more
        part, parts, left = np.zeros(len(self), dtype=np.int64), 0, most_values
        for row, more in enumerate(values.tolist()):
            if more > left and row > 0 and part[row - 1] == parts:
                parts += 1
                left = most_values
            part[row] = parts
            left -= more
        return [self.where(part == number) for number in range(parts + 1)]


def joined(parts: list[Outputs]) -> Outputs:
    """One row for each request, with what all the parts say of it, in order."""
    if len(parts) == 1:
        return parts[0]
    requests = np.concatenate([part.requests for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    starts = counts.cumsum() - counts
    _, firsts, row_of = np.unique(requests, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)  # rows stand where their first part stood
    rank[firsts.argsort()] = np.arange(len(firsts))
    row_of = rank[row_of]
    order = row_of.argsort(kind="stable")
    lengths = counts[order]
    token_at = (starts[order] - (lengths.cumsum() - lengths)).repeat(lengths)

    def added(column: NDArray[np.int64]) -> NDArray[np.int64]:
        total = np.zeros(len(firsts), dtype=np.int64)
        np.add.at(total, row_of, column)
        return total

    whole = Outputs(
        requests[np.sort(firsts)],
        added(counts),
        ids[token_at + np.arange(len(token_at))],
        added(np.concatenate([part.drafted for part in parts])),
        added(np.concatenate([part.accepted for part in parts])),
        {},
    )
    return _with_special(whole, parts)


def _with_special(whole: Outputs, parts: list[Outputs]) -> Outputs:
    """`whole`, of whose rows some say more than tokens in some of `parts`."""
    more = {output.request for part in parts for output in part.special.values()}
    if not more:
        return whole
    wanted = np.array(list(more), dtype=np.uint64)
    said: dict[int, Output] = {}
    for part in parts:
        for output in part.where(np.isin(part.requests, wanted)):
            before = said.get(output.request)
            said[output.request] = output if before is None else _merged(before, output)
    special = np.isin(whole.requests, wanted)
    plain = ~special
    none = np.zeros(len(whole), dtype=np.int64)
    return Outputs(
        whole.requests,
        np.where(plain, whole.counts, none),
        whole.ids[plain.repeat(whole.counts)],
        np.where(plain, whole.drafted, none),
        np.where(plain, whole.accepted, none),
        {row: said[int(whole.requests[row])] for row in special.nonzero()[0].tolist()},
    )


def _merged(before: Output, after: Output) -> Output:
    logprobs: list[TokenLogprob] | None = before.logprobs
    if after.logprobs is not None:
        logprobs = [*(logprobs or []), *after.logprobs]
    return replace(
        before,
        ids=before.ids + after.ids,
        logprobs=logprobs,
        finish=after.finish,
        drafted=before.drafted + after.drafted,
        accepted=before.accepted + after.accepted,
    )


def _values(output: Output) -> int:
    count = len(output.ids)
    for entries in (output.logprobs, output.prompt_logprobs):
        if entries:
            count += sum(1 + len(entry.top) for entry in entries)
    return count
