"""What callgrind and strace counted, read from their files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

# What the router's allocator, mimalloc, is called by. Its functions call each other, which counts nothing.
ALLOCATES = re.compile(r"mi_(?:heap_)?(?:malloc|zalloc|calloc|realloc|rezalloc|recalloc)\w*$")
OF_ALLOCATOR = re.compile(r"_?mi_")
FUNCTION = re.compile(r"(c?fn)=\((\d+)\)(?: (.*))?$")
CALLS = re.compile(r"calls=(\d+)")
Counts = dict[str, float]


class NotCountedError(Exception):
    """A file does not say what it should; the message says what is missing."""


class TokensCameTogetherError(NotCountedError):
    """What was counted is not what a token costs that comes alone."""


def callgrind(text: str) -> Counts:
    """Instructions, allocations and atomic instructions of a whole run, from a file of callgrind.

    Atomic instructions are those with a locked bus: each lock that is taken and given back is two, and each change of a
    shared count is one.
    """
    events = re.search(r"^events: (.*)$", text, re.MULTILINE)
    totals = re.search(r"^(?:totals|summary): (.*)$", text, re.MULTILINE)
    if events is None or totals is None:
        raise NotCountedError(
            "callgrind's file has no totals: the router did not end in good order"
        )
    of = dict(zip(events[1].split(), map(int, totals[1].split()), strict=False))
    return {
        "instructions": of["Ir"],
        "allocations": allocations(text),
        "atomics": of.get("Ge", 0),  # columns of zeros at the end are left out
    }


def allocations(text: str) -> int:
    """Calls of the allocator by anything but itself."""
    names: dict[str, str] = {}  # a name is written once, then its number stands for it
    caller = callee = ""
    count = 0
    for line in text.splitlines():
        if function := FUNCTION.match(line):
            kind, number, name = function.groups()
            name = names.setdefault(number, name or "")
            if kind == "fn":
                caller = name
            else:
                callee = name
        elif (calls := CALLS.match(line)) and ALLOCATES.match(callee):
            count += 0 if OF_ALLOCATOR.match(caller) else int(calls[1])
    return count


def strace(text: str) -> Counts:
    """System calls of a whole run, and those of them that wait for a lock or wake who waits, from `strace -c`."""
    calls: Counter[str] = Counter()
    for line in text.splitlines():
        fields = line.split()
        # share, seconds, microseconds a call, calls, errors if there were any, name
        if len(fields) in (5, 6) and fields[3].isdigit() and not fields[-1].isdigit():
            calls[fields[-1]] += int(fields[3])
    whole = calls.pop("total", None)
    if whole is None:
        raise NotCountedError("strace's summary has no total: the router did not end in good order")
    return {"syscalls": sum(calls.values()), "futexes": calls["futex"]}


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise NotCountedError(f"{path.name} is not there: {error}") from error
