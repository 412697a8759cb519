"""How a worker's log looks: lines of text or of JSON, in the form of the router's, with a time in UTC.

    2026-01-31T12:00:00.123456Z  INFO headrace.worker.log.request_log: request finished leg=8 model="m" output_tokens=30

Texts of strangers, such as the name of a model or what a router says, cannot pass for a line of their own, steer a
terminal or fill a disk: values are quoted and escaped, further lines are marked, and a line is bounded.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from headrace.logs import LogStream

FORMATS = ("text", "json")
LINE_CHARACTERS = 16 << 10  # a traceback fits
VALUE_CHARACTERS = 256
CONTINUED = "\n    | "  # before what follows the first part of a line

# What moves a terminal's cursor, hides text or turns its direction.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

Value = str | int | float | None


def begin_log(level: str, form: str) -> None:
    """Send the log of this process to stderr in one of `FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    lines = JsonLines() if form == "json" else TextLines()
    handler.setFormatter(lines)
    if isinstance(sys.stderr, LogStream):
        sys.stderr.say_what_is_lost(
            lambda text: lines.format(
                logging.LogRecord(LogStream.__module__, logging.WARNING, "", 0, text, None, None)
            )
        )
    logging.basicConfig(level=level, handlers=[handler])


def fields(**values: Value) -> dict[str, dict[str, Value]]:
    """What a line says besides its message, for the `extra` of a call; what is None is left out."""
    return {
        "fields": {name: _bounded(value) for name, value in values.items() if value is not None}
    }


class TextLines(logging.Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {_level(record):>5} {record.name}: {_text(record)}"
        told = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        line = head + told
        if len(line) > LINE_CHARACTERS:
            line = line[:LINE_CHARACTERS] + "..."
        line = _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), line)
        return line.replace("\n", CONTINUED)


class JsonLines(logging.Formatter):
    """Lines for programs, with the names that the router's have."""

    def format(self, record: logging.LogRecord) -> str:
        text = _text(record)
        if len(text) > LINE_CHARACTERS:
            text = text[:LINE_CHARACTERS] + "..."
        line = {
            "timestamp": _time(record),
            "level": _level(record),
            "fields": {"message": text} | _fields(record),
            "target": record.name,
        }
        return json.dumps(line)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _level(record: logging.LogRecord) -> str:
    return {"WARNING": "WARN", "CRITICAL": "ERROR"}.get(record.levelname, record.levelname)


def _text(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    return text


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    return getattr(record, "fields", {})


def _bounded(value: Value) -> Value:
    if isinstance(value, str) and len(value) > VALUE_CHARACTERS:
        return value[:VALUE_CHARACTERS] + "..."
    return round(value, 3) if isinstance(value, float) else value


def _shown(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)
