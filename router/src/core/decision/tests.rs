//! A decision that was written down is made again to the same bytes.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::core::candidate::digest;
use crate::core::estimate::{WorkerLoad, coarse};
use crate::core::frame::{Role, StepCost};
use crate::core::policy::PolicyName;
use crate::core::transfer::{Sources, TransferCost};

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 1e-9..1e9f64, (0..1_000_000u32).prop_map(f64::from)]
}

prop_compose! {
    fn worker_load()(n in proptest::collection::vec(number(), 15), runs in any::<bool>()) -> WorkerLoad {
        WorkerLoad {
            cost: StepCost {
                fixed_ms: n[0],
                prefill_ms: n[1],
                context_ms: n[2] * 1e-6,
                row_ms: n[3],
                kv_ms: n[4] * 1e-6,
            },
            step_tokens: n[5],
            slots: n[6],
            occupied: n[7],
            rows: n[8].min(n[7]),
            kv_tokens: n[9],
            backlog_tokens: n[10],
            backlog_context: n[11],
            arriving_tokens: 0.0,
            elapsed_ms: n[12],
            backlog_runs: runs,
            blocks_used: n[13],
            blocks: n[14],
            blocks_cached: 0.0,
            reuse: 0.0,
            accepted: 1.0,
            group_ms: 0.0,
            group_rows: 0.0,
            group_prompt_ms: 0.0,
            group_prompt_steps: 0.0,
            pressure: 0.0,
        }
    }
}

prop_compose! {
    fn candidates()(
        worker_loads in proptest::collection::vec((worker_load(), 0..900u32, any::<bool>()), 1..9),
    ) -> Vec<Candidate> {
        let candidate = |(id, (worker_load, cached_tokens, full)): (u32, (WorkerLoad, u32, bool))| {
            Candidate {
                excluded: full.then_some(Exclusion::Full),
                occupied: id,
                booked_tokens: u64::from(id) * 10,
                held_tokens: cached_tokens,
                cached_tokens,
                ..Candidate::with(id, Role::Both, worker_load)
            }
        };
        (0..).zip(worker_loads).map(candidate).collect()
    }
}

proptest! {
    #[test]
    fn a_line_of_the_log_replays_to_the_same_bytes(
        candidates in candidates(),
        policy in proptest::sample::select(PolicyName::ALL.to_vec()),
        shadow in proptest::option::of(proptest::sample::select(PolicyName::ALL.to_vec())),
        output_tokens in 1.0..1e4f64,
        deadline_ms in proptest::option::of(number()),
        seed in any::<u64>(),
        session in any::<bool>(),
    ) {
        let chooser = |policy| Chooser::new(policy, seed);
        let (mut own, mut other) = (chooser(policy), shadow.map(chooser));
        let ask = Ask {
            prompt_tokens: 1000,
            max_tokens: 10_000,
            output_tokens,
            block_tokens: 16,
            block_bytes: 0,
            session: session.then(|| digest("s")),
            deadline_ms,
        };
        for i in 0..4 {
            let decision = decide(
                format!("request-{i}").into(),
                f64::from(i) / 3.0,
                ask.clone(),
                candidates.clone(),
                &mut own,
                other.as_mut(),
            );
            let line = serde_json::to_string(&decision).unwrap();
            let read: Decision = serde_json::from_str(&line).unwrap();
            prop_assert_eq!(&read, &decision);
            prop_assert_eq!(serde_json::to_string(&replay(&read)).unwrap(), line);
        }
    }
}

prop_compose! {
    fn many()(loads in proptest::collection::vec((worker_load(), 0..900u32, 0..4u8), 1..70)) -> Vec<Candidate> {
        let any = TransferCost { latency_ms: 2.0, mib_ms: 1.0, failing: 0.0 };
        let candidate = |(id, (load, cached_tokens, kind)): (u32, (WorkerLoad, u32, u8))| {
            let role = if kind == 0 { Role::Prefill } else { Role::Both };
            let sources = (role == Role::Both).then(|| Arc::new(Sources { any, known: Vec::new() }));
            let excluded = (kind == 1).then_some(Exclusion::Full);
            Candidate { excluded, cached_tokens, sources, ..Candidate::with(id * 3, role, load) }
        };
        (0..).zip(loads).map(candidate).collect()
    }
}

