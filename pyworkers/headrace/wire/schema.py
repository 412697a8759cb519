"""Messages as msgpack arrays, from the annotations of dataclasses.

A body is `[number, field, field, ...]`; nested dataclasses are arrays too. Both directions are as strict as the Rust
side: no integer for a float, no string for bytes, no missing or extra field. A body passes a structural check before
anything is built from it, so no message can ask for more memory than it has bytes for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
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


class Range(NamedTuple):
    """Of an annotated integer."""

    low: int
    high: int
    name: str


U8: TypeAlias = Annotated[int, Range(0, 2**8 - 1, "an integer of 8 bits")]
U16: TypeAlias = Annotated[int, Range(0, 2**16 - 1, "an integer of 16 bits")]
U32: TypeAlias = Annotated[int, Range(0, 2**32 - 1, "an integer of 32 bits")]
U64: TypeAlias = Annotated[int, Range(0, 2**64 - 1, "an integer of 64 bits")]
I8: TypeAlias = Annotated[int, Range(-(2**7), 2**7 - 1, "a signed integer of 8 bits")]
I32: TypeAlias = Annotated[int, Range(-(2**31), 2**31 - 1, "a signed integer of 32 bits")]

# A body that is not longer needs no look at how many values are in it. An empty array takes 64 bytes of memory.
FEW_BYTES: Final = 64 << 10

# A rule raises MalformedFrame: lengths that have to fit each other, which no type can say.
Rules: TypeAlias = Mapping[type, Callable[[Any], None]]
# Looks at the fields of a message as msgpack gave them, before they are counted and read.
FirstLooks: TypeAlias = Mapping[type, Callable[[list[Any]], None]]


class Schema:
    """Messages by number and name. A body has at most `max_bytes`, and one that is read at most `max_values` values."""

    def __init__(
        self,
        messages: Mapping[int, tuple[str, type]],
        max_bytes: int,
        rules: Rules | None = None,
        *,
        max_values: int = FEW_BYTES,
        first: FirstLooks | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._first = {
            number: first[kind] for number, (_, kind) in messages.items() if first and kind in first
        }
        self._loads: dict[int, tuple[str, _Convert]] = {}
        self._dumps: dict[type, tuple[int, str, _Convert]] = {}
        for number, (name, kind) in messages.items():
            load, dump = _struct(kind, rules or {})
            self._loads[number] = (name, load)
            self._dumps[kind] = (number, name, dump)

    def encode(self, message: object) -> bytes:
        """The body of `message`. Raises MalformedFrame if a field is of the wrong type, FrameTooLong."""
        if type(message) not in self._dumps:
            raise MalformedFrame("frame", "a frame", type(message).__name__)
        number, name, dump = self._dumps[type(message)]
        try:
            fields = dump(message)
        except MalformedFrame as error:
            error.at = name + error.at
            raise
        body = _pack(name, [number, *fields])
        if len(body) > self._max_bytes:
            raise FrameTooLong(len(body), self._max_bytes)
        return body

    def decode(self, body: bytes) -> Any:
        """The message with this body, or a WireError."""
        if len(body) > self._max_bytes:
            raise FrameTooLong(len(body), self._max_bytes)
        values = _unpack(body, self._max_values)
        if type(values) is not list:
            raise MalformedFrame("frame", "an array", _name_of(values))
        if not values:
            raise MalformedFrame("frame", "a type number", "an empty array")
        number = values[0]
        if type(number) is not int or number < 0:
            raise MalformedFrame("frame", "an integer of 64 bits", _name_of(number))
        try:
            name, load = self._loads[number]
        except KeyError:
            raise UnknownFrameType(number) from None
        if (look := self._first.get(number)) is not None:
            look(values[1:])
        try:
            return load(values[1:])
        except MalformedFrame as error:
            error.at = name + error.at
            raise


class Packed(NamedTuple):
    """The msgpack of a field."""

    data: bytes


# --- msgpack ---


def _pack(name: str, values: list[Any]) -> bytes:
    # strict: what is no plain value here is our mistake. The default buffer is 256 KiB for each call.
    packer = msgpack.Packer(strict_types=True, buf_size=1024)
    try:
        if Packed not in map(type, values):
            return packer.pack(values)
        parts: list[bytes] = [packer.pack_array_header(len(values))]
        parts += [v.data if type(v) is Packed else packer.pack(v) for v in values]
        return b"".join(parts)
    except UnicodeEncodeError as error:  # a lone surrogate
        raise MalformedFrame(name, "UTF-8", error.reason) from None


def _unpack(body: bytes, max_values: int) -> Any:
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
    if len(body) > FEW_BYTES and not _has_few_values(body, max_values):
        raise MalformedFrame("frame", f"at most {max_values} values", "more")
    try:
        return msgpack.unpackb(
            body, object_pairs_hook=_no_map, ext_hook=_no_ext, strict_map_key=False
        )
    except UnicodeDecodeError as error:
        raise MalformedFrame("frame", "UTF-8", error.reason) from None
    except ValueError as error:  # a timestamp of a wrong length
        raise MalformedFrame("frame", "msgpack", str(error)) from None


# What follows the first byte of a value: bytes of its length (or number of values), by msgpack's specification.
_LENGTHS: Final = {
    0xC4: 1, 0xC5: 2, 0xC6: 4,  # bytes
    0xD9: 1, 0xDA: 2, 0xDB: 4,  # strings
    0xC7: 1, 0xC8: 2, 0xC9: 4,  # extensions, whose type is one byte more
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,  # arrays, maps
}  # fmt: skip
_FIXED: Final = {
    0xCA: 4, 0xCB: 8,  # floats
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,  # integers
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,  # extensions
}  # fmt: skip


def _has_few_values(body: bytes, most: int) -> bool:
    """Whether a body that is msgpack has at most `most` values, those inside of arrays and maps included."""
    at = values = 0
    size = len(body)
    while at < size:
        values += 1
        if values > most:
            return False
        first = body[at]
        at += 1
        if first in _FIXED:
            at += _FIXED[first]
        elif first in _LENGTHS:
            width = _LENGTHS[first]
            length = int.from_bytes(body[at : at + width], "big")
            at += width
            if first < 0xDC:  # not of values
                at += length + (first in {0xC7, 0xC8, 0xC9})
        elif 0xA0 <= first <= 0xBF:
            at += first & 0x1F
    return True


def _no_map(_pairs: list[tuple[Any, Any]]) -> Any:
    raise MalformedFrame("frame", "no map", "a map")


def _no_ext(_code: int, _data: bytes) -> Any:
    raise MalformedFrame("frame", "no extension", "an extension")


# --- fields ---

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


def _enum(kind: type[StrEnum]) -> tuple[_Convert, _Convert]:
    """A closed set of words: on the wire its values, in a message its members."""
    check = _one_of(tuple(member.value for member in kind))

    def dump(value: Any) -> Any:
        if type(value) is not kind:
            raise MalformedFrame("", kind.__name__, _name_of(value))
        return value.value

    return lambda value: kind(check(value)), dump


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


def _columns(convert: _Convert) -> _Convert:
    """Dumps of a field that is a list, or columns, which write themselves but for rows that they hand to a function."""
    each = _list(convert)

    def one(item: Any, row: int) -> bytes:
        try:
            return _pack("", convert(item))
        except MalformedFrame as error:
            error.at = f"[{row}]{error.at}"
            raise

    def dump(value: Any) -> Any:
        encode_rows = getattr(value, "encode_rows", None)
        return each(value) if encode_rows is None else Packed(encode_rows(one))

    return dump


def _load_fields(kind: type, fields: list[tuple[str, _Convert]], rule: _Convert | None) -> _Convert:
    """Fields of an array of the right length, in order, then the object."""
    loads = [load for _, load in fields]

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


def _dump_fields(kind: type, fields: list[tuple[str, _Convert]], rule: _Convert | None) -> _Convert:
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


def _struct(kind: type, rules: Rules) -> tuple[_Convert, _Convert]:
    hints = get_type_hints(kind, include_extras=True)
    # also for a NamedTuple, hints come in the order of declaration
    converts = [(name, *_converts(hint, rules)) for name, hint in hints.items()]
    rule = rules.get(kind)
    load = _load_fields(kind, [(name, load) for name, load, _ in converts], rule)
    return load, _dump_fields(kind, [(name, dump) for name, _, dump in converts], rule)


_PLAIN: Final = {
    bool: _exactly(bool, "a bool"),
    float: _exactly(float, "a float"),
    str: _exactly(str, "a string"),
    bytes: _exactly(bytes, "bytes"),
}


def _converts(hint: Any, rules: Rules) -> tuple[_Convert, _Convert]:
    """Load and dump of a field with this annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check = _int(*arguments[1])
        return check, check
    if origin is Literal:
        check = _one_of(arguments)
        return check, check
    if origin in {list, Sequence}:
        load, dump = _converts(arguments[0], rules)
        return _list(load), _list(dump) if origin is list else _columns(dump)
    if origin in {Union, types.UnionType}:
        inner, nothing = arguments
        assert nothing is type(None)
        load, dump = _converts(inner, rules)
        return _optional(load), _optional(dump)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint)
    if hint in _PLAIN:
        return _PLAIN[hint], _PLAIN[hint]
    return _struct(hint, rules)
