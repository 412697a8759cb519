"""Rows as e4m3 with one float32 scale for each 128 of their values.

x       [rows, width]  float
values  [rows, width]  e4m3
scale   [rows, ceil(width / 128)]  float32; x is about values * scale
Source: DeepSeek-V3 2024, section 3.3.

The scales are a row's own, so they do not depend on the rows beside it.
"""

import torch

BLOCK = 128  # values of one scale, and rows and columns of one scale of a weight; part of the checkpoint format
E4M3_MAX = 448.0


def quantise_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    rows, width = x.shape
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - width)).view(rows, blocks, -1)
    scale = padded.abs().amax(-1) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)  # of zeros
    values = (padded / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.view(rows, -1)[:, :width].to(torch.float8_e4m3fn).contiguous(), scale
