"""What a worker pays to read and write frames, beside msgspec with the same fields, and what msgspec lets pass.

    .venv/bin/python -m pip install --no-deps --target target/msgspec msgspec==0.22.0
    python -m bench.wire.codec [--out bench/results/wire_codec.json]

The structs of msgspec are made from the annotations of `headrace/wire/frames.py`: arrays with the frame's number in
front, with the bounds of every integer that msgspec can bound (2**63 - 1 is the largest). Both sides read and write the
same bytes, which is checked first.

`us` are microseconds of CPU time for one call, each the least of `rounds` rounds, as other work on the machine only
ever adds; the sides take turns. `lax` has what msgspec does with values that `headrace/wire/schema.py` refuses: what it
made of them, or how it names the place.
"""

from __future__ import annotations

import argparse
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from bench.helpers.report import ROOT, rounded, write
from headrace.errors import WireError
from headrace.wire import codec
from headrace.wire.frames import Frame, Load, Sampling, Step, Submit
from headrace.wire.schema import Range

MSGSPEC = ROOT / "target/msgspec"
LARGEST = 2**63 - 1  # that msgspec bounds an integer by
STEP_NUMBER, SUBMIT_NUMBER = 5, 34

SUBMIT = Submit(
    7,
    b"".join((1000 + 37 * i).to_bytes(4, "little") for i in range(512)),
    Sampling(temperature=0.7, top_p=0.95, seed=1234),
    [2],
    256,
    30_000,
)
HEARTBEAT = Step(41, 0.0, 0, 0, 0, 0, 0, 0, 4096, 0, Load(), [])


class Structs:
    """The dataclasses of the protocol as structs of msgspec."""

    def __init__(self, msgspec: Any) -> None:
        self._msgspec = msgspec
        self._made: dict[type, Any] = {}

    def of(self, kind: type, number: int | None = None) -> Any:
        """The struct for `kind`; with a number that of a frame, which is an array with the number in front."""
        if kind not in self._made:
            hints = get_type_hints(kind, include_extras=True)
            fields = [(name, self._hint(hint)) for name, hint in hints.items()]
            self._made[kind] = self._msgspec.defstruct(
                kind.__name__, fields, array_like=True, tag=number, forbid_unknown_fields=True
            )
        return self._made[kind]

    def value(self, value: Any) -> Any:
        """A frame, or a part of one, with the structs in place of the dataclasses."""
        if isinstance(value, list):
            return [self.value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        if type(value) not in self._made:
            return value
        names = get_type_hints(type(value))
        return self._made[type(value)](*(self.value(getattr(value, name)) for name in names))

    def _hint(self, hint: Any) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            bounds: Range = arguments[1]
            high = min(bounds.high, LARGEST)
            return Annotated[int, self._msgspec.Meta(ge=bounds.low, le=high)]
        if origin in {Union, types.UnionType}:
            return self._hint(arguments[0]) | None
        if origin is not None and arguments and origin.__name__ in {"list", "Sequence"}:
            return list[self._hint(arguments[0])]
        return self.of(hint) if hasattr(hint, "__dataclass_fields__") else hint


def us(call: Callable[[], object], calls: int) -> float:
    began = time.process_time_ns()
    for _ in range(calls):
        call()
    return (time.process_time_ns() - began) / calls / 1e3


def compare(structs: Structs, msgspec: Any, frame: Frame, number: int) -> dict[str, Any]:
    """Calls that read and write `frame`, by side."""
    struct = structs.of(type(frame), number)
    decoder, encoder = msgspec.msgpack.Decoder(struct), msgspec.msgpack.Encoder()
    theirs, body = structs.value(frame), codec.encode(frame)
    assert decoder.decode(body) == theirs
    assert encoder.encode(theirs) == body
    assert codec.decode(body) == frame
    return {
        "read": {"schema": lambda: codec.decode(body), "msgspec": lambda: decoder.decode(body)},
        "write": {"schema": lambda: codec.encode(frame), "msgspec": lambda: encoder.encode(theirs)},
    }


def said(call: Callable[[], object], *errors: type[Exception]) -> str:
    """What came of a call that should be refused."""
    try:
        return f"takes it: {call()!r}"
    except errors as error:
        return f"{type(error).__name__}: {error}"


def lax(structs: Structs, msgspec: Any) -> dict[str, dict[str, str]]:
    """Frames that no worker or router may send, and what each side says of them."""
    struct = structs.of(Step, STEP_NUMBER)
    fields = msgspec.msgpack.decode(codec.encode(HEARTBEAT))
    integer = msgspec.msgpack.encode([*fields[:2], 2, *fields[3:]])
    text = msgspec.msgpack.encode([*fields[:11], ["much", *fields[11][1:]], *fields[12:]])
    wrong = structs.value(HEARTBEAT)
    wrong.waiting_tokens = "many"
    ours = Step(*[getattr(HEARTBEAT, name) for name in get_type_hints(Step)])
    object.__setattr__(ours, "waiting_tokens", "many")
    read = msgspec.msgpack.Decoder(struct).decode

    def both(theirs: Callable[[], object], own: Callable[[], object]) -> dict[str, str]:
        return {"msgspec": said(theirs, msgspec.ValidationError), "schema": said(own, WireError)}

    return {
        "an integer for the float Step.ms": both(
            lambda: read(integer).ms, lambda: codec.decode(integer)
        ),
        "a text for an integer of Step.load": both(lambda: read(text), lambda: codec.decode(text)),
        "Step.waiting_tokens = 'many', written": both(
            lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(wrong)),
            lambda: codec.encode(ours),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=5_000, help="calls in a round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(MSGSPEC))
    try:
        import msgspec  # pyright: ignore[reportMissingImports]  # no part of the project
    except ImportError:
        parser.error(f"{MSGSPEC.relative_to(ROOT)} has no msgspec; the first line of --help")
    structs = Structs(msgspec)
    calls = {
        "a Submit of 512 tokens": compare(structs, msgspec, SUBMIT, SUBMIT_NUMBER),
        "a heartbeat, a Step without outputs": compare(structs, msgspec, HEARTBEAT, STEP_NUMBER),
    }
    times: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(args.rounds):
        for name, ways in calls.items():
            for way, sides in ways.items():
                for side, call in sides.items():
                    times.setdefault((name, way, side), []).append(us(call, args.calls))
    figures = [
        {
            "frame": name,
            "way": way,
            "us": {side: min(times[name, way, side]) for side in sides},
        }
        for name, ways in calls.items()
        for way, sides in ways.items()
    ]
    write(
        args.out,
        {
            "msgspec": msgspec.__version__,
            "rounds": args.rounds,
            "calls": args.calls,
            "cases": rounded(figures),
            "lax": lax(structs, msgspec),
        },
    )


if __name__ == "__main__":
    main()
