//! Where costs are hardly equal, or hardly not: random fleets seldom have such.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::core::candidate::Candidate;
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Role, StepCost};
use crate::core::policy::Choosable;
use crate::core::policy::pairs::Options;
use crate::core::transfer::{Sources, TransferCost};

/// What a decode worker adds to each pair: nine of ten tokens, one ms each.
const DECODE_MS: f64 = 9.0;

/// What a worker costs, and by which share less its floor is.
#[derive(Debug, Clone)]
struct Cost {
    total_ms: f64,
    ttft_ms: f64,
    below: f64,
    why: Option<Exclusion>,
    /// It only computes prompts.
    prompts: bool,
    /// What it waits for KV; `None`: it takes none.
    pull_ms: Option<f64>,
}

struct Told {
    floors: CostFloors,
    costs: Vec<Cost>,
    candidates: Vec<Candidate>,
    ask: Ask,
}

impl Cost {
    fn estimate(&self) -> Estimate {
        let decode_ms = self.total_ms - self.ttft_ms;
        Estimate { queue_ms: self.ttft_ms, decode_ms, ..Estimate::default() }
    }

    fn candidate(&self, place: usize) -> Candidate {
        let cost =
            StepCost { fixed_ms: 1.0, prefill_ms: 1.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
        let load = WorkerLoad::idle(cost);
        let role = if self.prompts { Role::Prefill } else { Role::Both };
        let sources = self.pull_ms.filter(|_| !self.prompts).map(|latency_ms| {
            let any = TransferCost { latency_ms, mib_ms: 0.0, failing: 0.0 };
            Arc::new(Sources { any, known: Vec::new() })
        });
        Candidate { excluded: self.why, sources, ..Candidate::with(place as u32, role, load) }
    }
}

impl Told {
    fn of(costs: Vec<Cost>, ask: Ask) -> Self {
        let floors = costs
            .iter()
            .map(|cost| [cost.total_ms, cost.ttft_ms].map(|ms| ms * (1.0 - cost.below)));
        let floors = CostFloors::with(floors);
        let candidates = (0..).zip(&costs).map(|(place, cost)| cost.candidate(place)).collect();
        Self { floors, costs, candidates, ask }
    }

    fn eligible(&self) -> Eligible {
        let mut eligible = Eligible::default();
        for (place, cost) in self.costs.iter().enumerate() {
            eligible.add(place, !cost.prompts, cost.why);
        }
        eligible
    }
}

impl Prospects for Told {
    fn can_pull(&self, place: usize) -> bool {
        self.candidates[place].sources.is_some()
    }

    fn named(&self, place: usize) -> TurnName {
        (self.candidates[place].id, self.candidates[place].name.digest())
    }

    fn floors(&self) -> &CostFloors {
        &self.floors
    }

    fn estimate(&mut self, place: usize) -> Estimate {
        let estimate = self.costs[place].estimate();
        self.floors.raise(place, &estimate);
        estimate
    }

    fn decode_floor_ms(&self, decode: usize, _: f64) -> f64 {
        DECODE_MS * (1.0 - self.costs[decode].below)
    }

    fn last_tokens(&self, _: usize) -> f64 {
        0.0
    }

