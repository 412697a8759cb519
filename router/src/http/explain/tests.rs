//! What is said of a split request.

use super::*;
use crate::core::candidate::Ask;
use crate::core::decision::{Chooser, decide};
use crate::core::estimate::WorkerLoad;
use crate::core::frame::StepCost;
use crate::core::transfer::{Sources, TransferCost};

/// By a policy that always splits; the shadow weighs.
fn split() -> Decision {
    let cost =
        StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 0.0, row_ms: 0.1, kv_ms: 0.0 };
    let any = TransferCost { latency_ms: 2.0, mib_ms: 1.0, failing: 0.0 };
    let sources = Some(Arc::new(Sources { any, known: Vec::new() }));
    let decodes = Candidate::with(1, Role::Decode, WorkerLoad::idle(cost));
    let workers = vec![
        Candidate::with(0, Role::Prefill, WorkerLoad::idle(cost)),
        Candidate { sources, ..decodes },
    ];
    let ask = Ask {
        prompt_tokens: 160,
        max_tokens: 8,
        output_tokens: 8.0,
        block_tokens: 16,
        block_bytes: 1 << 20,
        session: None,
        deadline_ms: None,
    };
    let mut chooser = Chooser::new(PolicyName::LeastLoaded, 1);
    let mut shadow = Chooser::new(PolicyName::Kv, 1);
    decide("r".into(), 0.0, ask, workers, &mut chooser, Some(&mut shadow))
}

#[test]
fn a_split_shows_the_pair_its_parts_and_what_the_winner_alone_would_have_cost() {
    let explained = json!(Explanation::of(&split()));
    assert_eq!(
        (&explained["winner"], &explained["prefill"]),
        (&json!("worker-1"), &json!("worker-0"))
    );
    let pair = &explained["pair"];
    assert_eq!((&pair["prefill"], &pair["decode"]), (&json!("worker-0"), &json!("worker-1")));
    assert_eq!((&pair["prefill_ms"], &pair["transfer_ms"]), (&json!(21.0), &json!(12.0)));
    let candidates = explained["candidates"].as_array().unwrap();
    let roles: Vec<&Value> = candidates.iter().map(|one| &one["role"]).collect();
    assert_eq!(roles, ["prefill", "decode"]);
    assert_eq!(
        (&candidates[1]["transfer_ms"], &candidates[0]["decode_ms"]),
        (&json!(0.0), &json!(0.0))
    );
    let shadow = &explained["shadow"];
    assert_eq!((&shadow["winner"], shadow.get("prefill")), (&json!("worker-1"), None));
    assert_eq!(shadow["regret_ms"], json!(-12.0), "alone it would have been without the transfer");
}
