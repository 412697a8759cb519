"""The sampler: exact distributions, no influence of batch mates, the same numbers everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.engine.errors import RequestError
from headrace.engine.sampling import noise
from headrace.engine.sampling.device_logits import DeviceLogits, bits_on_device
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits import Draws, TokenIds
from headrace.engine.sampling.penalties import Penalties
from headrace.engine.sampling.sampler import Sampler, check_sampling, needs_penalties
from headrace.engine.sequence import Key, Sequence
from headrace.wire.frames import Ranked, Sampling, TokenLogprob
from helpers.engine.distribution import chi_squared, cut
from helpers.engine.sampling_rows import one_each, take_row
from helpers.engine.toy import make_submit
from helpers.require import missing

VOCAB = 64
DRAWS = 6_000
PINNED_BITS = [
    [1087771678, 1983588720, 2127695735, 1044273951],
    [18918147, 815829808, 1120821264, 1484431379],
    [1261365380, 519661155, 869567372, 321051269],
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        missing("cuda", "there is no CUDA device")
    return request.param


def make_sequence(
    sampling: Sampling,
    *,
    batch_row: int = 0,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Sequence:
    ids = np.array(prompt or [1, 2, 3], dtype=np.int32)
    answer = generated or []
    penalties = None
    if needs_penalties(sampling):
        penalties = Penalties(ids, answer, with_prompt=sampling.repetition_penalty != 1)
    return Sequence(
        key=Key(0, batch_row),
        arrival=batch_row,
        priority=0,
        prompt=ids,
        listed=answer,
        limit=1 << 20,
        sampling=sampling,
        stop_ids=stop_ids,
        salt=b"",
        deadline_s=None,
        names=[],
        penalties=penalties,
        batch_row=batch_row,
    )


class Sampled(NamedTuple):
    """One token for each sequence; `None` where the logits were not finite."""

    ids: list[int | None]
    logprobs: list[TokenLogprob | None]


def sample_with(sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
    rows = one_each(sequences)
    sampled = sampler.sample(logits_of(logits), rows)
    logprobs = sampler.logprobs(sampled, rows, np.ones(len(sequences), np.bool_))
    return Sampled([token if token >= 0 else None for token in sampled.ids.tolist()], logprobs)


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
    sampler = Sampler(logits.shape[1], max(s.batch_row or 0 for s in sequences) + 1)
    for sequence in sequences:
        take_row(sampler, sequence)
    return sample_with(sampler, logits.clone(), sequences)


def frequencies(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.int64]:
    """How often each token is drawn from the same logits, with one seed for each draw."""
    batch = 500
    counts = np.zeros(len(logits), dtype=np.int64)
    sampler = Sampler(len(logits), batch)
    for start in range(0, DRAWS, batch):
        sequences = [
            make_sequence(replace(sampling, seed=start + i), batch_row=i) for i in range(batch)
        ]
        for sequence in sequences:
            take_row(sampler, sequence)
        rows = torch.from_numpy(np.tile(logits, (batch, 1)))
        counts += np.bincount(
            sampler.sample(logits_of(rows), one_each(sequences)).ids, minlength=len(logits)
        )
    return counts


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def expected(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The textbook: sort, cut, normalise."""
    return cut(softmax(logits / sampling.temperature), sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(temperature=1.0, top_k=7),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=2.0, top_p=0.95),
        Sampling(temperature=1.0, min_p=0.05),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
        # After top-k each of the other two cuts alone, or one would hide that the other is not done.
        Sampling(temperature=1.3, top_k=20, top_p=0.6),
        Sampling(temperature=1.3, top_k=20, min_p=0.2),
        Sampling(temperature=1.0, top_p=0.9, min_p=0.2),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(sampling: Sampling) -> None:
    logits = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32) * 2
    z = chi_squared(frequencies(logits, sampling), expected(logits, sampling), DRAWS)
    assert z < 5, f"chi-squared is {z:.1f} deviations above its mean"


def test_draws_at_successive_positions_are_independent() -> None:
    logits = torch.zeros((1, 8))
    counts = np.zeros((8, 8), dtype=np.int64)
    sampler = Sampler(8, 1)
    before = 0
    for position in range(DRAWS):
        sequence = make_sequence(Sampling(temperature=1.0, seed=5))
        sequence.total += position  # only their number counts
        take_row(sampler, sequence)
        token = sample_with(sampler, logits, [sequence]).ids[0]
        assert token is not None
        counts[before, token] += 1
        before = token
    assert chi_squared(counts.ravel(), np.full(64, 1 / 64), DRAWS) < 5


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, [9, 30, 31]] = 4.0
    assert sample(logits, [make_sequence(Sampling())]).ids == [9]


