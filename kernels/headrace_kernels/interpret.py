"""Whether Triton runs in its interpreter, and what that changes inside kernels.

The interpreter computes `tl.dot` of bfloat16 operands from their bit patterns (triton issue 11584) and truncates
float32 -> bfloat16 instead of rounding. Kernels take `INTERPRET` as a constexpr and then multiply in float32; tests in
the interpreter use float32 and float16, which it rounds rightly.
"""

import os

import triton.language as tl

#: Read once, like Triton's own: `@triton.jit` looks at the variable when it decorates.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
