"""SiLU of the gate times the up projection, from their common buffer.

gate_up  [rows, 2 * width]  gate in the first half of a row, up in the second
out      [rows, width]
Cost: reads 2 and writes 1 value for each of out, so memory bandwidth is the bound.
Source: Shazeer 2020 (SwiGLU).
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

TILE = 1024  # values; a guess, not tuned yet


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, TILE: tl.constexpr, INTERPRET: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = col < width
    gate = tl.load(gate_up_ptr + row * 2 * width + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + col, mask=inside, other=0.0).to(tl.float32)
    out = narrow(gate / (1.0 + tl.exp(-gate)) * up, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + row * width + col, out, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, computed in float32 and stored in the input's type."""
    assert gate_up.dim() == 2 and gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(width, TILE))](
            gate_up, out, width, TILE=TILE, INTERPRET=INTERPRET
        )
    return out


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul_bytes(rows: int, width: int, element_bytes: int) -> int:
    """Bytes that must move."""
    return 3 * rows * width * element_bytes
