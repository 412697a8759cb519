"""Split serving with a real model, from settings to answers: the bits are those of one worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.settings.worker import WorkerSettings
from headrace.wire.frames import Sampling, Snapshot
from headrace.worker import main
from headrace.worker.load_model import load
from helpers.models.tiny_model import tiny_llama
from helpers.worker.fake_router import Conversation, FakeRouter
from helpers.worker.split import Legs

SETTINGS = WorkerSettings(
    model=None,
    name="",
    routers=(),
    served_model_name=None,
    device="cpu",
    dtype="auto",
    kv_memory_bytes=4 << 20,
    context_tokens=200,
    block_tokens=16,
    max_sequences=4,
    max_batched_tokens=32,
    max_waiting=10,
    prefix_cache=True,
    secret=None,
    router_ca=None,
    router_tls=False,
    log_level="info",
)


@contextlib.asynccontextmanager
async def served(router: FakeRouter, settings: WorkerSettings) -> AsyncGenerator[Conversation]:
    task = asyncio.create_task(main.serve(load(settings), settings))
    try:
        talk = await router.worker()
        await talk.until(lambda: any(isinstance(f, Snapshot) and f.last for f in talk.seen))
        yield talk
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_split_and_whole_answers_are_equal_to_the_bit(tmp_path: Path, backend: str) -> None:
    # ten layers are two groups
    model = str(tiny_llama(tmp_path / "tiny", num_hidden_layers=10))
    async with FakeRouter(tmp_path / "r") as router:
        common = replace(SETTINGS, model=model, routers=(router.address,))
        async with (
            served(router, replace(common, name="p", role="prefill")) as p,
            served(router, replace(common, name="d", role="decode")) as d,
        ):
            assert p.hello is not None
            assert p.hello.kv_block_bytes > 0
            ways = {way.split(":")[0]: way for way in p.hello.transfer}
            assert set(ways) >= {"shm", "tcp"}
            assert ways["tcp"].startswith("tcp:127.0.0.1:")
            legs = Legs(p, d, transfer=[ways[backend]])
            tokens = np.random.default_rng(3).integers(3, 250, 120).tolist()
            for number, length in enumerate((5, 16, 33, 120), start=1):
                for sampling in (
                    Sampling(logprobs=2),
                    Sampling(temperature=1.0, seed=number, logprobs=1, repetition_penalty=1.2),
                ):
                    request = number + (10 if sampling.temperature else 0)
                    prompt = tokens[number : number + length]
                    split = await legs.whole(request, prompt, max_tokens=12, sampling=sampling)
                    alone = await legs.alone(
                        100 + request, prompt, max_tokens=12, sampling=sampling
                    )
                    assert split.ids == alone.ids
                    assert split.logprobs == alone.logprobs
                    (report,) = d.answer(request).transferred
                    assert (report.error, report.backend) == (None, backend)
            assert p.steps[-1].load.blocks_used == d.steps[-1].load.blocks_used == 0
