"""Every kernel at the shapes of DeepSeek-R1, Llama-70B, Qwen3-235B and gpt-oss, against this device's ceilings.

    python -m bench.kernels --out kernels.json [--dry] [--budget-s 150]

The file is written anew after every case. Started again with the same file, it goes on after the cases that the file
has: one that broke the device, or ended the process, is in it as failed. Exit status: 0, all cases are right; 1, some
failed; 75, the device is broken or the process must be started again for the rest.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.kernels import ceilings
from bench.kernels.case import Case
from bench.kernels.launched import kernels_of_the_package
from bench.kernels.measure import all_cases, breaks_the_device, head, measure, with_shares
from bench.kernels.shapes import DRY, FULL, Sizes
from bench.kernels.timing import Clock, GpuClock, HostClock

AGAIN = 75
CASE_LIMIT_S = 45  # on a GPU: a case that takes longer hangs, and the process with it
OF_NO_CASE = "a kernel of the package without a case"


class Kept:
    """What is known so far, in a file that is whole at all times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"ceilings": None, "cases": []}
        )

    def write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1) + "\n")
        new.replace(self.path)

    def take_up(self) -> set[str]:
        """The names of the cases that are done. One that was begun and not ended has ended the process."""
        begun = self.figures.pop("begun", None)
        if begun is not None:
            self.figures["cases"].append(begun | {"failed": "the process ended in it"})
            self.write()
        return {row["case"] for row in self.figures["cases"]}


def run(kept: Kept, sizes: Sizes, clock: Clock, device: torch.device, end_at: float) -> int:
    """All cases that are not done yet, until the clock is at `end_at`."""
    done = kept.take_up()
    figures = kept.figures
    if figures["ceilings"] is None:
        figures["ceilings"] = ceilings.measure(clock, device)
        kept.write()
    rates = rates_of(figures["ceilings"])
    waiting = [case for case in all_cases(sizes) if case.name not in done]
    figures["left_out"] = []
    for i, case in enumerate(waiting):
        if time.monotonic() >= end_at:
            figures["left_out"] = [case.name for case in waiting[i:]]
            break
        if not _one(kept, case, clock, device, rates):
            return AGAIN
    figures["without_case"] = _without_case(figures)
    kept.write()
    failed = [row["case"] for row in figures["cases"] if "failed" in row]
    failed += [row["ceiling"] for row in figures["ceilings"] if "error" in row]
    print(
        f"{len(figures['cases'])} cases, {len(failed)} failed, {len(figures['left_out'])} left out"
    )
    return 1 if failed or figures["without_case"] else 0


def _one(
    kept: Kept, case: Case, clock: Clock, device: torch.device, rates: dict[str, float]
) -> bool:
    """Measure a case; whether the process can go on."""
    figures = kept.figures
    figures["begun"] = head(case)
    kept.write()
    usable = True
    if not clock.dry:
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        row = with_shares(measure(case, clock, device), rates)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        row = head(case) | {"failed": f"{type(error).__name__}: {text[0]}"}
        usable = not breaks_the_device(error)
        print(f"failed: {case.name}: {row['failed']}", flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
    del figures["begun"]
    figures["cases"].append(row)
    kept.write()
    if usable and not clock.dry:
        torch.cuda.empty_cache()
    return usable


def rates_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes or flops a second by the name of the ceiling."""
    return {
        row["ceiling"]: row[unit]
        for row in rows
        for unit in ("bytes_per_s", "flops_per_s")
        if unit in row
    }


def _without_case(figures: dict[str, Any]) -> list[str]:
    """Kernels that no case launched, unless some cases were left out or failed before they launched one."""
    if figures["left_out"] or any("failed" in row for row in figures["cases"]):
        return []
    launched = {name for row in figures["cases"] for name in row["kernels"]}
    missing = sorted(kernels_of_the_package(one_gpu=True) - launched)
    for name in missing:
        print(f"{OF_NO_CASE}: {name}")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without times")
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--share", help="I/N: compile every Nth case from the Ith on, measure none")
    args = parser.parse_args()
    end_at = time.monotonic() + args.budget_s
    torch.manual_seed(0)
    if args.dry:
        device, clock, sizes = torch.device("cpu"), HostClock(), DRY
    else:
        device, sizes = torch.device("cuda"), FULL
        if args.share:
            return compile_share(sizes, device, args.share, end_at)
        clock = GpuClock(device)
    return run(Kept(args.out), sizes, clock, device, end_at)


def compile_share(sizes: Sizes, device: torch.device, share: str, end_at: float) -> int:
    """Call some cases once, for the cache of compiled kernels. What fails here fails in the measurement too."""
    from bench.kernels.case import Bench

    first, step = (int(part) for part in share.split("/"))
    for case in all_cases(sizes)[first::step]:
        if time.monotonic() >= end_at:
            break
        try:
            with torch.inference_mode():
                case.build(Bench(device)).ours()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            if breaks_the_device(error):
                return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
