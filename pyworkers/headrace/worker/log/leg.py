"""A leg of a request at a worker: what is noted of it on its way, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.wire.frames import TraceContext, Transferred


@dataclass(slots=True, kw_only=True)
class Leg:
    """One that runs or waits. Times are those of the event loop's clock."""

    number: int  # that it has on the link to its router
    request_id: str
    router: str
    came_s: float
    trace: TraceContext | None = None
    admitted_s: float | None = None  # to the batch, for the first time
    first_token_s: float | None = None
    transfer: tuple[float, Transferred] | None = (
        None  # of its KV from elsewhere, and when that was over
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LegEnd:
    """`finish` is the word for its end; else `error` is. What is not known is left out."""

    at_s: float
    finish: str | None = None
    error: str | None = None
    why: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