/// Ids that are to be kept, by sorting all; and what is to be said of the others.
fn worth_keeping(decision: &Decision) -> (BTreeSet<WorkerId>, Option<LeftOut>) {
    let all: Vec<_> = decision.candidates.iter().zip(&decision.estimates).collect();
    let mut kept = BTreeSet::new();
    for decodes in [false, true] {
        let mut kind: Vec<_> = all.iter().filter(|(c, _)| c.decodes() == decodes).collect();
        kind.sort_by(|(a, x), (b, y)| {
            let excluded = (a.excluded.is_some(), b.excluded.is_some());
            excluded.0.cmp(&excluded.1).then(coarse(x.total_ms()).total_cmp(&coarse(y.total_ms())))
        });
        kept.extend(kind.iter().take(8).map(|(c, _)| c.id));
    }
    kept.extend(decision.winner.into_iter().chain(decision.prefill));
    kept.extend(decision.pair.iter().flat_map(|pair| [pair.prefill, pair.decode]));
    let rest: Vec<_> = all.iter().filter(|(c, _)| !kept.contains(&c.id)).collect();
    let able = rest.iter().filter(|(c, _)| c.excluded.is_none());
    let mut totals: Vec<f64> = able.map(|(_, estimate)| estimate.total_ms()).collect();
    totals.sort_by(f64::total_cmp);
    let left_out = LeftOut {
        candidates: rest.len() as u32,
        excluded: (rest.len() - totals.len()) as u32,
        least_ms: totals.first().copied().map_or(0.0, coarse),
    };
    (kept, Some(left_out).filter(|_| !rest.is_empty()))
}

proptest! {
    #[test]
    fn a_shortened_decision_says_the_same_of_those_it_names_and_how_the_others_were(
        candidates in many(),
        policy in proptest::sample::select(PolicyName::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let ask = Ask {
            prompt_tokens: 1000,
            max_tokens: 100,
            output_tokens: 20.0,
            block_tokens: 16,
            block_bytes: 1 << 16,
            session: None,
            deadline_ms: None,
        };
        let mut chooser = Chooser::new(policy, seed);
        let whole = decide("r".into(), 0.0, ask, candidates, &mut chooser, None);
        let (ids, left_out) = worth_keeping(&whole);
        let (short, weighed) = whole.clone().shortened(LeftOut::default());
        prop_assert_eq!(short.left_out, left_out);
        prop_assert!(short.candidates.iter().map(|c| c.id).eq(ids));
        prop_assert_eq!((short.chosen(), short.chosen_prefill()), (whole.chosen(), whole.chosen_prefill()));
        for (candidate, estimate) in short.candidates.iter().zip(&short.estimates) {
            let i = whole.position(candidate.id).unwrap();
            prop_assert_eq!((candidate, estimate), (&whole.candidates[i], &whole.estimates[i]));
        }
        if left_out.is_none() {
            prop_assert_eq!(&replay(&short), &whole);
        } else {
            prop_assert_eq!((weighed.candidates, weighed.estimates), (whole.candidates, whole.estimates), "its memory");
        }
    }
}

#[test]
fn regret_is_what_the_other_choice_would_have_cost_more() {
    let cost =
        StepCost { fixed_ms: 1.0, prefill_ms: 1.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
    let worker_load = WorkerLoad { step_tokens: 1e9, blocks: 1e9, ..WorkerLoad::idle(cost) };
    let candidate = |id, cached_tokens| Candidate {
        held_tokens: cached_tokens,
        cached_tokens,
        ..Candidate::with(id, Role::Both, worker_load)
    };
    let mut shadow = Chooser::new(PolicyName::RoundRobin, 1);
    let ask = Ask {
        prompt_tokens: 1000,
        max_tokens: 1,
        output_tokens: 1.0,
        block_tokens: 10,
        block_bytes: 0,
        session: None,
        deadline_ms: None,
    };
    let workers = vec![candidate(0, 0), candidate(1, 600)];
    let mut own = Chooser::new(PolicyName::Kv, 1);
    let decision = decide("r".into(), 0.0, ask, workers, &mut own, Some(&mut shadow));
    assert_eq!(decision.winner, Some(WorkerId(1)));
    let shadow = decision.shadow.unwrap();
    assert_eq!(shadow.winner, WorkerId(0));
    assert!((shadow.regret_ms - 600.0).abs() < 1e-6, "{}", shadow.regret_ms);
}
