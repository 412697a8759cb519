"""Experts move while requests run: loads are gathered, changes are weighed, and experts move layer by layer.

Everything happens between two steps, in turns that all ranks take (`turns.py`): so all ranks know the same and decide
the same, without a leader. A layer that is worth changing changes wave by wave (`headrace_kernels/moe/moves.py`).
Images of slots go in pieces, and once every rank has all of what it gets, all ranks overwrite their slots and send rows
by the new placement, in one turn. A wave that any rank refuses, as a piece did not come whole, is dropped by all: what
stood before it stands.

Memory: the images of one slot that comes and of one that goes, the pieces of two turns, `WINDOWS` windows of counts.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.worker.parallel.rebalanced import RebalanceConfig, Rebalanced
from headrace.worker.parallel.track_record import Expected, TrackRecord
from headrace.worker.parallel.turns import NO_BYTES, Note, Said, Turns
from headrace_kernels.moe.gate import (
    WINDOWS,
    Prices,
    Verdict,
    persistence,
    rows_of_ranks,
    seconds_per_row,
    weigh,
)
from headrace_kernels.moe.moves import ExpertMove, Wave, after_wave, busiest
from headrace_kernels.moe.placed import PlacedLayer
from headrace_kernels.moe.transport import Transport

log = logging.getLogger(__name__)

LAYERS_A_TURN = 4  # that are weighed: some 4 ms for 256 experts on 32 ranks


class _Phase(Enum):
    GATHER = 0
    PROBE = 1
    WEIGH = 2
    MOVE = 3


@dataclass(slots=True)
class _Job:
    """A layer on its way to another placement."""

    layer: int
    verdict: Verdict
    waves: deque[Wave]


class Rebalancer:
    """One rank's part: the `BetweenSteps` of its engine. `layers` are the same on all ranks, in the same order."""

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[PlacedLayer],
        config: RebalanceConfig,
        *,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`device` is that of parcels. Raises ValueError where ranks differ in slots, or the shape is another one."""
        shape = config.shape
        for layer in layers:
            shape.check(layer.placement.experts)
            slots = {len(held) for held in layer.placement.ranks}
            if slots != {shape.slots} or len(layer.placement.ranks) != transport.ranks:
                raise ValueError(f"ranks have {slots} slots of a layer, not {shape.slots} each")
        self.done = Rebalanced()
        self._transport = transport
        self._clock = clock
        self._layers = layers
        self._config = config
        self._turns = Turns(transport, device or torch.device("cpu"))
        self._phase = _Phase.GATHER
        self._state = 0  # digest of the jobs
        self._windows: deque[NDArray[np.float64]] = deque(
            maxlen=WINDOWS
        )  # [layers, ranks, experts]
        self._seconds = np.zeros((len(layers), transport.ranks))  # of slots, of the newest window
        self._counted = [layer.counts().copy() for layer in layers]
        self._clocks = [layer.dispatch.clock.seconds for layer in layers]
        self._prices = (0.0, 0.0)  # seconds for a row more and for a byte, as agreed
        self._verdicts: list[Verdict] = []
        self._record = TrackRecord()
        self._jobs: deque[_Job] = deque()
        self._offset = 0  # in the images of the wave
        self._staged = NO_BYTES  # what came of this rank's image
        self._outgoing: tuple[ExpertMove, torch.Tensor] | None = None
        self._refusal: str | None = None
        self._seconds_per_byte = 0.0  # as measured here
        self._spent_s = 0.0  # on the wave
        self._began_s = 0.0

    def due(self, round_number: int) -> bool:
        """Whether this rank needs a turn."""
        gathers = self._phase is _Phase.GATHER
        return (
            self._turns.missed or not gathers or round_number % self._config.rounds_of_window == 0
        )

    def run(self) -> None:
        """One turn."""
        self._began_s = self._clock()
        self._turns.run(self)

    # --- what this rank says ---

    def speak(self) -> tuple[Note, Sequence[torch.Tensor]]:
        note = Note(
            state=self._state,
            refuses=self._refusal is not None,
            seconds_per_byte=self._seconds_per_byte,
        )
        ranks = self._transport.ranks
        bodies = [NO_BYTES] * ranks
        match self._phase:
            case _Phase.GATHER:
                bodies = [self._statistics()] * ranks
            case _Phase.PROBE:
                bodies[(self._transport.rank + 1) % ranks] = self._probe()
            case _Phase.MOVE if self._offset < self._image_bytes:
                for move in self._wave:
                    if move.source == self._transport.rank:
                        bodies[move.rank] = self._piece(move)
                        self.done.bytes_sent += len(bodies[move.rank])
            case _:
                pass
        return note, bodies

    def _statistics(self) -> torch.Tensor:
        """Counts and seconds since the last window, of all layers."""
        counts = [layer.counts().copy() for layer in self._layers]
        clocks = [layer.dispatch.clock.seconds for layer in self._layers]
        new = [now - then for now, then in zip(counts, self._counted, strict=True)]
        seconds = np.array(clocks) - np.array(self._clocks)
        self._counted, self._clocks = counts, clocks
        data = b"".join(
            [*(one.astype("<i8").tobytes() for one in new), seconds.astype("<f8").tobytes()]
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _probe(self) -> torch.Tensor:
        """As many bytes as one piece, of a slot that is read and written in place: the same bits."""
        layer = max(self._layers, key=lambda layer: layer.slot_bytes)
        image = layer.read(0)
        layer.write(0, image)
        return image[: self._config.piece_bytes]

    def _piece(self, move: ExpertMove) -> torch.Tensor:
        if self._outgoing is None or self._outgoing[0].source_slot != move.source_slot:
            image = self._layers[self._jobs[0].layer].read(move.source_slot)
            self._outgoing = (move, image)
        return self._outgoing[1][self._offset : self._offset + self._config.piece_bytes]

    # --- what comes of it ---

    def take(self, said: Sequence[Said]) -> None:
        if len({one.note.state for one in said}) > 1:
            self._diverged(said)
            return
        match self._phase:
            case _Phase.GATHER:
                self._take_statistics(said)
            case _Phase.PROBE:
                spent = self._clock() - self._began_s
                self._seconds_per_byte = spent / self._probe_bytes
                self._phase = _Phase.WEIGH
            case _Phase.WEIGH:
                self._take_prices(said)
                self._weigh_some()
            case _Phase.MOVE:
                self._take_pieces(said)

    def _diverged(self, said: Sequence[Said]) -> None:
        """Ranks must not act on different plans: all forget theirs."""
        states = [one.note.state for one in said]
        log.error("experts: ranks made different plans (%s), none of them is carried out", states)
        self.done.diverged += 1
        self._record.forget()
        self._windows.clear()
        self._rest()

    def _rest(self) -> None:
        """Back to gathering."""
        self._phase, self._state = _Phase.GATHER, 0
        self._verdicts = []
        self._jobs.clear()
        self._outgoing = self._refusal = None
        self._offset, self._spent_s = 0, 0.0

    def _take_statistics(self, said: Sequence[Said]) -> None:
        ranks, layers = self._transport.ranks, len(self._layers)
        experts = [layer.placement.experts for layer in self._layers]
        size = 8 * (sum(experts) + layers)
        bodies = [one.body for one in said]
        if any(body is None or len(body) != size for body in bodies):
            # Alike on all ranks only if it was damaged where it was sent; then no rank counts this window.
            raise ValueError("loads of a rank came damaged")
        window = np.zeros((layers, ranks, max(experts)))
        for rank, body in enumerate(bodies):
            assert body is not None
            data = body.numpy().tobytes()
            counts = np.frombuffer(data, "<i8", sum(experts)).astype(np.float64)
            for layer, part in enumerate(np.split(counts, np.cumsum(experts)[:-1])):
                window[layer, rank, : len(part)] = part
            self._seconds[:, rank] = np.frombuffer(data, "<f8", layers, 8 * sum(experts))
        self._windows.append(window)
        self.done.windows += 1
        came_true = self._record.window(self._rows(), self._seconds)
        self.done.trust = self._record.trust
        if came_true is not None:
            log.info("experts: %.2f of what the last change was to save came true", came_true)
        if len(self._windows) == WINDOWS and not self._record.open:
            known = all(one.note.seconds_per_byte > 0 for one in said)
            self._phase = _Phase.WEIGH if known else _Phase.PROBE

    @property
    def _probe_bytes(self) -> int:
        most = max(layer.slot_bytes for layer in self._layers)
        return min(most, self._config.piece_bytes)

    def _take_prices(self, said: Sequence[Said]) -> None:
        """Of the slowest rank, once for all layers."""
        if self._verdicts:
            return
        of_byte = max(one.note.seconds_per_byte for one in said)
        of_row = seconds_per_row(self._rows(), self._seconds) * self._record.trust
        self._prices = of_row, of_byte

    def _rows(self) -> NDArray[np.float64]:
        """Rows of each rank in each layer in the newest window, as experts lie now."""
        return np.stack(
            [
                rows_of_ranks(window[:, : layer.placement.experts], layer.placement)
                for window, layer in zip(self._windows[-1], self._layers, strict=True)
            ]
        )

    def _weigh_some(self) -> None:
        windows = np.stack(self._windows)  # [windows, layers, ranks, experts]
        lasts = persistence(windows.sum(2))
        of_row, of_byte = self._prices
        start = len(self._verdicts)
        for i, layer in enumerate(self._layers[start : start + LAYERS_A_TURN], start):
            prices = Prices(
                seconds_per_row=of_row, seconds_per_byte=of_byte, slot_bytes=layer.slot_bytes
            )
            seen = windows[:, i, :, : layer.placement.experts]
            verdict = weigh(
                seen, layer.placement, self._config.shape, persistence=lasts, prices=prices
            )
            self._verdicts.append(verdict)
        if len(self._verdicts) == len(self._layers):
            self._decide(lasts)

    def _decide(self, lasts: float) -> None:
        paying = [(i, verdict) for i, verdict in enumerate(self._verdicts) if verdict.pays]
        declined = sum(bool(verdict.waves) for verdict in self._verdicts) - len(paying)
        gain_s = sum(verdict.gain_s for _, verdict in paying)
        cost_s = sum(verdict.cost_s for _, verdict in paying)
        log.info(
            "experts: %d of %d layers change, %d are uneven but would not pay; predicted gain %.3f s, cost %.3f s "
            "(%.3g s for a row more, %.3g s for a MB, %.2f of the skew stays)",
            len(paying), len(self._layers), declined, gain_s, cost_s,
            self._prices[0], self._prices[1] * 1e6, lasts,
        )  # fmt: skip
        self.done.layers_declined += declined
        self.done.gain_s += gain_s
        self.done.cost_s += cost_s
        expected = self._expected(paying)
        self._rest()
        best_first = sorted(paying, key=lambda pair: pair[1].cost_s - pair[1].gain_s)
        self._jobs = deque(_Job(i, verdict, deque(verdict.waves)) for i, verdict in best_first)
        if self._jobs:
            self._record.changed(expected)
            self._phase = _Phase.MOVE
            self._state = zlib.crc32(
                repr([(i, verdict.waves) for i, verdict in best_first]).encode()
            )

    def _expected(self, paying: Sequence[tuple[int, Verdict]]) -> dict[int, Expected]:
        """What of these changes is to be seen in the windows to come, as predicted without regard to trust."""
        total = self._rows().sum(1)
        return {
            i: Expected(
                float(self._seconds[i].max() / total[i]),
                verdict.window_s / float(total[i]) / self._record.trust,
            )
            for i, verdict in paying
        }

    # --- moving ---

    @property
    def _wave(self) -> Wave:
        return self._jobs[0].waves[0]

    @property
    def _image_bytes(self) -> int:
        return self._layers[self._jobs[0].layer].slot_bytes

    def _take_pieces(self, said: Sequence[Said]) -> None:
        if refused := [rank for rank, one in enumerate(said) if one.note.refuses]:
            log.warning(
                "experts: rank %d refused a move of experts; nothing of it is done", refused[0]
            )
            self.done.cancelled += 1
            self._record.forget()
            self._rest()
        elif self._offset < self._image_bytes:
            self._stage(said)
            self._offset += self._config.piece_bytes
            self._spent_s += self._clock() - self._began_s
        else:
            self._commit()

    def _stage(self, said: Sequence[Said]) -> None:
        """Keep the piece that came for this rank. What is wrong with it is said in the next turn."""
        mine = next((move for move in self._wave if move.rank == self._transport.rank), None)
        if mine is None or self._refusal is not None:
            return
        size = self._image_bytes
        start, end = self._offset, min(self._offset + self._config.piece_bytes, size)
        body = said[mine.source].body
        if body is None or len(body) != end - start:
            self._refusal = f"bytes {start} to {end} of expert {mine.expert} did not come whole"
        else:
            try:
                if len(self._staged) < size:
                    self._staged = torch.empty(size, dtype=torch.uint8)
                self._staged[start:end] = body
            except (MemoryError, RuntimeError) as error:
                self._refusal = f"no room for expert {mine.expert}: {error}"
        if self._refusal is not None:
            log.warning("experts: refused a move from rank %d: %s", mine.source, self._refusal)

    def _commit(self) -> None:
        """All ranks have what the wave brings them: slots and placement change, here and on all others."""
        job, wave = self._jobs[0], self._wave
        layer = self._layers[job.layer]
        target = after_wave(layer.placement, wave)
        for move in wave:
            if move.rank == self._transport.rank:
                layer.write(move.slot, self._staged[: self._image_bytes])
                self.done.slots_changed += 1
        layer.dispatch.place(target)
        size = busiest([wave]) * self._image_bytes
        self._spent_s += self._clock() - self._began_s
        self._seconds_per_byte = (self._seconds_per_byte + self._spent_s / size) / 2
        self.done.spent_s += self._spent_s
        self.done.experts_moved += len(wave)
        self.done.waves += 1
        job.waves.popleft()
        self._outgoing, self._offset, self._spent_s = None, 0, 0.0
        if not job.waves:
            self.done.layers_changed += 1
            before, after = job.verdict.before, job.verdict.after
            log.info(
                "experts: layer %d, busiest rank %.3f above the mean, now %.3f",
                job.layer,
                before,
                after,
            )
            self._jobs.popleft()
        if not self._jobs:
            self._rest()
