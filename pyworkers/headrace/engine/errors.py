"""Why a worker does not serve a request, by name."""

from __future__ import annotations

from enum import StrEnum

from headrace.errors import HeadraceError
from headrace.wire.frames import Failed


class FailureKind(StrEnum):
    """`Failed.kind` on the wire."""

    QUEUE_FULL = "queue_full"
    DUPLICATE_REQUEST = "duplicate_request"
    EMPTY_PROMPT = "empty_prompt"
    TOO_LONG = "too_long"
    TOO_BIG_FOR_POOL = "too_big_for_pool"
    BAD_TOKEN = "bad_token"
    BAD_SAMPLING = "bad_sampling"
    BAD_RESUME = "bad_resume"
    UNSUPPORTED = "unsupported"
    DRAINING = "draining"
    ENGINE = "engine"

    @property
    def retryable(self) -> bool:
        """Whether another worker of the same model may succeed."""
        return self in RETRYABLE


RETRYABLE = frozenset(
    {
        FailureKind.QUEUE_FULL,
        FailureKind.TOO_BIG_FOR_POOL,
        FailureKind.UNSUPPORTED,
        FailureKind.DRAINING,
        FailureKind.ENGINE,
    }
)


class RequestError(HeadraceError):
    """A request that this worker refuses. The worker goes on."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def frame(self, request: int) -> Failed:
        return Failed(
            request=request,
            kind=self.kind.value,
            message=self.message,
            retryable=self.kind.retryable,
        )


class KernelPanic(HeadraceError):
    """The Rust code found a mistake of its own. What PyO3 raises then is no `Exception`; to a batch it is one."""