    fn pair_ms(&mut self, prefill: usize, decode: usize) -> f64 {
        let estimates = [prefill, decode].map(|place| self.estimate(place));
        let [source, leg] = [prefill, decode].map(|place| &self.candidates[place]);
        let way = &leg.sources.as_ref().expect("it can pull").any;
        leg.decode_leg(&self.ask, &estimates[1]).pair_ms(
            estimates[0].total_ms(),
            &source.source(&self.ask, &estimates[0]),
            way,
        )
    }
}

fn an_ask() -> Ask {
    Ask {
        prompt_tokens: 100,
        max_tokens: 10,
        output_tokens: 10.0,
        block_tokens: 16,
        block_bytes: 0,
        session: None,
        deadline_ms: None,
    }
}

/// `late`: of this share of them the first token comes too late for every deadline, and they would be the cheapest.
fn cost(late: f64, prompts: f64) -> impl Strategy<Value = Cost> {
    let about = |ms: f64| {
        let by = vec![0.0, 1e-12, 4e-7, 1e-6 - 1e-12, 1e-6, 1e-6 + 1e-12, 1.4e-6, 2e-6, 1e-3, 0.5];
        prop::sample::select(by).prop_map(move |more| ms * (1.0 + more))
    };
    let below = prop::sample::select(vec![0.0, 1e-12, 1e-9, 1e-9, 3e-7, 1e-6, 1e-3, 0.9]);
    let why = prop::sample::select(vec![Exclusion::Full, Exclusion::Closed, Exclusion::Backlog]);
    let why = prop::option::weighted(0.1, why);
    let pull_ms = prop::option::weighted(
        0.7,
        prop::sample::select(vec![0.0, 0.0, 0.0, 5e-5, 1e-4, 1.0, f64::INFINITY, f64::NAN]),
    );
    let is = prop::bool::weighted;
    let kind = (is(late), is(prompts), pull_ms);
    (about(100.0), about(10.0), below, why, kind).prop_map(
        |(total_ms, ttft_ms, below, why, (late, prompts, pull_ms))| {
            let total_ms = if prompts { total_ms - DECODE_MS } else { total_ms };
            let (total_ms, ttft_ms) =
                if late { (total_ms / 2.0, 2.0 * ttft_ms) } else { (total_ms, ttft_ms) };
            let why = why.filter(|why| !prompts || *why != Exclusion::Backlog); // all that compute prompts, or none
            Cost { total_ms, ttft_ms, below, why, prompts, pull_ms }
        },
    )
}

/// The costs of some workers, and by when their first token has to come.
fn costs() -> impl Strategy<Value = (Vec<Cost>, Option<f64>)> {
    let deadline_ms = prop::sample::select(vec![9.0, 10.0, 10.000_01, 11.0]);
    let kinds = prop::sample::select(vec![(0.0, 0.0), (0.0, 0.4), (0.5, 0.0), (0.5, 0.3)]);
    let (hurries, long) = (any::<bool>(), any::<bool>());
    // those of a crowd are the cheapest but for what no decision tells apart, and more than it keeps
    let crowd = prop::sample::select(vec![0, 0, 0, 20]);
    (kinds, deadline_ms, hurries, long, crowd).prop_flat_map(
        |((late, prompts), deadline_ms, hurries, long, crowd)| {
            let hurries = hurries || late > 0.0;
            let costs = prop::collection::vec(cost(late, prompts), 1..40);
            let costs = costs.prop_map(move |mut costs| {
                for cost in costs.iter_mut().filter(|cost| long && cost.prompts) {
                    cost.why = cost.why.or(Some(Exclusion::Backlog));
                }
                for cost in costs.iter_mut().filter(|cost| !cost.prompts).take(crowd) {
                    (cost.total_ms, cost.below) = (100.0 * (1.0 + 4e-7), 0.0);
                }
                costs
            });
            (costs, Just(hurries.then_some(deadline_ms)))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8_000))]

