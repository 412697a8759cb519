"""Grammars are compiled beside the loop of a worker: what is of their requests waits, and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace._core import GrammarVocabulary
from headrace.engine.errors import FailureKind, RequestError
from headrace.wire.frames import Cancel, Continue, Grammar, GrammarKind, Sampling, Submit, Ticket
from headrace.worker.grammar_compiler import (
    MOST_OF_LINK,
    MOST_OF_REQUEST,
    MOST_WAITING,
    GrammarCompiler,
)
from headrace.worker.sessions import EngineInput, ForEngine, Left, Peer
from helpers.engine.toy import make_submit


@dataclass
class Slow:
    """A vocabulary that compiles when it may."""

    may: threading.Event = field(default_factory=threading.Event)
    known: set[str] = field(default_factory=set[str])
    prepared: list[str] = field(default_factory=list[str])

    def knows(self, kind: str, source: str) -> bool:
        del kind
        return source in self.known

    def prepare(self, kind: str, source: str) -> None:
        del kind
        self.may.wait()
        self.prepared.append(source)
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


def a_submit(request: int, source: str = "one", priority: int = 0) -> Submit:
    grammar = Grammar(GrammarKind.REGEX, source)
    submit = make_submit(request, [1, 2], sampling=Sampling(grammar=grammar))
    return replace(submit, priority=priority)


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
    def at(request: int) -> tuple[Submit, int]:
        return a_submit(request), request // MOST_OF_LINK

    for request in range(MOST_WAITING):
        submit, link = at(request)
        if request == MOST_OF_LINK:
            with pytest.raises(RequestError) as refused:
                scene.compiler.hold(given(submit, 0))
            assert refused.value.kind is FailureKind.QUEUE_FULL
        assert scene.compiler.hold(given(submit, link))
    with pytest.raises(RequestError) as refused:
        scene.compiler.hold(given(a_submit(MOST_WAITING), 2))
    assert refused.value.kind is FailureKind.QUEUE_FULL
    assert "try again" in str(refused.value)
    for _ in range(9):
        assert scene.compiler.hold(given(Ticket(0, b"x")))
    scene.vocabulary.may.set()
    found = await all_due(scene)
    assert len(found) == MOST_WAITING + MOST_OF_REQUEST - 1
    assert scene.vocabulary.prepared == ["one"], "all have the same grammar"


async def all_due(scene: Scene) -> list[Any]:
    found: list[Any] = []
    while not scene.compiler.idle:
        await scene.woken.wait()
        scene.woken.clear()
        found += due(scene.compiler)
    return found


async def test_the_highest_priority_goes_first_then_the_shortest_and_one_of_five_is_the_oldest(
    scene: Scene,
) -> None:
    sources = ["long" * 9, "middle" * 2, "short", "low", "s", "mm", "lll", "first"]
    assert scene.compiler.hold(given(a_submit(0, "begun")))
    for request, source in enumerate(sources, 1):
        assert scene.compiler.hold(given(a_submit(request, source, -1 if source == "low" else 0)))
    scene.vocabulary.may.set()
    await all_due(scene)
    got = scene.vocabulary.prepared
    assert got[:4] == ["begun", "s", "mm", "lll"]
    assert got[4] == "long" * 9, "the oldest, in the fifth turn"
    assert got[5:] == ["short", "first", "middle" * 2, "low"]


async def test_links_take_turns_and_a_flood_holds_nobody_up(scene: Scene) -> None:
    assert scene.compiler.hold(given(a_submit(0, "begun")))
    for request in range(1, 30):
        assert scene.compiler.hold(given(a_submit(request, f"f{request}"), link=0))
    assert scene.compiler.hold(given(a_submit(1, "of another router"), link=1))
    scene.vocabulary.may.set()
    await all_due(scene)
    assert scene.vocabulary.prepared[1] == "of another router"


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(scene: Scene) -> None:
    for request, source in enumerate(["begun", "gone", "here"]):
        assert scene.compiler.hold(given(a_submit(request, source)))
    assert not scene.compiler.hold(given(Cancel(1)))
    scene.vocabulary.may.set()
    await all_due(scene)
    assert scene.vocabulary.prepared == ["begun", "here"]


async def test_after_the_end_nothing_more_is_begun(scene: Scene) -> None:
    for request, source in enumerate(["begun", "next"]):
        assert scene.compiler.hold(given(a_submit(request, source)))
    scene.compiler.close()
    scene.vocabulary.may.set()
    await scene.woken.wait()
    assert scene.vocabulary.prepared == ["begun"]


async def test_a_worker_without_a_vocabulary_holds_nothing() -> None:
    compiler = GrammarCompiler(None, lambda: None)
    assert not compiler.hold(given(a_submit(1)))
    compiler.close()
