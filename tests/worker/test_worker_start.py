"""From settings to a worker that serves, and the signals that end it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace.models
from headrace.engine.cache.memory import kv_blocks
from headrace.errors import ContextTooLong, Refused
from headrace.exit_status import EXIT_CONFIG
from headrace.host_memory import available_bytes
from headrace.models.step_memory import StepMemory
from headrace.settings.worker import WorkerSettings
from headrace.wire.frames import PROTOCOL, Bye
from headrace.worker import main
from headrace.worker.load_model import Loaded, load
from helpers.engine.toy import ToyModel, make_submit
from helpers.models.tiny_model import tiny_llama
from helpers.worker.fake_router import TIMEOUT_S, Conversation, FakeRouter

SETTINGS = WorkerSettings(
    model=None,
    name="w",
    routers=("unix:/nowhere",),
    served_model_name=None,
    device="cpu",
    dtype="auto",
    kv_memory_bytes=64 * 50,  # 50 blocks of the toy
    context_tokens=100,
    block_tokens=4,
    max_sequences=4,
    max_batched_tokens=16,
    max_waiting=10,
    prefix_cache=True,
    secret=None,
    router_ca=None,
    router_tls=False,
    log_level="info",
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """For a real checkpoint whose weights are a toy's."""

    def load_toy(checkpoint: Any, *, block_tokens: int, **_: object) -> ToyModel:
        vocab_size = checkpoint.config.vocab_size
        return ToyModel(vocab_size=vocab_size, block_tokens=block_tokens)

    monkeypatch.setattr(headrace.models, "load_model", load_toy)
    return replace(SETTINGS, model=str(tiny_llama(tmp_path / "tiny")))


def test_hello_says_what_was_loaded(settings: WorkerSettings) -> None:
    loaded = load(settings)
    hello = loaded.hello
    assert (hello.protocol, hello.worker, hello.role, hello.model) == (
        PROTOCOL,
        "w",
        "both",
        "tiny",
    )
    assert hello.capacity.blocks == 50
    assert (hello.capacity.sequences, hello.capacity.batched_tokens) == (4, 16)
    assert hello.context_tokens == 100
    assert hello.fingerprints.block_tokens == 4
    assert hello.fingerprints.kv_layout == "toy"
    assert loaded.document.startswith(b"{")
    assert (hello.aliases, load(replace(settings, served_model_name="mine")).hello.model) == (
        [],
        "mine",
    )
    several = load(replace(settings, served_model_name="mine, yours")).hello
    assert (several.model, several.aliases) == ("mine", ["yours"])
    assert load(replace(settings, role="prefill")).hello.role == "prefill"


def test_a_small_pool_shortens_the_context(settings: WorkerSettings) -> None:
    small = replace(settings, kv_memory_bytes=64 * 3, context_tokens=None)
    assert load(small).hello.context_tokens == 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context_tokens": 513}, "513 is more than the 512 tokens that this model allows"),
        ({"kv_memory_bytes": 64 * 3}, "100 is more than the 12 tokens that the KV cache holds"),
    ],
    ids=["model", "cache"],
)
def test_a_context_that_was_typed_is_not_cut(
    settings: WorkerSettings, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ContextTooLong) as refused:
        main.run(replace(settings, **change))
    line = str(refused.value)
    assert line.startswith("--max-model-len (--context-tokens) ") and says in line
    assert "\n" not in line


