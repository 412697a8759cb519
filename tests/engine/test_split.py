"""One request on two engines: what is exported here arrives there, and the answer is that of one engine."""

from __future__ import annotations

import pytest

from headrace.wire.frames import Ranked, Sampling
from helpers.engine.legs import make_engine
from helpers.engine.pair import split, unsplit
from helpers.engine.toy import make_submit

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=4, logprobs=2),
    Sampling(temperature=1.2, top_k=10, repetition_penalty=1.3, seed=5, logprobs=0),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4, logprobs=1),
    Sampling(temperature=0.9, top_p=0.8, min_p=0.02, seed=6, logit_bias=[Ranked(7, 3.0)]),
    Sampling(temperature=1.0, seed=7, min_tokens=6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33])
def test_a_split_answer_is_that_of_one_engine(sampling: Sampling, length: int) -> None:
    prompt = [(7 * place) % 50 for place in range(length)]
    submit = make_submit(0, prompt, max_tokens=12, sampling=sampling, stop_ids=[3, 9])
    whole = unsplit(make_engine(), submit)
    prefill, decode = make_engine(), make_engine()
    for _ in range(2):  # the second time, both have cached it
        heard = split(prefill, decode, submit)
        assert (heard.ids, heard.logprobs, heard.finish) == (
            whole.ids,
            whole.logprobs,
            whole.finish,
        )
