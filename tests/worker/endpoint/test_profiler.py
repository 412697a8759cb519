"""Profiles: what they see, what they refuse, and that one runs at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from headrace.worker.endpoint import profiler
from headrace.worker.endpoint.pages import profile_seconds
from headrace.worker.endpoint.profiler import EVERY_S, OTHER, Profiler, ProfileRuns
from helpers.worker.watched import parsed, request, serving_endpoint


class Clock:
    """Goes on by each pause."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


@contextmanager
def thread_in(depth: int = 0) -> Generator[None]:
    """A thread that waits that deep."""
    release, there = threading.Event(), threading.Event()

    def stuck(left: int) -> None:
        if left:
            stuck(left - 1)
        else:
            there.set()
            release.wait()

    thread = threading.Thread(target=stuck, args=(depth,), name="a; stuck")
    thread.start()
    there.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def counts(text: str) -> dict[str, int]:
    pairs = (line.rsplit(" ", 1) for line in text.splitlines())
    return {stack: int(count) for stack, count in pairs}


async def test_a_thread_that_waits_is_seen_at_every_look() -> None:
    clock = Clock()
    with thread_in():
        found = counts(await Profiler(clock, clock.pause).profile(1))
    [(stack, count)] = [item for item in found.items() if item[0].startswith("a, stuck;")]
    assert abs(count - 1 / EVERY_S) <= 1  # steps of 0.01 add up to 1 or a bit less
    frames = stack.split(";")
    assert any("stuck (test_profiler.py:" in frame for frame in frames), stack
    assert "wait (threading.py:" in frames[-1], stack
    own = threading.current_thread().name
    assert not any(stack.startswith(f"{own};") for stack in found), "the one that looks"


async def test_deep_stacks_and_many_stacks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with thread_in(depth=500):
        found = counts(await Profiler(clock, clock.pause).profile(0.05))
        assert max(len(stack.split(";")) for stack in found) == profiler.MOST_FRAMES + 1
        monkeypatch.setattr(profiler, "MOST_STACKS", 0)
        found = counts(await Profiler(clock, clock.pause).profile(0.05))
    assert list(found) == [OTHER]


async def test_one_runs_at_a_time_and_the_next_when_it_is_over_or_cancelled() -> None:
    clock = Clock()
    goes_on = asyncio.Event()

    async def pause(seconds: float) -> None:
        clock.now_s += seconds
        await goes_on.wait()

    one = Profiler(clock, pause)
    first = asyncio.create_task(one.profile(10))
    await asyncio.sleep(0)
    with pytest.raises(ProfileRuns) as refused:
        await one.profile(1)
    assert refused.value.left_s == pytest.approx(10 - EVERY_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    goes_on.set()
    await one.profile(1)
    await one.profile(1)


@pytest.mark.parametrize(
    ("query", "seconds"),
    [([], 10), ([("seconds", "1")], 1), ([("seconds", "60")], 60), ([("seconds", "007")], 7)],
)
def test_seconds_are_whole_and_bounded(query: list[tuple[str, str]], seconds: int) -> None:
    assert profile_seconds(query) == seconds


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("seconds=0", "seconds is '0'; write a whole number from 1 to 60"),
        ("seconds=61", "seconds is '61'; write a whole number from 1 to 60"),
        ("seconds=", "seconds is ''; write a whole number from 1 to 60"),
        ("seconds", "seconds is ''; write a whole number from 1 to 60"),
        ("seconds=-1", "seconds is '-1'; write a whole number from 1 to 60"),
        ("seconds=1.5", "seconds is '1.5'; write a whole number from 1 to 60"),
        ("seconds=1e1", "seconds is '1e1'; write a whole number from 1 to 60"),
        ("seconds=%D9%A1", "seconds is '\u0661'; write a whole number from 1 to 60"),
        ("seconds=" + "9" * 3000, f"seconds is {'9' * 40!r}; write a whole number from 1 to 60"),
        ("seconds=1&seconds=2", "the query is seconds=N, once, and nothing else"),
        ("seconds=1&frequency=99", "the query is seconds=N, once, and nothing else"),
        ("second=1", "the query is seconds=N, once, and nothing else"),
    ],
    ids=lambda text: text[:30],
)
async def test_a_profile_of_no_length_is_refused_in_words(query: str, message: str) -> None:
    async with serving_endpoint() as scene:
        answer = await scene.get(f"/debug/profile?{query}")
    assert (answer.status, answer.json["message"]) == (400, message)


async def test_a_second_one_is_refused_until_the_client_of_the_first_is_gone() -> None:
    async with serving_endpoint() as scene:
        clients = [await scene.connect() for _ in range(2)]
        for client in clients:
            await client.send(request("/debug/profile?seconds=60"))
        answers = [asyncio.create_task(client.rest()) for client in clients]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        refused = parsed(done.pop().result())
        assert refused.status == 429
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert refused.json["message"].startswith("a profile runs already, for ")
        for client in clients:
            client.hang_up()
        await asyncio.wait(answers)
        while (answer := await scene.get("/debug/profile?seconds=1")).status == 429:
            pass  # until it is noticed that nobody is there
    assert answer.status == 200
    assert ";" in answer.body