    #[test]
    fn who_is_as_good_as_equal_has_its_turn_among_few_as_among_all(
        (costs, deadline_ms) in costs(),
        last in prop::option::of(0..40_u32),
        last_prefill in prop::option::of(0..40_u32),
        session in prop::option::of(any::<u64>()),
    ) {
        let ask = Ask { session, deadline_ms, ..an_ask() };
        let mut told = Told::of(costs.clone(), ask.clone());
        let kv = Kv { last: last.map(WorkerId), last_prefill: last_prefill.map(WorkerId) };
        let eligible = told.eligible();
        let found = kv.shortlist(&mut told, &eligible, &ask);
        let choose = |places: &[usize]| {
            let candidates: Vec<_> = places.iter().map(|i| told.candidates[*i].clone()).collect();
            let estimates: Vec<_> = places.iter().map(|i| costs[*i].estimate()).collect();
            let options = Options::of(&candidates, &estimates, &ask);
            let id = |of: &[Choosable<'_>], i: usize| of[i].candidate.id;
            (!options.wholes.is_empty()).then(|| {
                let mut after = kv.clone();
                let chosen = after.pick(&options);
                let pair = |(prefill, whole)| (id(&options.prefills, prefill), id(&options.wholes, whole));
                let prefill = chosen.prefill.map(|prefill| id(&options.prefills, prefill));
                (id(&options.wholes, chosen.whole), prefill, chosen.best_pair.map(pair), after)
            })
        };
        let all: Vec<_> = (0..costs.len()).collect();
        let Some(Shortlist { places, left_out }) = found else {
            // where some ways take for ever, it may as well look at all
            let for_ever = |cost: &Cost| cost.pull_ms.is_some_and(|ms| !ms.is_finite());
            prop_assert!(choose(&all).is_none() || costs.iter().any(for_ever));
            return Ok(());
        };
        prop_assert_eq!(choose(&places), choose(&all));
        // the best of each kind are there, and of the others the cheapest is told
        let mut expected = LeftOut::default();
        for prompts in [true, false] {
            let mut order: Vec<_> = all.iter().copied().filter(|i| costs[*i].prompts == prompts).collect();
            order.sort_by(|a, b| {
                let key = |i: &usize| (costs[*i].why.is_some(), coarse(costs[*i].total_ms));
                let ((a_excluded, a_ms), (b_excluded, b_ms)) = (key(a), key(b));
                a_excluded.cmp(&b_excluded).then(a_ms.total_cmp(&b_ms)).then(a.cmp(b))
            });
            prop_assert!(order.iter().take(KEPT).all(|place| places.contains(place)));
            let others: Vec<_> = order.iter().filter(|place| !places.contains(place)).collect();
            let able: Vec<_> = others.iter().filter(|place| costs[***place].why.is_none()).collect();
            let least_ms = able.first().map_or(0.0, |place| coarse(costs[***place].total_ms));
            let (count, excluded) = (others.len() as u32, (others.len() - able.len()) as u32);
            expected = expected.with(&LeftOut { candidates: count, excluded, least_ms });
        }
        prop_assert_eq!(left_out, expected);
    }
}

#[test]
fn where_a_cost_is_no_number_all_are_looked_at() {
    for (lowest_ms, is_none) in [(90.0, false), (f64::NAN, true)] {
        let of = |total_ms| Cost {
            total_ms,
            ttft_ms: 10.0,
            below: 0.0,
            why: None,
            prompts: false,
            pull_ms: None,
        };
        let mut costs = vec![of(100.0); 40];
        costs[20] = of(lowest_ms);
        let mut told = Told::of(costs, an_ask());
        told.floors =
            CostFloors::with(told.costs.iter().map(|cost| [cost.total_ms.min(80.0), 10.0]));
        let kv = Kv { last: None, last_prefill: None };
        let eligible = told.eligible();
        assert_eq!(kv.shortlist(&mut told, &eligible, &an_ask()).is_none(), is_none);
    }
}

/// Of a worker that takes whole requests and no KV, whose floors are exact.
fn whole(total_ms: f64, ttft_ms: f64) -> Cost {
    Cost { total_ms, ttft_ms, below: 0.0, why: None, prompts: false, pull_ms: None }
}

/// The places that a choice looks at, after one that took this worker.
fn places(costs: Vec<Cost>, ask: &Ask, last: u32) -> Vec<usize> {
    let mut told = Told::of(costs, ask.clone());
    let kv = Kv { last: Some(WorkerId(last)), last_prefill: None };
    let eligible = told.eligible();
    kv.shortlist(&mut told, &eligible, ask).unwrap().places
}

#[test]
fn a_pair_that_costs_as_much_as_is_just_equal_has_its_turn() {
    let enough_ms = 100.0 * (1.0 + TIE);
    let with = |prefill_ms: f64, latency_ms: f64| {
        let mut costs = vec![whole(200.0, 10.0); 40];
        costs[7] = Cost { pull_ms: Some(0.0), ..whole(300.0, 10.0) };
        costs[20] = Cost { prompts: true, ..whole(prefill_ms, 10.0) };
        costs[30] = Cost { pull_ms: Some(latency_ms), ..whole(300.0, 10.0) };
        costs
    };
    let pair_ms = |costs: &[Cost], decode| Told::of(costs.to_vec(), an_ask()).pair_ms(20, decode);
    let mut prefill_ms = 100.0 - (pair_ms(&with(0.0, 0.0), 7) + 1e-9);
    while pair_ms(&with(prefill_ms, 0.0), 7) < 100.0 {
        prefill_ms = prefill_ms.next_up();
    }
    let mut latency_ms = enough_ms - 100.0 - 1e-12;
    while pair_ms(&with(prefill_ms, latency_ms), 30) < enough_ms {
        latency_ms += 1e-15;
    }
    let costs = with(prefill_ms, latency_ms);
    assert_eq!([7, 30].map(|decode| pair_ms(&costs, decode)), [100.0, enough_ms]);
    assert!(places(costs, &an_ask(), 7).contains(&30));
}

#[test]
fn where_the_least_is_not_known_to_a_millionth_nobody_is_passed_over_for_it() {
    let least_ms = 100.0 * (1.0 + 4e-7);
    let mut costs = vec![whole(300.0, 10.0); 40];
    costs[..20].fill(whole(least_ms, 10.0)); // more than a decision keeps, so that the next one is not looked at
    costs[25] = Cost { below: 3e-7, ..whole(least_ms, 10.0) };
    costs[30] = whole(100.0 * (1.0 + 1.4e-6), 10.0);
    assert!(places(costs, &an_ask(), 28).contains(&30));
}

#[test]
fn one_that_only_seems_to_be_in_time_has_no_turn() {
    let ask = Ask { deadline_ms: Some(10.0), ..an_ask() };
    let mut costs = vec![whole(50.0, 20.0); 40];
    costs[5] = whole(300.0, 1.0); // the soonest, so that nobody else is looked at for that
    for place in [30, 32] {
        costs[place] = whole(100.0, 10.0);
    }
    costs[31] = Cost { below: 1e-9, ..whole(100.0 * (1.0 + 5e-7), 10.0 * (1.0 + 5e-10)) };
    assert!(places(costs, &ask, 30).contains(&32));
}
