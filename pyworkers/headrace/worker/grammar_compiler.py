"""Grammars that are not known yet are compiled on a thread of their own, which takes milliseconds.

What comes for their requests waits meanwhile, in its order: all else goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.wire.frames import Cancel, Continue, Submit, Ticket
from headrace.worker.sessions import EngineInput, Left

if TYPE_CHECKING:
    from headrace._core import GrammarVocabulary

MOST_WAITING = 256  # requests whose grammar is to be compiled. A guess
MOST_OF_REQUEST = 4  # of one request: a Submit, a ticket, and how it goes on


@dataclass(slots=True, eq=False)
class Held:
    """What came for one request."""

    inputs: list[EngineInput]
    compiled: bool = False


class GrammarCompiler:
    """Belongs to the event loop. `wake` is called when something is due."""

    def __init__(self, vocabulary: GrammarVocabulary | None, wake: Callable[[], None]) -> None:
        self._vocabulary = vocabulary
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")
        self._held: dict[Key, Held] = {}

    @property
    def idle(self) -> bool:
        return not self._held

    def hold(self, given: EngineInput) -> bool:
        """Whether this waits until a grammar is compiled. Raises `RequestError` where too much does."""
        link, what = given.peer.number, given.what
        match what:
            case Left():
                for key in [key for key in self._held if key.link == link]:
                    del self._held[key]
            case Cancel(request):
                self._held.pop(Key(link, request), None)
            case Submit() | Ticket() | Continue():
                key = Key(link, what.request)
                held = self._held.get(key)
                if isinstance(what, Submit):
                    return self._hold_submit(key, held, what, given)
                if held is not None and len(held.inputs) < MOST_OF_REQUEST:
                    held.inputs.append(given)
                return held is not None
            case _:
                pass
        return False

    def _hold_submit(self, key: Key, held: Held | None, submit: Submit, given: EngineInput) -> bool:
        if held is not None:
            text = f"request {key.request} is here"
            raise RequestError(FailureKind.DUPLICATE_REQUEST, text)
        grammar, vocabulary = submit.sampling.grammar, self._vocabulary
        if grammar is None or vocabulary is None or vocabulary.knows(grammar.kind, grammar.source):
            return False
        if len(self._held) >= MOST_WAITING:
            text = f"{MOST_WAITING} requests wait until their grammar is compiled"
            raise RequestError(FailureKind.QUEUE_FULL, text)
        held = self._held[key] = Held([given])
        compiling = asyncio.get_running_loop().run_in_executor(
            self._thread, vocabulary.prepare, grammar.kind, grammar.source
        )
        compiling.add_done_callback(partial(self._compiled, held))
        return True

    def _compiled(self, held: Held, compiling: asyncio.Future[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            compiling.exception()  # whoever takes the request in meets it again
        held.compiled = True
        self._wake()

    def due(self) -> list[EngineInput]:
        """What waits no longer."""
        if not self._held:
            return []
        keys = [key for key, held in self._held.items() if held.compiled]
        return [given for key in keys for given in self._held.pop(key).inputs]

    def close(self) -> None:
        """A grammar that is being compiled may take its milliseconds."""
        self._thread.shutdown(wait=False, cancel_futures=True)
