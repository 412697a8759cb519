"""The decode side of split serving: has the pulls run that the engine's requests wait for, and reports them.

Where a pull stands is the engine's business (`engine/cache/kv_import.py`); here is only which mover works for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.kv_transfer.producer import Tell
from headrace.kv_transfer.pulls import Pull, Puller
from headrace.wire.frames import Freed, Transferred

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

log = logging.getLogger(__name__)


class Consumer:
    """Between the pulls of one engine and the mover. All methods are for the event loop."""

    def __init__(self, engine: Engine, puller: Puller, tell: Tell) -> None:
        self._engine = engine
        self._puller = puller
        self._tell = tell
        self._moving: dict[Key, Pull] = {}

    def go_on(self, key: Key, generated: bytes, now_s: float) -> None:
        """The first tokens are known; or nothing comes, and the request is to do it all itself.

        Raises RequestError for tokens that cannot be.
        """
        if self._engine.kv_imports.awaiting_tokens(key) is None:
            return
        if len(generated) > 4 * self._engine.context_tokens:
            text = f"{len(generated) // 4} tokens, the context is {self._engine.context_tokens}"
            raise RequestError(FailureKind.BAD_RESUME, text)
        self._engine.go_on(key, np.frombuffer(generated, dtype="<u4").tolist(), now_s)

    def settle(self) -> None:
        """Stop the pulls that were given up, start those that have their blocks."""
        imports = self._engine.kv_imports
        while imports.stops:
            key, why = imports.stops.popleft()
            if key in self._moving:  # otherwise it ended by itself meanwhile
                self._puller.stop(self._moving[key], why)
        while imports.reports:
            key, report = imports.reports.popleft()
            log.warning(
                "handoff transfer_late: request %d got no KV from %s within %d ms: %s",
                *(key.request, report.worker, report.ms, report.error),
            )
            self._tell(key.link, report)
        for it in imports.take_pulls():
            pull = Pull(it.key, it.kv_from, it.ticket, it.wanted, self._ended)
            self._moving[it.key] = pull
            self._puller.start(pull)

    def _ended(self, key: Key, report: Transferred) -> None:
        del self._moving[key]
        self._tell(key.link, report)
        blocks = self._engine.kv_imports.ended(key, arrived=report.error is None)
        if blocks is not None:  # the request was cancelled meanwhile
            self._tell(key.link, Freed(key.request, blocks))
