"""`make soak`: minutes of load with churn; what the router holds is printed, and the exit status is 1 if it grows.

python -m soak [--seconds 600] [--share 0.7] [--seed 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from helpers.origin import origin
from soak.run import Soaked, soak
from soak.samples import Trend, rows

# By how much the last quarter may be above the first one: a share, and so much in any case. Pools and caches fill
# within the first quarter of ten minutes.
ALLOWED = {
    "rss_mb": (0.05, 8.0),
    "descriptors": (0.10, 16.0),
    "threads": (0.0, 4.0),
    "tasks": (0.10, 32.0),
    "streams": (0.50, 32.0),
    "booked": (0.50, 32.0),
    "connections": (0.10, 16.0),
    "index_blocks": (0.25, 1000.0),
}


def grown(trends: dict[str, Trend]) -> list[str]:
    """The measures that are not flat."""
    return [
        name
        for name, (share, more) in ALLOWED.items()
        if trends[name].last > trends[name].first * (1 + share) + more
    ]


def table(soaked: Soaked) -> str:
    lines = [f"{'measure':14} {'first quarter':>14} {'last quarter':>14} {'slope an hour':>14}"]
    for name, trend in soaked.trends.items():
        lines.append(f"{name:14} {trend.first:14.1f} {trend.last:14.1f} {trend.per_hour:14.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m soak")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--share", type=float, default=0.7, help="of the measured capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(
            Path(folder), seconds=arguments.seconds, share=arguments.share, seed=arguments.seed
        )
    requests = soaked.report["requests"]
    print(
        f"{soaked.rate:.0f} requests/s, {soaked.visits:,} visits beside them; {json.dumps(requests)}"
    )
    print(table(soaked))
    failures = [f"{name} grows" for name in grown(soaked.trends)]
    failures += [f"{name} is {value:g} at the end" for name, value in soaked.left.items()]
    if arguments.out:
        command = f"make soak SECONDS={arguments.seconds:g} SEED={arguments.seed}"
        result = origin(command) | {
            "share": arguments.share,
            "requests_per_s": round(soaked.rate, 2),
            "visits": soaked.visits,
            "requests": requests,
            "trends": {name: asdict(trend) for name, trend in soaked.trends.items()},
            "failures": failures,
            "samples": rows(soaked.samples),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("; ".join(failures) or "flat")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
