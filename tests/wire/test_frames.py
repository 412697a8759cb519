"""Frames in Python: equal to the golden ones, strict in both directions, safe with any bytes."""

import dataclasses
import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    FrameTooLong,
    FrameTruncated,
    MalformedFrame,
    OtherProtocol,
    TrailingBytes,
    UnknownFrameType,
    WireError,
)
from headrace.wire import codec
from headrace.wire.codec import decode, encode
from headrace.wire.frames import (
    MAX_FRAME_BYTES,
    Bye,
    Continue,
    Fetch,
    Frame,
    KvFrom,
    Load,
    ModelPart,
    Offer,
    Output,
    Ping,
    Ranked,
    Sampling,
    Step,
    Ticket,
    TokenLogprob,
)
from helpers.kv.pull_keys import PULL_KEY
from helpers.worker.frames import any_frame, as_json

GOLDEN = Path(__file__).parents[1] / "golden"
FRAMES = sorted((GOLDEN / "frames").glob("*/*.json"))
KINDS: dict[type[WireError], str] = {
    FrameTruncated: "truncated",
    UnknownFrameType: "unknown",
    MalformedFrame: "malformed",
    OtherProtocol: "version",
    TrailingBytes: "trailing",
}


def golden(path: str | Path) -> list[Any]:
    return json.loads((GOLDEN / path).read_text(encoding="utf-8"))


def a_step(**changes: Any) -> Step:
    return dataclasses.replace(Step(1, 2.5, 0, 0, 0, 1, 9, 0, 0, 0, Load(), []), **changes)


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_golden_frames_are_read_and_written_byte_for_byte(path: Path) -> None:
    for case in golden(path):
        body = bytes.fromhex(case["hex"])
        frame = decode(body)
        # as text, because 1 == 1.0 == True
        assert json.dumps(as_json(frame)) == json.dumps(case["fields"]), case["name"]
        assert encode(frame) == body, case["name"]


def test_every_frame_has_golden_cases() -> None:
    assert {path.stem for path in FRAMES} == {name for name, _ in codec._NUMBERS.values()}


@pytest.mark.parametrize("case", golden("invalid.json"), ids=lambda case: case["name"])
def test_invalid_frames_are_refused_for_their_reason(case: dict[str, str]) -> None:
    with pytest.raises(WireError) as caught:
        decode(bytes.fromhex(case["hex"]))
    assert KINDS[type(caught.value)] == case["error"], str(caught.value)
    if case["at"]:
        assert getattr(caught.value, "at", "") == case["at"]


