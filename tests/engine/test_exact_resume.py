"""An answer cut anywhere and gone on with elsewhere is the same, bit by bit, tokens and log-probabilities.

Cut by a lost worker (`resume`), or between the legs of a split request (`kv_transfer` and `kv_from`), or both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import Model
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.wire.frames import Ranked, Resume, Sampling, Submit, TokenLimits, TokenLogprob
from headrace_kernels.ops import Backend
from headrace_kernels.torch_ops import REFERENCE, TorchBackend
from helpers.engine.pair import Heard, split, unsplit
from helpers.engine.toy import ToyModel, make_submit, pack
from helpers.engine.toy_engine import engine_on
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.tiny_model import tiny_llama

torch.set_num_threads(1)

SAMPLINGS = {
    "greedy": Sampling(logprobs=2),
    "seeded": Sampling(temperature=1.0, seed=11, logprobs=0),
    "cut": Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.01, seed=12, logprobs=1),
    "repetition": Sampling(temperature=0.7, repetition_penalty=1.5, seed=13, logprobs=1),
    "penalties": Sampling(frequency_penalty=0.9, presence_penalty=0.6, logprobs=1),
    "min tokens": Sampling(temperature=1.0, seed=14, min_tokens=7, logprobs=0),
    "bias": Sampling(logit_bias=[Ranked(7, 4.0), Ranked(3, -9.0)], logprobs=3),
    "limits": Sampling(
        temperature=1.0,
        seed=16,
        logprobs=1,
        limits=TokenLimits(allowed=list(range(16)), banned=[3, 5, 1, 2, 9, 2], lengths=[1, 2, 3]),
    ),
    "all": Sampling(
        temperature=1.1,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        seed=15,
        min_tokens=4,
        logprobs=2,
        logit_bias=[Ranked(5, 2.0)],
    ),
}


def toy_engine(batched: int = 8) -> Engine:
    return engine_on(ToyModel(), sequences=4, batched=batched)


def resumed(submit: Submit, generated: list[int]) -> Submit:
    return replace(submit, resume=Resume(pack(generated), len(generated)))


def heard(*parts: Heard) -> tuple[list[int], list[TokenLogprob], str | None]:
    """What a client hears of several legs."""
    ids = [token for part in parts for token in part.ids]
    logprobs = [entry for part in parts for entry in part.logprobs]
    return ids, logprobs, parts[-1].finish


def cut(whole: Heard, at: int) -> Heard:
    return Heard(ids=whole.ids[:at], logprobs=whole.logprobs[:at])


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_run_cut_at_every_token_goes_on_the_same(name: str) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    submit = make_submit(0, prompt, max_tokens=18, sampling=SAMPLINGS[name], stop_ids=[8, 21])
    whole = unsplit(toy_engine(), submit)
    assert len(whole.ids) > 4
    for at in range(1, len(whole.ids)):
        rest = resumed(submit, whole.ids[:at])
        assert heard(cut(whole, at), unsplit(toy_engine(), rest)) == heard(whole)
        # The new pair, too, may be two workers; the answer may end with the first token there.
        assert heard(cut(whole, at), split(toy_engine(), toy_engine(), rest)) == heard(whole)


@given(data=st.data())
def test_whatever_is_asked_and_wherever_it_is_cut(data: st.DataObject) -> None:
    draw = data.draw
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.3])),
        top_k=draw(st.sampled_from([0, 1, 9])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.8, -0.4])),
        presence_penalty=draw(st.sampled_from([0.0, 0.8, -0.4])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        logit_bias=draw(st.sampled_from([[], [Ranked(1, 3.0), Ranked(2, -3.0)]])),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 5])),
    )
    prompt = draw(st.lists(st.integers(0, 49), min_size=1, max_size=20))
    submit = make_submit(0, prompt, max_tokens=12, sampling=sampling, stop_ids=[1, 2, 3, 4])
    whole = unsplit(toy_engine(), submit)
    parts: list[Heard] = []
    ids: list[int] = []
    while len(ids) < len(whole.ids):
        leg = resumed(submit, ids) if ids else submit
        batched = draw(st.integers(4, 20))
        if draw(st.booleans()):
            part = split(toy_engine(batched), toy_engine(), leg)
        else:
            part = unsplit(toy_engine(batched), leg)
        kept = draw(st.integers(1, len(part.ids)))
        last = kept == len(part.ids)
        parts.append(part if last else cut(part, kept))
        ids += part.ids[:kept]
    assert heard(*parts) == heard(whole)


BLOCK = 16
BATCHED = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    path: Path = tmp_path_factory.mktemp("tiny")
    # Two layer groups, the second one shorter.
    return SafetensorsCheckpoint(tiny_llama(path, num_hidden_layers=9, hidden_size=32))


@pytest.fixture(scope="module", params=["float32", "int8", "torch"])
def engines(
    request: pytest.FixtureRequest, checkpoint: SafetensorsCheckpoint
) -> Callable[[], Engine]:
    """Makes engines over two models: one that computes alone or prefills, one that decodes."""
    attention = attention_of(checkpoint.config, BLOCK)
    models: list[Model] = []
    for _ in range(2):
        backend: Backend
        if request.param == "torch":
            backend = TorchBackend(attention, dtype="float32", device="cpu", kernels=REFERENCE)
        else:
            backend = TensorBackend(attention, dtype=request.param)
        weights = load_weights(checkpoint, backend)
        models.append(Llama(checkpoint.config, weights, backend, BLOCK))

    def make() -> Engine:
        models.reverse()
        models[0].allocate_kv(12)
        config = EngineConfig(
            num_blocks=12, block_tokens=BLOCK, max_sequences=4, max_batched_tokens=BATCHED
        )
        return Engine(models[0], config, KeyedBlockHasher(bytes(32), BLOCK))

    return make


def same(got: tuple[list[int], list[TokenLogprob], str | None], whole: Heard, model: Model) -> bool:
    """Bit by bit; the torch references only nearly so, as torch's sums depend on the rows of a step."""
    if model.kv_layout.startswith("native"):
        return got == heard(whole)
    near = [
        abs(one.logprob - other.logprob) < 1e-5
        for one, other in zip(got[1], whole.logprobs, strict=True)
    ]
    return all(near) and (got[0], got[2]) == (whole.ids, whole.finish)


LENGTHS = [1, 2, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 71, 72, 73]  # blocks and chunks


@pytest.mark.matrix
@pytest.mark.parametrize("length", LENGTHS)
def test_a_real_model_answers_the_same_in_two_legs(
    engines: Callable[[], Engine], length: int
) -> None:
    prompt = [(37 * place + length) % 280 for place in range(length)]
    submit = make_submit(0, prompt, max_tokens=5, sampling=SAMPLINGS["repetition"])
    whole = unsplit(engines(), submit)
    prefill, decode = engines(), engines()
    for _ in range(2):  # the second time, blocks are cached on both sides
        assert same(heard(split(prefill, decode, submit)), whole, decode.model)


def test_a_real_model_goes_on_the_same_after_every_token(engines: Callable[[], Engine]) -> None:
    prompt = [(41 * place) % 280 for place in range(27)]
    submit = make_submit(0, prompt, max_tokens=9, sampling=SAMPLINGS["all"])
    engine = engines()
    whole = unsplit(engine, submit)
    for at in range(1, len(whole.ids)):
        rest = resumed(submit, whole.ids[:at])
        done = cut(whole, at)
        assert same(heard(done, unsplit(engines(), rest)), whole, engine.model)
        assert same(heard(done, split(engines(), engines(), rest)), whole, engine.model)
