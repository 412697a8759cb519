"""Grammars are compiled beside the loop of a worker: what is of their requests waits, and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace._core import GrammarVocabulary
from headrace.engine.errors import FailureKind, RequestError
from headrace.wire.frames import Cancel, Continue, Grammar, GrammarKind, Sampling, Submit, Ticket
from headrace.worker.grammar_compiler import MOST_OF_REQUEST, MOST_WAITING, GrammarCompiler
from headrace.worker.sessions import EngineInput, ForEngine, Left, Peer
from helpers.engine.toy import make_submit


@dataclass
class Slow:
    """A vocabulary that compiles when it may."""

    may: threading.Event = field(default_factory=threading.Event)
    known: set[str] = field(default_factory=set[str])

    def knows(self, kind: str, source: str) -> bool:
        del kind
        return source in self.known

    def prepare(self, kind: str, source: str) -> None:
        del kind
        self.may.wait()
        self.known.add(source)
        if source == "wrong":
            raise ValueError("no grammar")


@dataclass
class Scene:
    compiler: GrammarCompiler
    vocabulary: Slow
    woken: asyncio.Event


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    slow, woken = Slow(), asyncio.Event()
    compiler = GrammarCompiler(cast("GrammarVocabulary", slow), woken.set)
    yield Scene(compiler, slow, woken)
    slow.may.set()
    compiler.close()


def given(what: ForEngine | Left, link: int = 0) -> EngineInput:
    peer = cast("Peer", SimpleNamespace(number=link))
    return EngineInput(peer, what, 1.0)


def a_submit(request: int, source: str = "one") -> Submit:
    grammar = Grammar(GrammarKind.REGEX, source)
    return make_submit(request, [1, 2], sampling=Sampling(grammar=grammar))


def due(compiler: GrammarCompiler) -> list[Any]:
    return [it.what for it in compiler.due()]


async def test_what_is_of_the_request_waits_in_order_and_nothing_else_does(scene: Scene) -> None:
    compiler, slow = scene.compiler, scene.vocabulary
    own = [a_submit(1), Ticket(1, b"x"), Continue(1, b"")]
    assert [compiler.hold(given(what)) for what in own] == [True] * 3
    others = [make_submit(2, [1]), Ticket(2, b"x"), Cancel(2), Continue(3, b"")]
    assert not any(compiler.hold(given(what)) for what in others)
    assert not compiler.hold(given(Ticket(1, b"x"), link=1))
    assert (due(compiler), compiler.idle) == ([], False)
    slow.may.set()
    await scene.woken.wait()
    assert due(compiler) == own
    assert compiler.idle
    assert not compiler.hold(given(a_submit(4))), "it is known now"


async def test_what_is_cancelled_or_left_is_forgotten(scene: Scene) -> None:
    compiler, slow = scene.compiler, scene.vocabulary
    for link in (0, 1):
        for request in (1, 2):
            assert compiler.hold(given(a_submit(request), link))
    assert not compiler.hold(given(Cancel(1)))
    assert not compiler.hold(given(Left(), link=1))
    slow.may.set()
    await scene.woken.wait()
    while not compiler.idle:
        await asyncio.sleep(0)
        for what in due(compiler):
            assert what == a_submit(2)
    slow.known.clear()
    assert compiler.hold(given(a_submit(1))), "the number is free again"


async def test_what_is_no_grammar_is_due_like_any_other(scene: Scene) -> None:
    assert scene.compiler.hold(given(a_submit(1, "wrong")))
    scene.vocabulary.may.set()
    await scene.woken.wait()
    assert due(scene.compiler) == [a_submit(1, "wrong")]


async def test_the_same_number_twice_is_refused(scene: Scene) -> None:
    assert scene.compiler.hold(given(a_submit(1)))
    with pytest.raises(RequestError) as refused:
        scene.compiler.hold(given(make_submit(1, [1])))
    assert refused.value.kind is FailureKind.DUPLICATE_REQUEST


async def test_what_waits_is_bounded(scene: Scene) -> None:
    for request in range(MOST_WAITING):
        assert scene.compiler.hold(given(a_submit(request)))
    with pytest.raises(RequestError) as refused:
        scene.compiler.hold(given(a_submit(MOST_WAITING)))
    assert refused.value.kind is FailureKind.QUEUE_FULL
    for _ in range(9):
        assert scene.compiler.hold(given(Ticket(0, b"x")))
    scene.vocabulary.may.set()
    found: list[Any] = []
    while not scene.compiler.idle:
        await scene.woken.wait()
        found += due(scene.compiler)
        await asyncio.sleep(0)
    assert len(found) == MOST_WAITING + MOST_OF_REQUEST - 1


async def test_a_worker_without_a_vocabulary_holds_nothing() -> None:
    compiler = GrammarCompiler(None, lambda: None)
    assert not compiler.hold(given(a_submit(1)))
    compiler.close()
