"""The flags of `headrace plan`: traffic, limits, GPUs, and what may be chosen from."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.planner.fleet.options import EP_SIZES, MOST_DRAFTS
from headrace.planner.fleet.traffic import SloLimits
from headrace.planner.model.gpus import GPUS
from headrace.settings.table import rows, setting
from headrace.settings.values import FlagError, duration, existing_file, shortened

TRAFFIC = "Traffic"
FLEET = "Fleet"
EXPERTS = "Experts and drafts"
REPORT = "Report"
EXAMPLE = "ttft=2s,tpot=80ms"


def number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads decimal numbers from `least` on, or from above it, to `most`."""

    def read(text: str) -> float:
        plain = re.fullmatch(r"\d{1,18}(\.\d{1,18})?", text, re.ASCII)
        value = float(text) if plain else math.nan
        inside = least < value <= most if above else least <= value <= most
        if not inside:
            start = f"above {least:g}" if above else f"from {least:g}"
            raise argparse.ArgumentTypeError(
                f"{shortened(text)} is not a number {start} to {most:g}"
            )
        return value

    return read


def slo(text: str) -> tuple[float, float]:
    """Seconds to the first token, and for each further one: of `ttft=2s,tpot=80ms`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in ("ttft", "tpot"):
            raise argparse.ArgumentTypeError(
                f"{shortened(part)} is neither ttft=TIME nor tpot=TIME; write both, such as {EXAMPLE}"
            )
        if name in limits:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        if not value[-1:].isalpha():
            raise argparse.ArgumentTypeError(
                f"{shortened(part)} has no unit; write s or ms, such as {EXAMPLE}"
            )
        limits[name] = duration(value)
        if limits[name] <= 0:
            raise argparse.ArgumentTypeError(f"{shortened(part)}: a limit is above 0")
    if len(limits) < 2:
        lacks = "tpot" if "ttft" in limits else "ttft"
        raise argparse.ArgumentTypeError(f"{lacks} is missing; write both, such as {EXAMPLE}")
    return limits["ttft"], limits["tpot"]


def ep_sizes(text: str) -> tuple[int, ...]:
    """`32` or `8,32,288`."""
    sizes: list[int] = []
    for word in text.split(","):
        size = int(word) if word.isascii() and word.isdigit() and len(word) < 5 else 0
        if size not in EP_SIZES:
            known = ", ".join(map(str, EP_SIZES))
            raise argparse.ArgumentTypeError(f"{shortened(word)} is not one of {known}")
        sizes.append(size)
    return tuple(sorted(set(sizes)))


def draft_counts(text: str) -> tuple[int, ...]:
    if text == "auto":
        return tuple(range(MOST_DRAFTS + 1))
    if text not in map(str, range(MOST_DRAFTS + 1)):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is neither auto nor a number from 0 to {MOST_DRAFTS}"
        )
    return (int(text),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What was typed, checked."""

    trace: Path | None = setting(
        "--trace",
        group=TRAFFIC,
        value="FILE",
        read=existing_file,
        help="Requests to serve: JSON lines with timestamp, input_length and output_length, or CSV, as for "
        "headrace sim; plain or gzip.",
    )
    speed: float = setting(
        "--speed",
        group=TRAFFIC,
        default=1.0,
        value="X",
        read=number(0, 1e6, above=True),
        shown="1",
        help="Let requests come so many times as fast as they were recorded.",
    )
    hit_rate: float = setting(
        "--hit-rate",
        group=TRAFFIC,
        default=0.0,
        value="SHARE",
        read=number(0, 1),
        shown="0",
        help="Share of each prompt that is in a cache already and is not computed.",
    )
    limits: tuple[float, float] | None = setting(
        "--slo",
        group=TRAFFIC,
        value="ttft=TIME,tpot=TIME",
        read=slo,
        help="Longest time to the first token, and mean time for each further token of an answer, with units.",
    )
    percentile: float = setting(
        "--percentile",
        group=TRAFFIC,
        default=99.0,
        value="PERCENT",
        read=number(0, 100, above=True),
        shown="99",
        help="Per cent of the requests that have to keep each limit.",
    )
    gpu: str | None = setting(
        "--gpu",
        group=FLEET,
        value="GPU",
        choices=tuple(GPUS),
        help="GPU of all machines.",
    )
    price: float | None = setting(
        "--price",
        group=FLEET,
        value="DOLLARS",
        read=number(0, 1e6, above=True),
        help="Price of one GPU for an hour.",
    )
    decode_sizes: tuple[int, ...] = setting(
        "--ep",
        group=FLEET,
        default=EP_SIZES,
        value="N[,N]",
        read=ep_sizes,
        shown=f"any of {', '.join(map(str, EP_SIZES))}",
        help="GPUs of a group that generates answers.",
    )
    prefill_sizes: tuple[int, ...] = setting(
        "--prefill-ep",
        group=FLEET,
        default=EP_SIZES,
        value="N[,N]",
        read=ep_sizes,
        shown="any of the same",
        help="GPUs of a group that computes prompts.",
    )
    kv: str = setting(
        "--kv-dtype",
        group=FLEET,
        default="fp8",
        value="DTYPE",
        choices=("fp8", "bf16"),
        help="Type of the KV cache.",
    )
    drafts: tuple[int, ...] = setting(
        "--mtp",
        group=EXPERTS,
        default=draft_counts("auto"),
        value="TOKENS",
        read=draft_counts,
        shown="auto",
        help="Tokens drafted ahead, 0 to 3. auto takes what needs the fewest GPUs.",
    )
    # SGLang with 2 drafts: 2.18 tokens a step; on GB300 with 3 drafts: 2.37
    acceptance: float = setting(
        "--acceptance",
        group=EXPERTS,
        default=0.7,
        value="SHARE",
        read=number(0, 1),
        help="Chance that a draft is right if those before it are.",
    )
    expert_loads: Path | None = setting(
        "--expert-loads",
        group=EXPERTS,
        value="FILE",
        read=existing_file,
        shown="Zipf's, as uneven as measured",
        help="Recorded rows of each expert: a JSON list of layers, each a list of 256 counts.",
    )
    rebalanced: bool = setting(
        "--no-rebalancing",
        group=EXPERTS,
        default=True,
        means=False,
        help="Leave experts in their order, without copies of the popular ones.",
    )
    picture: Path | None = setting(
        "--picture",
        group=REPORT,
        value="FILE.png",
        read=Path,
        shown="none",
        help="Draw rate against speed, and GPUs by the size of decode groups.",
    )
    preset: Path | None = setting(
        "--preset",
        group=REPORT,
        value="FILE",
        read=Path,
        shown="none",
        help="Write the step costs of one GPU that generates answers, for --preset of headrace sim and headrace mock.",
    )
    json: bool = setting(
        "--json", group=REPORT, default=False, help="Print all that is known, as JSON."
    )

    def needed(self) -> tuple[Path, str, SloLimits, float]:
        """Trace, GPU, limits and price, which have no default. Raises FlagError."""
        for name, value in (
            ("--trace", self.trace),
            ("--gpu", self.gpu),
            ("--slo", self.limits),
            ("--price", self.price),
        ):
            if value is None:
                raise FlagError(f"{name} is missing")
        if self.picture is not None and self.picture.suffix != ".png":
            raise FlagError(f"--picture {self.picture}: the name has to end in .png")
        assert self.trace and self.gpu and self.limits and self.price
        ttft_s, tpot_s = self.limits
        limits = SloLimits(ttft_s=ttft_s, tpot_s=tpot_s, percentile=self.percentile)
        return self.trace, self.gpu, limits, self.price


PLAN_FLAGS = rows(PlanSettings)
