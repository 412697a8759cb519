"""What a link hears of an engine that runs to its end, and the answer that it should hear."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.wire.frames import Failed, Output, TokenLogprob
from helpers.engine.toy import digest, toy_logits


@dataclass
class Heard:
    """What one link heard, by request."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    first: dict[int, Output] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)

    def hear(self, result: StepResult, link: int = 0) -> None:
        answers = result.of(link)
        for output in answers.outputs:
            assert output.request not in self.finish, "an output after the last one"
            self.first.setdefault(output.request, output)
            self.ids.setdefault(output.request, []).extend(output.ids)
            self.logprobs.setdefault(output.request, []).extend(output.logprobs or [])
            if output.finish is not None:
                self.finish[output.request] = output.finish
        for failed in answers.failed:
            assert failed.request not in self.finish
            self.failed[failed.request] = failed
        for freed in answers.freed:
            assert freed.request not in self.freed, "freed twice"
            self.freed[freed.request] = freed.blocks


class Hears(Protocol):
    def hear(self, result: StepResult) -> None: ...


H = TypeVar("H", bound=Hears)


def run(engine: Engine, heard: Heard | None = None, *, steps: int = 5_000) -> Heard:
    return run_out(engine, heard or Heard(), steps)


def run_out(engine: Engine, heard: H, steps: int) -> H:
    """Steps until the engine is idle, or so many; `heard` hears all of them."""
    while not engine.idle and steps > 0:
        heard.hear(engine.step())
        engine.check()
        steps -= 1
    if engine.idle:
        engine.check_idle()
    return heard


def true_greedy(prompt: list[int], count: int) -> list[int]:
    """The answer without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        kv = np.array([t * 4096 + i for i, t in enumerate(tokens)], dtype=np.int64)
        tokens.append(int(toy_logits(digest(kv), 50).argmax()))
    return tokens[len(prompt) :]
