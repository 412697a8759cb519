//! Where costs are hardly equal, or hardly not: random fleets seldom have such.

use proptest::prelude::*;

use super::*;
use crate::core::candidate::Candidate;
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Role, StepCost};
use crate::core::policy::pairs::Options;

/// What a worker costs, and by which share less its floor is.
#[derive(Debug, Clone)]
struct Cost {
    total_ms: f64,
    ttft_ms: f64,
    below: f64,
    why: Option<Exclusion>,
}

struct Told {
    floors: CostFloors,
    costs: Vec<Cost>,
}

impl Cost {
    fn estimate(&self) -> Estimate {
        let decode_ms = self.total_ms - self.ttft_ms;
        Estimate { queue_ms: self.ttft_ms, decode_ms, ..Estimate::default() }
    }
}

impl Prospects for Told {
    fn can_pull(&self, _: usize) -> bool {
        false
    }

    fn named(&self, place: usize) -> TurnName {
        (candidate(place, None).id, candidate(place, None).name.digest())
    }

    fn floors(&self) -> &CostFloors {
        &self.floors
    }

    fn estimate(&mut self, place: usize) -> Estimate {
        let estimate = self.costs[place].estimate();
        self.floors.raise(place, &estimate);
        estimate
    }

    fn decode_floor_ms(&self, _: usize, _: f64) -> f64 {
        0.0
    }

    fn last_tokens(&self, _: usize) -> f64 {
        0.0
    }

    fn pair_ms(&mut self, _: usize, _: usize) -> f64 {
        unreachable!("nobody can pull")
    }
}

fn candidate(place: usize, excluded: Option<Exclusion>) -> Candidate {
    let cost =
        StepCost { fixed_ms: 1.0, prefill_ms: 1.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
    let load = WorkerLoad::idle(cost);
    Candidate { excluded, ..Candidate::with(place as u32, Role::Both, load) }
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

fn cost() -> impl Strategy<Value = Cost> {
    let about = |ms: f64| {
        let by = vec![0.0, 1e-12, 4e-7, 1e-6 - 1e-12, 1e-6, 1e-6 + 1e-12, 1.4e-6, 2e-6, 1e-3, 0.5];
        prop::sample::select(by).prop_map(move |more| ms * (1.0 + more))
    };
    let below = prop::sample::select(vec![0.0, 1e-12, 1e-9, 1e-9, 3e-7, 1e-6, 1e-3, 0.9]);
    let why = prop::option::weighted(0.1, Just(Exclusion::Full));
    (about(100.0), about(10.0), below, why).prop_map(|(total_ms, ttft_ms, below, why)| Cost {
        total_ms,
        ttft_ms,
        below,
        why,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn who_is_as_good_as_equal_has_its_turn_among_few_as_among_all(
        costs in prop::collection::vec(cost(), 1..40),
        last in prop::option::of(0..40_u32),
        session in prop::option::of(any::<u64>()),
        deadline_ms in prop::option::of(prop::sample::select(vec![9.0, 10.0, 10.000_01, 11.0])),
    ) {
        let ask = Ask { session, deadline_ms, ..an_ask() };
        let mut eligible = Eligible::default();
        for (place, cost) in costs.iter().enumerate() {
            eligible.add(place, true, cost.why);
        }
        let floors = costs.iter().map(|cost| [cost.total_ms, cost.ttft_ms].map(|ms| ms * (1.0 - cost.below)));
        let mut told = Told { floors: CostFloors::with(floors), costs: costs.clone() };
        let kv = Kv { last: last.map(WorkerId), last_prefill: None };
        let found = kv.shortlist(&mut told, &eligible, &ask);
        let choose = |places: &[usize]| {
            let candidates: Vec<_> = places.iter().map(|i| candidate(*i, costs[*i].why)).collect();
            let estimates: Vec<_> = places.iter().map(|i| costs[*i].estimate()).collect();
            let options = Options::of(&candidates, &estimates, &ask);
            (!options.wholes.is_empty()).then(|| {
                let chosen = kv.clone().pick(&options);
                options.wholes[chosen.whole].candidate.id
            })
        };
        let all: Vec<_> = (0..costs.len()).collect();
        let Some(Shortlist { places, left_out }) = found else {
            prop_assert_eq!(choose(&all), None);
            return Ok(());
        };
        prop_assert_eq!(choose(&places), choose(&all));
        // the best are there, and of the others the cheapest is told
        let mut order = all;
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
        prop_assert_eq!(left_out, LeftOut { candidates: count, excluded, least_ms });
    }
}

#[test]
fn where_a_cost_is_no_number_all_are_looked_at() {
    for (lowest_ms, is_none) in [(90.0, false), (f64::NAN, true)] {
        let of = |total_ms| Cost { total_ms, ttft_ms: 10.0, below: 0.0, why: None };
        let mut costs = vec![of(100.0); 40];
        costs[20] = of(lowest_ms);
        let mut eligible = Eligible::default();
        (0..costs.len()).for_each(|place| eligible.add(place, true, None));
        let floors = costs.iter().map(|cost| [cost.total_ms.min(80.0), 10.0]);
        let mut told = Told { floors: CostFloors::with(floors), costs };
        let kv = Kv { last: None, last_prefill: None };
        assert_eq!(kv.shortlist(&mut told, &eligible, &an_ask()).is_none(), is_none);
    }
}
