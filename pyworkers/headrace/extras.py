"""Imports that the base install does not bring: where one fails, the error names the extra to install."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from headrace.errors import MissingExtra

# Our own packages are there or the install is broken: that is a bug to be seen with its traceback.
OURS = ("headrace", "headrace_kernels")
# What one extra alone brings, whatever else of it was asked for.
ONLY_IN = {"torch": "worker", "triton": "worker"}


@contextmanager
def needs(extra: str, what_for: str = "") -> Generator[None]:
    """Around imports of what `extra` brings. Raises `MissingExtra` for the first package that is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        raise MissingExtra(package, ONLY_IN.get(package, extra), what_for) from error
