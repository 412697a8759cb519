"""Frames to bytes and back: the numbers of frames, and the lengths that have to fit each other.

Both directions are as strict as the Rust side. `tests/golden/` holds frames that both languages read and write byte for
byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from headrace.errors import MalformedFrame, OtherProtocol
from headrace.wire.frames import (
    MAX_FRAME_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_MARKER_TOKENS,
    MAX_REQUEST_ID,
    MAX_TICKET_BYTES,
    MAX_TRACE_STATE,
    MOST_OTHER_PROMPTS,
    NAME_BYTES,
    PROTOCOL,
    PULL_KEY_BYTES,
    Blocks,
    Bye,
    Cancel,
    Continue,
    Describe,
    Drain,
    Failed,
    Fetch,
    Frame,
    Freed,
    Grammar,
    GrammarTotals,
    GroupTotals,
    Hello,
    KvFrom,
    KvReady,
    KvTransfer,
    MigrationOrder,
    ModelPart,
    Offer,
    OtherPrompts,
    OtherVersion,
    Ping,
    Prove,
    Reasoning,
    Refuse,
    Resync,
    Snapshot,
    Step,
    Submit,
    Ticket,
    TokenLimits,
    TraceContext,
    Transferred,
    Welcome,
)
from headrace.wire.schema import Schema

# Of one frame. What there is much of is bytes on this wire, but for the lists of a `Fetch`: two values for each block.
MAX_VALUES: Final = 1 << 18


def encode(frame: Frame) -> bytes:
    """The body of `frame`. Raises MalformedFrame if a field is of the wrong type or out of range, and FrameTooLong."""
    if type(frame) is Step and (columns := getattr(frame.outputs, "encode_step", None)) is not None:
        body: bytes | None = columns(frame)  # all at once, where nothing is special or wrong
        if body is not None and len(body) <= MAX_FRAME_BYTES:
            return body
    return _SCHEMA.encode(frame)


def decode(body: bytes) -> Frame:
    """The frame with this body, or a WireError."""
    return _SCHEMA.decode(body)


def _check_version(fields: list[Any]) -> None:
    """Of a Hello of another version nothing is read but that. What is no version at all is found with the fields."""
    if fields and type(fields[0]) is int and 0 <= fields[0] < 2**16 and fields[0] != PROTOCOL:
        raise OtherProtocol(fields[0], PROTOCOL)


# --- rules: lengths that have to fit each other, which no type can say ---


def _ticket_rule(frame: KvReady | Ticket | Offer | Fetch) -> None:
    if len(frame.ticket) > MAX_TICKET_BYTES:
        got = str(len(frame.ticket))
        raise MalformedFrame(".ticket", f"at most {MAX_TICKET_BYTES} bytes", got)


def _pull_key_rule(part: KvFrom | KvTransfer | MigrationOrder) -> None:
    if len(part.pull_key) != PULL_KEY_BYTES:
        raise MalformedFrame(".pull_key", f"{PULL_KEY_BYTES} bytes", str(len(part.pull_key)))


def _refuse_rule(frame: Refuse) -> None:
    """A worker that is to come back is told when, and no other."""
    if frame.reason.says_when is (frame.retry_after_ms is not None):
        return
    expected = "a time" if frame.reason.says_when else "nil"
    got = "nil" if frame.retry_after_ms is None else str(frame.retry_after_ms)
    raise MalformedFrame(".retry_after_ms", f"{expected} for {frame.reason}", got)


def _offer_rule(frame: Offer) -> None:
    _ticket_rule(frame)
    _one_each("hits", frame.hits, _tree(frame))


def _continue_rule(frame: Continue) -> None:
    _units("generated", frame.generated, 4)


def _fetch_rule(frame: Fetch) -> None:
    _ticket_rule(frame)
    _one_each("offset", frame.offset, _tree(frame))


def _grammar_rule(grammar: Grammar) -> None:
    # a character has at least one byte: most sources need not be encoded to be known as short
    if len(grammar.source) > MAX_GRAMMAR_BYTES // 4:
        size = len(grammar.source.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise MalformedFrame(".source", f"at most {MAX_GRAMMAR_BYTES} bytes", str(size))


def _reasoning_rule(reasoning: Reasoning) -> None:
    markers = (
        ("begin", reasoning.begin, 0),
        ("end", reasoning.end, 1),
        ("ends_too", reasoning.ends_too, 0),
    )
    for name, marker, least in markers:
        if not least <= len(marker) <= MAX_MARKER_TOKENS:
            expected = f"{least} to {MAX_MARKER_TOKENS} items"
            raise MalformedFrame(f".{name}", expected, str(len(marker)))
    if reasoning.begun >= len(reasoning.end):
        expected = f"less than the {len(reasoning.end)} of `end`"
        raise MalformedFrame(".begun", expected, str(reasoning.begun))


def _limits_rule(limits: TokenLimits) -> None:
    if 0 in limits.lengths or sum(limits.lengths) != len(limits.banned):
        expected = f"lengths above 0, {len(limits.banned)} together"
        raise MalformedFrame(".lengths", expected, str(sum(limits.lengths)))


_REQUEST_ID: Final = re.compile(rf"[!-~]{{0,{MAX_REQUEST_ID}}}")
# Neither trace nor span may be all zeros.
_TRACE_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]")
_TRACE_STATE: Final = re.compile(rf"[ -~]{{1,{MAX_TRACE_STATE}}}")


def _submit_rule(submit: Submit) -> None:
    expected = f"at most {MAX_REQUEST_ID} visible characters"
    _text(".request_id", _REQUEST_ID, submit.request_id, expected)


def _trace_rule(trace: TraceContext) -> None:
    _text(".parent", _TRACE_PARENT, trace.parent, "a traceparent")
    if trace.state is not None:
        _text(".state", _TRACE_STATE, trace.state, "a tracestate")


def _text(field: str, form: re.Pattern[str], text: str, expected: str) -> None:
    if form.fullmatch(text) is None:
        raise MalformedFrame(field, expected, repr(text[:80]))


def _others_rule(frame: OtherPrompts) -> None:
    if len(frame.prompts) > MOST_OTHER_PROMPTS:
        expected = f"at most {MOST_OTHER_PROMPTS} items"
        raise MalformedFrame(".prompts", expected, str(len(frame.prompts)))


def _tree(frame: Offer | Fetch) -> int:
    """Number of blocks, each of whose parents stands before it."""
    blocks = _units("names", frame.names, NAME_BYTES)
    _one_each("parents", frame.parents, blocks)
    for place, parent in enumerate(frame.parents):
        if not -1 <= parent < place:
            expected = f"-1 or a place before {place}"
            raise MalformedFrame(f".parents[{place}]", expected, str(parent))
    return blocks


def _units(field: str, value: bytes, unit: int) -> int:
    if len(value) % unit:
        raise MalformedFrame(f".{field}", f"a multiple of {unit} bytes", str(len(value)))
    return len(value) // unit


def _one_each(field: str, items: list[int], blocks: int) -> None:
    if len(items) != blocks:
        raise MalformedFrame(f".{field}", f"{blocks} items", str(len(items)))


_RULES: Final[dict[type, Callable[[Any], None]]] = {
    KvReady: _ticket_rule,
    KvFrom: _pull_key_rule,
    KvTransfer: _pull_key_rule,
    MigrationOrder: _pull_key_rule,
    Refuse: _refuse_rule,
    Offer: _offer_rule,
    Ticket: _ticket_rule,
    Continue: _continue_rule,
    Fetch: _fetch_rule,
    Grammar: _grammar_rule,
    Reasoning: _reasoning_rule,
    TokenLimits: _limits_rule,
    Submit: _submit_rule,
    TraceContext: _trace_rule,
    OtherPrompts: _others_rule,
}


_NUMBERS: Final[dict[int, tuple[str, type]]] = {
    1: ("hello", Hello),
    2: ("prove", Prove),
    3: ("snapshot", Snapshot),
    4: ("blocks", Blocks),
    5: ("step", Step),
    6: ("model", ModelPart),
    7: ("kv_ready", KvReady),
    8: ("freed", Freed),
    9: ("failed", Failed),
    10: ("bye", Bye),
    11: ("transferred", Transferred),
    12: ("offer", Offer),
    13: ("group_totals", GroupTotals),
    14: ("grammar_totals", GrammarTotals),
    15: ("other_prompts", OtherPrompts),
    32: ("welcome", Welcome),
    33: ("other_version", OtherVersion),
    34: ("submit", Submit),
    35: ("describe", Describe),
    36: ("cancel", Cancel),
    37: ("drain", Drain),
    38: ("ping", Ping),
    39: ("resync", Resync),
    40: ("ticket", Ticket),
    41: ("continue", Continue),
    42: ("fetch", Fetch),
    43: ("refuse", Refuse),
}
_SCHEMA: Final = Schema(
    _NUMBERS, MAX_FRAME_BYTES, _RULES, max_values=MAX_VALUES, first={Hello: _check_version}
)
