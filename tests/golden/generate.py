"""Writes the golden frames: `PYTHONPATH=tests python tests/golden/generate.py`. Only a new protocol changes them.

Each file holds the cases of one frame: a name, the body in hex, and its fields as both languages must read them (byte
strings as lists of numbers). `invalid.json` holds bodies that both must refuse, by the same kind of error.
`blocks.json` was made once with the blake3 package of PyPI, which shares no code of ours.
"""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

from headrace.wire import codec
from headrace.wire.frames import (
    Blocks,
    Bye,
    Cancel,
    Capacity,
    Continue,
    Describe,
    Drain,
    Failed,
    FailureKind,
    Fetch,
    Fingerprints,
    Frame,
    Freed,
    Grammar,
    GrammarKind,
    GrammarTotals,
    Group,
    GroupTotals,
    Hello,
    KvFrom,
    KvReady,
    KvTransfer,
    Load,
    MigrationOrder,
    ModelPart,
    Offer,
    OtherPrompt,
    OtherPrompts,
    OtherVersion,
    Output,
    Ping,
    Pooling,
    Prove,
    Ranked,
    Reasoning,
    Refuse,
    RefuseReason,
    Resume,
    Resync,
    Sampling,
    Snapshot,
    Step,
    StepCost,
    StoredRun,
    Submit,
    Ticket,
    TokenLimits,
    TokenLogprob,
    TraceContext,
    TransferBackend,
    TransferFailure,
    Transferred,
    Welcome,
)
from helpers.worker.frames import as_json

HERE = Path(__file__).parent
U8, U16, U32, U64 = (2**bits - 1 for bits in (8, 16, 32, 64))
BYTES_256 = bytes(range(256))
PULL_KEY = BYTES_256[64:96]
UNICODE = "žluťoučký 🐎\u0000\u200d\uffff"
# one below, at and above each change of an integer's width
INTEGERS = {
    f"{n:#x}": n for n in [0, 1, 0x7F, 0x80, U8, U8 + 1, U16, U16 + 1, U32, U32 + 1, 2**63, U64]
}

FINGERPRINTS = Fingerprints("w-01", "t-02", "c-03", "kv-04", "blake3-chain-v2", 16)
HELLO = Hello(
    9, "worker-0", 1_790_000_000_000, "both", "SmolLM2-135M-Instruct", FINGERPRINTS,
    Capacity(4096, 64, 2048, 256), 8192, None, [], bytes(range(16)), dtype="bfloat16",
)  # fmt: skip
STEP = Step(1, 12.5, 0, 512, 130816, 3, 1536, 0, 0, 0, Load(96, 32, 4, 0, 2), [])
TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
SUBMIT = Submit(7, b"\x01\0\0\0\x00\xc0\0\0", Sampling(), [2], 256)
LOGPROBS = [
    TokenLogprob(-0.5, [Ranked(11, -0.5), Ranked(U32, -1e300)]),
    TokenLogprob(-0.0, []),
]

