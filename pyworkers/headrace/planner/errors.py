"""Why there is no plan. The texts are one line, for the person who asked."""

from __future__ import annotations


class PlanError(Exception):
    """Base of all of them."""


class BadTrace(PlanError):
    """A file that is no trace of requests, or an empty one."""


class BadLoads(PlanError):
    """A file that does not hold loads of experts."""


class DoesNotFit(PlanError):
    """No allowed group has memory for the model and one request."""


class OutOfReach(PlanError):
    """No allowed group keeps a limit, however many there are."""

    def __init__(self, limit: str, wanted_s: float, best_s: float, why: str) -> None:
        super().__init__(limit, wanted_s, best_s, why)
        self.limit = limit
        self.wanted_s = wanted_s
        self.best_s = best_s
        self.why = why

    def __str__(self) -> str:
        wanted, best = shown_s(self.wanted_s), shown_s(self.best_s, up=True)
        return f"{self.limit}={wanted} cannot be met: {self.why}; the best within reach is {self.limit}={best}"


def shown_s(seconds: float, *, up: bool = False) -> str:
    """`80ms`, `2.5s`: three digits. `up`: rounded up, so that it can be asked for."""
    unit, value = ("ms", seconds * 1e3) if seconds < 1 else ("s", seconds)
    shown = float(f"{value:.3g}")
    if up and shown < value:
        digits = len(str(int(value)))
        shown += 10.0 ** (digits - 3)
    return f"{shown:.3g}{unit}"
