"""Grammars that are not known yet are compiled on a thread of their own, one at a time, which takes milliseconds each.

What comes for their requests waits meanwhile, in its order: all else goes on. The next grammar is one of the highest
priority, of the router whose turn it is, and the shortest of these: whoever sends many has a low priority for all but a
few. One turn in five belongs to whoever has waited longest, so that none waits for ever.
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
from headrace.wire.frames import Cancel, Continue, Grammar, Submit, Ticket
from headrace.worker.sessions import EngineInput, Left

if TYPE_CHECKING:
    from headrace._core import GrammarVocabulary

MOST_WAITING = 256  # requests whose grammar is to be compiled: some seconds of work. A guess
MOST_OF_LINK = 224  # of one router: seven eighths
OLDEST_EVERY = 5  # turns: the same as of prompts that are tokenised
MOST_OF_REQUEST = 4  # of one request: a Submit, a ticket, and how it goes on


@dataclass(slots=True, eq=False)
class Held:
    """What came for one request."""

    grammar: Grammar
    priority: int
    inputs: list[EngineInput]
    compiled: bool = False


class GrammarCompiler:
    """Belongs to the event loop. `wake` is called when something is due."""

    def __init__(self, vocabulary: GrammarVocabulary | None, wake: Callable[[], None]) -> None:
        self._vocabulary = vocabulary
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")
        self._held: dict[Key, Held] = {}  # in the order of their coming
        self._compiling = False
        self._closed = False
        self._turns = 0
        self._served: dict[int, int] = {}  # by link: its latest turn

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
                self._served.pop(link, None)
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
        of_link = sum(held.link == key.link for held in self._held)
        if len(self._held) >= MOST_WAITING or of_link >= MOST_OF_LINK:
            text = (
                f"{len(self._held)} requests wait until their grammar is compiled, {of_link} of "
                "this router; try again later"
            )
            raise RequestError(FailureKind.QUEUE_FULL, text)
        self._held[key] = Held(grammar, submit.priority, [given])
        if not self._compiling:
            self._compile_next(vocabulary)
        return True

    def _compile_next(self, vocabulary: GrammarVocabulary) -> None:
        waiting = {key: held for key, held in self._held.items() if not held.compiled}
        if not waiting:
            return
        self._turns += 1
        oldest = next(iter(waiting))

        def rank(key: Key) -> tuple[int, int, int]:
            it = waiting[key]
            return -it.priority, self._served.get(key.link, 0), len(it.grammar.source)

        chosen = oldest if self._turns % OLDEST_EVERY == 0 else min(waiting, key=rank)
        self._served[chosen.link] = self._turns
        grammar = waiting[chosen].grammar
        self._compiling = True
        compiling = asyncio.get_running_loop().run_in_executor(
            self._thread, vocabulary.prepare, grammar.kind, grammar.source
        )
        compiling.add_done_callback(partial(self._compiled, vocabulary, grammar))

    def _compiled(
        self, vocabulary: GrammarVocabulary, grammar: Grammar, compiling: asyncio.Future[None]
    ) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            compiling.exception()  # whoever takes the request in meets it again
        self._compiling = False
        for held in self._held.values():
            held.compiled |= held.grammar == grammar
        self._wake()
        if not self._closed:
            self._compile_next(vocabulary)

    def due(self) -> list[EngineInput]:
        """What waits no longer."""
        if not self._held:
            return []
        keys = [key for key, held in self._held.items() if held.compiled]
        return [given for key in keys for given in self._held.pop(key).inputs]

    def close(self) -> None:
        """A grammar that is being compiled may take its milliseconds."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