def many_kinds() -> list[Sampling]:
    kinds = [
        Sampling(),
        Sampling(logprobs=3),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=0.7, top_k=20, logprobs=5),
        Sampling(temperature=1.1, top_k=300, top_p=0.5, min_p=0.01),
        Sampling(temperature=1.5, min_p=0.1, frequency_penalty=0.5),
        Sampling(repetition_penalty=1.3, presence_penalty=0.2, logprobs=0),
        Sampling(temperature=1.0, logit_bias=[Ranked(3, 5.0), Ranked(4, -100.0)]),
    ]
    return [replace(kinds[i % len(kinds)], seed=i) for i in range(32)]


@pytest.mark.parametrize("vocab", [1000, 4999])
def test_a_row_is_the_same_alone_and_among_others(vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((32, vocab), generator=generator) * 3
    sequences = [
        make_sequence(s, batch_row=i, generated=[i, i, 7], prompt=[5, i + 1])
        for i, s in enumerate(many_kinds())
    ]
    together = sample(logits, sequences)
    for row, sequence in enumerate(sequences):
        alone = sample(logits[row : row + 1], [sequence])
        assert alone.ids[0] == together.ids[row]
        assert alone.logprobs[0] == together.logprobs[row]  # to the bit


def test_other_seeds_and_positions_give_other_tokens() -> None:
    logits = torch.zeros((40, VOCAB))
    seeds = [make_sequence(Sampling(temperature=1.0, seed=i), batch_row=i) for i in range(40)]
    assert len(set(sample(logits, seeds).ids)) > 15
    places = [
        make_sequence(Sampling(temperature=1.0), batch_row=i, generated=[0] * i) for i in range(40)
    ]
    assert len(set(sample(logits, places).ids)) > 15


def test_noise_is_the_same_everywhere() -> None:
    key, key2 = noise.keys(
        np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 7, 2**31], dtype=np.int64)
    )
    tokens = np.array([0, 1, 2, 49151], dtype=np.uint32)
    found = noise.bits(tokens[None, :], key[:, None], key2[:, None])
    # Pinned: a resumed request must draw on a new worker what the old one would have drawn.
    assert found.tolist() == PINNED_BITS


def test_noise_on_the_device_is_that_on_the_host(device: str) -> None:
    tokens = np.arange(5000, dtype=np.uint32)
    key, key2 = noise.keys(np.array([99], dtype=np.uint64), np.array([1234], dtype=np.int64))
    found = bits_on_device(
        torch.arange(5000, dtype=torch.int32, device=device),
        torch.from_numpy(key.view(np.int32)).to(device),
        torch.from_numpy(key2.view(np.int32)).to(device),
    )
    assert (found.cpu().numpy() == noise.bits(tokens, key[0], key2[0])).all()


@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.7, 0.0), (0.999, 0.0), (0.9, 0.1)])
def test_the_race_on_the_device_has_the_same_winners(
    top_p: float, min_p: float, device: str
) -> None:
    rows, vocab = 64, 3000
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(2)) * 2
    key, key2 = noise.keys(np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64))
    draws = Draws(
        best=logits.amax(dim=1).numpy(),
        temperature=np.full(rows, 0.8),
        top_k=np.zeros(rows, dtype=np.int64),
        top_p=np.full(rows, top_p),
        min_p=np.full(rows, min_p),
        key=key,
        key2=key2,
    )
    tokens = TokenIds(np.arange(vocab, dtype=np.int32))
    host = logits_of(logits).race(draws, tokens)
    other = DeviceLogits(logits.to(device)).race(draws, tokens)
    assert (host == other).all()


