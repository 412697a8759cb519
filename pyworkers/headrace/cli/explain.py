"""`headrace explain`: why a request went where it went, as a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any
from urllib.parse import quote

from headrace.cli import keys
from headrace.cli.chat import ChatError, Server
from headrace.cli.terminal import printable

TIMES = ("queue", "prefill", "transfer", "decode", "interference", "saturation", "total")
"""The parts of a prediction, each `*_ms` in the answer of `/decisions/ID`; `total` is compared."""

LEGEND = (
    "interference: delay that this request adds to the requests already running there; "
    "saturation: penalty that grows as the worker's KV cache fills"
)
"""What the two parts mean that are no time of the request's own."""


def run(args: argparse.Namespace) -> int:
    """Print the decisions about one request; the exit status."""
    key_from = f"{keys.ADMIN_KEY_FROM}, otherwise from {keys.API_KEY_FROM}"
    server = Server(args.url, keys.admin_key(args) or keys.api_key(args), key_from)
    path = f"/decisions/{quote(args.request_id, safe='')}"
    try:
        with contextlib.closing(server.request("GET", path)) as response:
            document = json.loads(response.read())
        print(json.dumps(document, indent=2) if args.json else printable(describe(document)))
    except (ChatError, ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, ChatError) else f"not a decision: {error!r}"
        print(printable(f"headrace explain: {reason}"), file=sys.stderr)
        return 1
    return 0


def describe(document: dict[str, Any]) -> str:
    """All decisions of an answer of `/decisions/ID`, each with its table; those of each tenant together."""
    by_tenant: dict[str | None, list[dict[str, Any]]] = {}  # several may have chosen the same id
    for decision in document["decisions"]:
        by_tenant.setdefault(decision.get("tenant"), []).append(decision)
    parts: list[str] = []
    for tenant, decisions in by_tenant.items():
        of = "" if tenant is None else f" of tenant {tenant}"
        parts.append(f"request {document['request']}{of}")
        for number, decision in enumerate(decisions, start=1):
            if len(decisions) > 1:  # several choices or prompts, or another try
                parts.append(f"placement {number} of {len(decisions)}")
            parts.append(_describe_one(decision))
    parts.append(LEGEND)
    return "\n\n".join(parts)


def _describe_one(decision: dict[str, Any]) -> str:
    wanted = (
        f"{decision['prompt_tokens']:,} prompt tokens, about {decision['output_tokens']:,.0f} of at "
        f"most {decision['max_tokens']:,} to generate; "
        f"{decision['at_ms'] / 1e3:,.3f} s after the router's start"
    )
    candidates: list[dict[str, Any]] = decision["candidates"]
    prefills = [one for one in candidates if one.get("role") == "prefill"]
    wholes = [one for one in candidates if one.get("role") != "prefill"]
    pair = decision.get("pair")
    if pair is not None:
        name = f"{pair['prefill']} + {pair['decode']}"
        [computes] = [one for one in prefills if one["worker"] == pair["prefill"]]
        cached_tokens = computes["cached_tokens"]
        wholes.append({**pair, "worker": name, "cached_tokens": cached_tokens, "excluded": None})
    lines = [
        wanted,
        f"{decision['policy']} chose {_who(decision) or _why_nobody(decision)}",
        "",
        "tokens of the prompt in its cache, and what it was predicted to cost in ms:",
        *_table(wholes, _row(decision), decision.get("actual")),
    ]
    if prefills:
        lines += ["", "of the prompt alone, with the workers that do nothing else:"]
        lines += _table(prefills, decision.get("prefill"))
    if shadow := decision["shadow"]:
        lines += ["", _shadow(shadow, decision)]
    return "\n".join(lines)


def _row(choice: dict[str, Any]) -> str | None:
    """The name of what was chosen in the table."""
    prefill = choice.get("prefill")
    return choice["winner"] if prefill is None else f"{prefill} + {choice['winner']}"


def _who(choice: dict[str, Any]) -> str | None:
    prefill = choice.get("prefill")
    if prefill is None:
        return choice["winner"]
    return f"{prefill} for the prompt and {choice['winner']} for the answer"


def _why_nobody(decision: dict[str, Any]) -> str:
    if pair := decision.get("pair"):
        return f"to wait: {pair['prefill']} and its like have long queues, and it is worth it"
    return "no worker: none could take it"


def _shadow(shadow: dict[str, Any], decision: dict[str, Any]) -> str:
    if _row(shadow) == _row(decision):
        return f"{shadow['policy']} would have chosen the same"
    regret_ms = shadow["regret_ms"]
    kind = "longer" if regret_ms >= 0 else "shorter"
    return (
        f"{shadow['policy']} would have chosen {_who(shadow)}: "
        f"predicted {abs(regret_ms):,.1f} ms {kind}"
    )


def _table(
    candidates: list[dict[str, Any]], winner: str | None, actual: dict[str, Any] | None = None
) -> list[str]:
    """Those that could be chosen, the cheapest first, then the others with the reason.

    Below the winner stands what happened, as far as `actual` has it.
    """
    ranked = sorted(candidates, key=lambda one: (one["excluded"] is not None, one["total_ms"]))
    rows = [["", "worker", "cached", *TIMES, ""]]
    for one in ranked:
        mark = "->" if one["worker"] == winner else ""
        rows.append([mark, one["worker"], *_cells(one), one["excluded"] or ""])
        if mark and actual is not None:
            rows.append(["", "  actual", *_cells(actual), ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    names = {0, 1, len(widths) - 1}  # these columns are words
    return [
        "  ".join(
            cell.ljust(width) if column in names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(one: dict[str, Any]) -> list[str]:
    """Cached tokens and times of a row; a dash for what is not known."""
    cached, times = one.get("cached_tokens"), [one.get(f"{time}_ms") for time in TIMES]
    cells = ["-" if time is None else f"{time:,.1f}" for time in times]
    return ["-" if cached is None else f"{cached:,}", *cells]
