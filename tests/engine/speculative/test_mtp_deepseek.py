"""Drafting with a real drafting layer on the native kernels: the same answers to the bit, whole, split and cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import load_model
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from helpers.engine.drafting_engine import KINDS, Heard, run
from helpers.engine.pair import split
from helpers.engine.toy import ToyHasher, make_submit
from helpers.models.tiny_deepseek import tiny_deepseek

BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek(tmp_path_factory.mktemp("deepseek") / "tiny", mtp=True)


def make_engine(path: Path, k: int, *, blocks: int = 80, batched: int = 24) -> Engine:
    model = load_model(
        SafetensorsCheckpoint(path), dtype="float32", device="cpu", block_tokens=BLOCK, mtp=k > 0
    )
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=6,
        max_batched_tokens=batched,
        mtp=k,
        mtp_fixed=True,
    )
    return Engine(model, config, ToyHasher(BLOCK))


SUBMITS = [
    make_submit(
        request,
        [7] * (request % 4 * 4) + [(request * 11 + i) % 40 + 3 for i in range(6 + request)],
        max_tokens=24,
        sampling=replace(KINDS[request % len(KINDS)], seed=request, temperature=temperature),
        stop_ids=[5],
    )
    for request, temperature in enumerate([0.0, 0.05, 0.3, 1.0] * 3)
]


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> Heard:
    """Each answer alone, on a model without its drafting layer."""
    heard = Heard()
    for submit in SUBMITS:
        engine = make_engine(checkpoint, 0)
        engine.submit(submit)
        run(engine, heard)
    return heard


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(("k", "blocks"), [(1, 80), (2, 80), (3, 80), (3, 12)])
def test_answers_are_those_without_drafts(
    checkpoint: Path, wanted: Heard, k: int, blocks: int
) -> None:
    engine = make_engine(checkpoint, k, blocks=blocks)
    for _ in range(2):  # the second time from the prefix cache
        heard = Heard()
        for submit in SUBMITS:
            engine.submit(submit)
        run(engine, heard)
        for submit in SUBMITS:
            assert heard.ids(submit.request) == wanted.ids(submit.request)
            assert heard.logprobs(submit.request) == wanted.logprobs(submit.request)
            assert heard.finish(submit.request) == wanted.finish(submit.request)
        assert sum(result.drafted for result in heard.results) > 100


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("k", [1, 3])
def test_drafts_after_a_hand_off_are_those_without_one(
    checkpoint: Path, wanted: Heard, k: int
) -> None:
    prefill, decode = make_engine(checkpoint, k, batched=7), make_engine(checkpoint, k)
    for submit in SUBMITS:
        whole = make_engine(checkpoint, k)
        whole.submit(submit)
        aggregated = run(whole)
        heard = split(prefill, decode, submit)
        assert heard.ids == wanted.ids(submit.request)
        assert heard.logprobs == wanted.logprobs(submit.request)
        assert heard.drafts == [(o.drafted, o.accepted) for o in aggregated.outputs[submit.request]]
