"""DeepSeek-V3 on the native backend: a row has the same bits however its step is cut, and whoever is beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.models import DType, load_model
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.deepseek_oracle import CONFIGS, build_mtp, load, prompt
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper, Stream

torch.set_num_threads(1)

BLOCK = 16
DTYPES: list[DType] = ["float32", "bfloat16", "float16", "int8"]


@pytest.fixture(scope="module", params=["as R1", "as SmolLM2", "odd sizes"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    build_mtp(path, **CONFIGS[request.param])
    return path


def drafter(path: Path, dtype: DType, blocks: int = 256) -> Drafter:
    model = load(path, "native", block_tokens=BLOCK, dtype=dtype, mtp=True)
    return Drafter(Stepper(model, BLOCK, blocks=blocks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[64, 64, 22], [1] * 150, [7, 100, 43], [149, 1]])
def test_chunks_and_decode_give_the_bits_of_one_prefill(
    tiny: Path, dtype: DType, cuts: list[int]
) -> None:
    drafts = drafter(tiny, dtype)
    tokens = prompt(150)
    whole, whole_drafts = drafts.step([(drafts.stepper.stream(tokens), 150)])
    stream = drafts.stepper.stream(tokens)
    pieces = [drafts.step([(stream, n)]) for n in cuts]
    assert torch.equal(torch.cat([main[0] for main, _ in pieces]), whole[0])
    assert torch.equal(torch.cat([draft[0] for _, draft in pieces]), whole_drafts[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cached_prefix_changes_no_bit(tiny: Path, dtype: DType) -> None:
    drafts = drafter(tiny, dtype)
    tokens = prompt(100)
    whole, whole_drafts = drafts.step([(drafts.stepper.stream(tokens), 100)])
    first = drafts.stepper.stream(tokens[:70] + prompt(9, seed=3))
    drafts.step([(first, 79)])
    for cached in (16, 64):
        stream = drafts.stepper.stream(tokens, shared=first, cached=cached)
        main, draft = drafts.step([(stream, 100 - cached)])
        assert torch.equal(main[0], whole[0][cached:])
        assert torch.equal(draft[0], whole_drafts[0][cached - 1 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [1, 16])
def test_company_changes_no_bit(tiny: Path, dtype: DType, others: int) -> None:
    drafts = drafter(tiny, dtype, blocks=1024)
    prompts = [prompt(8 + 7 * i % 90, seed=i) for i in range(others + 1)]
    alone = [complete(drafts, [tokens], [len(tokens) - 2])[0] for tokens in prompts]
    # Mixed: some prefill whole, some a chunk, then all decode together to their ends.
    first = [len(tokens) - 2 - 3 * (i % 3) for i, tokens in enumerate(prompts)]
    together = complete(drafts, prompts, first)
    for found, wanted in zip(together, alone, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def complete(
    drafts: Drafter, prompts: list[list[int]], first: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each prompt: its main logits, its draft logits and those of a chained pass, but for its last two tokens."""
    streams = [drafts.stepper.stream(tokens) for tokens in prompts]
    steps = [drafts.step(list(zip(streams, first, strict=True)))]
    while any(s.computed < len(s.tokens) - 2 for s in streams):
        steps.append(drafts.step([(s, min(1, len(s.tokens) - 2 - s.computed)) for s in streams]))
    ready = [i for i, s in enumerate(streams) if s.drafted < len(s.tokens)]
    again: list[Stream] = [streams[i] for i in ready]
    # The newest row of each once more, in one pass, so that the chain has something to read.
    drafts.draft([(s, range(s.drafted - 1, s.drafted), [tail_of(drafts, s)]) for s in again])
    chained = drafts.chain(again)
    return [
        (torch.cat([main[i] for main, _ in steps]), torch.cat([d[i] for _, d in steps]), chained[i])
        for i in range(len(streams))
    ]


def tail_of(drafts: Drafter, stream: Stream) -> int:
    """The hidden tail with the newest row of a stream."""
    return -(stream.blocks[(stream.computed - 1) // drafts.size] + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_give_the_same_bits(tiny: Path, dtype: DType) -> None:
    checkpoint = SafetensorsCheckpoint(tiny)
    attention = attention_of(checkpoint.config, BLOCK, mtp=True)
    results: list[torch.Tensor] = []
    for simd in ("avx512", "avx2", "portable"):
        try:
            backend = TensorBackend(attention, dtype=dtype, simd=simd)
        except ValueError:
            continue  # this machine lacks it
        weights = load_weights(checkpoint, backend, mtp=True)
        drafts = Drafter(Stepper(Deepseek(checkpoint.config, weights, backend, BLOCK), BLOCK))
        main, draft = drafts.step([(drafts.stepper.stream(prompt(83)), 83)])
        results.append(torch.cat((main[0], draft[0])))
    assert results and all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02), ("int8", 0.2)]
)
def test_narrow_weights_stay_close(tiny: Path, dtype: DType, tolerance: float) -> None:
    tokens = prompt(40)
    exact = drafter(tiny, "float32").stepper.whole(tokens)
    narrow = drafter(tiny, dtype).stepper.whole(tokens)
    # Relative to the spread of the logits, and of most rows: another expert may be chosen where two are nearly equal.
    error = (narrow - exact).abs().amax(-1) / exact.std()
    assert error.median() < tolerance


def test_the_cpu_gets_int8_where_nobody_says(tiny: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny)
    model = load_model(checkpoint, dtype="auto", device="cpu", block_tokens=BLOCK, mtp=True)
    assert (model.dtype_name, model.drafts) == ("int8", True)