@given(any_frame())
def test_frames_survive_the_wire(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_named_error(body: bytes) -> None:
    frame_or_error(body)


@given(any_frame(), st.data())
def test_changed_bytes_are_a_frame_or_a_named_error(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(encode(frame))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[at] = data.draw(st.integers(0, 255))
    frame_or_error(bytes(body))


def frame_or_error(body: bytes) -> None:
    try:
        frame = decode(body)
    except WireError:
        return
    canonical = encode(frame)
    assert encode(decode(canonical)) == canonical  # bytes, because a NaN may have come in


@given(any_frame(), st.data())
def test_a_cut_frame_is_truncated(frame: Frame, data: st.DataObject) -> None:
    body = encode(frame)
    with pytest.raises(FrameTruncated):
        decode(body[: data.draw(st.integers(0, len(body) - 1))])


@given(any_frame(), st.binary(min_size=1, max_size=9))
def test_bytes_after_a_frame_are_refused(frame: Frame, tail: bytes) -> None:
    with pytest.raises(TrailingBytes) as caught:
        decode(encode(frame) + tail)
    assert caught.value.extra == len(tail)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Ping(-1), "ping.nonce: expected an integer of 64 bits, got -1"),
        (Ping(2**64), f"ping.nonce: expected an integer of 64 bits, got {2**64}"),
        (Ping(True), "ping.nonce: expected an integer of 64 bits, got a bool"),
        (a_step(ms=2), "step.ms: expected a float, got an integer"),
        (a_step(outputs=()), "step.outputs: expected an array, got tuple"),
        (
            a_step(outputs=[Output(1, [1, 2**32])]),
            f"step.outputs[0].ids[1]: expected an integer of 32 bits, got {2**32}",
        ),
        (
            a_step(outputs=[Output(1, [1], [TokenLogprob(-1.0, [Ranked(1, 0)])])]),
            "step.outputs[0].logprobs[0].top[0].value: expected a float, got an integer",
        ),
        (
            a_step(outputs=[Output(1, [1], finish="done")]),  # type: ignore[arg-type]
            "step.outputs[0].finish: expected stop, length or cancelled, got 'done'",
        ),
        (a_step(load=Sampling()), "step.load: expected Load, got Sampling"),
        (Bye("\ud800"), "bye: expected UTF-8, got surrogates not allowed"),
        (Load(), "frame: expected a frame, got Load"),
        (Ticket(1, bytes(257)), "ticket.ticket: expected at most 256 bytes, got 257"),
        (Continue(1, bytes(3)), "continue.generated: expected a multiple of 4 bytes, got 3"),
        (
            Offer(b"", bytes(32), [-1, 1], [0, 0], 0),
            "offer.parents[1]: expected -1 or a place before 1, got 1",
        ),
        (
            Fetch(1, KvFrom("w", [], 1, PULL_KEY), b"", bytes(16), [-1], [-1]),
            "fetch.offset[0]: expected an integer of 32 bits, got -1",
        ),
        (
            Fetch(1, KvFrom("w", [], 1, PULL_KEY), b"", bytes(16), [-1], [1, 2]),
            "fetch.offset: expected 1 items, got 2",
        ),
    ],
)
def test_a_wrong_field_is_named_where_it_is_written(frame: Any, message: str) -> None:
    with pytest.raises(MalformedFrame) as caught:
        encode(frame)
    assert str(caught.value) == message


def test_what_the_peer_wrote_is_cut_in_errors() -> None:
    hello = bytes.fromhex(golden("frames/from_worker/hello.json")[0]["hex"])
    body = hello.replace(b"\xa4both", b"\xda\x10\x00" + b"x" * 4096)
    with pytest.raises(MalformedFrame) as caught:
        decode(body)
    assert len(str(caught.value)) < 200


def test_a_frame_over_the_limit_is_neither_sent_nor_taken() -> None:
    with pytest.raises(FrameTooLong):
        encode(ModelPart("", 0, True, bytes(MAX_FRAME_BYTES)))
    with pytest.raises(FrameTooLong):
        decode(bytes(MAX_FRAME_BYTES + 1))


def allocated(body: bytes) -> int:
    """Peak bytes taken to decode `body`, which is no frame."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_length_that_lies_takes_no_memory() -> None:
    size = 1 << 20
    promise = b"\xdd" + (size // 2).to_bytes(4, "big")
    # 100 arrays, one inside the other, each of which promises 4 MB of pointers
    honest = promise * 100 + bytes(size)
    assert allocated(honest) < 4 * len(honest)
    assert allocated(b"\x9b\x05" + b"\xdd\xff\xff\xff\xff" + bytes(1000)) < 64 << 10


def test_wide_integers_are_taken_but_not_written() -> None:
    wide = b"\xdc\x00\x02\xd3" + (38).to_bytes(8, "big") + b"\xcd\x00\x05"
    assert decode(wide) == Ping(5)
    assert encode(Ping(5)) == b"\x92\x26\x05"


def test_floats_are_written_with_64_bits_and_read_with_32_too() -> None:
    double, single = b"\xcb" + struct.pack(">d", 0.1), b"\xca" + struct.pack(">f", 0.5)
    body = encode(a_step(ms=0.1))
    assert double in body
    assert decode(body.replace(double, single)) == a_step(ms=0.5)


def test_importing_the_codec_loads_nothing_heavy() -> None:
    code = "import sys, headrace, headrace.wire.codec, headrace.wire.link; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "triton", "transformers"} & set(done.stdout.split())
