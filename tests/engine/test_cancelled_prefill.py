"""A cancelled long prompt is in nobody's way: what came behind it begins within two steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.engine.engine import Engine
from headrace.engine.sequence import Key
from headrace.wire.frames import KvTransfer
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.kv.pull_keys import PULL_KEY

BLOCK, CHUNK, LONG = 16, 256, 32_768


def engine() -> Engine:
    model = ToyModel(block_tokens=BLOCK, context_tokens=LONG + 64)
    return engine_on(model, blocks=LONG // BLOCK + 64, batched=CHUNK)


@pytest.mark.parametrize("handed_off", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 7, 60])
def test_a_short_request_begins_within_two_steps(chunks: int, handed_off: bool) -> None:
    subject = engine()
    long = make_submit(1, [5 + i % 40 for i in range(LONG)], max_tokens=4)
    if handed_off:
        long = replace(long, kv_transfer=KvTransfer(lease_ms=1_000, pull_key=PULL_KEY))
    subject.submit(long)
    for _ in range(chunks):
        subject.step()
    subject.submit(make_submit(2, [9] * 40, max_tokens=4))
    subject.cancel(Key(0, 1))
    outputs = [output.request for _ in range(2) for output in subject.step().of(0).outputs]
    assert 2 in outputs
    assert subject.load.blocks_used <= 3, "nothing of the long prompt is held"
    subject.check()
