"""Steps of answers, recorded: a CUDA graph starts all kernels of a step by one call.

On an H100 a decode step of DeepSeek-R1's 61 layers waited 83 ms for the host, which started some 2,300 kernels, and 54
ms for the GPU. A recording has the launches with all of their numbers, so it fits steps of one form: as many rows,
block tables as wide, as much work of attention. What differs between such steps lies in tensors, its inputs. The first
step of a form runs as it is, and compiles what is not compiled yet; the second is recorded; from then on inputs are
copied to where the recording reads them. The same kernels run with the same numbers, so the bits are the same.

Prompts are not recorded, as hardly two are alike; nor passes that are told of, draft, or meet other ranks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

log = logging.getLogger(__name__)

MOST = 128  # recordings that are kept; each is some megabytes of launches. A guess
FORMS = 4096  # that were seen once

Form: TypeAlias = tuple[Any, ...]
Replay: TypeAlias = Callable[[], None]
Record: TypeAlias = Callable[[Callable[[], object]], Replay]


class RecordableStep(Protocol):
    """One forward pass."""

    def form(self) -> Form | None:
        """The numbers that its launches have, or `None` where it is not to be recorded."""
        ...

    def inputs(self) -> Sequence[torch.Tensor]:
        """What its launches read and another step of the same form brings anew."""
        ...


@dataclass(frozen=True, slots=True)
class Recording:
    inputs: Sequence[torch.Tensor]
    replay: Replay
    step: RecordableStep  # owns all that the launches read
    rows: int


class Recordings:
    """Of one model. `record` calls launches without their work, and returns what does it: `cuda_graphs` by default."""

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        self._device = device
        self._record = record or cuda_graphs(device)
        self._known: OrderedDict[Form, Recording] = OrderedDict()
        self._seen: OrderedDict[Form, torch.Size] = (
            OrderedDict()
        )  # once, with the size of the result
        self._results = torch.empty(0)
        self._broken = False
        self.replayed = 0  # steps

    def run(self, step: RecordableStep, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `compute` gives for `step`, in float32. It is valid until the next call."""
        form = None if self._broken else step.form()
        if form is None:
            return compute().float()
        inputs = step.inputs()
        key = (form, tuple((x.shape, x.dtype) for x in inputs))
        recording = self._known.get(key)
        if recording is not None:
            self._known.move_to_end(key)
            for ours, theirs in zip(recording.inputs, inputs, strict=True):
                ours.copy_(theirs, non_blocking=True)
        elif (size := self._seen.pop(key, None)) is None:
            result = compute().float()
            self._seen[key] = result.shape
            if len(self._seen) > FORMS:
                self._seen.popitem(last=False)
            return result
        else:
            recording = self._recorded(step, inputs, size, compute)
            if recording is None:
                return compute().float()
            self._known[key] = recording
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        recording.replay()
        self.replayed += 1
        return self._results[: recording.rows]

    def forget(self) -> None:
        """What recordings read and write is gone."""
        self._known.clear()
        self._seen.clear()

    def _recorded(
        self,
        step: RecordableStep,
        inputs: Sequence[torch.Tensor],
        size: torch.Size,
        compute: Callable[[], torch.Tensor],
    ) -> Recording | None:
        if size[0] > len(self._results) or size[1:] != self._results.shape[1:]:
            self.forget()  # all write to one tensor, which nobody reads but for the newest step's results
            rows = 1 << (size[0] - 1).bit_length()
            self._results = torch.empty(rows, *size[1:], device=self._device)
        results = self._results[: size[0]]
        try:
            replay = self._record(lambda: results.copy_(compute()))
        except RuntimeError as error:
            # Steps go on one launch after the other, which is slower and no less right.
            log.warning("decode steps cannot be recorded, and run launch by launch: %s", error)
            self._broken = True
            return None
        return Recording(inputs, replay, step, size[0])


def cuda_graphs(device: torch.device) -> Record:
    """Recordings as CUDA graphs. They share their memory, as one runs after the other."""

    def record(launches: Callable[[], object]) -> Replay:
        if (
            not anchor
        ):  # torch gives a pool up with the last graph in it, and takes no new one into it
            anchor.append(graph_of(lambda: torch.zeros(1, device=device)))
        return graph_of(launches).replay

    def graph_of(launches: Callable[[], object]) -> torch.cuda.CUDAGraph:
        nonlocal pool
        pool = pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads may go on with the device meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                launches()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph

    pool: Any = None
    anchor: list[torch.cuda.CUDAGraph] = []
    return record
