"""How many tokens are drafted: what is learnt, what follows from it, and that it is found out when it was wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.engine.speculative.adaptive import (
    PATIENCE,
    PROBE_AT_MOST_EVERY,
    TRIED,
    TRIES,
    UNTRIED,
    Adaptive,
)
from headrace.wire.frames import Ranked, Sampling
from helpers.engine.drafting_engine import Heard, assert_same, make_engine, run
from helpers.engine.toy import make_submit

ROWS = 64


class Machine:
    """Steps of `count` sequences whose drafts are right with a chance, on a machine with these costs in ms."""

    def __init__(
        self,
        count: int,
        *,
        right: float | list[float],
        fixed: float,
        row: float,
        draft: float,
        most: int = 3,
        seed: int = 5,
        noise: float = 0.0,
        drift: float = 0.0,
        varies: bool = False,
    ) -> None:
        self.adaptive = Adaptive(most, ROWS)
        self.batch_rows = np.arange(count)
        for batch_row in self.batch_rows.tolist():
            self.adaptive.take_row(batch_row)
        self.right = np.broadcast_to(np.array(right), count)
        self.costs = fixed, row, draft
        self.random = np.random.default_rng(seed)
        self.noise, self.drift, self.slower = noise, drift, 0.0
        self.varies = varies
        self.made = np.zeros(count, dtype=np.int64)  # drafts of each so far
        self.tokens = self.ms = 0.0

    def only(self, count: int) -> None:
        """The others are gone."""
        self.batch_rows, self.right, self.made = (
            self.batch_rows[:count],
            self.right[:count],
            self.made[:count],
        )

    def steps(self, steps: int) -> list[int]:
        """Drafts of each step."""
        totals: list[int] = []
        fixed, row, draft = self.costs
        most = np.full(len(self.batch_rows), self.adaptive.most)
        for _ in range(steps):
            drafts = self.adaptive.choose(self.batch_rows, most)
            follows = int(self.adaptive.keeps_up(self.batch_rows).sum())
            self.slower = 0.97 * self.slower + self.drift * self.random.standard_normal()
            ms = 0.0
            chances = self._chances()
            made = np.zeros_like(drafts)
            going = np.flatnonzero(drafts)
            for depth in range(1, self.adaptive.most + 1):
                if computed := follows if depth == 1 else len(going):
                    took = draft * computed + fixed / 30
                    if len(going):
                        self.adaptive.passes.note(computed, self._seen(took))
                    ms += took
                made[going] = depth
                going = going[drafts[going] > depth]
                if len(going):
                    sure = chances[going, depth - 1]
                    going = going[self.adaptive.goes_on(self.batch_rows[going], depth, sure)]
            totals.append(int(made.sum()))
            self.made += made
            rows = len(self.batch_rows) + totals[-1]
            self.adaptive.forward.note(rows, self._seen(fixed + row * rows))
            ms += fixed + row * rows
            hits = self.random.random(chances.shape) < chances
            accepted = np.minimum(np.cumprod(hits, axis=1).sum(axis=1), made)
            if made.any():
                self.adaptive.acceptance.checked(self.batch_rows, made, accepted)
            self.tokens += len(self.batch_rows) + accepted.sum()
            self.ms += ms
        return totals

    def _chances(self) -> NDArray[np.float64]:
        """Of each draft, `[sequences, most]`; the drafting layer knows them."""
        shape = len(self.batch_rows), self.adaptive.most
        right = np.broadcast_to(self.right[:, None], shape)
        return self.random.beta(right, 1 - right) if self.varies else right

    def _seen(self, ms: float) -> float:
        """What a clock shows: now and then, something else came in between."""
        other = 1.5 if self.noise and self.random.random() < 0.01 else 1.0
        noise = 1 + self.noise * self.random.standard_normal()
        return ms * max(noise, 0.1) * np.exp(self.slower) * other

    def speed(self, steps: int) -> float:
        """Tokens per ms over so many steps."""
        self.tokens = self.ms = 0.0
        self.steps(steps)
        return self.tokens / self.ms


def without(count: int, fixed: float, row: float) -> float:
    return count / (fixed + row * count)


def test_a_lone_sequence_drafts_all_where_a_row_costs_nothing() -> None:
    machine = Machine(1, right=0.7, fixed=10.0, row=0.2, draft=0.3)
    machine.steps(100)
    assert np.median(machine.steps(300)) == 3
    assert machine.speed(500) > 1.5 * without(1, 10.0, 0.2)


def test_a_large_batch_drafts_nothing_and_loses_little() -> None:
    machine = Machine(64, right=0.5, fixed=2.0, row=1.0, draft=0.5)
    totals = machine.steps(20) and machine.steps(3000)
    assert np.median(totals) == 0
    assert sum(total > 0 for total in totals) <= 8, "few probes"
    assert max(totals) <= 3 * 64 // TRIED
    assert machine.speed(3000) > 0.99 * without(64, 2.0, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_costs_between_are_worth_the_likelier_drafts_only(seed: int) -> None:
    """Second drafts are not worth it as long as nothing is known of them."""
    right = [0.95] * 4 + [0.1] * 4
    machine = Machine(8, right=right, fixed=10.0, row=1.0, draft=0.1, seed=seed)
    machine.steps(300)
    machine.made[:] = 0
    assert machine.speed(1000) > 1.25 * without(8, 10.0, 1.0)
    drafts = machine.made / 1000
    assert drafts[:4].min() > 1.5
    assert drafts[4:].max() < 0.1


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("count", [1, 4])
def test_the_layer_says_which_drafts_deserve_another_one(count: int) -> None:
    """Half of the drafts are right, and the layer knows which."""

    def speed(most: int, *, varies: bool) -> float:
        row, draft = 1.0 / count, 0.9 / count
        machine = Machine(
            count, right=0.5, fixed=10.0, row=row, draft=draft, most=most, varies=varies
        )
        machine.steps(200)
        return machine.speed(3000)

    sure = speed(3, varies=True)
    assert sure > 1.025 * speed(1, varies=True)
    assert sure > 1.025 * speed(3, varies=False)


def test_who_goes_on_is_who_is_surest() -> None:
    machine = Machine(8, right=0.9, fixed=10.0, row=0.6, draft=0.1)
    machine.steps(300)
    assert (machine.adaptive.choose(machine.batch_rows, np.full(8, 3)) == 3).all()
    sure = np.array([0.05, 0.95, 0.5, 0.99, 0.05, 0.9, 0.1, 0.05])
    goes = machine.adaptive.goes_on(machine.batch_rows, 1, sure)
    assert goes[[1, 3, 5]].all()
    assert not goes[[0, 4, 6, 7]].any()


def test_what_begins_has_to_pay_even_if_rows_cost_more_than_they_seem_to() -> None:
    machine = Machine(8, right=0.65, fixed=15.5, row=1.9, draft=0.12, most=1)
    machine.steps(UNTRIED + TRIES)
    adaptive = machine.adaptive
    adaptive.acceptance.rates[:] = 0.65
    batch_rows, most = machine.batch_rows, np.ones(8, dtype=np.int64)

    def drafts(doubt: float) -> bool:
        adaptive.forward._doubt = doubt**2
        return bool(adaptive.choose(batch_rows, most).all())

    assert not drafts(0.3), "5 % more tokens per ms, or 1 % less"
    assert drafts(0.03)
    assert drafts(0.3), "once it drafts, its own steps tell what rows cost"


def test_an_answer_without_room_to_draft_says_nothing_of_what_pays() -> None:
    machine = Machine(1, right=0.7, fixed=10.0, row=0.2, draft=0.3)
    machine.steps(100)
    none = np.zeros(1, np.int64)
    for _ in range(8):
        assert machine.adaptive.choose(machine.batch_rows, none).tolist() == [0]
        machine.adaptive.take_row(0)
        totals = machine.steps(60)
        assert totals.count(0) <= 2, "it need not begin anew"


def test_it_begins_again_when_the_batch_gets_small() -> None:
    machine = Machine(64, right=0.7, fixed=20.0, row=1.0, draft=0.1)
    machine.steps(200)
    machine.only(1)
    assert np.median(machine.steps(50)[10:]) >= 2


def test_a_module_that_becomes_good_is_found_out() -> None:
    machine = Machine(1, right=0.02, fixed=10.0, row=2.0, draft=1.0)
    machine.steps(500)
    assert np.median(machine.steps(200)) == 0
    machine.right = np.array([0.95])
    assert machine.speed(12 * PROBE_AT_MOST_EVERY) > 0
    assert np.median(machine.steps(200)) >= 1


def test_the_drafting_layer_follows_those_that_drafted_a_while_ago() -> None:
    adaptive = Adaptive(3, ROWS)
    batch_rows, none = np.arange(2), np.zeros(2, np.int64)
    for batch_row in batch_rows.tolist():
        adaptive.take_row(batch_row)
    for _ in range(UNTRIED):
        assert not adaptive.choose(batch_rows, np.full(2, 3)).any(), "what is new in memory is slow"
    drafts = adaptive.choose(batch_rows, np.full(2, 3))
    assert sorted(drafts.tolist()) == [0, 3], "one tries"
    for _ in range(PATIENCE):
        adaptive.choose(batch_rows, none)
        assert adaptive.keeps_up(batch_rows).tolist() == (drafts > 0).tolist()
    adaptive.choose(batch_rows, none)
    assert not adaptive.keeps_up(batch_rows).any()


def test_the_drafting_layer_follows_the_first_ones_before_anything_is_known() -> None:
    """Once. Otherwise the prompt that all others begin with would be in the cache without its keys."""
    for count in (1, 32):
        adaptive = Adaptive(2, ROWS)
        batch_rows = np.arange(count)
        for batch_row in batch_rows.tolist():
            adaptive.take_row(batch_row)
        adaptive.choose(batch_rows, np.full(count, 2))
        assert adaptive.keeps_up(batch_rows).all()
        adaptive.choose(batch_rows, np.full(count, 2))
        assert not adaptive.keeps_up(batch_rows).any()


def test_the_drafting_layer_does_not_follow_answers_of_one_token() -> None:
    adaptive = Adaptive(2, ROWS)
    adaptive.take_row(0)
    adaptive.choose(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert not adaptive.keeps_up(np.zeros(1, np.int64)).any()


def test_the_drafting_layer_follows_new_ones_only_where_others_draft() -> None:
    pays = Machine(4, right=0.8, fixed=10.0, row=0.2, draft=0.1)
    costs = Machine(4, right=0.8, fixed=2.0, row=5.0, draft=0.1)
    for machine, follows in [(pays, True), (costs, False)]:
        machine.steps(40)
        machine.adaptive.take_row(1)
        machine.adaptive.choose(machine.batch_rows, np.array([3, 0, 3, 3]))
        assert machine.adaptive.keeps_up(machine.batch_rows[1:2]).all() == follows


@given(data=st.data())
def test_any_numbers_give_possible_drafts(data: st.DataObject) -> None:
    draw = data.draw
    most = draw(st.integers(1, 3))
    adaptive = Adaptive(most, ROWS)
    ms = st.floats(0, 1e9, allow_nan=False)
    for _ in range(draw(st.integers(1, 40))):
        count = draw(st.integers(0, 8))
        batch_rows = np.array(draw(st.permutations(range(ROWS))))[:count]
        bounds = np.array(
            draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), np.int64
        )
        drafts = adaptive.choose(batch_rows, bounds)
        assert (drafts >= 0).all()
        assert (drafts <= np.minimum(bounds, most)).all()
        adaptive.forward.note(draw(st.integers(1, 999)), draw(ms))
        adaptive.passes.note(draw(st.integers(1, 99)), draw(ms))
        for depth in range(1, most):
            going = drafts > depth
            if going.any():
                sure = np.array(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
                goes = adaptive.goes_on(batch_rows[going], depth, sure[going])
                drafts[np.flatnonzero(going)[~goes]] = depth
        if drafts.any():
            adaptive.acceptance.checked(batch_rows, drafts, drafts // 2)


@pytest.mark.parametrize(
    "costs", [(1.0, 0.001, 0.001), (0.01, 1.0, 1.0), (1.0, 0.1, 0.05)], ids=str
)
def test_what_is_drafted_never_shows_in_an_answer(costs: tuple[float, float, float]) -> None:
    """In the second case it is turned off, and on again by probes, which leave holes behind."""
    engine, model = make_engine(3, agreement=0.7, fixed=False, blocks=200)
    model.fixed_ms, model.row_ms, model.draft_ms = costs
    submits = [make_submit(r, [r, 1, 2], max_tokens=150) for r in range(6)]
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert_same(heard, submits)
    drafted = [result.drafted for result in heard.results]
    if costs[1] == 1.0:
        assert np.median(drafted) == 0
        assert max(drafted[20:]) > 0, "a probe"
        holes = engine.pool.num_blocks - sum(map(engine.pool.keyed, range(200)))
        assert holes > 10
        again = make_submit(9, [0, 1, 2, *heard.ids(0)[:100]], max_tokens=100)
        engine.submit(again)
        model.fixed_ms, model.row_ms, model.draft_ms = 1.0, 0.0, 0.0
        more = run(engine, Heard())
        assert_same(more, [again])
        assert more.drafts(9)[1] > 0
    else:
        assert np.median(drafted[:40]) > 0


def test_the_engine_drafts_further_where_the_layer_is_sure() -> None:
    """The same layer, as often right; but with a bias that leaves no doubt."""
    engine, model = make_engine(3, agreement=0.7, fixed=False)
    model.fixed_ms, model.row_ms, model.draft_ms = 10.0, 1.5, 1.0
    doubt = Sampling()
    no_doubt = Sampling(logit_bias=[Ranked(9, 100.0)])
    per_step: list[float] = []
    for request, sampling in enumerate([doubt, no_doubt] * 3):
        engine.submit(make_submit(request, [request, 1, 2], max_tokens=120, sampling=sampling))
        heard = run(engine)
        drafted = [result.drafted for result in heard.results if result.drafted]
        per_step.append(float(np.mean(drafted)))
    assert min(per_step[3::2]) > max(per_step[2::2]) + 0.5


@pytest.mark.parametrize("count", [1, 4, 8, 32])
def test_short_runs_after_a_warm_up_lose_nothing(count: int) -> None:
    """Costs of a small model on a CPU: rows are almost free up to four, then each takes its full time."""
    machine = Machine(count, right=0.47, fixed=11.0 if count < 4 else 7.0, row=0.6, draft=0.2)
    if count >= 4:
        machine.costs = 7.0, 2.6, 0.2
    machine.steps(100)
    for _ in range(8):
        for batch_row in machine.batch_rows.tolist():
            machine.adaptive.take_row(batch_row)
        assert machine.speed(64) > 0.97 * without(count, *machine.costs[:2])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [4, 8, 32])
def test_noise_and_drift_hardly_make_it_draft_where_that_does_not_pay(
    count: int, seed: int
) -> None:
    machine = Machine(
        count, right=0.55, fixed=7.0, row=2.6, draft=0.2, seed=seed, noise=0.04, drift=0.02
    )
    machine.steps(100)
    for _ in range(12):
        for batch_row in machine.batch_rows.tolist():
            machine.adaptive.take_row(batch_row)
        assert machine.speed(64) > 0.97 * without(count, *machine.costs[:2])


def test_what_begins_to_draft_for_all_is_soon_done_without_for_a_step() -> None:
    machine = Machine(8, right=0.8, fixed=30.0, row=1.0, draft=0.1)
    totals = machine.steps(64)
    began = next(step for step, total in enumerate(totals) if total > 8)
    lows = [step - began for step in range(began, 64) if totals[step] < 8]
    assert lows[0] <= 2
    assert np.diff(lows[:3]).tolist() == [4, 8]


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_drift_do_not_keep_it_from_drafting_where_that_pays(seed: int) -> None:
    machine = Machine(
        8, right=0.8, fixed=30.0, row=1.0, draft=0.2, seed=seed, noise=0.04, drift=0.02
    )
    machine.steps(100)
    assert machine.speed(600) > 1.4 * without(8, *machine.costs[:2])


def test_a_size_keeps_what_it_learnt_while_others_run() -> None:
    machine = Machine(1, right=0.7, fixed=10.0, row=0.2, draft=0.1)
    machine.steps(100)
    others = Machine(32, right=0.7, fixed=2.0, row=3.0, draft=0.1)
    others.adaptive = machine.adaptive
    others.steps(100)
    assert np.median(machine.steps(3)) == 3
