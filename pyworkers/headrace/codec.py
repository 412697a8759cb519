"""Frames to bytes and back.

Both directions are as strict as the Rust side: no integer for a float, no string for bytes, no missing or extra field.
`tests/golden/` holds frames that both languages read and write byte for byte.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from headrace.errors import (
    FrameTooLong,
    FrameTruncated,
    MalformedFrame,
    TrailingBytes,
    UnknownFrameType,
)
from headrace.frames import (
    MAX_FRAME_BYTES,
    MAX_TICKET_BYTES,
    NAME_BYTES,
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
    Hello,
    KvReady,
    ModelPart,
    Offer,
    Ping,
    Prove,
    Refuse,
    Resync,
    Snapshot,
    Step,
    Submit,
    Ticket,
    Transferred,
    Welcome,
)


def encode(frame: Frame) -> bytes:
    """The body of `frame`. Raises MalformedFrame if a field is of the wrong type or out of range, and FrameTooLong."""
    if type(frame) not in _DUMPS:
        raise MalformedFrame("frame", "a frame", type(frame).__name__)
    number, name, dump = _DUMPS[type(frame)]
    try:
        fields = dump(frame)
    except MalformedFrame as error:
        error.at = name + error.at
        raise
    # strict: what is no plain value here is our mistake. The default buffer is 256 KiB for each call.
    packer = msgpack.Packer(strict_types=True, buf_size=1024)
    try:
        body = packer.pack([number, *fields])
    except UnicodeEncodeError as error:  # a lone surrogate
        raise MalformedFrame(name, "UTF-8", error.reason) from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(len(body), MAX_FRAME_BYTES)
    return body


def decode(body: bytes) -> Frame:
    """The frame with this body, or a WireError."""
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(len(body), MAX_FRAME_BYTES)
    values = _unpack(body)
    if type(values) is not list:
        raise MalformedFrame("frame", "an array", _name_of(values))
    if not values:
        raise MalformedFrame("frame", "a type number", "an empty array")
    number = values[0]
    if type(number) is not int or number < 0:
        raise MalformedFrame("frame", "an integer of 64 bits", _name_of(number))
    try:
        name, load = _LOADS[number]
    except KeyError:
        raise UnknownFrameType(number) from None
    try:
        return load(values[1:])
    except MalformedFrame as error:
        error.at = name + error.at
        raise


# --- msgpack ---


def _unpack(body: bytes) -> Any:
    # unpackb makes room for as many items as an array promises. skip() makes none, and fails unless all are there.
    scan = msgpack.Unpacker(max_buffer_size=len(body) or 1)
    scan.feed(body)
    try:
        scan.skip()
    except msgpack.OutOfData:
        raise FrameTruncated("frame") from None
    except ValueError as error:  # FormatError, StackError
        raise MalformedFrame("frame", "msgpack", type(error).__name__) from None
    if scan.tell() != len(body):
        raise TrailingBytes("complete", len(body) - scan.tell())
    try:
        return msgpack.unpackb(
            body, object_pairs_hook=_no_map, ext_hook=_no_ext, strict_map_key=False
        )
    except UnicodeDecodeError as error:
        raise MalformedFrame("frame", "UTF-8", error.reason) from None
    except ValueError as error:  # a timestamp of a wrong length
        raise MalformedFrame("frame", "msgpack", str(error)) from None


def _no_map(_pairs: list[tuple[Any, Any]]) -> Any:
    raise MalformedFrame("frame", "no map", "a map")


def _no_ext(_code: int, _data: bytes) -> Any:
    raise MalformedFrame("frame", "no extension", "an extension")


# --- rules: lengths that have to fit each other, which no type can say ---


def _ticket_rule(frame: KvReady | Ticket | Offer | Fetch) -> None:
    if len(frame.ticket) > MAX_TICKET_BYTES:
        got = str(len(frame.ticket))
        raise MalformedFrame(".ticket", f"at most {MAX_TICKET_BYTES} bytes", got)


def _offer_rule(frame: Offer) -> None:
    _ticket_rule(frame)
    _one_each("hits", frame.hits, _tree(frame))


def _continue_rule(frame: Continue) -> None:
    _units("generated", frame.generated, 4)


def _fetch_rule(frame: Fetch) -> None:
    _ticket_rule(frame)
    _one_each("offset", frame.offset, _tree(frame))


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
    Offer: _offer_rule,
    Ticket: _ticket_rule,
    Continue: _continue_rule,
    Fetch: _fetch_rule,
}


# --- the schema, from the annotations of `frames` ---

# A load takes what msgpack gave and returns what a field holds; a dump goes the other way. Both raise MalformedFrame,
# whose `at` grows from the inside out.
_Convert: TypeAlias = Callable[[Any], Any]


_NAMES: Final[dict[type, str]] = {
    type(None): "nil",
    bool: "a bool",
    int: "an integer",
    float: "a float",
    str: "a string",
    bytes: "bytes",
    list: "an array",
}


def _name_of(value: object) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def _int(low: int, high: int, name: str) -> _Convert:
    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise MalformedFrame("", name, str(value) if type(value) is int else _name_of(value))

    return check


def _exactly(kind: type, name: str) -> _Convert:
    def check(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise MalformedFrame("", name, _name_of(value))

    return check


def _one_of(values: tuple[str, ...]) -> _Convert:
    known = {value: value for value in values}  # also makes all equal strings one object

    def check(value: Any) -> Any:
        if type(value) is not str:
            raise MalformedFrame("", "a string", _name_of(value))
        if value not in known:
            shown = value if len(value) <= 80 else value[:80] + "..."  # the peer chose it
            raise MalformedFrame("", f"{', '.join(values[:-1])} or {values[-1]}", repr(shown))
        return known[value]

    return check


def _optional(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _list(convert: _Convert) -> _Convert:
    def each(value: Any) -> Any:
        if type(value) is not list:
            raise MalformedFrame("", "an array", _name_of(value))
        out: list[Any] = []
        try:
            for item in value:
                out.append(convert(item))  # noqa: PERF401  a comprehension would lose the index
        except MalformedFrame as error:
            error.at = f"[{len(out)}]{error.at}"
            raise
        return out

    return each


def _load_fields(kind: type, fields: list[tuple[str, _Convert]]) -> _Convert:
    """Fields of an array of the right length, in order, then the object."""
    loads = [load for _, load in fields]
    rule = _RULES.get(kind)

    def load(values: Any) -> Any:
        if type(values) is not list:
            raise MalformedFrame("", "an array", _name_of(values))
        if len(values) != len(loads):
            raise MalformedFrame("", f"{len(loads)} fields", str(len(values)))
        out: list[Any] = []
        try:
            for convert, value in zip(loads, values, strict=True):
                out.append(convert(value))
        except MalformedFrame as error:
            error.at = f".{fields[len(out)][0]}{error.at}"
            raise
        made = kind(*out)
        if rule is not None:
            rule(made)
        return made

    return load


def _dump_fields(kind: type, fields: list[tuple[str, _Convert]]) -> _Convert:
    rule = _RULES.get(kind)

    def dump(value: Any) -> Any:
        if type(value) is not kind:
            raise MalformedFrame("", kind.__name__, type(value).__name__)
        out: list[Any] = []
        try:
            for name, convert in fields:
                out.append(convert(getattr(value, name)))
        except MalformedFrame as error:
            error.at = f".{fields[len(out)][0]}{error.at}"
            raise
        if rule is not None:
            rule(value)
        return out

    return dump


def _struct(kind: type) -> tuple[_Convert, _Convert]:
    hints = get_type_hints(kind, include_extras=True)
    # also for a NamedTuple, hints come in the order of declaration
    converts = [(name, *_converts(hint)) for name, hint in hints.items()]
    load = _load_fields(kind, [(name, load) for name, load, _ in converts])
    return load, _dump_fields(kind, [(name, dump) for name, _, dump in converts])


_PLAIN: Final = {
    bool: _exactly(bool, "a bool"),
    float: _exactly(float, "a float"),
    str: _exactly(str, "a string"),
    bytes: _exactly(bytes, "bytes"),
}


def _converts(hint: Any) -> tuple[_Convert, _Convert]:
    """Load and dump of a field with this annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check = _int(*arguments[1])
        return check, check
    if origin is Literal:
        check = _one_of(arguments)
        return check, check
    if origin is list:
        load, dump = _converts(arguments[0])
        return _list(load), _list(dump)
    if origin in {Union, types.UnionType}:
        inner, nothing = arguments
        assert nothing is type(None)
        load, dump = _converts(inner)
        return _optional(load), _optional(dump)
    if hint in _PLAIN:
        return _PLAIN[hint], _PLAIN[hint]
    return _struct(hint)


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
    32: ("welcome", Welcome),
    33: ("refuse", Refuse),
    34: ("submit", Submit),
    35: ("describe", Describe),
    36: ("cancel", Cancel),
    37: ("drain", Drain),
    38: ("ping", Ping),
    39: ("resync", Resync),
    40: ("ticket", Ticket),
    41: ("continue", Continue),
    42: ("fetch", Fetch),
}
_STRUCTS: Final = {kind: _struct(kind) for _, kind in _NUMBERS.values()}
_LOADS: Final = {number: (name, _STRUCTS[kind][0]) for number, (name, kind) in _NUMBERS.items()}
_DUMPS: Final = {
    kind: (number, name, _STRUCTS[kind][1]) for number, (name, kind) in _NUMBERS.items()
}
