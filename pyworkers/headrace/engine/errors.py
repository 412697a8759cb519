"""Why a worker does not serve a request, by name."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.wire.frames import Failed, FailureKind

__all__ = ["FailureKind", "KernelPanic", "RequestError", "not_finite", "nothing_allowed"]


class RequestError(HeadraceError):
    """A request that this worker refuses. The worker goes on."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def frame(self, request: int) -> Failed:
        return Failed(request, self.kind, self.message)


class KernelPanic(HeadraceError):
    """The Rust code found a mistake of its own. What PyO3 raises then is no `Exception`; to a batch it is one."""


def not_finite(what: str = "logits") -> RequestError:
    return RequestError(FailureKind.ENGINE, f"the model's {what} are not finite")


def nothing_allowed(why: str) -> RequestError:
    return RequestError(FailureKind.GRAMMAR, f"no token can go on under the grammar: {why}")
