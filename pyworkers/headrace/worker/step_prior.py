"""What the steps of a model cost on a device, remembered in the user's cache: only the first start has to time some."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from headrace.models.load.cache import cache_root
from headrace.wire.frames import StepCost
from headrace_kernels.torch_if_loaded import type_of

log = logging.getLogger(__name__)

MOST_REMEMBERED = 256  # models and devices; of more the oldest are forgotten
MOST_MS = 1e6  # as a router takes it
MOST_BYTES = 1 << 16  # of a file; more is not ours


class StepPriors:
    """A folder with one small file for each combination of what decides about a step's time."""

    def __init__(self, root: Path | None = None) -> None:
        self._folder = (root or cache_root()) / "steps"

    def recall(self, of: dict[str, Any]) -> StepCost | None:
        """What was kept for `of`; `None` where nothing was, or where the file is no good any more."""
        path = self._path(of)
        try:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            kept = json.loads(text)
            if kept["of"] != of:
                raise ValueError("it is about something else")
            cost = StepCost(*(float(kept["cost"][name]) for name in StepCost.__slots__))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is of no use (%r): steps are timed again", path, error)
            return None
        if not _makes_sense(cost):
            log.warning("%s says that steps cost %s: they are timed again", path, cost)
            return None
        return cost

    def keep(self, of: dict[str, Any], cost: StepCost) -> None:
        """For the next start. A cache that cannot be written to is no reason not to serve."""
        path = self._path(of)
        costs = dict(zip(StepCost.__slots__, astuple(cost), strict=True))
        text = json.dumps({"of": of, "cost": costs}, indent=1)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(text)
                partial.rename(path)  # whole or not at all, whoever else starts now
            finally:
                partial.unlink(missing_ok=True)
            self._forget_oldest()
        except OSError as error:
            log.warning(
                "%s: %s; the next start times its steps again", path, error.strerror or error
            )

    def _forget_oldest(self) -> None:
        kept = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-MOST_REMEMBERED]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _path(self, of: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]
        return self._folder / f"{digest}.json"


def known_or_timed(
    of: dict[str, Any],
    time: Callable[[], StepCost | None],
    *,
    all_know: Callable[[bool], bool] = bool,
    priors: StepPriors | None = None,
) -> StepCost | None:
    """What the steps of `of` cost: as it was kept, or else as `time` finds now. `all_know` says whether every rank of a
    group knows: they time their steps together or not at all.
    """
    priors = priors or StepPriors()
    kept = priors.recall(of)
    if all_know(kept is not None):
        return kept
    cost = time()
    if cost is None or not _makes_sense(cost):
        log.warning("the timed steps say nothing (%s): routers learn what steps cost", cost)
        return None
    priors.keep(of, cost)
    return cost


def device_name(device: str) -> str:
    """Of the processor or GPU, as its maker calls it."""
    if type_of(device) == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _makes_sense(cost: StepCost) -> bool:
    costs = astuple(cost)
    return all(math.isfinite(ms) and 0 <= ms <= MOST_MS for ms in costs) and sum(costs) > 0
