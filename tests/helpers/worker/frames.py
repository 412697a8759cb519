"""Frames for tests: as strategies of Hypothesis, and as JSON."""

import dataclasses
import types
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from headrace.wire.frames import (
    MAX_MARKER_TOKENS,
    MAX_REQUEST_ID,
    MAX_TICKET_BYTES,
    MAX_TRACE_STATE,
    MOST_OTHER_PROMPTS,
    NAME_BYTES,
    PROTOCOL,
    PULL_KEY_BYTES,
    U32,
    U64,
    Continue,
    Fetch,
    Frame,
    FromRouter,
    FromWorker,
    Hello,
    KvFrom,
    KvReady,
    KvTransfer,
    MigrationOrder,
    Offer,
    OtherPrompt,
    OtherPrompts,
    Reasoning,
    Refuse,
    RefuseReason,
    Submit,
    Ticket,
    TokenLimits,
    TraceContext,
)

# Where integers and lengths change their width on the wire.
_EDGES = [0, 1, 31, 32, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63]


def any_frame() -> st.SearchStrategy[Frame]:
    """Every frame, with no NaN in it, so that frames can be compared."""
    return st.one_of([_frames(kind) for kind in get_args(FromWorker) + get_args(FromRouter)])


def _frames(kind: Any) -> st.SearchStrategy[Any]:
    """Frames of this kind, also where lengths have to fit each other."""
    ticket = st.binary(max_size=MAX_TICKET_BYTES)
    number = _values(U32)
    if kind in {KvReady, Ticket}:
        return _values(kind).flatmap(
            lambda frame: st.builds(dataclasses.replace, st.just(frame), ticket=ticket)
        )
    if kind is Continue:
        ids = st.lists(number, max_size=9)
        generated = ids.map(lambda ids: b"".join(token.to_bytes(4, "little") for token in ids))
        return st.builds(Continue, _values(U64), generated)
    if kind is Offer:
        return _trees().flatmap(lambda tree: st.builds(Offer, ticket, *map(st.just, tree), number))
    if kind is Fetch:
        return _trees().flatmap(
            lambda tree: st.builds(
                Fetch, _values(U64), _values(KvFrom), ticket, *map(st.just, tree)
            )
        )
    if kind is OtherPrompts:
        prompts = st.lists(_values(OtherPrompt), max_size=MOST_OTHER_PROMPTS)
        return st.builds(OtherPrompts, prompts)
    if kind is Hello:  # of another version only that is read
        return _values(Hello).map(lambda hello: dataclasses.replace(hello, protocol=PROTOCOL))
    if kind is Refuse:
        return st.tuples(_values(Refuse), number).map(
            lambda both: dataclasses.replace(
                both[0], retry_after_ms=both[1] if both[0].reason.says_when else None
            )
        )
    if kind is Submit:
        return st.builds(
            dataclasses.replace, _values(Submit), request_id=_ascii("!", 0, MAX_REQUEST_ID)
        )
    return _values(kind)


def refusal(
    reason: RefuseReason,
    retry_after_ms: int | None = None,
    *,
    router: str = "router-0",
    differs: tuple[str, str, str] = ("", "", ""),
    message: str = "it may not be",
) -> Refuse:
    """`differs` is a field, the fleet's value and the worker's."""
    return Refuse(reason, router, retry_after_ms, *differs, message)


@st.composite
def _trees(draw: st.DrawFn) -> tuple[bytes, list[int], list[int]]:
    """Names of blocks, the places of their parents, and a number for each."""
    blocks = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, place - 1)) for place in range(blocks)]
    numbers = [draw(_values(U32)) for _ in range(blocks)]
    size = blocks * NAME_BYTES
    return draw(st.binary(min_size=size, max_size=size)), parents, numbers


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field with this annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        low, high, _ = arguments[1]
        edges = [edge for edge in [*_EDGES, -1, -32, -33, low, high] if low <= edge <= high]
        return st.sampled_from(edges) | st.integers(low, high)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in {list, Sequence}:
        return st.lists(_values(arguments[0]), max_size=20)
    if origin in {Union, types.UnionType}:
        return st.one_of([_values(argument) for argument in arguments])
    plain = {
        type(None): st.none(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=40) | st.integers(0, 300).map(lambda n: "é" * n),
        bytes: st.binary(max_size=40) | st.integers(0, 300).map(bytes),
    }
    if hint in plain:
        return plain[hint]
    if hint in {KvFrom, KvTransfer, MigrationOrder}:
        fields = [
            _values(field)
            for field in list(get_type_hints(hint, include_extras=True).values())[:-1]
        ]
        return st.builds(hint, *fields, st.binary(min_size=PULL_KEY_BYTES, max_size=PULL_KEY_BYTES))
    if hint is Reasoning:
        marker = st.lists(_values(U32), max_size=MAX_MARKER_TOKENS)
        return st.builds(Reasoning, marker, marker.filter(bool), _values(U32 | None))
    if hint is TokenLimits:
        words = st.lists(st.lists(_values(U32), min_size=1, max_size=4), max_size=5)
        return st.builds(_limits, st.lists(_values(U32), max_size=20), words)
    if hint is TraceContext:
        trace, span = st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1)
        parent = st.builds("00-{:032x}-{:016x}-0{:d}".format, trace, span, st.booleans())
        return st.builds(TraceContext, parent, st.none() | _ascii(" ", 1, MAX_TRACE_STATE))
    hints = get_type_hints(hint, include_extras=True)
    return st.tuples(*[_values(field) for field in hints.values()]).map(
        lambda fields: hint(*fields)
    )


def _ascii(first: str, least: int, most: int) -> st.SearchStrategy[str]:
    letters = st.characters(min_codepoint=ord(first), max_codepoint=ord("~"))
    return st.text(letters, min_size=least, max_size=most)


def _limits(allowed: list[int], words: list[list[int]]) -> TokenLimits:
    banned = [token for word in words for token in word]
    return TokenLimits(allowed, banned, [len(word) for word in words])


def as_json(value: Any) -> Any:
    """`value` as tests/golden has it."""
    if dataclasses.is_dataclass(value):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return list(value) if isinstance(value, bytes) else value
