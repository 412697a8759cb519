"""The key that tickets are bound to where a test is not about it."""

from __future__ import annotations

from typing import Final

from headrace.kv_transfer.backends.base import BoundTicket
from headrace.wire.frames import PULL_KEY_BYTES

PULL_KEY: Final = b"p" * PULL_KEY_BYTES
OTHER_PULL_KEY: Final = b"q" * PULL_KEY_BYTES


def bound(ticket: bytes, pull_key: bytes = PULL_KEY) -> BoundTicket:
    return BoundTicket(ticket, pull_key)
