"""Whether Triton runs in its interpreter, and what that changes inside kernels.

The interpreter computes `tl.dot` of bfloat16 operands from their bit patterns (triton issue 11584), truncates
float32 -> bfloat16 instead of rounding, loses carries in float32 -> e4m3, and takes e4m3's NaN for 480. Kernels take
`INTERPRET` as a constexpr, then multiply in float32, round through `narrow` and read through `widen`.

What is no finite number must show in the logits, so that a request fails rather than get made-up text. `tl.maximum`,
`tl.minimum` and `tl.max` drop NaN, and e4m3 has no infinity.
"""

import os

import triton
import triton.language as tl

#: Read once, like Triton's own: `@triton.jit` looks at the variable when it decorates.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRET: tl.constexpr) -> tl.tensor:
    """float32 `x` as `dtype`: the nearest value, the even one of two. e4m3 ends at +-448, its infinities are NaN."""
    if dtype == tl.float8e4nv:
        cut = tl.minimum(tl.maximum(x, -448.0), 448.0)
        x = tl.where(tl.abs(x) < float("inf"), cut, float("nan"))
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        if dtype == tl.bfloat16:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
        if dtype == tl.float8e4nv:
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
            # Below 2**-6 the step is 2**-9 whatever the exponent, as it is next to 2**14 in float32.
            size = (tl.abs(x) + 16384.0) - 16384.0
            small = tl.where(x < 0.0, -size, size)
            rounded = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
            bits = tl.where(x == x, rounded.to(dtype).to(tl.uint8, bitcast=True), 0x7F)
            return bits.to(tl.uint8).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def widen(x, dtype: tl.constexpr, INTERPRET: tl.constexpr) -> tl.tensor:
    """`x` as `dtype`, which holds all of its values."""
    if INTERPRET and x.dtype == tl.float8e4nv:
        bits = x.to(tl.uint8, bitcast=True) & 0x7F
        return tl.where(bits == 0x7F, float("nan"), x.to(tl.float32)).to(dtype)
    return x.to(dtype)
