"""`headrace top`: the fleet and its traffic in a terminal, from the stream behind the router's page.

A terminal shows the last document and is drawn anew with each; a pipe gets one snapshot after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any, TextIO, cast

from headrace.cli.client import keys
from headrace.cli.client.chat import ChatError, KeyRefusedError, NotThereError, Server
from headrace.cli.client.columns import aligned
from headrace.cli.client.terminal import leave_stdout, printable

Document = dict[str, Any]

AGAIN_S = 1.0  # before a stream that broke off is asked for again
SILENCE_S = 15.0  # a document comes every second: a router that sends none for so long is away
MOST_EVENT_BYTES = 16 << 20  # of a fleet of 512 workers it is some 300 kB
BAR = 12
ENTER, LEAVE = (
    "\x1b[?1049h\x1b[?25l",
    "\x1b[?25h\x1b[?1049l",
)  # a screen of its own, without a cursor
HOME, REST = "\x1b[H", "\x1b[J"
END_OF_LINE = "\x1b[K\r\n"


def run(args: argparse.Namespace) -> int:
    """Show documents until Ctrl-C, or one with `--once`; the exit status."""
    key, tls = keys.admin_key(args), keys.tls(args)
    server = Server(args.url, key, keys.ADMIN_KEY_FROM, tls, SILENCE_S)
    try:
        if args.once:
            with contextlib.closing(_first_documents(server, once=True)) as documents:
                _print(next(documents), args, sys.stdout)
            return 0
        return _watch(server, args)
    except (ChatError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ChatError) else f"not a document of a router: {error!r}"
        print(printable(f"headrace top: {reason}"), file=sys.stderr)
        return 1
    except StopIteration:
        print("headrace top: the router sent nothing", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        leave_stdout()
        return 0


def _watch(server: Server, args: argparse.Namespace) -> int:
    draws = sys.stdout.isatty() and not args.json
    documents = _for_ever(server)
    try:
        if draws:
            sys.stdout.write(ENTER)
        for document in documents:
            if isinstance(document, ChatError):
                if draws:
                    _draw([f"away: {document}"], args.url, sys.stdout)
                else:
                    print(printable(f"headrace top: {document}"), file=sys.stderr, flush=True)
            elif draws:
                _draw(describe(document), args.url, sys.stdout)
            else:
                _print(document, args, sys.stdout)
    finally:
        documents.close()
        if draws:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
    return 0


def _for_ever(server: Server) -> Generator[Document | ChatError]:
    """Documents of one stream after the other, and between them why there is none, each reason once.

    Raises ChatError where the first one cannot be had, and KeyRefusedError at any time.
    """
    yield from _first_documents(server)
    ended, told = ChatError("the stream ended"), ""
    reason = ended
    while True:
        if str(reason) != told:
            told = str(reason)
            yield reason
        time.sleep(AGAIN_S)
        try:
            for document in _documents(server):
                told = ""
                yield document
            reason = ended
        except KeyRefusedError:
            raise
        except ChatError as error:  # the router may be on its way back
            reason = error


def _documents(server: Server, *, once: bool = False) -> Generator[Document]:
    """Those of one stream, up to its end. Raises ChatError, or ValueError for what is no document."""
    path = "/dashboard/events?once=true" if once else "/dashboard/events"
    with contextlib.closing(server.request("GET", path)) as response:
        for line in _lines(response):
            if line.startswith(b"data: "):
                document = json.loads(line[6:])
                if not isinstance(document, dict):
                    raise ValueError("a document is an object")
                yield cast(Document, document)


def _first_documents(server: Server, *, once: bool = False) -> Generator[Document]:
    """Those of the first stream. Where there is none, the reason may be that operators are served elsewhere."""
    try:
        yield from _documents(server, once=once)
    except NotThereError as error:
        hint = "a router with --admin-listen-only has it at --admin-listen: give that as --url"
        raise ChatError(f"{error}; {hint}") from error


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines of a bounded length. A stream that breaks off has ended."""
    while True:
        try:
            line = response.readline(MOST_EVENT_BYTES)
        except (OSError, http.client.HTTPException):
            return
        if not line:
            return
        if not line.endswith(b"\n"):
            raise ValueError(f"a line is longer than {MOST_EVENT_BYTES} bytes")
        yield line


def _print(document: Document, args: argparse.Namespace, out: TextIO) -> None:
    text = json.dumps(document) if args.json else printable("\n".join(describe(document))) + "\n"
    print(text, file=out, flush=True)


def _draw(text: list[str], url: str, out: TextIO) -> None:
    """All that the terminal has room for, over what it shows."""
    width, height = shutil.get_terminal_size()
    lines = [f"headrace top  {url}   Ctrl-C leaves", "", *text]
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    shown = [printable(line)[:width] for line in lines]
    out.write(HOME + END_OF_LINE.join(shown) + "\x1b[K" + REST)
    out.flush()


