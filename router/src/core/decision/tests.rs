//! A decision that was written down is made again to the same bytes.

use proptest::prelude::*;

use super::*;
use crate::core::candidate::digest;
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Role, StepCost};
use crate::core::policy::PolicyName;

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
                format!("request-{i}"),
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
