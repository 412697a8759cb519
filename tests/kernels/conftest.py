"""Without a GPU the same kernel tests run in Triton's interpreter (`tests/conftest.py` chooses it).

It multiplies matrices with numpy, and so with whatever BLAS kernel suits the processor. Some, as OpenBLAS takes for AMD
Zen 5, give a row other last bits in another place of the tile, which no GPU does. So products are summed here in order.
"""

import os
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def products_in_order() -> Generator[None]:
    if "TRITON_INTERPRET" not in os.environ:
        yield
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return original(self, a, b, d, *precision)
        product = np.zeros_like(d.data)
        for k in range(a.data.shape[-1]):
            product += a.data[..., :, k, None] * b.data[..., k, None, :]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
