"""FP8 weights with a scale for each block: dequantised as stored, in parts too, and named where they are broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.models.fp8 import scale_shape
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace_kernels.upload import tensor_of
from helpers.models.tiny_deepseek import (
    Tensors,
    dequantise_blocks,
    quantise_blocks,
    save_tensors,
    tiny_config,
)
from helpers.models.tiny_model import write_json_files

NAME = "w.weight"
SCALE = "w.weight_scale_inv"


def checkpoint(path: Path, tensors: Tensors) -> SafetensorsCheckpoint:
    write_json_files(path, tiny_config())
    save_tensors(path, tensors)
    return SafetensorsCheckpoint(path)


def quantised(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    # Blocks differ in size, so that the scale of a neighbour would show.
    return quantise_blocks(torch.randn(shape, generator=random) * torch.rand(shape[-1:]).exp2())


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 1), (127, 129), (300, 200), (3, 130, 260)]
)
def test_each_block_has_its_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values, scale_inv = quantised(shape)
    assert scale_inv.shape == scale_shape(shape)
    found = checkpoint(tmp_path, {NAME: values, SCALE: scale_inv})
    tensor = tensor_of(found.tensor(NAME, shape))
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, dequantise_blocks(values, scale_inv))
    scaled = found.scaled(NAME, shape)
    assert torch.equal(tensor_of(scaled.weight).float(), values.float())
    assert torch.equal(tensor_of(scaled.scale_inv), scale_inv)


@pytest.mark.parametrize("rows", [range(300), range(100, 150), range(130, 131), range(5, 5)])
def test_parts_have_the_scales_of_the_whole(tmp_path: Path, rows: range) -> None:
    values, scale_inv = quantised((300, 200))
    found = checkpoint(tmp_path, {NAME: values, SCALE: scale_inv})
    whole = dequantise_blocks(values, scale_inv)
    assert torch.equal(tensor_of(found.tensor(NAME, rows=rows)), whole[rows.start : rows.stop])


def test_parts_of_stacked_matrices_are_whole_matrices(tmp_path: Path) -> None:
    values, scale_inv = quantised((4, 130, 140))
    found = checkpoint(tmp_path, {NAME: values, SCALE: scale_inv})
    expected = dequantise_blocks(values, scale_inv)[1:3]
    assert torch.equal(tensor_of(found.tensor(NAME, rows=range(1, 3))), expected)
    assert found.scaled(NAME, rows=range(1, 3)).scale_inv.shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (None, "w.weight: expected its scales as w.weight_scale_inv, which is missing"),
        (
            torch.ones(2, 2),
            r"scale_inv: expected float32 \[3, 2\] for w.weight \[300, 200\], found float32 \[2, 2\]",
        ),
        (torch.ones(3, 2, dtype=torch.bfloat16), r"expected float32 \[3, 2\] .* found bfloat16"),
    ],
)
def test_missing_or_wrong_scales_are_named(
    tmp_path: Path, scale: torch.Tensor | None, text: str
) -> None:
    values, _ = quantised((300, 200))
    found = checkpoint(tmp_path, {NAME: values} if scale is None else {NAME: values, SCALE: scale})
    with pytest.raises(CheckpointError, match=text):
        found.tensor(NAME, (300, 200))


def test_another_fp8_is_named(tmp_path: Path) -> None:
    values = torch.ones(4, 4).to(torch.float8_e5m2)
    found = checkpoint(tmp_path, {NAME: values, SCALE: torch.ones(1, 1), "plain": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn to go with .* found float8_e5m2"):
        found.tensor(NAME, (4, 4))
    with pytest.raises(CheckpointError, match=r"plain: expected a matrix of float8_e4m3fn"):
        found.scaled("plain")
    flat = checkpoint(tmp_path, {NAME: torch.ones(4).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"expected a matrix .* found float8_e4m3fn \[4\]"):
        flat.tensor(NAME)
