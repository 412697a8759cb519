"""While kernels are warmed, every form of a product is launched, whichever the rows at hand ask for.

The largest and the smallest step of a worker reach all forms that follow from the rows of a step. But how many pairs of
a row and an expert a rank of a group receives follows from what the rows of all ranks choose, and may be more or fewer
than in any step of a warm-up. A form that is met later would be compiled while requests wait.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_warming: ContextVar[bool] = ContextVar("warming", default=False)


@contextmanager
def every_form() -> Generator[None]:
    """What this thread launches until the block ends is launched in all of its forms."""
    token = _warming.set(True)
    try:
        yield
    finally:
        _warming.reset(token)


def forms_to_launch(chosen: T, every: Sequence[T]) -> Sequence[T]:
    """`chosen` alone, or all while kernels are warmed. They write the same bits to the same place."""
    return every if _warming.get() else (chosen,)
