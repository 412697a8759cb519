"""Before a worker is ready, steps without a request reach every kernel in every form that requests will need."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from headrace.engine.warm_up import WarmUp, warm_up
from headrace.models import Model
from headrace.models.deepseek import Deepseek
from headrace.models.deepseek import attention_of as latent_attention
from headrace.models.deepseek_weights import load_weights
from headrace.models.llama import Llama, attention_of
from headrace.models.llama import load_weights as load_llama_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels import torch_mla, torch_ops
from headrace_kernels.batch import Batch
from headrace_kernels.dense import parts
from headrace_kernels.moe.fp8_grouped_linear import FEW as FP8_FEW
from headrace_kernels.moe.fp8_grouped_linear import MANY as FP8_MANY
from headrace_kernels.moe.grouped_linear import FEW, MANY
from helpers.engine.toy import ToyModel
from helpers.models.tiny_deepseek import quantise_fp8, save_tensors, tiny_config, tiny_tensors
from helpers.models.tiny_model import tiny_llama, write_json_files
from helpers.ranks.thread_group import Member, ThreadGroup

BLOCK, BLOCKS = 16, 40
KINDS = ["llama", "deepseek", "fp8", "drafts", "drafts of fp8"]
# A kernel's name, the types of its arguments, and its constants.
Form = tuple[str, tuple[object, ...], tuple[tuple[str, Any], ...]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def of(model: Model, rows: int = 50, sequences: int = 9) -> WarmUp:
    model.allocate_kv(BLOCKS)
    return WarmUp(model=model, num_blocks=BLOCKS, rows=rows, sequences=sequences)


def llama(path: Path, **config: Any) -> Model:
    checkpoint = SafetensorsCheckpoint(tiny_llama(path, **config))
    backend = torch_ops.TorchBackend(
        attention_of(checkpoint.config, BLOCK), dtype="bfloat16", device=DEVICE, kernels=torch_ops.TRITON
    )  # fmt: skip
    return Llama(checkpoint.config, load_llama_weights(checkpoint, backend), backend, BLOCK)


def deepseek(path: Path, *, mtp: bool, fp8: bool, **config: Any) -> Model:
    raw = tiny_config(mtp=True) | config
    tensors = tiny_tensors(raw)
    write_json_files(path, raw)
    save_tensors(path, quantise_fp8(tensors)[0] if fp8 else tensors)
    checkpoint = SafetensorsCheckpoint(path)
    backend = torch_mla.TorchMlaBackend(
        latent_attention(checkpoint.config, BLOCK, mtp=mtp), dtype="bfloat16", device=DEVICE,
        kernels=torch_mla.TRITON,
    )  # fmt: skip
    weights = load_weights(checkpoint, backend, mtp=mtp, fp8=backend if fp8 else None)
    return Deepseek(checkpoint.config, weights, backend, BLOCK)


def of_kind(kind: str, path: Path, **config: Any) -> Model:
    if kind == "llama":
        return llama(path, **config)
    return deepseek(path, mtp="drafts" in kind, fp8="fp8" in kind, **config)


def launched(run: Callable[[], object], note: Callable[..., None]) -> None:
    """Tell `note` of each launch: kernel, grid, arguments and constants. Nothing is computed."""

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: note(kernel, grid, args, constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launch)
        run()


def forms(run: Callable[[], object]) -> set[Form]:
    """Kernels that are launched, with what each is compiled for but for numbers."""
    found: set[Form] = set()

    def note(kernel: Any, _grid: object, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = tuple(x.dtype if torch.is_tensor(x) else type(x) for x in args)
        found.add((kernel.fn.__name__, types, tuple(sorted(constants.items()))))

    launched(run, note)
    return found


def ways(run: Callable[[], object]) -> dict[tuple[object, ...], set[str]]:
    """Weights whose columns are cut into parts, and how the programs of their products share them."""
    found: dict[tuple[object, ...], set[str]] = {}

    def note(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        if kernel.fn.__name__ not in ("_linear_kernel", "_fp8_linear_kernel"):
            return
        signature = inspect.signature(kernel.fn)
        own = {name: x for name, x in constants.items() if name in signature.parameters}
        named = signature.bind(*args, **own).arguments  # the others are Triton's
        if grid[-1] * named["parts"] > 1:
            weight = named["weight_ptr"]
            way = "split" if grid[-1] > 1 else "whole"
            found.setdefault((weight.dtype, *weight.shape), set()).add(way)

    launched(run, note)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [40, 1024])
def test_a_product_whose_columns_are_cut_is_warmed_split_and_whole(
    context: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of the largest step are those of several prompts, as a context ends before."""
    # The head has one part, as heads of real vocabularies.
    monkeypatch.setattr(parts, "PROGRAMS", 16)
    monkeypatch.setattr(parts, "LEAST_STEPS", 1)
    monkeypatch.setattr(parts, "MOST_PROGRAMS", 16)  # one tile of rows is split, ten are not
    sizes = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 2000}
    model = of_kind(kind, tmp_path, max_position_embeddings=context, **sizes)
    found = ways(lambda: warm_up(of(model, rows=600, sequences=16)))
    assert len(found) >= 3
    assert all(both == {"split", "whole"} for both in found.values()), found


