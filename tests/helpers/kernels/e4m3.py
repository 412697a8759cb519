"""Tests of 8-bit floats: GPUs have them from compute capability 8.9 on, Triton's interpreter always."""

import torch

from helpers.require import needs

NEEDS_E4M3 = needs(
    "e4m3",
    "this GPU has no e4m3",
    here=not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9),
)

E4M3_MAX = 448.0


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest values; what is too large becomes the largest one. Torch itself makes NaN of it, on a GPU alone."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
