"""What a run says while it runs and leaves when it ends: progress, the machine, the picture of the loss."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from headrace.mtp_training.loop import Point

WIDTH = 24
LINE_EVERY_S = 30.0  # where there is no terminal


class Bar:
    """A bar on a terminal, a line now and then anywhere else; with what is left at the pace so far."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._began: tuple[float, int] | None = None
        self._drawn_s = 0.0
        self._note = ""

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._began is None:
            self._began = (now_s, done)
        tty = self._stream.isatty()
        if done < total and now_s - self._drawn_s < (0.2 if tty else LINE_EVERY_S):
            return
        self._drawn_s = now_s
        began_s, first = self._began
        left = ""
        if done > first:
            left = f", {(now_s - began_s) / (done - first) * (total - done) / 60:.1f} min left"
        filled = "#" * int(done / total * WIDTH)
        text = f"{self._label} [{filled:<{WIDTH}}] {done}/{total}{left}{self._note}"
        end = "\n" if done == total or not tty else ""
        self._stream.write((f"\r\x1b[K{text}" if tty else text) + end)
        self._stream.flush()

    def step(self, done: int, total: int, point: Point | None) -> None:
        if point is not None:
            self._note = f", loss {point.loss:.3f}"
        self(done, total)


def machine(device: str) -> dict[str, Any]:
    """Where it ran."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def rounded(value: Any) -> Any:
    """The value with its numbers cut to what they can mean, five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def plot(curve: Sequence[Point], path: Path) -> None:
    """Draw the loss of each draft over the steps; without matplotlib, say so and go on."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        sys.stderr.write(f"{path} is not drawn: pip install headrace[bench]\n")
        return
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for m in range(max(len(point.by_pass) for point in curve)):
        trained = [point for point in curve if m < len(point.by_pass)]
        steps = [point.step for point in trained]
        axes.plot(steps, [point.by_pass[m] for point in trained], label=f"draft {m + 1}", lw=1)
    axes.set(
        xlabel="step",
        ylabel="cross-entropy with the model (nats)",
        title="Training of the MTP head",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
