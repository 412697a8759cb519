"""Turns: what ranks say to each other between steps, so that each rank takes every turn, once and in order.

In a turn each rank has something for each other one, and takes what all said. A rank that fails, or learns that another
one did, may miss the end of a turn that others took: whoever is behind is seen by the numbers of the next turn, and
then all say that one again before they compute anything. So the ranks stay copies of each other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch

from headrace_kernels.moe.transport import RankLost, Span, Transport

HEADER = struct.Struct("<4s?3xIIqQd")
MAGIC = b"HRt1"
MOST_TRIES = 3  # of a turn that fails here, while others are done with it
NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank says to all others in a turn."""

    state: int = 0  # digest of what all ranks know; 32 bits
    refuses: bool = False  # what is under way
    seconds_per_byte: float = 0.0  # as measured here; 0 where it was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What came from one rank in a turn. `body` is None where it was damaged on the way."""

    turn: int
    note: Note
    body: torch.Tensor | None  # uint8


class TurnsDiffer(Exception):
    """What a rank says does not fit to what this one knows, beyond repair."""


class Speaker(Protocol):
    def speak(self) -> tuple[Note, Sequence[torch.Tensor]]:
        """The note of this turn, and a body of bytes for each rank."""
        ...

    def take(self, said: Sequence[Said]) -> None:
        """Go on by what all ranks said. Where this raises it is called again, with the same."""
        ...


class Turns:
    """This rank's end. One thread at a time."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.number = 0
        self.missed = False  # the last turn began here and did not end
        self._transport = transport
        self._device = device  # of parcels
        self._failed = 0  # how often this turn could not be taken
        self._before: _Parcels | None = None  # what was said in the turn before
        self._now: _Parcels | None = None

    def run(self, speaker: Speaker) -> None:
        """One turn with all ranks, or the one before again where some rank missed it.

        Raises what the transport raises, and TurnsDiffer.
        """
        self.missed = True
        if self._now is None:
            note, bodies = speaker.speak()
            assert len(bodies) == self._transport.ranks
            self._now = _packed(self.number, note, bodies, self._device)
        said = self._exchange(self._now)
        behind = min(one.turn for one in said)
        if any(one.turn not in (behind, behind + 1) for one in said):
            turns = [one.turn for one in said]
            raise TurnsDiffer(f"the ranks are in turns {turns}: restart the group")
        if any(one.turn > behind for one in said):
            again = self._before if self.number > behind else self._now
            assert again is not None, "a rank that is ahead took a turn"
            said = self._exchange(again)
            if any(one.turn != behind for one in said):
                raise TurnsDiffer(f"turn {behind} was not said again by all: restart the group")
        if self.number == behind:
            self._take(speaker, said)
        self.missed = False

    def _take(self, speaker: Speaker, said: Sequence[Said]) -> None:
        try:
            speaker.take(said)
        except Exception as error:
            self._failed += 1
            if self._failed == MOST_TRIES:
                what = f"turn {self.number} failed {MOST_TRIES} times here: {error}"
                raise RankLost(self._transport.rank, what) from error
            raise
        self._failed = 0
        self._before, self._now = self._now, None
        self.number += 1

    def _exchange(self, parcels: _Parcels) -> list[Said]:
        (data,), counts = self._transport.post((parcels.data,), parcels.spans)()
        return [_read(rank, part) for rank, part in enumerate(data.cpu().split(counts))]


class _Parcels(NamedTuple):
    """Bytes, and which of them are for each rank."""

    data: torch.Tensor
    spans: list[Span]


def _packed(
    turn: int, note: Note, bodies: Sequence[torch.Tensor], device: torch.device
) -> _Parcels:
    """What is for several ranks is there once."""
    spans: dict[int, Span] = {}
    parts: list[torch.Tensor] = []
    end = 0
    for body in bodies:
        if id(body) not in spans:
            here = body.cpu().contiguous()
            header = HEADER.pack(
                MAGIC, note.refuses, note.state, _crc(here), turn, len(here), note.seconds_per_byte
            )
            parts += [torch.frombuffer(bytearray(header), dtype=torch.uint8), here]
            spans[id(body)] = Span(end, end + len(header) + len(here))
            end = spans[id(body)].end
    return _Parcels(torch.cat(parts).to(device), [spans[id(body)] for body in bodies])


def _crc(body: torch.Tensor) -> int:
    return zlib.crc32(cast("Any", body.numpy()))


def _read(rank: int, parcel: torch.Tensor) -> Said:
    data = parcel.contiguous()
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) < HEADER.size:
        raise TurnsDiffer(f"rank {rank} sent {tuple(data.shape)} of {data.dtype}, no turn")
    fields = HEADER.unpack(data[: HEADER.size].numpy().tobytes())
    magic, refuses, state, crc, turn, length, seconds_per_byte = fields
    if magic != MAGIC:
        raise TurnsDiffer(f"rank {rank} sent something that begins with {magic!r}, no turn")
    body = data[HEADER.size :]
    whole = len(body) == length and _crc(body) == crc
    note = Note(state=state, refuses=refuses, seconds_per_byte=seconds_per_byte)
    return Said(turn=turn, note=note, body=body if whole else None)
