"""Writes the golden frames: `PYTHONPATH=tests python tests/golden/generate.py`. Only a new protocol changes them.

Each file holds the cases of one frame: a name, the body in hex, and its fields as both languages must read them (byte
strings as lists of numbers). `invalid.json` holds bodies that both must refuse, by the same kind of error.
`blocks.json` was made once with the blake3 package of PyPI, which shares no code of ours.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from headrace import frames
from headrace.frames import (
    Blocks,
    Bye,
    Cancel,
    Capacity,
    Describe,
    Drain,
    Failed,
    Fingerprints,
    Frame,
    Freed,
    Group,
    Hello,
    KvFrom,
    KvReady,
    Load,
    ModelPart,
    Output,
    Ping,
    Prove,
    Ranked,
    Refuse,
    Resume,
    Resync,
    Sampling,
    Snapshot,
    Step,
    StepCost,
    StoredRun,
    Submit,
    TokenLogprob,
    Welcome,
)
from helpers.frames import as_json

HERE = Path(__file__).parent
U8, U16, U32, U64 = (2**bits - 1 for bits in (8, 16, 32, 64))
BYTES_256 = bytes(range(256))
UNICODE = "žluťoučký 🐎\u0000\u200d\uffff"
# one below, at and above each change of an integer's width
INTEGERS = {
    f"{n:#x}": n for n in [0, 1, 0x7F, 0x80, U8, U8 + 1, U16, U16 + 1, U32, U32 + 1, 2**63, U64]
}

FINGERPRINTS = Fingerprints("w-01", "t-02", "c-03", "kv-04", "blake3-chain-v2", 16)
HELLO = Hello(
    1, "worker-0", 1_790_000_000_000, "both", "SmolLM2-135M-Instruct", FINGERPRINTS,
    Capacity(4096, 64, 2048, 256), 8192, None, [], bytes(range(16)),
)  # fmt: skip
STEP = Step(1, 12.5, 512, 130816, 3, 1536, 0, 0, 0, Load(96, 32, 4, 0), [])
SUBMIT = Submit(7, b"\x01\0\0\0\x00\xc0\0\0", Sampling(), [2], 256)
LOGPROBS = [
    TokenLogprob(-0.5, [Ranked(11, -0.5), Ranked(U32, -1e300)]),
    TokenLogprob(-0.0, []),
]

FRAMES: dict[str, dict[str, Frame]] = {
    "hello": {
        "usual": HELLO,
        "in a group, with every way to pull": dataclasses.replace(
            HELLO,
            role="prefill",
            group=Group("ep-0", 3, 8),
            transfer=[f"tcp://[::1]:{port}" for port in range(16)],
        ),
        "extreme": Hello(
            U16, UNICODE, U64, "decode", "x" * 32, Fingerprints("", "y" * 31, "é" * 128, "", "", U32),
            Capacity(0, U32, U16, U8, 127, 128), 0, Group("", 0, U32), [""], b"",
            StepCost(0.0, 1e-300, -1.5, 1e300, 0.0625),
        ),
        "with lower tiers and a prior": dataclasses.replace(
            HELLO,
            capacity=dataclasses.replace(HELLO.capacity, host_blocks=65536, disk_blocks=U32),
            step_prior=StepCost(4.5, 0.03125, 1e-06, 0.0078125, 2e-05),
        ),
    },
    "prove": {"usual": Prove(BYTES_256[:32]), "empty": Prove(b""), "long": Prove(BYTES_256)},
    "snapshot": {
        "empty": Snapshot(1_790_000_000_000, 0, b"", True),
        "a part": Snapshot(1, U32 + 1, BYTES_256, False),
    },
    "blocks": {
        "stored at the root and below": Blocks(
            1, 2, [StoredRun(None, BYTES_256[:16]), StoredRun(2**63, BYTES_256[8:16])], b"", False, 0
        ),
        "removed": Blocks(1, 3, [], BYTES_256[:8], False, U8),
        "cleared, 16 runs": Blocks(0, U64, [StoredRun(n, b"") for n in range(16)], b"", True, 128),
    },
    "step": {
        "heartbeat": STEP,
        "first and last tokens": dataclasses.replace(
            STEP,
            outputs=[
                Output(1, [49151], None, None, 48),
                Output(2, [0, 127, 128, 255, 256, U16, U16 + 1, U32], None, "length"),
                Output(U64, [], None, "cancelled", None, None),
                Output(3, [2], None, "stop", 0),
            ],
        ),
        "log-probabilities": dataclasses.replace(
            STEP, outputs=[Output(1, [11, 12], LOGPROBS, None, 0, LOGPROBS), Output(2, [5], [], None, None, [])]
        ),
        "40 outputs": dataclasses.replace(
            STEP, decode_rows=40, outputs=[Output(n, [n * 1000]) for n in range(40)]
        ),
        "extreme": Step(
            U64, 1e-300, U32, 2**63, U32, U64, 2**63, 65536, 255, Load(U32, U16, U8, 127), [Output(0, list(range(20)))]
        ),
    },
    "model": {
        "first part": ModelPart("t-02/c-03", 0, False, b'{"tokenizer": "'),
        "last part": ModelPart("", U32, True, BYTES_256),
    },
    "kv_ready": {"usual": KvReady(7, b"ticket", 30_000), "extreme": KvReady(U64, b"", U32)},
    "freed": {"usual": Freed(7, 12), "extreme": Freed(U64, 0)},
    "failed": {
        "usual": Failed(7, "queue_full", "256 requests wait", True),
        "text": Failed(0, "", UNICODE * 9, False),
    },
    "bye": {"usual": Bye("drained"), **{f"{n} bytes": Bye("b" * n) for n in (0, 31, 32, 255, 256)}},
    "welcome": {
        "without a secret": Welcome(1, "router-1", 1000, b"", b"", BYTES_256[:32]),
        "with a secret": Welcome(1, "router-1", 1000, BYTES_256[:16], BYTES_256[16:48], b""),
    },
    "refuse": {
        "protocol": Refuse("protocol", "1", "2", "upgrade the router"),
        "text": Refuse("fingerprints.tokenizer", UNICODE, "", "é" * 16),
    },
    "submit": {
        "greedy": SUBMIT,
        "everything": Submit(
            U64, BYTES_256, Sampling(
                0.75, 40, 0.9375, 0.0625, 1.25, -2.0, 2.0, U64, 0, 20, [Ranked(0, -100.0), Ranked(U32, 100.0)],
                True, U32,
            ), list(range(120, 137)), U32, U64, -128, UNICODE.encode(),
            KvFrom("prefill-0", ["tcp://10.0.0.1:9000", ""]), Resume(b"\x05\0\0\0", 2**63),
        ),
        **{f"priority {n}": dataclasses.replace(SUBMIT, priority=n) for n in (127, -1, -32, -33)},
    },
    "describe": {"usual": Describe("t-02/c-03")},
    "cancel": {"usual": Cancel(7), "extreme": Cancel(U64)},
    "drain": {"usual": Drain(30_000), "extreme": Drain(0)},
    "ping": {name: Ping(n) for name, n in INTEGERS.items()},
    "resync": {"usual": Resync("block events 7 after 5"), "text": Resync(UNICODE)},
}  # fmt: skip


def invalid() -> list[dict[str, str]]:
    """Bodies that are no frame: name, hex, kind of error, and the place where it must be found."""
    hello, step, submit = (frames.encode(frame) for frame in (HELLO, STEP, SUBMIT))

    def swap(body: bytes, old: bytes, new: bytes) -> bytes:
        assert body.count(old) == 1, (body, old)
        return body.replace(old, new)

    bodies = [
        ("no bytes", b"", "truncated", ""),
        ("no array", b"\x05", "malformed", "frame"),
        ("a map for the frame", b"\x81\x26\x01", "malformed", "frame"),
        ("no type", b"\x90", "malformed", "frame"),
        ("type is text", b"\x92\xa4ping\x01", "malformed", "frame"),
        ("type is negative", b"\x92\xff\x01", "malformed", "frame"),
        ("type is a bool", b"\x92\xc3\x01", "malformed", "frame"),
        ("unknown type", b"\x92\x28\x01", "unknown", ""),
        ("type 0", b"\x92\x00\x01", "unknown", ""),
        ("huge type", b"\x92\xcf" + b"\xff" * 8 + b"\x01", "unknown", ""),
        ("field missing", b"\x91\x26", "malformed", "ping"),
        ("field too many", b"\x93\x26\x01\x02", "malformed", "ping"),
        ("byte too many", b"\x92\x26\x01\x02", "trailing", ""),
        ("two frames", b"\x92\x26\x01" * 2, "trailing", ""),
        ("integer cut", b"\x92\x26\xcf\0\0\0\0\0\0\0", "truncated", ""),
        ("nil for a number", b"\x92\x26\xc0", "malformed", "ping.nonce"),
        ("bool for a number", b"\x92\x26\xc3", "malformed", "ping.nonce"),
        ("float for a number", b"\x92\x26\xcb\x3f\xf0\0\0\0\0\0\0", "malformed", "ping.nonce"),
        ("text for a number", b"\x92\x26\xa11", "malformed", "ping.nonce"),
        ("negative number", b"\x92\x26\xff", "malformed", "ping.nonce"),
        ("the byte that msgpack reserves", b"\x92\x26\xc1", "malformed", ""),
        ("extension", b"\x92\x26\xd4\x05\x00", "malformed", ""),
        ("timestamp", b"\x92\x26\xd6\xff\0\0\0\0", "malformed", ""),
        ("number beyond 32 bits", b"\x93\x08\x07\xcf\0\0\0\x01\0\0\0\0", "malformed", "freed.blocks"),
        ("text for bytes", b"\x92\x02\xa1x", "malformed", "prove.proof"),
        ("numbers for bytes", b"\x92\x02\x91\x01", "malformed", "prove.proof"),
        ("bytes for text", b"\x92\x0a\xc4\x01x", "malformed", "bye.reason"),
        ("text that is no UTF-8", b"\x92\x0a\xa2\xc3\x28", "malformed", ""),
        ("text with a surrogate", b"\x92\x0a\xa3\xed\xa0\x80", "malformed", ""),
        ("text cut", b"\x92\x0a\xa9short", "truncated", ""),
        ("text of 4 GB", b"\x92\x0a\xdb\xff\xff\xff\xff", "truncated", ""),
        ("bytes of 4 GB", b"\x92\x02\xc6\xff\xff\xff\xff", "truncated", ""),
        ("array of 4 G", b"\xdd\xff\xff\xff\xff\x26\x01", "truncated", ""),
        ("outputs of 4 G", step[:-1] + b"\xdd\xff\xff\xff\xff", "truncated", ""),
        ("deep nesting", b"\x92\x0a" + b"\x91" * 600 + b"\x01", "malformed", "bye.reason"),
        ("unknown role", swap(hello, b"\xa4both", b"\xa4Both"), "malformed", "hello.role"),
        ("role by number", swap(hello, b"\xa4both", b"\x02"), "malformed", "hello.role"),
        (
            "number in nested text",
            swap(hello, b"\xa4c-03", b"\x03"),
            "malformed",
            "hello.fingerprints.chat_template",
        ),
        ("nested field missing", swap(hello, b"\x96\xa4w-01", b"\x95"), "malformed", "hello.fingerprints"),
        ("integer for a float", swap(step, b"\xcb\x40\x29\0\0\0\0\0\0", b"\x0c"), "malformed", "step.ms"),
        ("map for outputs", step[:-1] + b"\x80", "malformed", ""),
        (
            "bool among ids",
            step[:-1] + b"\x91\x96\x01\x92\x05\xc2\xc0\xc0\xc0\xc0",
            "malformed",
            "step.outputs[0].ids[1]",
        ),
        (
            "unknown finish",
            step[:-1] + b"\x91\x96\x01\x90\xc0\xa4done\xc0\xc0",
            "malformed",
            "step.outputs[0].finish",
        ),
        ("priority beyond 8 bits", swap(submit, b"\xc0\x00\xc4", b"\xc0\xcc\x80\xc4"), "malformed", "submit.priority"),
    ]  # fmt: skip
    return [
        {"name": name, "hex": body.hex(), "error": error, "at": at}
        for name, body, error, at in bodies
    ]


def main() -> None:
    """Rewrite all files."""
    (HERE / "frames").mkdir(exist_ok=True)
    for frame, cases in FRAMES.items():
        rows = [
            {"name": name, "hex": frames.encode(value).hex(), "fields": as_json(value)}
            for name, value in cases.items()
        ]
        _write(HERE / "frames" / f"{frame}.json", rows)
    _write(HERE / "invalid.json", invalid())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
