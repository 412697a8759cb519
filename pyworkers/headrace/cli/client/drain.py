"""`headrace drain`: ask a worker to leave, follow that, and say what became of its cache and its requests."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any
from urllib.parse import quote

from headrace.cli.client import keys
from headrace.cli.client.chat import ChatError, Server
from headrace.cli.client.terminal import printable

POLL_S = 0.2
GRACE_S = 30.0  # after the budget, for the router to call it over

HAND_OVER = {
    "done": "",
    "late": "; some of it took too long",
    "not_asked": "nothing was to be handed over",
    "cannot_move": "this worker cannot hand blocks over",
    "no_offer": "the worker offered nothing in time",
    "nothing_cached": "it had nothing cached",
    "no_successor": "no other worker could take them",
    "worker_lost": "the worker was lost before it offered anything",
}
"""What the router's word for the outcome means; after the figures where there are any."""


def run(args: argparse.Namespace) -> int:
    """Drain, wait, report; 0 if the worker left in time, otherwise 1."""
    server = Server(args.url, keys.admin_key(args), keys.ADMIN_KEY_FROM, keys.tls(args))
    path = f"/workers/{quote(args.worker, safe='')}/drain"
    order = {"budget_ms": round(args.budget * 1e3), "hand_over": args.hand_over}
    try:
        state = _ask(server, "POST", path, order)
        state = _follow(server, path, state, time.monotonic() + args.budget + GRACE_S)
        print(json.dumps(state, indent=2) if args.json else printable(describe(state)))
        return 0 if state["left_in_time"] else 1
    except (ChatError, ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, ChatError) else f"not a drain: {error!r}"
        print(printable(f"headrace drain: {reason}"), file=sys.stderr)
        return 1


def _ask(server: Server, method: str, path: str, body: Any = None) -> dict[str, Any]:
    with contextlib.closing(server.request(method, path, body)) as response:
        return json.loads(response.read())


def _follow(server: Server, path: str, state: dict[str, Any], give_up_at: float) -> dict[str, Any]:
    while state["phase"] != "done":
        if time.monotonic() > give_up_at:
            raise ChatError(f"the drain does not end; it is still {state['phase']}")
        time.sleep(POLL_S)
        state = _ask(server, "GET", path)
    return state


def describe(state: dict[str, Any]) -> str:
    """What became of a drain, for a person."""
    requests, over = state["requests"], state["hand_over"]
    left = "left" if state["left_in_time"] else "did not leave in time and was hung up on"
    went = f"{requests['finished']} finished, {requests['moved']} went on elsewhere"
    lines = [
        f"{state['worker']} {left} after {state['seconds']:.1f} s",
        f"requests: {requests['running']} were running, {went}",
    ]
    outcome = HAND_OVER.get(over["outcome"], over["outcome"])
    if over["hit_rate_kept"] is None:
        return "\n".join([*lines, f"cache: {outcome}"])
    lines.append(
        f"cache: {over['blocks_kept']} of {over['blocks_offered']} blocks offered are kept "
        f"({over['blocks_handed_over']} handed over), {over['hit_rate_kept']:.1%} of their hits{outcome}"
        if over["outcome"] in {"done", "late"}
        else f"cache: {outcome}; {over['hit_rate_kept']:.1%} of the hits are kept"
    )
    for successor in over["successors"]:
        if successor["error"]:
            lines.append(f"  {successor['worker']}: {successor['error']}")
        else:
            mebibytes = (successor["bytes"] or 0) / 2**20
            lines.append(
                f"  {successor['worker']}: {successor['pulled']} blocks, {mebibytes:.1f} MiB by {successor['backend']}"
            )
    return "\n".join(lines)
