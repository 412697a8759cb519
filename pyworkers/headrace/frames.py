"""Every message between router and worker: the twin of `router/src/core/frame.rs`, which says what each field is.

A body is the msgpack array `[type, field, field, ...]`; nested dataclasses are arrays too. Both directions are as
strict as the Rust side: no integer for a float, no string for bytes, no missing or extra field. `tests/golden/` holds
frames that both languages read and write byte for byte.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
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

PROTOCOL: Final = 1
MAX_FRAME_BYTES: Final = 64 << 20


class _Range(NamedTuple):
    low: int
    high: int
    name: str


U8: TypeAlias = Annotated[int, _Range(0, 2**8 - 1, "an integer of 8 bits")]
U16: TypeAlias = Annotated[int, _Range(0, 2**16 - 1, "an integer of 16 bits")]
U32: TypeAlias = Annotated[int, _Range(0, 2**32 - 1, "an integer of 32 bits")]
U64: TypeAlias = Annotated[int, _Range(0, 2**64 - 1, "an integer of 64 bits")]
I8: TypeAlias = Annotated[int, _Range(-(2**7), 2**7 - 1, "a signed integer of 8 bits")]
Role: TypeAlias = Literal["prefill", "decode", "both"]
Finish: TypeAlias = Literal["stop", "length", "cancelled"]


# --- worker -> router ---


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What must agree between two sides before they may share KV or hashes."""

    weights: str
    tokenizer: str
    chat_template: str
    kv_layout: str
    hash_scheme: str
    block_tokens: U32


@dataclass(frozen=True, slots=True)
class Capacity:
    """Upper bounds of one worker."""

    blocks: U32
    sequences: U32
    batched_tokens: U32
    waiting: U32
    host_blocks: U32 = 0
    disk_blocks: U32 = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, as factors of the counts in `Step`."""

    fixed_ms: float
    prefill_ms: float
    context_ms: float
    row_ms: float
    kv_ms: float


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that step together."""

    id: str
    rank: U32
    size: U32


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a link. `Link` fills in `nonce`."""

    protocol: U16
    worker: str
    epoch: U64
    role: Role
    model: str
    fingerprints: Fingerprints
    capacity: Capacity
    context_tokens: U32
    group: Group | None = None
    transfer: list[str] = field(default_factory=list[str])
    nonce: bytes = b""
    step_prior: StepCost | None = None


@dataclass(frozen=True, slots=True)
class Prove:
    """Proof that the worker knows the deployment secret."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Part of the full list of cached blocks. `hashes` are block keys of 8 bytes, little-endian.

    No `Blocks` stand between the parts of one snapshot.
    """

    epoch: U64
    sequence: U64
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of blocks, each the child of the one before."""

    parent: U64 | None
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """What changed in a worker's cache, sent before the `Step` that changed it.

    Order of application: cleared, removed, stored.
    """

    epoch: U64
    sequence: U64
    stored: list[StoredRun]
    removed: bytes
    cleared: bool
    tier: U8


@dataclass(frozen=True, slots=True)
class Load:
    """Pool and queue of a worker after a step."""

    blocks_used: U32 = 0
    blocks_cached: U32 = 0
    running: U32 = 0
    waiting: U32 = 0


class Ranked(NamedTuple):
    """A token and its log-probability (or, in `Sampling.logit_bias`, its bias)."""

    token: U32
    value: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the token at one place, and of the most probable ones there, best first."""

    logprob: float
    top: list[Ranked]


@dataclass(frozen=True, slots=True)
class Output:
    """What one sequence got from a step."""

    request: U64
    ids: list[U32]
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    cached_tokens: U32 | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. With `outputs` empty and the `step` of before it is a heartbeat."""

    step: U64
    ms: float
    prefill_tokens: U32
    prefill_context: U64
    decode_rows: U32
    kv_tokens: U64
    waiting_tokens: U64
    drafted: U32
    accepted: U32
    load: Load
    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of a model description; all parts together are one JSON document."""

    fingerprint: str
    part: U32
    last: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class KvReady:
    """Permission to pull a request's KV."""

    request: U64
    ticket: bytes
    lease_ms: U32


@dataclass(frozen=True, slots=True)
class Freed:
    """All blocks of a request are free."""

    request: U64
    blocks: U32


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that cannot be served by this worker."""

    request: U64
    kind: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Bye:
    """The worker leaves."""

    reason: str


# --- router -> worker ---


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is part of the fleet (after `Prove`, where there is a secret)."""

    protocol: U16
    router: str
    heartbeat_ms: U32
    challenge: bytes
    proof: bytes
    hash_key: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why a worker may not join."""

    field: str
    expected: str
    got: str
    message: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy, with everything else off."""

    temperature: float = 0.0
    top_k: U32 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: U64 = 0
    logprobs: U32 | None = None
    prompt_logprobs: U32 | None = None
    logit_bias: list[Ranked] = field(default_factory=list[Ranked])
    ignore_eos: bool = False
    min_tokens: U32 = 0


@dataclass(frozen=True, slots=True)
class KvFrom:
    """Where the KV of a prompt comes from, when not from this worker."""

    worker: str
    transfer: list[str]


@dataclass(frozen=True, slots=True)
class Resume:
    """State of a request that began on another worker. `generated` is u32 little-endian."""

    generated: bytes
    rng_counter: U64


@dataclass(frozen=True, slots=True)
class Submit:
    """One leg of a request. `tokens` is the prompt, u32 little-endian."""

    request: U64
    tokens: bytes
    sampling: Sampling
    stop_ids: list[U32]
    max_tokens: U32
    deadline_ms: U64 | None = None
    priority: I8 = 0
    salt: bytes = b""
    kv_from: KvFrom | None = None
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for a model description."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request."""

    request: U64


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new, finish what runs, leave."""

    budget_ms: U64


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Step` as a sign of life."""

    nonce: U64


@dataclass(frozen=True, slots=True)
class Resync:
    """The view of the cached blocks is lost: send the snapshot again, then deltas from there on."""

    reason: str


FromWorker: TypeAlias = (
    Hello | Prove | Snapshot | Blocks | Step | ModelPart | KvReady | Freed | Failed | Bye
)
FromRouter: TypeAlias = Welcome | Refuse | Submit | Describe | Cancel | Drain | Ping | Resync
Frame: TypeAlias = FromWorker | FromRouter


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


# --- the schema, from the annotations above ---

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
        return kind(*out)

    return load


def _dump_fields(kind: type, fields: list[tuple[str, _Convert]]) -> _Convert:
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
    32: ("welcome", Welcome),
    33: ("refuse", Refuse),
    34: ("submit", Submit),
    35: ("describe", Describe),
    36: ("cancel", Cancel),
    37: ("drain", Drain),
    38: ("ping", Ping),
    39: ("resync", Resync),
}
_STRUCTS: Final = {kind: _struct(kind) for _, kind in _NUMBERS.values()}
_LOADS: Final = {number: (name, _STRUCTS[kind][0]) for number, (name, kind) in _NUMBERS.items()}
_DUMPS: Final = {
    kind: (number, name, _STRUCTS[kind][1]) for number, (name, kind) in _NUMBERS.items()
}
