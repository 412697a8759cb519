"""Traces of requests: arrival times and lengths. The formats are those of `headrace sim`, plain or gzip."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from headrace.planner.errors import BadTrace

CSV_HEADERS = (
    ["timestamp_ms", "input_length", "output_length"],
    ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
)
MOST_BYTES = 1 << 30  # of an unpacked file: more than any published trace has
MOST_REQUESTS = 200_000  # a plan goes through them some hundred times
LONGEST = 163_840  # tokens of DeepSeek-R1's context


class _BadLine(Exception):
    """A line that is no request, and why."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line."""

    at_s: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in their order, times from the first."""

    requests: list[TracedRequest]
    too_long: int  # requests that are left out, since the model's context does not hold them

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s


def read_trace(path: Path) -> RequestTrace:
    """Raises BadTrace, with the line."""
    lines = [(n, line) for n, line in enumerate(_lines(path), 1) if line.strip()]
    if not lines:
        raise BadTrace(f"{path}: the trace is empty")
    parse: Callable[[str], TracedRequest] = _object
    if not lines[0][1].startswith("{"):
        number, header = lines.pop(0)
        parse = _row_parser(path, number, header)
        if not lines:
            raise BadTrace(f"{path}: the trace is empty")
    if len(lines) > MOST_REQUESTS:
        raise BadTrace(f"{path}: {len(lines)} requests; at most {MOST_REQUESTS} are read")
    requests: list[TracedRequest] = []
    for number, line in lines:
        try:
            request = parse(line)
        except _BadLine as error:
            raise BadTrace(f"{path}:{number}: {error}") from error
        if requests and request.at_s < requests[-1].at_s:
            raise BadTrace(f"{path}:{number}: its time is before that of the line above")
        requests.append(request)
    fitting = [one for one in requests if one.prompt + one.answer <= LONGEST]
    if not fitting:
        raise BadTrace(f"{path}: the model's context of {LONGEST} tokens holds no request")
    begin = fitting[0].at_s
    moved = [TracedRequest(one.at_s - begin, one.prompt, one.answer) for one in fitting]
    return RequestTrace(moved, len(requests) - len(fitting))


def _lines(path: Path) -> list[str]:
    try:
        packed = path.read_bytes()
        if packed[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                packed = file.read(MOST_BYTES + 1)
        if len(packed) > MOST_BYTES:
            raise BadTrace(f"{path}: more than {MOST_BYTES} bytes")
        text = packed.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadTrace(f"{path}: {said}") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not text") from error
    return [line.strip() for line in text.splitlines()]


def _object(line: str) -> TracedRequest:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine("not JSON") from error
    if not isinstance(fields, dict):
        raise _BadLine("not a JSON object")
    fields = cast(dict[str, Any], fields)
    if "messages" in fields:
        raise _BadLine("a trace of messages; a plan needs lengths")
    for name in ("timestamp", "input_length", "output_length"):
        if name not in fields:
            raise _BadLine(f"`{name}` is missing")
    at = fields["timestamp"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise _BadLine("`timestamp` is not a number of ms from 0 on")
    prompt, answer = (fields[name] for name in ("input_length", "output_length"))
    for name, value in (("input_length", prompt), ("output_length", answer)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise _BadLine(f"`{name}` is not a whole number")
    return _request(at / 1e3, prompt, answer)


def _row_parser(path: Path, number: int, header: str) -> Callable[[str], TracedRequest]:
    columns = [column.strip() for column in header.split(",")]
    if columns not in CSV_HEADERS:
        known = "` or `".join(",".join(names) for names in CSV_HEADERS)
        raise BadTrace(f"{path}:{number}: neither JSON nor the columns `{known}`")
    in_ms = columns == CSV_HEADERS[0]

    def row(line: str) -> TracedRequest:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 3:
            raise _BadLine(f"{len(cells)} columns instead of 3")
        if not all(cell.isascii() and cell.isdigit() and len(cell) < 10 for cell in cells[1:]):
            raise _BadLine(f"`{cells[1]}`, `{cells[2]}`: lengths are whole numbers")
        return _request(_time_s(cells[0], in_ms), int(cells[1]), int(cells[2]))

    return row


def _time_s(cell: str, in_ms: bool) -> float:
    try:
        if not in_ms:
            at = datetime.fromisoformat(cell)
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        at_s = float(cell) / 1e3
    except ValueError as error:
        raise _BadLine(f"`{cell[:40]}` is not a time") from error
    if not 0 <= at_s < math.inf:
        raise _BadLine(f"`{cell[:40]}` is not a time from 0 on")
    return at_s


def _request(at_s: float, prompt: int, answer: int) -> TracedRequest:
    if prompt < 1 or answer < 1:
        raise _BadLine(f"{prompt} tokens in, {answer} out: both are at least 1")
    return TracedRequest(at_s, prompt, answer)
