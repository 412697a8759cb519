"""The tables of `docs/benchmarks.md` beside other routers, made from the files of `RESULTS`: of a case the first's.

.venv/bin/python -m bench.peers.table            prints them
.venv/bin/python -m bench.peers.table --write    writes them into the page
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.helpers import page
from bench.helpers.report import ROOT

RESULTS = [
    ROOT / f"bench/results/{name}.json"
    for name in ("peers_short", "peers_streams", "peers_30000", "peers_long", "peers_stalled")
]
COMMAND = "bench.peers.table --write"
LIMIT_MARK = "†"
NAMES = {
    "direct": "no router: a loop of writes",
    "headrace": "Headrace",
    "nginx": "nginx",
    "sglang": "sglang-router",
    "vllm": "vllm-router",
    "dynamo": "dynamo's frontend",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of one case."""

    case: str
    title: str
    figures: tuple[str, ...]  # one beside the other
    spread: bool = False  # with the least and the greatest of the runs


def cpu(case: str, title: str, unit: str) -> Column:
    """CPU time of the router; without a router, of the workers."""
    return Column(case, title, (f"router_us_a_{unit}",), spread=True)


def at_pace(case: str, streams: str) -> list[Column]:
    return [
        Column(case, f"{streams}: tokens/s", ("tokens_per_s",)),
        Column(case, "TTFT p50 / p99", ("ttft_p50_ms", "ttft_p99_ms")),
        Column(case, "gap p50 / p99", ("itl_p50_ms", "itl_p99_ms")),
        Column(case, "late p50 / p99", ("late_p50_ms", "late_p99_ms")),
        Column(case, "KiB a stream", ("rss_kib_a_stream",)),
        Column(case, "errors", ("errors",)),
    ]


TABLES: list[tuple[str, list[Column]]] = [
    (
        "CPU time of the router in us (of the workers, where there is no router)",
        [
            cpu("A", "A: a request", "request"),
            cpu("B", "B: a token", "token"),
            Column("B", "B: an event", ("router_us_an_event",)),
            Column("B", "B: events a token", ("events_a_token",)),
            cpu("B0", "B0: a token", "token"),
            Column("B0", "B0: an event", ("router_us_an_event",)),
            Column("B0", "B0: events a token", ("events_a_token",)),
            cpu("C512", "C512: a token", "token"),
            cpu("C2048", "C2048: a token", "token"),
            cpu("F", "F: a token", "token"),
        ],
    ),
    (
        "Long prompts, chosen by what workers have cached: CPU time in us, hits",
        [
            cpu("D8k", "D8k: a request", "request"),
            Column("D8k", "hits", ("hit_rate",)),
            Column("D8k", "requests/s", ("requests_per_s",)),
            cpu("D100k", "D100k: a request", "request"),
            Column("D100k", "hits", ("hit_rate",)),
            Column("D100k", "requests/s", ("requests_per_s",)),
        ],
    ),
    (
        "Added to the same load without a router, ms, p50 / p99",
        [
            Column("F", "F: TTFT", ("added_ttft_p50_ms", "added_ttft_p99_ms")),
            Column("F", "F: gap", ("added_itl_p50_ms", "added_itl_p99_ms")),
            Column("B", "B: TTFT", ("added_ttft_p50_ms", "added_ttft_p99_ms")),
            Column("B", "B: gap", ("added_itl_p50_ms", "added_itl_p99_ms")),
            Column("C512", "C512: TTFT", ("added_ttft_p50_ms", "added_ttft_p99_ms")),
            Column("C512", "C512: gap", ("added_itl_p50_ms", "added_itl_p99_ms")),
        ],
    ),
    (
        "As fast as it goes",
        [
            Column("A", "A: requests/s", ("requests_per_s",), spread=True),
            Column("B0", "B0: tokens/s", ("tokens_per_s",), spread=True),
        ],
    ),
    ("512 and 2,048 streams, ms", [*at_pace("C512", "C512"), *at_pace("C2048", "C2048")]),
    ("9,900 and more streams, ms", [*at_pace("C9900", "C9900"), *at_pace("C19500", "C19500")]),
    ("30,000 streams, ms", at_pace("C30000", "C30000")),
    (
        "E: one client beside 9,900 stalled streams, ms",
        [
            Column("E", "TTFT p50 / p99", ("ttft_p50_ms", "ttft_p99_ms")),
            Column("E", "gap p50 / p99", ("itl_p50_ms", "itl_p99_ms")),
            Column("E", "us a token", ("router_us_a_token",)),
            Column("E", "KiB a stalled stream", ("rss_kib_a_stream",)),
            Column("E", "errors", ("errors",)),
        ],
    ),
]


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def cell(row: Row | None, column: Column) -> str:
    if row is None:
        return ""
    if not row["figures"]:
        return "not run" if row["why_not"] else ""
    figures = row["figures"]
    names = column.figures
    if row["peer"] == "direct":  # there the workers are all there is
        names = tuple(name.replace("router_us", "worker_us") for name in names)
    if names == ("errors",):
        return str(row["errors"])
    known = [figures[name] for name in names if name in figures]
    if len(known) < len(names):
        return "-"
    text = " / ".join(number(median) for median, _, _ in known)
    if column.spread and row["runs"] > 1:
        text += f" ({number(known[0][1])} to {number(known[0][2])})"
    return text + (LIMIT_MARK if row["client_is_limit"] else "")