FROM_WORKER: dict[str, dict[str, Frame]] = {
    "hello": {
        "usual": HELLO,
        "in a group, with every way to pull": dataclasses.replace(
            HELLO,
            role="prefill",
            group=Group("ep-0", 3, 8, 1_790_000_000_123, "shm"),
            transfer=[f"tcp:[::1]:{port}" for port in range(16)],
            kv_block_bytes=1 << 20,
        ),
        "extreme": Hello(
            9, UNICODE, U64, "decode", "x" * 32, Fingerprints("", "y" * 31, "é" * 128, "", "", U32),
            Capacity(0, U32, U16, U8, 127, 128), 0, Group("", 0, U32, U64, UNICODE), [""], b"",
            StepCost(0.0, 1e-300, -1.5, 1e300, 0.0625), U64, "é" * 200, [UNICODE], U32, "fifo",
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
        "drafts": dataclasses.replace(
            STEP,
            decode_rows=3,
            drafted=7,
            accepted=3,
            outputs=[
                Output(1, [5, 6, 7], drafted=3, accepted=2),
                Output(2, [5, 6], [LOGPROBS[1]] * 2, "stop", drafted=3, accepted=1),
                Output(3, [9], drafted=1),
            ],
        ),
        "log-probabilities": dataclasses.replace(
            STEP, outputs=[Output(1, [11, 12], LOGPROBS, None, 0, LOGPROBS), Output(2, [5], [], None, None, [])]
        ),
        "a rank that waited": dataclasses.replace(STEP, waited_us=3_500),
        "pooled prompts": dataclasses.replace(
            STEP, outputs=[Output(1, [], None, "length", 16, pooled=BYTES_256), Output(2, [], pooled=b"")]
        ),
        "40 outputs": dataclasses.replace(
            STEP, decode_rows=40, outputs=[Output(n, [n * 1000]) for n in range(40)]
        ),
        "extreme": Step(
            U64, 1e-300, U32, U32, 2**63, U32, U64, 2**63, 65536, 255, Load(U32, U16, U8, 127, U64),
            [Output(0, list(range(20)), drafted=U32, accepted=U32)],
        ),
    },
    "model": {
        "first part": ModelPart("t-02/c-03", 0, False, b'{"tokenizer": "'),
        "last part": ModelPart("", U32, True, BYTES_256),
    },
    "kv_ready": {"usual": KvReady(7, b"ticket", 30_000), "extreme": KvReady(U64, BYTES_256, U32)},
    "freed": {"usual": Freed(7, 12), "extreme": Freed(U64, 0)},
    "failed": {
        "text": Failed(0, FailureKind.QUEUE_FULL, UNICODE * 9),
        **{kind.value: Failed(7, kind, "256 requests wait") for kind in FailureKind},
    },
    "bye": {"usual": Bye("drained"), **{f"{n} bytes": Bye("b" * n) for n in (0, 31, 32, 255, 256)}},
    "transferred": {
        "extreme": Transferred(0, UNICODE, TransferBackend.CUDA_IPC, U32, U64, 1e300, None),
        **{by.value: Transferred(8, "prefill-0", by, 12, 12 << 20, 3.5, None) for by in TransferBackend},
        **{why.value: Transferred(U64, "", None, 0, 0, 0.0, why) for why in TransferFailure},
    },
    "offer": {
        "usual": Offer(b"ticket", BYTES_256[:48], [-1, 0, 0], [9, U32, 0], 30_000),
        "nothing": Offer(b"", b"", [], [], 0),
        "200 blocks": Offer(
            BYTES_256, bytes(200 * 16), [n - 1 for n in range(200)], list(range(200)), U32
        ),
    },
    "group_totals": {
        "nothing": GroupTotals(),
        "usual": GroupTotals(12, 250.5, 7, 9, 44 << 20, 1, 1.5, 0.25, 0.125),
        "extreme": GroupTotals(U64, 1e300, U64, U64, U64, U64, 1e300, 1e-300, -0.0),
    },
    "other_prompts": {
        "none any more": OtherPrompts(),
        "two, one behind an own one": OtherPrompts(
            [OtherPrompt(0, 8000, 3904), OtherPrompt(1, U32, 0)]
        ),
        "as many as there may be": OtherPrompts(
            [*(OtherPrompt(n, n + 1, n) for n in range(15)), OtherPrompt(15, U32, U32, U32)]
        ),
    },
    "grammar_totals": {
        "nothing": GrammarTotals(),
        "usual": GrammarTotals(1200, 9000, 1, 250, 3, 12_357, 40, 2, 1, 3 << 20),
        "extreme": GrammarTotals(U64, U64, U64, U64, U64, U64, U64, U64, U64, U64),
    },
}  # fmt: skip
FROM_ROUTER: dict[str, dict[str, Frame]] = {
    "welcome": {
        "without a secret": Welcome(5, "router-1", 1000, b"", b"", BYTES_256[:32]),
        "with a secret": Welcome(5, "router-1", 1000, BYTES_256[:16], BYTES_256[16:48], b""),
    },
    "other_version": {
        "an older worker": OtherVersion("protocol", "5", "4", "update the worker"),
        "text": OtherVersion("", UNICODE, "", "é" * 16),
    },
    "submit": {
        "greedy": SUBMIT,
        "everything": Submit(
            U64, BYTES_256, Sampling(
                0.75, 40, 0.9375, 0.0625, 1.25, -2.0, 2.0, U64, 0, 20, [Ranked(0, -100.0), Ranked(U32, 100.0)],
                True, U32, Grammar(GrammarKind.LARK, UNICODE), Reasoning([U32], [0, 127], U32, 1, [5, U32]),
                TokenLimits([0, U32], [9, 1, U32, 3], [1, 3]),
            ), list(range(120, 137)), U32, U64, -128, UNICODE.encode(),
            KvFrom("prefill-0", ["tcp:10.0.0.1:9000", ""], U32, PULL_KEY), Resume(b"\x05\0\0\0", 2**63),
            KvTransfer(U32, PULL_KEY), Pooling.MEAN, "r" * 128,
            TraceContext(f"00-{'f' * 32}-{'f' * 16}-00", "a=" + "~" * 510),
        ),
        "traced": dataclasses.replace(SUBMIT, request_id="req-1", trace=TRACE),
        "traced elsewhere, too": dataclasses.replace(
            SUBMIT, trace=dataclasses.replace(TRACE, state="vendor=1,other@x=2")
        ),
        **{
            f"grammar {kind}": dataclasses.replace(SUBMIT, sampling=Sampling(grammar=Grammar(kind, "{}")))
            for kind in GrammarKind
        },
        "reasoning": dataclasses.replace(SUBMIT, sampling=Sampling(reasoning=Reasoning([], [49151]))),
        "reasoning, longest markers": dataclasses.replace(
            SUBMIT, sampling=Sampling(reasoning=Reasoning(list(range(32)), list(range(32)), 0))
        ),
        "prefill leg": dataclasses.replace(SUBMIT, kv_transfer=KvTransfer(30_000, PULL_KEY)),
        "decode leg": dataclasses.replace(
            SUBMIT, kv_from=KvFrom("prefill-0", ["shm:1", "tcp:127.0.0.1:9000"], 2000, PULL_KEY)
        ),
        **{
            f"pooling {pooling}": dataclasses.replace(SUBMIT, max_tokens=0, pooling=pooling)
            for pooling in Pooling
        },
        **{f"priority {n}": dataclasses.replace(SUBMIT, priority=n) for n in (127, -1, -32, -33)},
    },
    "describe": {"usual": Describe("t-02/c-03")},
    "cancel": {"usual": Cancel(7), "extreme": Cancel(U64)},
    "drain": {
        "usual": Drain(30_000),
        "extreme": Drain(0, MigrationOrder(U32, PULL_KEY)),
        "with a migration": Drain(U64, MigrationOrder(4096, PULL_KEY)),
    },
    "ping": {name: Ping(n) for name, n in INTEGERS.items()},
    "resync": {"usual": Resync("block events 7 after 5"), "text": Resync(UNICODE)},
    "ticket": {"usual": Ticket(8, b"ticket"), "longest": Ticket(U64, BYTES_256), "empty": Ticket(0, b"")},
    "continue": {
        "one token": Continue(8, b"\x05\0\0\0"),
        "alone": Continue(U64, b""),
        "many tokens": Continue(0, BYTES_256),
    },
    "fetch": {
        "usual": Fetch(
            9, KvFrom("decode-0", ["tcp:127.0.0.1:9000"], 5000, PULL_KEY), b"ticket", BYTES_256[:32], [-1, 0],
            [0, 7],
        ),
        "nothing": Fetch(U64, KvFrom("", [], 0, PULL_KEY), b"", b"", [], []),
    },
    "refuse": {
        "text": Refuse(RefuseReason.NAME_TAKEN, UNICODE, U32, "", UNICODE, "", "é" * 16),
        **{
            why.value: Refuse(
                why, "router-1", 1500 if why.says_when else None, "worker", "w-1", "w-2", "another name"
            )
            for why in RefuseReason
        },
    },
}  # fmt: skip


def invalid() -> list[dict[str, str]]:
    """Bodies that are no frame: name, hex, kind of error, and the place where it must be found."""
    hello, step, submit = (codec.encode(frame) for frame in (HELLO, STEP, SUBMIT))
    traced = codec.encode(FROM_ROUTER["submit"]["traced"])
    parent = b"\xd9\x37" + TRACE.parent.encode()

    limits = TokenLimits([], [200, 201], [2])
    limited = codec.encode(dataclasses.replace(SUBMIT, sampling=Sampling(limits=limits)))
    fetch = codec.encode(FROM_ROUTER["fetch"]["usual"])
    failed = codec.encode(FROM_WORKER["failed"]["engine"])
    pulled = codec.encode(FROM_WORKER["transferred"]["tcp"])
    lost = codec.encode(FROM_WORKER["transferred"]["lost"])
    totals = codec.encode(FROM_WORKER["group_totals"]["usual"])
    grammars = codec.encode(FROM_WORKER["grammar_totals"]["usual"])
    thinks = codec.encode(FROM_ROUTER["submit"]["reasoning"])
    refuse = codec.encode(FROM_ROUTER["refuse"]["circuit"])
    for_good = codec.encode(FROM_ROUTER["refuse"]["secret"])

    key = b"\xc4\x20" + PULL_KEY
    kv_from = fetch[3 : fetch.index(b"\xc4\x06ticket")]
    grouped = codec.encode(FROM_WORKER["hello"]["in a group, with every way to pull"])
    group = b"\x95\xa4ep-0\x03\x08\xcf\0\0\x01\xa0\xc4\x50\x6c\x7b\xa3shm"
    ms = b"\xcb\x40\x29\0\0\0\0\0\0\x00"  # and the us that the step waited
    hour = b"\xcf\0\0\0\x01\0\0\0\0"
    held_ms, half = (b"\xcb" + struct.pack(">d", value) for value in (250.5, 0.5))
    moved = b"\xce" + struct.pack(">I", 44 << 20)

    def swap(body: bytes, old: bytes, new: bytes) -> bytes:
        assert body.count(old) == 1, (body, old)
        return body.replace(old, new)

    def offer(
        ticket: bytes = b"\xc4\x00",
        names: bytes = bytes(32),
        parents: bytes = b"\x92\xff\x00",
        hits: bytes = b"\x92\x01\x02",
    ) -> bytes:
        return b"\x96\x0c" + ticket + bytes([0xC4, len(names)]) + names + parents + hits + b"\x05"

    def reasoned(
        begin: bytes,
        end: bytes,
        most: bytes = b"\xc0",
        begun: bytes = b"\x00",
        ends_too: bytes = b"\x90",
    ) -> bytes:
        new = b"\x95" + begin + end + most + begun + ends_too
        return swap(thinks, b"\x95\x90\x91\xcd\xbf\xff\xc0\x00\x90", new)

    assert isinstance(codec.decode(offer()), Offer)
    assert isinstance(codec.decode(reasoned(b"\x91\x01", b"\x91\x05", b"\x00")), Submit)
    bodies = [
        ("no bytes", b"", "truncated", ""),
        ("no array", b"\x05", "malformed", "frame"),
        ("a map for the frame", b"\x81\x26\x01", "malformed", "frame"),
        ("no type", b"\x90", "malformed", "frame"),
        ("type is text", b"\x92\xa4ping\x01", "malformed", "frame"),
        ("type is negative", b"\x92\xff\x01", "malformed", "frame"),
        ("type is a bool", b"\x92\xc3\x01", "malformed", "frame"),
        ("unknown type", b"\x92\x2c\x01", "unknown", ""),
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
        ("a hello of version 1", b"\x9e\x01\x01" + b"\xa1x" * 12, "version", ""),
        ("a hello of version 2", b"\x9f\x01\x02" + b"\xa1x" * 13, "version", ""),
        ("a hello of version 3", b"\x9f\x01\x03" + b"\xa1x" * 13, "version", ""),
        ("a hello of version 4", b"\xdc\x00\x10\x01\x04" + b"\xa1x" * 14, "version", ""),
        ("a hello of version 8", b"\xdc\x00\x12\x01\x08" + b"\xa1x" * 16, "version", ""),
        ("a hello of a later version", b"\x93\x01\xcd\xff\xff\x90", "version", ""),
        ("a hello without a version", b"\x91\x01", "malformed", "hello"),
        ("a version in words", b"\xdc\x00\x12\x01\xa12" + b"\xa1x" * 16, "malformed", "hello.protocol"),
        (
            "a version of 17 bits",
            b"\xdc\x00\x12\x01\xce\x00\x01\x00\x00" + b"\xa1x" * 16,
            "malformed",
            "hello.protocol",
        ),
        ("a version below zero", b"\xdc\x00\x12\x01\xff" + b"\xa1x" * 16, "malformed", "hello.protocol"),
        (
            "a hello without its queue's rule",
            swap(hello, b"\xdc\x00\x12\x01\x09", b"\xdc\x00\x11\x01\x09")[:-7],
            "malformed",
            "hello",
        ),
        (
            "banned words of no length",
            swap(limited, b"\xc9\x91\x02", b"\xc9\x91\x00"),
            "malformed",
            "submit.sampling.limits.lengths",
        ),
        (
            "banned words that are too short",
            swap(limited, b"\xc9\x91\x02", b"\xc9\x91\x01"),
            "malformed",
            "submit.sampling.limits.lengths",
        ),
        ("aliases by number", hello[:-9] + b"\x01\x00" + hello[-7:], "malformed", "hello.aliases"),
        ("a width of 33 bits", hello[:-8] + hour + hello[-7:], "malformed", "hello.pooled_width"),
        ("a rule that is none", hello[:-7] + b"\xa4lifo", "malformed", "hello.queue_rule"),
        ("a rule by number", hello[:-7] + b"\x01", "malformed", "hello.queue_rule"),
        ("dtype by number", swap(hello, b"\xa8bfloat16", b"\x10"), "malformed", "hello.dtype"),
        ("dtype of nothing", swap(hello, b"\xa8bfloat16", b"\xc0"), "malformed", "hello.dtype"),
        ("dtype of 4 GB", swap(hello, b"\xa8bfloat16", b"\xdb\xff\xff\xff\xff"), "truncated", ""),
        ("role by number", swap(hello, b"\xa4both", b"\x02"), "malformed", "hello.role"),
        (
            "number in nested text",
            swap(hello, b"\xa4c-03", b"\x03"),
            "malformed",
            "hello.fingerprints.chat_template",
        ),
        ("nested field missing", swap(hello, b"\x96\xa4w-01", b"\x95"), "malformed", "hello.fingerprints"),
        ("group of version 2", swap(grouped, group, b"\x93\xa4ep-0\x03\x08"), "malformed", "hello.group"),
        ("group without an epoch", swap(grouped, group[8:17], b"\xc0"), "malformed", "hello.group.epoch"),
        ("group by a transport in numbers", swap(grouped, b"\xa3shm", b"\x07"), "malformed", "hello.group.transport"),
        ("step of version 2", step[:1].replace(b"\x9d", b"\x9c") + swap(step, ms, ms[:-1])[1:], "malformed", "step"),
        ("waited for longer than 32 bits of us", swap(step, ms, ms[:-1] + hour), "malformed", "step.waited_us"),
        ("waited for nothing", swap(step, ms, ms[:-1] + b"\xc0"), "malformed", "step.waited_us"),
        ("integer for a float", swap(step, b"\xcb\x40\x29\0\0\0\0\0\0", b"\x0c"), "malformed", "step.ms"),
        ("map for outputs", step[:-1] + b"\x80", "malformed", ""),
        (
            "bool among ids",
            step[:-1] + b"\x91\x99\x01\x92\x05\xc2\xc0\xc0\xc0\xc0\x00\x00\xc0",
            "malformed",
            "step.outputs[0].ids[1]",
        ),
        (
            "unknown finish",
            step[:-1] + b"\x91\x99\x01\x90\xc0\xa4done\xc0\xc0\x00\x00\xc0",
            "malformed",
            "step.outputs[0].finish",
        ),
        (
            "output of the version before",
            step[:-1] + b"\x91\x98\x01\x92\x05\x06\xc0\xc0\xc0\xc0\x00\x00",
            "malformed",
            "step.outputs[0]",
        ),
        (
            "accepted by text",
            step[:-1] + b"\x91\x99\x01\x90\xc0\xc0\xc0\xc0\x00\xa11\xc0",
            "malformed",
            "step.outputs[0].accepted",
        ),
        (
            "a vector of numbers",
            step[:-1] + b"\x91\x99\x01\x90\xc0\xa6length\xc0\xc0\x00\x00\x91\x01",
            "malformed",
            "step.outputs[0].pooled",
        ),
        ("pooling that is not known", submit[:-3] + b"\xa3max" + submit[-2:], "malformed", "submit.pooling"),
        ("an id with a space", swap(traced, b"\xa5req-1", b"\xa5req 1"), "malformed", "submit.request_id"),
        ("an id of control", swap(traced, b"\xa5req-1", b"\xa5\x1b[31m"), "malformed", "submit.request_id"),
        ("an id of 129 bytes", swap(traced, b"\xa5req-1", b"\xd9\x81" + b"r" * 129), "malformed", "submit.request_id"),
        ("an id of nothing", swap(traced, b"\xa5req-1", b"\xc0"), "malformed", "submit.request_id"),
        *(
            (f"trace {what}", swap(traced, parent, bytes([0xD9, len(text)]) + text), "malformed", "submit.trace.parent")
            for what, text in {
                "of a later version": b"01" + parent[4:],
                "with a flag that nobody knows": parent[2:-2] + b"03",
                "in capitals": parent[2:].upper(),
                "of zeros": b"00-" + b"0" * 32 + parent[37:],
                "under a span of zeros": parent[2:38] + b"0" * 16 + parent[54:],
                "cut": parent[2:-1],
                "and more": parent[2:] + b"-00",
                "in no hex": swap(parent[2:], b"f92f", b"fg2f"),
                "with a line's end": parent[2:-1] + b"\n",
            }.items()
        ),
        ("trace as bytes", swap(traced, parent, b"\xc4" + parent[1:]), "malformed", "submit.trace.parent"),
        ("trace of one field", swap(traced, b"\x92" + parent + b"\xc0", b"\x91" + parent), "malformed", "submit.trace"),
        ("trace without an array", traced[: traced.index(b"\x92" + parent)] + b"\x01", "malformed", "submit.trace"),
        ("trace state of nothing", traced[:-1] + b"\xa0", "malformed", "submit.trace.state"),
        ("trace state of two lines", traced[:-1] + b"\xa3a\nb", "malformed", "submit.trace.state"),
        ("trace state of 513 bytes", traced[:-1] + b"\xda\x02\x01" + b"x" * 513, "malformed", "submit.trace.state"),
        ("submit of version 7", swap(submit, b"\x9f\x22", b"\x9d\x22")[:-2], "malformed", "submit"),
        ("priority beyond 8 bits", swap(submit, b"\xc0\x00\xc4", b"\xc0\xcc\x80\xc4"), "malformed", "submit.priority"),
        ("ticket over 256 bytes", b"\x94\x07\x07\xc5\x01\x01" + bytes(257) + b"\x05", "malformed", "kv_ready.ticket"),
        ("ticket to pass on over 256 bytes", b"\x93\x28\x07\xc5\x01\x01" + bytes(257), "malformed", "ticket.ticket"),
        ("ticket of 4 GB", b"\x93\x28\x07\xc6\xff\xff\xff\xff", "truncated", ""),
        ("ticket as text", b"\x93\x28\x07\xa1x", "malformed", "ticket.ticket"),
        ("half a token generated", b"\x93\x29\x07\xc4\x06\0\0\0\0\0\0", "malformed", "continue.generated"),
        ("tokens as numbers", b"\x93\x29\x07\x91\x05", "malformed", "continue.generated"),
        ("failed for no reason that is known", swap(failed, b"\xa6engine", b"\xa7sulking"), "malformed", "failed.kind"),
        ("failed in capitals", swap(failed, b"\xa6engine", b"\xa6Engine"), "malformed", "failed.kind"),
        ("failed by number", swap(failed, b"\xa6engine", b"\x0a"), "malformed", "failed.kind"),
        ("failed for nothing", swap(failed, b"\xa6engine", b"\xc0"), "malformed", "failed.kind"),
        ("failed without a message", b"\x93\x09\x07\xa6engine", "malformed", "failed"),
        ("failed of version 1", b"\x95\x09\x07\xa6engine\xa0\xc3", "malformed", "failed"),
        ("pulled by a pigeon", swap(pulled, b"\xa3tcp", b"\xa6pigeon"), "malformed", "transferred.backend"),
        ("pulled by no name", swap(pulled, b"\xa3tcp", b"\xa0"), "malformed", "transferred.backend"),
        ("pulled by number", swap(pulled, b"\xa3tcp", b"\x01"), "malformed", "transferred.backend"),
        ("lost in another word", swap(lost, b"\xa4lost", b"\xa4gone"), "malformed", "transferred.error"),
        ("lost in no word", swap(lost, b"\xa4lost", b"\xa0"), "malformed", "transferred.error"),
        ("refused in a mood", swap(refuse, b"\xa7circuit", b"\xa4mood"), "malformed", "refuse.reason"),
        ("refused by number", swap(refuse, b"\xa7circuit", b"\x05"), "malformed", "refuse.reason"),
        ("refused for nothing", swap(refuse, b"\xa7circuit", b"\xc0"), "malformed", "refuse.reason"),
        ("refused until soon", swap(refuse, b"\xcd\x05\xdc", b"\xa4soon"), "malformed", "refuse.retry_after_ms"),
        ("refused until before", swap(refuse, b"\xcd\x05\xdc", b"\xff"), "malformed", "refuse.retry_after_ms"),
        (
            "refused by a fraction",
            swap(refuse, b"\xcd\x05\xdc", b"\xca\x3f\0\0\0"),
            "malformed",
            "refuse.retry_after_ms",
        ),
        (
            "refused for longer than 32 bits of ms",
            swap(refuse, b"\xcd\x05\xdc", b"\xcf\0\0\0\x01\0\0\0\0"),
            "malformed",
            "refuse.retry_after_ms",
        ),
        ("held off, for no time", swap(refuse, b"\xcd\x05\xdc", b"\xc0"), "malformed", "refuse.retry_after_ms"),
        ("for good, and for a while", swap(for_good, b"\xc0", b"\x05"), "malformed", "refuse.retry_after_ms"),
        ("refused by no router", swap(refuse, b"\xa8router-1", b"\xc0"), "malformed", "refuse.router"),
        ("refuse of version 1", b"\x95\x2b\xa6secret\xa1a\xa1b\xa1c", "malformed", "refuse"),
        ("other version in numbers", b"\x95\x21\xa1p\x02\xa11\xa1m", "malformed", "other_version.expected"),
        ("transferred without its error", b"\x97\x0b\x07\xa0\xc0\x00\x00\xcb" + bytes(8), "malformed", "transferred"),
        ("error by number", b"\x98\x0b\x07\xa0\xc0\x00\x00\xcb" + bytes(8) + b"\x01", "malformed", "transferred.error"),
        ("offer of half a name", offer(names=bytes(24), parents=b"\x91\xff"), "malformed", "offer.names"),
        ("offer with a parent too few", offer(parents=b"\x91\xff"), "malformed", "offer.parents"),
        ("offer with a parent after its child", offer(parents=b"\x92\x01\xff"), "malformed", "offer.parents[0]"),
        ("offer with a block as its own parent", offer(parents=b"\x92\xff\x01"), "malformed", "offer.parents[1]"),
        ("offer with a parent below the root", offer(parents=b"\x92\xff\xfe"), "malformed", "offer.parents[1]"),
        (
            "offer with a parent beyond 32 bits",
            offer(parents=b"\x92\xff\xce\x80\0\0\0"),
            "malformed",
            "offer.parents[1]",
        ),
        ("offer with hits too many", offer(hits=b"\x93\x01\x02\x03"), "malformed", "offer.hits"),
        ("offer with a long ticket", offer(ticket=b"\xc5\x01\x01" + bytes(257)), "malformed", "offer.ticket"),
        ("fetch without offsets", swap(fetch, b"\x92\x00\x07", b"\x90"), "malformed", "fetch.offset"),
        ("fetch of a name and a byte", swap(fetch, b"\xc4\x20\x00", b"\xc4\x21\x00\x00"), "malformed", "fetch.names"),
        ("fetch from nobody", swap(fetch, kv_from, b"\xc0"), "malformed", "fetch.kv_from"),
        ("KV transfer by number", submit[:-4] + b"\x05\xc0\xa0\xc0", "malformed", "submit.kv_transfer"),
        ("KV transfer without its lease", submit[:-4] + b"\x90\xc0\xa0\xc0", "malformed", "submit.kv_transfer"),
        ("drain of version 1", b"\x92\x25\x05", "malformed", "drain"),
        ("drain of version 8", b"\x93\x25\x05\x64", "malformed", "drain.migration"),
        *(
            (f"{which} {what}", swap(body, key, wrong), "malformed", f"{at}.pull_key")
            for which, body, at in (
                ("KV transfer", codec.encode(FROM_ROUTER["submit"]["prefill leg"]), "submit.kv_transfer"),
                ("KV", codec.encode(FROM_ROUTER["submit"]["decode leg"]), "submit.kv_from"),
                ("fetch", fetch, "fetch.kv_from"),
                ("drain", codec.encode(FROM_ROUTER["drain"]["with a migration"]), "drain.migration"),
            )
            for what, wrong in {
                "by no key": b"\xc4\x00",
                "by a key of 31 bytes": b"\xc4\x1f" + PULL_KEY[1:],
                "by a key of 33 bytes": b"\xc4\x21\x00" + PULL_KEY,
                "by a key in letters": b"\xd9\x20" + PULL_KEY,
                "by a key of nothing": b"\xc0",
                "by a key in numbers": b"\x91\x05",
            }.items()
        ),
        ("KV transfer without its key", submit[:-4] + b"\x91\x05\xc0\xa0\xc0", "malformed", "submit.kv_transfer"),
        (
            "fetch without its key",
            swap(fetch, kv_from, b"\x93" + kv_from[1 : -len(key)]),
            "malformed",
            "fetch.kv_from",
        ),
        ("drain without its key", b"\x93\x25\x05\x91\x64", "malformed", "drain.migration"),
        (
            "more prompts than are told",
            b"\x92\x0f\xdc\x00\x11" + b"\x94\x00\x01\x01\x01" * 17,
            "malformed",
            "other_prompts.prompts",
        ),
        (
            "a prompt of three fields",
            b"\x92\x0f\x91\x93" + 3 * b"\xcd\x01\x00",
            "malformed",
            "other_prompts.prompts[0]",
        ),
        ("grammar totals of one less", b"\x9a\x0e" + grammars[2:-5], "malformed", "grammar_totals"),
        ("masks below zero", swap(grammars, b"\x0e\xcd\x04\xb0", b"\x0e\xff"), "malformed", "grammar_totals.masks"),
        ("reasoning without an end", reasoned(b"\x90", b"\x90"), "malformed", "submit.sampling.reasoning.end"),
        ("reasoning ending in text", reasoned(b"\x90", b"\x91\xa1x"), "malformed", "submit.sampling.reasoning.end[0]"),
        (
            "reasoning that begins with 65 tokens",
            reasoned(b"\xdc\x00\x41" + b"\x01" * 65, b"\x91\x05"),
            "malformed",
            "submit.sampling.reasoning.begin",
        ),
        (
            "reasoning for less than nothing",
            reasoned(b"\x90", b"\x91\x05", b"\xff"),
            "malformed",
            "submit.sampling.reasoning.max_tokens",
        ),
        (
            "reasoning whose end is there",
            reasoned(b"\x90", b"\x92\x05\x06", begun=b"\x02"),
            "malformed",
            "submit.sampling.reasoning.begun",
        ),
        (
            "reasoning that ends with 65 tokens, too",
            reasoned(b"\x90", b"\x91\x05", ends_too=b"\xdc\x00\x41" + b"\x01" * 65),
            "malformed",
            "submit.sampling.reasoning.ends_too",
        ),
        ("totals without the time spent", b"\x99" + totals[1:-9], "malformed", "group_totals"),
        ("totals of one more", b"\x9b" + totals[1:] + b"\x00", "malformed", "group_totals"),
        ("totals cut", totals[:-1], "truncated", ""),
        ("rounds below zero", swap(totals, totals[:3], b"\x9a\x0d\xff"), "malformed", "group_totals.held_rounds"),
        ("rounds as a fraction", b"\x9a\x0d" + half + totals[3:], "malformed", "group_totals.held_rounds"),
        ("held for a whole number of ms", swap(totals, held_ms, b"\xcc\xfa"), "malformed", "group_totals.held_ms"),
        ("held for nothing", swap(totals, held_ms, b"\xc0"), "malformed", "group_totals.held_ms"),
        ("waves by text", swap(totals, b"\x07\x09\xce", b"\xa17\x09\xce"), "malformed", "group_totals.waves"),
        ("slots by a bool", swap(totals, b"\x07\x09\xce", b"\x07\xc3\xce"), "malformed", "group_totals.slots"),
        ("bytes as bytes", swap(totals, moved, b"\xc4\x01\x05"), "malformed", "group_totals.bytes"),
        ("refused in a list", swap(totals, moved + b"\x01", moved + b"\x91\x01"), "malformed", "group_totals.refused"),
        ("time spent in a map", totals[:-9] + b"\x80", "malformed", ""),
    ]  # fmt: skip
    return [
        {"name": name, "hex": body.hex(), "error": error, "at": at}
        for name, body, error, at in bodies
    ]


def main() -> None:
    """Rewrite all files."""
    for sender, frames in (("from_worker", FROM_WORKER), ("from_router", FROM_ROUTER)):
        folder = HERE / "frames" / sender
        folder.mkdir(parents=True, exist_ok=True)
        for frame, cases in frames.items():
            rows = [
                {"name": name, "hex": codec.encode(value).hex(), "fields": as_json(value)}
                for name, value in cases.items()
            ]
            _write(folder / f"{frame}.json", rows)
    _write(HERE / "invalid.json", invalid())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