def test_top_k_breaks_ties_by_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    counts = frequencies(logits, Sampling(temperature=1.0, top_k=4))
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(4))
    sampling = Sampling(
        temperature=2.0, top_k=5, logprobs=4, logit_bias=[Ranked(11, 100.0)], seed=1
    )
    found = sample(logits, [make_sequence(sampling)])
    assert found.ids == [11]  # by its bias
    entry = found.logprobs[0]
    assert entry is not None
    exact = torch.log_softmax(logits.double(), dim=1)[0]
    assert entry.logprob == pytest.approx(float(exact[11]), abs=1e-5)
    best = exact.topk(4)
    assert [r.token for r in entry.top] == best.indices.tolist()
    assert [r.value for r in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logit_bias_forces_and_forbids() -> None:
    logits = torch.randn((2, VOCAB), generator=torch.Generator().manual_seed(5))
    best = int(logits[1].argmax())
    forced = make_sequence(Sampling(logit_bias=[Ranked(40, 100.0)]), batch_row=0)
    forbidden = make_sequence(Sampling(logit_bias=[Ranked(best, -100.0)]), batch_row=1)
    ids = sample(logits, [forced, forbidden]).ids
    assert ids[0] == 40
    assert ids[1] == int(logits[1].topk(2).indices[1])


def test_penalties_are_those_of_the_definition() -> None:
    logits = torch.tensor([[3.0, -1.0, 2.9, 2.0, 0.5]])
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logprobs=0
    )
    sequence = make_sequence(sampling, prompt=[0, 1], generated=[2, 2])
    sampler = Sampler(5, 1)
    take_row(sampler, sequence)
    edited = logits.clone()
    sample_with(sampler, edited, [sequence])
    assert edited[0].tolist() == pytest.approx([1.5, -2.0, 2.9 / 2 - 0.25 - 2 * 0.5, 2.0, 0.5])


def test_penalty_counts_grow_token_by_token() -> None:
    built = Penalties(np.array([3, 3, 9], dtype=np.int32), [], with_prompt=True)
    answer = [int(i) for i in np.random.default_rng(0).integers(0, 500, size=900)]
    for token in answer:
        built.add(token)
    fresh = Penalties(np.array([3, 3, 9], dtype=np.int32), answer, with_prompt=True)
    assert dict(zip(built.ids.tolist(), built.counts.tolist(), strict=True)) == {
        token: answer.count(token) for token in {3, 9, *answer}
    }
    assert built.ids.tolist() == fresh.ids.tolist()


def test_no_stop_token_before_min_tokens() -> None:
    logits = torch.zeros((2, VOCAB))
    logits[:, 6] = 9.0
    logits[:, 8] = 5.0
    early = make_sequence(
        Sampling(min_tokens=3), batch_row=0, generated=[1, 1], stop_ids=frozenset([6])
    )
    late = make_sequence(
        Sampling(min_tokens=3), batch_row=1, generated=[1, 1, 1], stop_ids=frozenset([6])
    )
    assert sample(logits, [early, late]).ids == [8, 6]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float) -> None:
    logits = torch.zeros((3, VOCAB))
    logits[1, 5] = bad
    logits[2, 7] = 1.0
    sequences = [
        make_sequence(Sampling(temperature=1.0), batch_row=0),
        make_sequence(Sampling(temperature=1.0, top_p=0.5, logprobs=2), batch_row=1),
        make_sequence(Sampling(), batch_row=2),
    ]
    ids = sample(logits, sequences).ids
    assert ids[0] is not None
    assert ids[1:] == [None, 7]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=float("nan")),
        Sampling(temperature=float("inf")),
        Sampling(top_p=0.0),
        Sampling(top_p=1.5),
        Sampling(min_p=-0.1),
        Sampling(repetition_penalty=0.0),
        Sampling(presence_penalty=float("inf")),
        Sampling(logprobs=1000),
        Sampling(prompt_logprobs=120),
        Sampling(logit_bias=[Ranked(VOCAB, 1.0)]),
        Sampling(logit_bias=[Ranked(0, float("nan"))]),
    ],
    ids=str,
)
def test_bad_sampling_is_named(sampling: Sampling) -> None:
    with pytest.raises(RequestError) as caught:
        check_sampling(sampling, VOCAB, prompt_tokens=10_000)
    assert caught.value.kind == "bad_sampling"


def test_extreme_but_legal_sampling_works() -> None:
    logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(6)) * 1e4
    kinds = [
        Sampling(temperature=1e-5),
        Sampling(temperature=1e9),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.0, top_k=2**32 - 1),
        Sampling(temperature=1.0, top_k=1),
    ]
    ids = sample(logits, [make_sequence(s, batch_row=i) for i, s in enumerate(kinds)]).ids
    best = logits.argmax(dim=1).tolist()
    assert [ids[i] for i in (0, 2, 3, 5)] == [best[i] for i in (0, 2, 3, 5)]
    assert make_submit(0, [1]).sampling == Sampling()
