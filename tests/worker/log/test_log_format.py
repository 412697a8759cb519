"""Lines of a worker's log: their two forms, and what strangers cannot do to them."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from types import TracebackType
from typing import Any

import pytest

from headrace.logs import WAITING_BYTES, Lines, LogStream
from headrace.worker.log.log_format import (
    FORMATS,
    LINE_CHARACTERS,
    JsonLines,
    TextLines,
    begin_log,
    fields,
)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def record(
    message: str, *args: object, exc_info: ExcInfo | None = None, **told: Any
) -> logging.LogRecord:
    made = logging.LogRecord(
        "headrace.worker.main", logging.WARNING, __file__, 1, message, args, exc_info
    )
    made.__dict__.update(fields(**told))
    made.created = 1_769_860_800.123456
    return made


def failure() -> ExcInfo:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        kind, error, trace = sys.exc_info()
        assert kind is not None and error is not None
        return kind, error, trace


def test_a_line_of_text_has_time_level_place_words_and_figures() -> None:
    line = TextLines().format(record("router %s left", "a", leg=8, model="m", kv_used=0.12345))
    assert line == (
        "2026-01-31T12:00:00.123456Z  WARN headrace.worker.main: router a left "
        'leg=8 model="m" kv_used=0.123'
    )


def test_a_line_of_json_has_the_names_of_the_routers() -> None:
    line = json.loads(JsonLines().format(record("left", leg=8, why=None)))
    assert line == {
        "timestamp": "2026-01-31T12:00:00.123456Z",
        "level": "WARN",
        "fields": {"message": "left", "leg": 8},
        "target": "headrace.worker.main",
    }


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_a_line_is_one_line_or_marked_as_more_of_it(form: type[logging.Formatter]) -> None:
    forged = "x\r\n2026-01-01T00:00:00Z  INFO all is well\x1b[2J\u202e"
    line = form().format(record("the router said %s", "a\nb", model=forged, exc_info=failure()))
    first, *others = line.split("\n")
    assert first and all(other.startswith("    | ") for other in others)
    if form is JsonLines:
        assert not others and "ValueError" in json.loads(line)["fields"]["message"]
    else:
        assert re.search(r"^    \|\s+raise ValueError", line, re.MULTILINE)
    assert "\x1b" not in line and "\u202e" not in line and "\r" not in line


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_a_line_is_bounded(form: type[logging.Formatter]) -> None:
    line = form().format(record("%s", "x" * 100_000, model="y" * 100_000))
    assert len(line) < LINE_CHARACTERS + 1_000
    assert "y" * 300 not in line


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_lost_is_said_in_the_form_of_the_other_lines(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    lines = Lines(writing)
    with LogStream(lines, writing) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(logging.getLogger(), "handlers", [])
        begin_log("INFO", form)
        while not lines.lost:
            lines.push(b"x" * (WAITING_BYTES // 2) + b"\n")
        rest = b""
        while b"taken too slowly" not in rest.rpartition(b"x\n")[2]:
            rest += os.read(reading, 1 << 20)
    notice = rest.rpartition(b"x\n")[2].decode()
    if form == "json":
        line = json.loads(notice)
        assert (line["level"], line["target"]) == ("WARN", "headrace.logs")
        notice = line["fields"]["message"]
    else:
        assert "Z  WARN headrace.logs: lines of the log" in notice
    assert re.search("lines of the log were lost here: [1-9]", notice)
    os.close(reading)
    os.close(writing)