@pytest.mark.parametrize(
    ("rows", "sequences", "want"),
    [(100, 9, [40, 40, 20]), (80, 9, [40, 40]), (100, 2, [40, 40]), (30, 9, [30])],
)
def test_prompts_fill_the_largest_step(rows: int, sequences: int, want: list[int]) -> None:
    seen: list[Batch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyModel, "forward", lambda _model, batch: seen.append(batch))
        model = ToyModel(block_tokens=BLOCK, context_tokens=40)
        of(model, rows, sequences).steps()[0][1]()
    assert seen[0].context_lens.tolist() == want
    assert seen[0].prompt_lens is not None and seen[0].prompt_lens.tolist() == want
    assert seen[0].rows == sum(want)
    # Ranks of a group would get no rows for most of their experts if all were of one token.
    assert len(set(seen[0].tokens.tolist())) == min(sum(want), model.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_meet_no_kernel_that_was_not_warmed(kind: str, tmp_path: Path) -> None:
    model = of_kind(kind, tmp_path)
    warming = of(model)
    warmed = forms(lambda: warm_up(warming))
    assert len(warmed) >= 6

    def steps() -> None:
        for rows, sequences in ((1, 1), (3, 2), (64, 33), (300, 40)):
            for _, step in of(model, rows, sequences).steps():
                step()

    assert forms(steps) <= warmed
    alone = forms(lambda: warming.steps()[0][1]())
    assert alone < warmed or kind == "llama"  # a prompt alone does not reach them all


@pytest.mark.parametrize("kind", ["deepseek", "fp8", "drafts", "drafts of fp8"])
def test_experts_are_warmed_for_few_rows_and_for_many(kind: str, tmp_path: Path) -> None:
    """How many rows a rank of a group gets for its experts is up to the routers of all its layers."""
    warmed = forms(lambda: warm_up(of(of_kind(kind, tmp_path), rows=1, sequences=1)))
    tiles: dict[str, set[tuple[int, int]]] = {}
    for name, _, constants in warmed:
        if name.endswith("grouped_linear_kernel"):
            form = dict(constants)
            tiles.setdefault(name, set()).add((form["ROWS_TILE"], form["OUT_TILE"]))
    want = {"_grouped_linear_kernel": {(tile.rows, tile.outs) for tile in (FEW, MANY)}}
    if "fp8" in kind:
        want = {
            "_fp8_grouped_linear_kernel": {(tile.rows, tile.outs) for tile in (FP8_FEW, FP8_MANY)}
        }
    assert all(len(both) == 2 for both in want.values())
    assert want.items() <= tiles.items()


def test_it_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = ToyModel(block_tokens=BLOCK)
    count = warm_up(of(model))
    lines = [message for message in caplog.messages if message.startswith("warm-up")]
    assert len(lines) == count == 5
    assert lines[0].startswith("warm-up: 1 of 5, as many prompt rows as there may be, ")
    assert lines[-1].startswith("warm-up: 5 of 5, sampling, ")
    assert model.forwards == 4


def test_it_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([0.0, 0.0, 4.0, 4.0, 9.0, 10.0])
    model = ToyModel(block_tokens=BLOCK)
    assert warm_up(of(model), limit_s=9.5, clock=lambda: next(now)) == 2
    assert model.forwards == 2
    assert "2 of 5 steps done in 10 s" in caplog.text
    assert "as many answers as there may be, a prompt beside an answer, sampling" in caplog.text


def test_no_memory_for_a_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ToyModel, "forward", fail)
    with pytest.raises(
        ValueError, match=r"no memory for as many prompt rows as there may be: .* give less"
    ):
        warm_up(of(ToyModel(block_tokens=BLOCK)))


def test_ranks_of_a_group_stop_after_the_same_step() -> None:
    """Each has a clock of its own."""

    def work(member: Member) -> int:
        now_s = itertools.count(0.0, 1.0 + member.rank)
        warming = of(ToyModel(block_tokens=BLOCK))
        return warm_up(warming, limit_s=4, clock=lambda: next(now_s), lockstep=member)

    first, second = ThreadGroup(2).run(work)
    assert first == second < 5
