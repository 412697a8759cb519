"""Masks on logits by Triton: as the rule in torch, and token by token; in the interpreter without a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.engine.sampling import device_logits
from headrace.engine.sampling.device_logits import DeviceLogits
from headrace.engine.step import forward
from headrace_kernels import token_masks
from headrace_kernels.dense.mask_rows import WORDS, mask_rows, mask_rows_bytes, mask_rows_ref
from headrace_kernels.token_masks import mask_logits, mask_logits_ref
from headrace_kernels.upload import upload
from helpers.engine.pair import unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, GRAMMARS, follows, toy_vocabulary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = 32 * WORDS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(rows: int, vocab: int, masked: list[int], dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Logits, rows, and masks: of all kinds, with bits set behind the last token."""
    random = np.random.default_rng(vocab)
    logits = torch.from_numpy(random.normal(size=(rows, vocab))).to(dtype).to(DEVICE)
    masks = random.integers(0, 2**32, (len(masked), -(-vocab // 32)), dtype=np.uint32)
    masks[1:2] = 2**32 - 1
    masks[2:3] &= 1 << 31
    return logits, np.array(masked, dtype=np.int64), masks


def on_device(array: Any) -> torch.Tensor:
    return upload(array, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 50, TILE - 1, TILE, TILE + 1, 3 * TILE + 77])
def test_what_is_forbidden_is_minus_infinity_and_nothing_else_changes(
    vocab: int, dtype: torch.dtype
) -> None:
    logits, rows, masks = drawn(6, vocab, [5, 0, 2], dtype)
    by_torch, by_token = logits.clone(), logits.cpu()
    mask_rows_ref(by_torch, on_device(rows), on_device(masks.view(np.int32)))
    mask_logits_ref(by_token, rows, masks)
    mask_rows(logits, on_device(rows), on_device(masks.view(np.int32)))
    assert torch.equal(logits, by_torch)
    assert torch.equal(logits.cpu(), by_token)


def test_without_rows_nothing_is_launched() -> None:
    logits, rows, masks = drawn(3, 70, [], torch.float32)
    before = logits.clone()
    mask_rows(logits, on_device(rows), on_device(masks.view(np.int32)))
    assert torch.equal(logits, before)


def test_rows_may_be_longer_in_memory() -> None:
    logits, rows, masks = drawn(4, 75, [3, 1], torch.float32)
    wide = torch.zeros(4, 128, device=DEVICE)
    wide[:, :75] = logits
    mask_rows(wide[:, :75], on_device(rows), on_device(masks.view(np.int32)))
    mask_rows_ref(logits, on_device(rows), on_device(masks.view(np.int32)))
    assert torch.equal(wide[:, :75], logits)
    assert not wide[:, 75:].any(), "what is behind a row stays"


def test_a_mask_of_zeros_leaves_a_row_from_which_nothing_is_chosen() -> None:
    logits, rows, masks = drawn(3, 1500, [1], torch.float32)
    masks[:] = 0
    logits[1, 7] = math.nan
    before = logits.clone()
    mask_rows(logits, on_device(rows), on_device(masks.view(np.int32)))
    assert torch.isneginf(logits[1]).all(), "also where it was no number"
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    _, best = DeviceLogits(logits).argmax()
    assert np.isneginf(best).tolist() == [False, True, False]


def test_what_is_no_number_stays_where_it_is_allowed() -> None:
    logits, rows, masks = drawn(2, 40, [1], torch.float32)
    masks[:] = 1 << 3
    logits[1, 3] = math.nan
    mask_rows(logits, on_device(rows), on_device(masks.view(np.int32)))
    assert logits[1].isnan().tolist() == [token == 3 for token in range(40)]


@pytest.mark.parametrize("wrong", ["words", "rows", "type"])
def test_masks_of_another_shape_are_refused(wrong: str) -> None:
    logits, rows, masks = drawn(3, 70, [0, 2], torch.float32)
    words = masks.view(np.int32)
    of = {"words": words[:, :2].copy(), "rows": words[:1].copy(), "type": words.astype(np.int64)}
    with pytest.raises(AssertionError):
        mask_rows(logits, on_device(rows), on_device(of[wrong]))


def test_the_bytes_are_those_of_masks_and_forbidden_logits() -> None:
    assert mask_rows_bytes(2, 65, 2) == 2 * (3 * 4 + 8 + 65 * 2)


def test_a_gpu_is_masked_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, a device that only says so stands in for it."""
    logits, rows, masks = drawn(4, 75, [3, 1], torch.float32)
    want = logits.clone()
    mask_rows_ref(want, on_device(rows), on_device(masks.view(np.int32)))
    monkeypatch.setattr(token_masks, "mask_by_torch", None)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(token_masks, "upload", lambda array, _: torch.from_numpy(array))
        logits = OnGpu(logits)
    mask_logits(logits, rows, masks)
    assert torch.equal(torch.as_tensor(logits).as_subclass(torch.Tensor), want)


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is elsewhere."""

    @property
    def device(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda")


@pytest.mark.parametrize("name", GRAMMARS)
def test_answers_by_the_kernel_are_those_of_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(seed: int) -> tuple[list[int], str | None]:
        sampling = follows(GRAMMARS[name], seed=seed)
        submit = make_submit(seed, [3, 1, 4], max_tokens=20, sampling=sampling, stop_ids=[END])
        heard = unsplit(engine_on(ToyModel(), vocabulary=toy_vocabulary()), submit)
        assert heard.failed is None
        return heard.ids, heard.finish

    def by_kernel(logits: torch.Tensor, rows: Any, masks: Any) -> None:
        mask_rows(logits, torch.from_numpy(rows), torch.from_numpy(masks.view(np.int32)))

    want = [answer(seed) for seed in range(2)]
    if DEVICE.type == "cpu":
        monkeypatch.setattr(device_logits, "mask_logits", by_kernel)
    monkeypatch.setattr(forward, "logits_of", DeviceLogits)
    assert [answer(seed) for seed in range(2)] == want