def one_table(title: str, columns: list[Column], rows: list[Row]) -> list[str]:
    """Empty where no case of it was measured."""
    measured = {row["case"] for row in rows}
    columns = [column for column in columns if column.case in measured]
    if not columns:
        return []
    by_key = {(row["case"], row["peer"]): row for row in rows}
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = [f"{title}:", "", f"| | {' | '.join(column.title for column in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for peer in sorted(peers, key=list(NAMES).index):
        cells = [cell(by_key.get((column.case, peer)), column) for column in columns]
        lines.append(f"| {NAMES[peer]} | {' | '.join(cells)} |")
    return [*lines, ""]


def remarks(result: Row) -> list[str]:
    """What is not in the tables, and why."""
    lines: list[str] = []
    for row in result["summary"]:
        lines += [f"- {NAMES[row['peer']]}, {row['case']}: {why}" for why in row["why_not"] or []]
        if row["figures"].get("clients", [1])[0] > 1:  # some results do not say it
            lines.append(
                f"- {NAMES[row['peer']]}, {row['case']}: {row['note']}. A percentile is the greatest of the "
                "clients' own; the percentile of all answers is at most that."
            )
    for peer, why in result["not_installed"].items():
        lines.append(f"- {NAMES[peer]} is missing, since it could not be installed: {why}")
    if any(row["client_is_limit"] for row in result["summary"]):
        lines.append(
            f"- {LIMIT_MARK} The client used more than 0.8 of a core, so it may be what was measured."
        )
    return [*lines, ""] if lines else []


def table(result: Row) -> str:
    """All tables, with what they are of."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    cases = "; ".join(f"{name}: {what}" for name, what in result["cases"].items())
    origin = (
        f"Machine: {machine['processor']}, {machine['cores']} cores. Commit {result['commit']}, "
        f"`{result['command']}`. {versions or 'No other router'}. {result['rounds']} rounds; "
        "medians, in brackets the least and the greatest."
    )
    lines = [origin, "", f"{cases}.", ""]
    for title, columns in TABLES:
        lines += one_table(title, columns, result["summary"])
    return "\n".join([*lines, *remarks(result)]).rstrip() + "\n"


def tables(results: list[Row]) -> str:
    """Of each run the cases that none before it has."""
    shown: set[str] = set()
    texts: list[str] = []
    for result in results:
        cases = {name: what for name, what in result["cases"].items() if name not in shown}
        summary = [row for row in result["summary"] if row["case"] in cases]
        shown |= set(cases)
        texts.append(table(result | {"cases": cases, "summary": summary}))
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, nargs="+", default=RESULTS)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = tables([json.loads(path.read_text()) for path in args.result])
    if args.write:
        page.write(COMMAND, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
