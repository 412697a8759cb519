"""`headrace explain`: why a request went where it went, and what happened to it there, as tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any
from urllib.parse import quote

from headrace.cli.client import keys
from headrace.cli.client.chat import ChatError, Server
from headrace.cli.client.columns import aligned
from headrace.cli.client.terminal import printable

TIMES = ("queue", "prefill", "transfer", "decode", "interference", "saturation", "total")
"""The parts of a prediction, each `*_ms` in the answer of `/decisions/ID`; `total` is compared."""

Row = tuple[str, float | None, float | None]
"""Name, predicted and actual figure of a line in the table of what happened."""


def run(args: argparse.Namespace) -> int:
    """Print the decisions about one request; the exit status."""
    key_from = f"{keys.ADMIN_KEY_FROM}, otherwise from {keys.API_KEY_FROM}"
    server = Server(args.url, keys.admin_key(args) or keys.api_key(args), key_from, keys.tls(args))
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
    if legend := _legend(document.get("words", {}).get("predicted", {})):
        parts.append(legend)
    return "\n\n".join(parts)


def _legend(words: dict[str, str]) -> str:
    """What the columns mean, in the router's words; empty where the router does not say."""
    names = {"cached": "cached_tokens"} | {time: f"{time}_ms" for time in TIMES}
    return "\n".join(f"{name}: {words[key]}" for name, key in names.items() if key in words)


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
        *_table(wholes, _row(decision)),
    ]
    chosen = next((one for one in wholes if one["worker"] == _row(decision)), None)
    if chosen is not None and (actual := decision.get("actual")):
        lines += ["", *_what_happened(actual, chosen, decision)]
    if left_out := decision.get("left_out"):
        lines += ["", _left_out(left_out)]
    if prefills:
        lines += ["", "of the prompt alone, with the workers that do nothing else:"]
        lines += _table(prefills, decision.get("prefill"))
    if shadow := decision["shadow"]:
        lines += ["", _shadow(shadow, decision)]
    return "\n".join(lines)


def _left_out(left_out: dict[str, Any]) -> str:
    """The candidates that the router did not keep."""
    able = left_out["candidates"] - left_out["excluded"]
    line = f"{left_out['candidates']:,} more workers are not shown"
    if able:
        least_ms = f"{left_out['least_ms']:,.1f} ms or more"
        line += f": {able:,} of them were predicted to cost {least_ms} in all"
    return line + "; X-Headrace-Explain shows all"


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


def _what_happened(
    actual: dict[str, Any], chosen: dict[str, Any], decision: dict[str, Any]
) -> list[str]:
    """How the placement ended, and each measured figure beside the predicted one."""
    detail = actual.get("finish_reason") or actual.get("error")
    outcome = f"{actual['outcome']} ({detail})" if detail else actual["outcome"]
    rows: list[Row] = [
        ("cached tokens", chosen["cached_tokens"], actual["cached_tokens"]),
        ("first token, ms", chosen["queue_ms"] + chosen["prefill_ms"], actual["first_token_ms"]),
        (
            "rest of the answer, ms",
            chosen["transfer_ms"] + chosen["decode_ms"],
            actual["decode_ms"],
        ),
        ("output tokens", decision["output_tokens"], actual["output_tokens"]),
    ]
    cells = [["", "predicted", "actual"]]
    for name, *figures in rows:
        digits = 1 if name.endswith("ms") else 0
        cells.append([name, *("-" if n is None else f"{n:,.{digits}f}" for n in figures)])
    waited = f"after {actual['waited_ms']:,.1f} ms in the router's queue: {outcome}"
    return [f"what happened, {waited}", *aligned(cells, words={0})]


def _table(candidates: list[dict[str, Any]], winner: str | None) -> list[str]:
    """Those that could be chosen, the cheapest first, then the others with the reason."""
    ranked = sorted(candidates, key=lambda one: (one["excluded"] is not None, one["total_ms"]))
    rows = [["", "worker", "cached", *TIMES, ""]]
    for one in ranked:
        mark = "->" if one["worker"] == winner else ""
        rows.append([mark, one["worker"], *_cells(one), one["excluded"] or ""])
    return aligned(rows, words={0, 1, len(rows[0]) - 1})


def _cells(one: dict[str, Any]) -> list[str]:
    return [f"{one['cached_tokens']:,}", *(f"{one[f'{time}_ms']:,.1f}" for time in TIMES)]
