"""Whether Triton runs in its interpreter, and what that changes inside kernels.

The interpreter computes `tl.dot` of bfloat16 operands from their bit patterns (triton issue 11584), truncates
float32 -> bfloat16 instead of rounding and loses carries in float32 -> e4m3. Kernels take `INTERPRET` as a constexpr,
then multiply in float32 and round through `narrow`.
"""

import os

import triton
import triton.language as tl

#: Read once, like Triton's own: `@triton.jit` looks at the variable when it decorates.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRET: tl.constexpr) -> tl.tensor:
    """float32 `x` as `dtype`: the nearest value, the even one of two; e4m3 ends at +-448."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        if dtype == tl.bfloat16:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
        if dtype == tl.float8e4nv:
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
            # Below 2**-6 the step is 2**-9 whatever the exponent, as it is next to 2**14 in float32.
            size = (tl.abs(x) + 16384.0) - 16384.0
            small = tl.where(x < 0.0, -size, size)
            x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(dtype)
