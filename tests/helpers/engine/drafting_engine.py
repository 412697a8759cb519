"""Engines that draft on the toy model, and what they must not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace._core import GrammarVocabulary
from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.wire.frames import Output, Ranked, Sampling, Submit, TokenLogprob
from helpers.engine.drafting_toy import DraftingToy
from helpers.engine.hearing import run_out
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on

BLOCK = 4


def make_engine(
    k: int,
    *,
    agreement: float = 0.5,
    blocks: int = 64,
    sequences: int = 8,
    batched: int = 32,
    fixed: bool = True,
    prefix_cache: bool = True,
    some_tokens: bool = False,
    rejection: bool = False,
    vocabulary: GrammarVocabulary | None = None,
) -> tuple[Engine, DraftingToy]:
    ids = np.arange(0, 50, 3, dtype=np.int32) if some_tokens else None
    model = DraftingToy(agreement=agreement, block_tokens=BLOCK, draft_token_ids=ids)
    engine = engine_on(
        model,
        blocks=blocks,
        sequences=sequences,
        batched=batched,
        clock=model.clock,
        prefix_cache=prefix_cache,
        vocabulary=vocabulary,
        mtp=k,
        mtp_fixed=fixed,
        mtp_verify="rejection" if rejection else "noise",
    )
    return engine, model


class Heard:
    """What one link heard, by request."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.results: list[StepResult] = []

    def hear(self, result: StepResult) -> None:
        self.results.append(result)
        for answers in result.answers.values():
            assert not answers.failed, answers.failed
            for output in answers.outputs:
                self.outputs.setdefault(output.request, []).append(output)

    def ids(self, request: int) -> list[int]:
        return [token for output in self.outputs.get(request, []) for token in output.ids]

    def logprobs(self, request: int) -> list[TokenLogprob]:
        found = [output.logprobs or [] for output in self.outputs[request]]
        return [entry for entries in found for entry in entries]

    def finish(self, request: int) -> str | None:
        return self.outputs[request][-1].finish

    def drafts(self, request: int) -> tuple[int, int]:
        outputs = self.outputs[request]
        return sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)


def run(engine: Engine, heard: Heard | None = None, *, steps: int = 5_000) -> Heard:
    return run_out(engine, heard or Heard(), steps)


def plain(submit: Submit) -> tuple[list[int], list[TokenLogprob], str | None]:
    """The answer of an engine that knows nothing of drafts and has nothing else to do."""
    engine = engine_on(ToyModel(), prefix_cache=False)
    engine.submit(submit)
    heard = run(engine)
    return heard.ids(submit.request), heard.logprobs(submit.request), heard.finish(submit.request)


KINDS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9, logprobs=2),
    Sampling(temperature=1.2, top_k=10, repetition_penalty=1.2),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4, logprobs=0),
    Sampling(temperature=0.7, min_p=0.05, min_tokens=9),
    Sampling(temperature=1.0, logit_bias=[Ranked(3, 4.0), Ranked(7, -100.0)], logprobs=1),
    Sampling(repetition_penalty=1.5, frequency_penalty=1.0, min_tokens=5),
    Sampling(temperature=1e-9, top_k=1),
    Sampling(temperature=1.5, ignore_eos=True),
]


def kind(request: int) -> Sampling:
    return replace(KINDS[request % len(KINDS)], seed=request)


def a_submit(request: int, *, prompt: int = 9, max_tokens: int = 24) -> Submit:
    tokens = [7] * (request % 3) + [(request * 5 + i) % 50 for i in range(prompt)]
    return make_submit(
        request, tokens, max_tokens=max_tokens, sampling=kind(request), stop_ids=[5, 11, 31]
    )


def assert_same(heard: Heard, submits: list[Submit]) -> None:
    for submit in submits:
        ids, logprobs, finish = plain(submit)
        assert heard.ids(submit.request) == ids, submit
        assert heard.logprobs(submit.request) == logprobs
        assert heard.finish(submit.request) == finish