def test_the_longest_context_that_can_be_may_be_typed(settings: WorkerSettings) -> None:
    typed = replace(settings, context_tokens=12, kv_memory_bytes=64 * 3)
    assert load(typed).hello.context_tokens == 12


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/no/such/model"},
        {"kv_memory_bytes": 1},
        {"max_batched_tokens": 2},
        {"routers": ("no address",)},
    ],
    ids=str,
)
def test_settings_that_cannot_work_end_with_their_own_status(
    settings: WorkerSettings, change: dict[str, Any]
) -> None:
    assert main.run(replace(settings, **change)) == EXIT_CONFIG


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        ("auto", "tiny in int8 on cpu (--dtype float32 leaves the weights as they are); loaded"),
        ("int8", "tiny in int8 on cpu; loaded"),
        ("float32", "tiny in float32 on cpu; loaded"),
    ],
)
def test_the_log_says_what_the_weights_became(
    dtype: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = str(tiny_llama(tmp_path / "tiny"))
    at = replace(SETTINGS, model=model, dtype=dtype, kv_memory_bytes=1 << 20, block_tokens=16)
    load(at)
    assert told in caplog.text


def test_a_model_without_a_drafting_layer_does_not_serve_with_mtp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama = str(tiny_llama(tmp_path / "tiny"))
    at = replace(SETTINGS, model=llama, kv_memory_bytes=1 << 20, mtp=1)
    assert main.run(at) == EXIT_CONFIG
    assert "llama has no layer for multi-token prediction" in caplog.text


def test_full_collections_pass_over_what_was_loaded(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(loaded: Loaded, _: WorkerSettings, **__: object) -> None:
        assert not any(found is loaded.engine for found in gc.get_objects())
        again = Loaded(loaded.engine, b"", loaded.hello)
        assert any(found is again for found in gc.get_objects()), "what comes later is collected"

    monkeypatch.setattr(main, "serve", serve)
    try:
        assert main.run(settings) == 0
    finally:
        gc.unfreeze()


def test_a_router_that_sends_a_worker_away_says_why(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def receive() -> None:
        raise Refused("epoch", "9 or later", "7", "give each worker its own name")

    async def keep() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receive())

    async def serve(*_: object, **__: object) -> None:  # the groups of `Worker`, one in the other
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep())

    monkeypatch.setattr(main, "serve", serve)
    assert main.run(settings) == EXIT_CONFIG
    assert "give each worker its own name" in caplog.text


@pytest.mark.parametrize(
    ("routers", "host"),
    [
        (("unix:/run/r",), "127.0.0.1"),
        (("127.0.0.1:8001", "localhost:8002"), "127.0.0.1"),
        (("[::1]:8001",), "::1"),
        (("127.0.0.1:8001", "10.0.0.1:8001"), "0.0.0.0"),
        (("[fe80::1]:8001",), "::"),
        (("dns:localhost:8001",), "0.0.0.0"),
        (("etcd:127.0.0.1:2379/routers",), "0.0.0.0"),
    ],
)
def test_a_worker_listens_where_others_can_be(routers: tuple[str, ...], host: str) -> None:
    assert main.transfer_host(replace(SETTINGS, routers=routers)) == host
    assert main.transfer_host(replace(SETTINGS, routers=routers, transfer_host="h")) == "h"


def test_unasked_the_cache_takes_a_share_of_the_memory() -> None:
    block = 1 << 20
    step = StepMemory(lasting=0, attention=1, mlp=0, logits=0)
    of = partial(kv_blocks, block_bytes=block, device="cpu", step=step)
    blocks = of(None, most_blocks=10**9)
    assert 0 < blocks * block < available_bytes()
    assert of(None, most_blocks=3) == 3
    assert of(10 * block, most_blocks=3) == 10


async def started(loaded: Loaded, router: FakeRouter) -> tuple[asyncio.Task[None], Conversation]:
    at = replace(SETTINGS, routers=(router.address,))
    task = asyncio.create_task(main.serve(loaded, at))
    return task, await router.worker()


async def test_a_signal_drains(settings: WorkerSettings, tmp_path: Path) -> None:
    loaded = load(settings)
    async with FakeRouter(tmp_path / "r") as router:
        task, talk = await started(loaded, router)
        talk.send(make_submit(1, [1, 2, 3], max_tokens=20))
        await talk.until(lambda: bool(talk.answer(1).ids))
        os.kill(os.getpid(), signal.SIGTERM)
        await talk.until_closed()
        assert any(isinstance(frame, Bye) for frame in talk.seen)
        assert len(talk.answer(1).ids) == 20
        async with asyncio.timeout(TIMEOUT_S):
            await task


async def test_a_second_signal_stops(settings: WorkerSettings, tmp_path: Path) -> None:
    loaded = load(replace(settings, context_tokens=None, kv_memory_bytes=64 * 64))
    async with FakeRouter(tmp_path / "r") as router:
        task, talk = await started(loaded, router)
        talk.send(make_submit(1, [1, 2, 3], max_tokens=10**6))
        await talk.until(lambda: bool(talk.answer(1).ids))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        await talk.until_closed()
        failed = talk.answer(1).failed
        assert failed is None or failed.kind == "draining"  # or it was complete by then
        async with asyncio.timeout(TIMEOUT_S):
            await task
        loaded.engine.check_idle()


def test_kernels_are_compiled_before_a_worker_is_ready(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    load(settings)
    assert "no warm-up: on a CPU no kernel is compiled" in caplog.text

    def load_toy(checkpoint: Any, *, block_tokens: int, **_: object) -> ToyModel:
        model = ToyModel(vocab_size=checkpoint.config.vocab_size, block_tokens=block_tokens)
        model.ahead_on = torch.device("cpu")  # as if it had a device
        return model

    monkeypatch.setattr(headrace.models, "load_model", load_toy)
    model = load(settings).engine.model
    assert isinstance(model, ToyModel) and model.forwards == 4
    assert "warm-up: 5 of 5" in caplog.text