def describe(seen: Document) -> list[str]:
    """A document as lines."""
    queue, kv = seen["queue"], seen["kv"]
    state = "draining" if seen["draining"] else f"up {_age(seen['uptime_s'])}"
    ready = f"{seen['workers_ready']} of {seen['workers_total']} workers ready"
    classes = ", ".join(f"{name} {number}" for name, number in reversed(queue["classes"].items()))
    oldest = f", oldest for {_age(queue['oldest_s'])}" if queue["waiting"] else ""
    ended = f"{seen['finished']:,} finished, {seen['failed']:,} failed"
    used = kv["used"] / kv["blocks"] if kv["blocks"] else None
    cached = kv["cached"] / kv["blocks"] if kv["blocks"] else None
    lines = [
        f"{state}, {ready}, version {seen['version']}; {', '.join(seen['models']) or 'no model'}",
        "",
        f"tokens/s    output {_figure(seen['output_tokens_per_s'])}, prompts {_figure(seen['prompt_tokens_per_s'])}",
        f"requests    {seen['running']} in flight, {_figure(seen['requests_per_s'])}/s, {ended}",
        f"queue       {queue['waiting']} waiting ({classes}){oldest}",
        f"first token {_spread(seen['ttft_ms'])}",
        f"per token   {_spread(seen['tpot_ms'])}",
        f"hits        {_percent(seen['hit_rate'])} of prompt tokens, in the last minute",
        f"KV          {_bar(used)} {_percent(used)} held, {_percent(cached)} cached, of {kv['blocks']:,} blocks",
        "",
        *aligned(_workers(seen["workers"]), words={0, 1, 2, 3, 10}),
    ]
    if left_out := seen["workers_left_out"]:
        lines.append(f"... and {left_out:,} more workers")
    for group in seen["groups"]:
        whole = "" if group["whole"] else ", NOT WHOLE"
        lines.append(
            f"group {group['id']}: {group['present']} of {group['size']} ranks{whole}, "
            f"skew {_percent(group['step_skew'])}, waits {_percent(group['waited_share'])}"
        )
    if seen["decisions"]:
        lines += [
            "",
            "placements, predicted > actual:",
            *aligned(_decisions(seen["decisions"]), words={1, 2, 7}),
        ]
    return lines


def _workers(workers: list[dict[str, Any]]) -> list[list[str]]:
    rows = [
        [
            "worker",
            "role",
            "state",
            "KV",
            "held",
            "running",
            "waiting",
            "step ms",
            "tokens/step",
            "rank",
            "credit",
        ]
    ]
    for one in workers:
        share = one["blocks_used"] / one["blocks"] if one["blocks"] else None
        group = one["group"]
        doubts = [f"no {one['credit_withdrawn']}"] if one["credit_withdrawn"] else []
        doubts += [f"slow {one['speed_doubted']}"] if one["speed_doubted"] else []
        rows.append(
            [
                one["id"],
                one["role"],
                one["state"],
                _bar(share),
                _percent(share),
                f"{one['running']}/{one['sequences']}",
                str(one["waiting"]),
                _figure(one["step_ms"]),
                f"{one['accepted']:.2f}",
                "" if group is None else f"{group['rank']}/{group['size']}",
                ", ".join(doubts) or "full",
            ]
        )
    return rows


def _decisions(decisions: list[dict[str, Any]]) -> list[list[str]]:
    rows = [
        ["age", "request", "worker", "prompt", "cached", "first token ms", "rest ms", "outcome"]
    ]
    for one in decisions:
        predicted, actual = one["predicted"] or {}, one["actual"]

        def pair(
            expected: str, real: str, predicted: Document = predicted, actual: Document = actual
        ) -> str:
            return f"{_figure(predicted.get(expected))} > {_figure(actual[real])}"

        where = one["worker"] if one["prefill"] is None else f"{one['prefill']} + {one['worker']}"
        rows.append(
            [
                _age(one["age_s"]),
                one["request"][:36],
                where or "waits",
                f"{one['prompt_tokens']:,}",
                pair("cached_tokens", "cached_tokens"),
                pair("first_token_ms", "first_token_ms"),
                pair("decode_ms", "decode_ms"),
                actual.get("error") or actual["outcome"],
            ]
        )
    return rows


def _bar(share: float | None) -> str:
    full = round(BAR * min(max(share or 0.0, 0.0), 1.0))
    return "#" * full + "." * (BAR - full)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) < 100 and value != round(value):
        return f"{value:.1f}"
    return f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _spread(times: dict[str, float] | None) -> str:
    if times is None:
        return "none in the last minute"
    shares = ", ".join(f"{name} {_figure(times[name])} ms" for name in ("p50", "p90", "p99"))
    return f"{shares}, of {times['count']:,.0f}"


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
