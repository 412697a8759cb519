//! The joint choice is the least of all, and it splits where that saves time.

use std::sync::Arc;

use proptest::prelude::*;

use crate::core::candidate::{Ask, Candidate, Exclusion, WorkerId};
use crate::core::decision::{Chooser, Decision, NoPlace, decide, replay};
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Role, StepCost};
use crate::core::policy::PolicyName;
use crate::core::transfer::{Sources, TransferCost};

const COST: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 1e-6, row_ms: 0.1, kv_ms: 1e-4 };
/// With [`ask`], 1000 tokens are 63 blocks of 1 MiB.
const BLOCK_BYTES: u64 = 1 << 20;

fn ask(prompt_tokens: u32) -> Ask {
    Ask {
        prompt_tokens,
        max_tokens: 200,
        output_tokens: 200.0,
        block_tokens: 16,
        block_bytes: BLOCK_BYTES,
        session: None,
        deadline_ms: None,
    }
}

fn way(latency_ms: f64, mib_ms: f64) -> TransferCost {
    TransferCost { latency_ms, mib_ms, failing: 0.0 }
}

fn prefill(id: u32) -> Candidate {
    Candidate::with(id, Role::Prefill, WorkerLoad::idle(COST))
}

/// One with so many rows.
fn decode(id: u32, rows: f64) -> Candidate {
    let kv_tokens = rows * 2_000.0;
    let worker_load = WorkerLoad { rows, occupied: rows, kv_tokens, ..WorkerLoad::idle(COST) };
    let sources = Sources { any: way(1.0, 0.01), known: Vec::new() };
    let sources = Some(Arc::new(sources));
    Candidate { sources, ..Candidate::with(id, Role::Decode, worker_load) }
}

fn choose(policy: PolicyName, ask: &Ask, workers: &[Candidate]) -> Decision {
    let mut chooser = Chooser::new(policy, 1);
    decide("request".into(), 0.0, ask.clone(), workers.to_vec(), &mut chooser, None)
}

fn kv(ask: &Ask, workers: &[Candidate]) -> (Option<u32>, Option<u32>) {
    let decision = choose(PolicyName::Kv, ask, workers);
    (decision.prefill.map(|id| id.0), decision.winner.map(|id| id.0))
}

#[test]
fn a_worker_is_estimated_by_what_its_role_does() {
    let ask = ask(8_000);
    let decode = decode(1, 40.0);
    let both = Candidate { role: Role::Both, ..decode.clone() };
    let [prompt, answer, whole] =
        [prefill(0), decode, both].map(|candidate| candidate.estimate(&ask));
    assert!(prompt.decode_ms == 0.0 && whole.decode_ms > 0.0);
    assert_eq!(answer.ttft_ms(), whole.ttft_ms());
    assert!(
        answer.interference_ms > 5.0 * whole.interference_ms,
        "rows there need not wait for prompts"
    );
}

#[test]
fn a_long_prompt_is_split_off_a_busy_worker_and_a_short_one_stays_on_an_idle_one() {
    assert_eq!(kv(&ask(8_000), &[prefill(0), decode(1, 40.0)]), (Some(0), Some(1)));
    assert_eq!(kv(&ask(50), &[prefill(0), decode(1, 0.0)]), (None, Some(1)));
}

#[test]
fn a_way_that_is_slower_than_computing_is_not_taken() {
    let mut busy = decode(1, 40.0);
    for (mib_ms, split) in [(0.01, true), (100.0, false)] {
        let known = vec![(WorkerId(0), way(1.0, mib_ms))];
        busy.sources = Some(Arc::new(Sources { any: way(1.0, 0.01), known }));
        let decision = choose(PolicyName::Kv, &ask(8_000), &[prefill(0), busy.clone()]);
        assert_eq!(decision.prefill.is_some(), split, "{mib_ms}");
        assert_eq!(decision.pair.unwrap().prefill, WorkerId(0), "shown either way");
    }
}

#[test]
fn only_what_is_left_at_the_end_of_the_prompt_is_waited_for() {
    // 8192 tokens, 512 MiB, in two steps of 4096: half of it can move while the other half is computed
    let moving = |mib_ms: f64| {
        let mut to = decode(1, 0.0);
        to.sources = Some(Arc::new(Sources { any: way(3.0, mib_ms), known: Vec::new() }));
        let pair = choose(PolicyName::RoundRobin, &ask(8_192), &[prefill(0), to]).pair.unwrap();
        (pair.estimate.prefill_ms, pair.estimate.transfer_ms)
    };
    let (_, fast) = moving(0.01);
    assert!((fast - (3.0 + 256.0 * 0.01)).abs() < 1e-9, "{fast}");
    let (prefill_ms, slow) = moving(10.0);
    assert!((slow - (3.0 + 5_120.0 - prefill_ms)).abs() < 1e-6, "{slow}");
}

#[test]
fn what_the_decode_worker_has_is_not_moved_and_a_failing_source_is_avoided() {
    let mut to = decode(2, 10.0);
    to.cached_tokens = 8_176;
    let pair = choose(PolicyName::RoundRobin, &ask(8_192), &[prefill(0), to.clone()]).pair.unwrap();
    assert!((pair.estimate.transfer_ms - 1.01).abs() < 1e-9, "{}", pair.estimate.transfer_ms);
    to.cached_tokens = 0;
    let failing = TransferCost { failing: 0.5, ..way(1.0, 0.01) };
    let known = vec![(WorkerId(0), failing)];
    to.sources = Some(Arc::new(Sources { any: way(1.0, 0.01), known }));
    assert_eq!(kv(&ask(8_000), &[prefill(0), prefill(1), to]), (Some(1), Some(2)));
}

#[test]
fn a_deadline_is_met_by_whoever_can() {
    let mut slow = prefill(0);
    slow.worker_load.backlog_tokens = 20_000.0;
    slow.worker_load.occupied = 1.0;
    slow.cached_tokens = 7_000;
    let workers = [slow, prefill(1), decode(2, 60.0)];
    let mut ask = ask(8_000);
    let soon = choose(PolicyName::Kv, &ask, &workers).estimates[1].ttft_ms();
    ask.deadline_ms = Some(soon * 1.01);
    assert_eq!(kv(&ask, &workers), (Some(1), Some(2)));
    ask.deadline_ms = Some(1.0);
    assert_eq!(kv(&ask, &workers), (Some(1), Some(2)), "late, but the soonest");
}

#[test]
fn equal_pairs_take_turns_on_both_sides_and_a_session_stays() {
    let workers = [prefill(0), decode(1, 40.0), prefill(2), decode(3, 40.0)];
    let mut chooser = Chooser::new(PolicyName::Kv, 1);
    let mut next = |ask: Ask| {
        let decision = decide("r".into(), 0.0, ask, workers.to_vec(), &mut chooser, None);
        (decision.prefill.unwrap().0, decision.winner.unwrap().0)
    };
    let turns: Vec<_> = (0..4).map(|_| next(ask(8_000))).collect();
    assert_eq!(turns, [(0, 1), (2, 3), (0, 1), (2, 3)]);
    let of = |session| Ask { session: Some(session), ..ask(8_000) };
    let sessions: Vec<_> = (0..64).map(|session| next(of(session))).collect();
    assert!(sessions.iter().any(|pair| *pair != sessions[0]));
    assert_eq!(sessions, (0..64).map(|session| next(of(session))).collect::<Vec<_>>());
}

#[test]
fn where_one_worker_does_as_well_as_two_nothing_is_moved() {
    let free =
        StepCost { fixed_ms: 0.0, prefill_ms: 0.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
    let mut workers = [prefill(0), decode(1, 0.0)];
    workers.iter_mut().for_each(|worker| worker.worker_load.cost = free);
    workers[1].sources = Some(Arc::new(Sources { any: way(0.0, 0.0), known: Vec::new() }));
    let decision = choose(PolicyName::Kv, &ask(8_000), &workers);
    assert_eq!(decision.pair.unwrap().estimate.total_ms(), decision.estimates[1].total_ms());
    assert_eq!((decision.prefill, decision.winner), (None, Some(WorkerId(1))));
}

#[test]
fn who_would_rather_wait_for_a_prefill_worker_waits_and_who_would_not_does_not() {
    let mut long = prefill(0);
    long.excluded = Some(Exclusion::Backlog);
    long.worker_load.backlog_tokens = 20_000.0;
    let workers = [long, decode(1, 60.0)];
    let waits = choose(PolicyName::Kv, &ask(8_000), &workers);
    assert_eq!((waits.winner, waits.no_place()), (None, NoPlace::AllFull));
    assert_eq!(waits.pair.unwrap().prefill, WorkerId(0), "it says for whom");
    assert_eq!(kv(&ask(20), &workers), (None, Some(1)));
}

#[test]
fn the_baselines_split_wherever_they_can() {
    let excluded = |why| Candidate { excluded: Some(why), ..prefill(2) };
    for policy in PolicyName::ALL.into_iter().filter(|policy| *policy != PolicyName::Kv) {
        let open = [prefill(0), decode(1, 0.0)];
        let decision = choose(policy, &ask(20), &open);
        assert_eq!((decision.prefill, decision.winner), (Some(WorkerId(0)), Some(WorkerId(1))));
        for closed in [Exclusion::Closed, Exclusion::Full, Exclusion::NoTransfer] {
            let decision = choose(policy, &ask(20), &[decode(1, 0.0), excluded(closed)]);
            assert_eq!((decision.prefill, decision.winner), (None, Some(WorkerId(1))));
        }
        let deaf = Candidate { sources: None, ..decode(1, 0.0) };
        assert_eq!(choose(policy, &ask(20), &[prefill(0), deaf]).prefill, None);
        assert_eq!(choose(policy, &ask(20), &[prefill(0)]).no_place(), NoPlace::NoneOpen);
    }
}

#[test]
fn round_robin_takes_turns_on_each_side_by_itself() {
    let workers = [prefill(0), prefill(1), decode(2, 0.0), decode(3, 0.0), decode(4, 0.0)];
    let mut chooser = Chooser::new(PolicyName::RoundRobin, 1);
    let turns = (0..6).map(|_| {
        let decision = decide("r".into(), 0.0, ask(20), workers.to_vec(), &mut chooser, None);
        (decision.prefill.unwrap().0, decision.winner.unwrap().0)
    });
    assert_eq!(turns.collect::<Vec<_>>(), [(0, 2), (1, 3), (0, 4), (1, 2), (0, 3), (1, 4)]);
}

prop_compose! {
    fn any_worker()(
        role in proptest::sample::select(vec![Role::Prefill, Role::Decode, Role::Both]),
        excluded in proptest::option::weighted(0.2, proptest::sample::select(vec![
            Exclusion::Closed, Exclusion::Failed, Exclusion::Full,
        ])),
        (occupied, rows) in (0..80u32, 0..80u32),
        (cached, backlog) in (0..500u32, 0..50_000u32),
        (used, arriving, pressure) in (0.0..11_000.0f64, 0..20_000u32, 0.0..9.0f64),
        slow in 0.2..5.0f64,
        costs in proptest::collection::vec((0.0..20.0f64, 0.0..3.0f64, 0.0..1.0f64), 9),
        known in proptest::collection::btree_set(0..8u32, 0..6),
        deaf in proptest::bool::weighted(0.1),
    ) -> Candidate {
        let cost = StepCost { prefill_ms: 0.1 * slow, fixed_ms: 5.0 * slow, ..COST };
        let rows = f64::from(rows.min(occupied));
        let worker_load = WorkerLoad {
            occupied: occupied.into(),
            rows: if role == Role::Prefill { 0.0 } else { rows },
            kv_tokens: rows * 1_000.0,
            backlog_tokens: backlog.into(),
            arriving_tokens: arriving.into(),
            blocks_used: used,
            pressure,
            ..WorkerLoad::idle(cost)
        };
        let cost = |i: usize| {
            let (latency_ms, mib_ms, failing) = costs[i];
            TransferCost { latency_ms, mib_ms, failing }
        };
        let known = known.into_iter().map(|id| (WorkerId(id), cost(id as usize))).collect();
        let sources = Arc::new(Sources { any: cost(8), known });
        let pulls = role != Role::Prefill && !deaf;
        Candidate {
            occupied,
            excluded,
            cached_tokens: cached * 16,
            sources: pulls.then_some(sources),
            ..Candidate::with(0, role, worker_load)
        }
    }
}

proptest! {
    /// By trying every worker and every pair by itself.
    #[test]
    fn the_choice_is_the_least_of_all(
        mut workers in proptest::collection::vec(any_worker(), 0..9),
        prompt_tokens in 8_001..40_000u32,
        deadline_ms in proptest::option::of(0.0..10_000.0f64),
        policy in proptest::sample::select(PolicyName::ALL.to_vec()),
    ) {
        for (id, worker) in (0..).zip(&mut workers) {
            worker.id = WorkerId(id);
        }
        let ask = Ask { deadline_ms, ..ask(prompt_tokens) };
        let open = |decodes: bool| {
            let open = workers.iter().filter(|worker| worker.excluded.is_none());
            open.filter(move |worker| worker.decodes() == decodes)
        };
        let mut all = Vec::new();
        for worker in open(true) {
            let alone = worker.estimate(&ask);
            all.push((alone.ttft_ms(), alone.total_ms()));
            for prefill in open(false) {
                let mut two = [prefill.clone(), worker.clone()];
                two.sort_by_key(|worker| worker.id);
                let pair = choose(PolicyName::RoundRobin, &ask, &two).pair;
                all.extend(pair.map(|pair| (pair.estimate.ttft_ms(), pair.estimate.total_ms())));
            }
        }
        let soonest = all.iter().map(|(ttft, _)| *ttft).fold(f64::INFINITY, f64::min);
        let latest = deadline_ms.map_or(f64::INFINITY, |deadline| deadline.max(soonest * (1.0 + 1e-9)));
        let in_time = all.iter().filter(|(ttft, _)| *ttft <= latest);
        let least = in_time.map(|(_, total)| *total).fold(f64::INFINITY, f64::min);
        let decision = choose(policy, &ask, &workers);
        match decision.chosen() {
            Some((_, estimate)) if policy == PolicyName::Kv => {
                let total = estimate.total_ms();
                prop_assert!(total <= least * (1.0 + 2e-6), "{total} {least}");
                prop_assert!(estimate.ttft_ms() <= latest * (1.0 + 2e-6));
            }
            Some((_, estimate)) => prop_assert!(all.iter().any(|(_, total)| *total == estimate.total_ms())),
            None => prop_assert!(all.is_empty()),
        }
        for id in [decision.prefill, decision.winner].into_iter().flatten() {
            prop_assert_eq!(workers[id.0 as usize].excluded, None);
        }
        let line = serde_json::to_string(&decision).unwrap();
        let read: Decision = serde_json::from_str(&line).unwrap();
        prop_assert_eq!(serde_json::to_string(&replay(&read)).unwrap(), line);
    }
}

#[test]
fn a_prefill_worker_meets_a_deadline_to_the_moment_and_none_for_who_cannot_pull() {
    let workers = [prefill(0), decode(1, 40.0)];
    let soonest_ms = workers[0].estimate(&ask(8_000)).ttft_ms();
    let hurried = |deadline_ms: f64| Ask { deadline_ms: Some(deadline_ms), ..ask(8_000) };
    assert_eq!(kv(&hurried(soonest_ms), &workers), (Some(0), Some(1)));
    // both are late, the second one less
    let [slow, soon] = [(1, 2.0), (2, 1.5)].map(|(id, times)| {
        let cost = StepCost { prefill_ms: COST.prefill_ms * times, ..COST };
        Candidate::with(id, Role::Decode, WorkerLoad::idle(cost))
    });
    assert_eq!(kv(&hurried(soonest_ms), &[prefill(0), slow, soon]), (None, Some(2)));
}

#[test]
fn of_equal_pairs_that_are_not_taken_the_first_is_shown() {
    let workers = [prefill(0), prefill(1), decode(2, 0.0)];
    let decision = choose(PolicyName::Kv, &ask(50), &workers);
    assert_eq!((decision.prefill, decision.pair.unwrap().prefill), (None, WorkerId(0)));
}

#[test]
fn where_a_prefill_worker_is_free_nobody_has_to_go_back_to_who_failed() {
    let failed = Candidate { excluded: Some(Exclusion::Failed), ..decode(1, 0.0) };
    let workers = [prefill(0), failed.clone()];
    assert_eq!(choose(PolicyName::Kv, &ask(50), &workers).where_it_failed(), None);
    let full = Candidate { excluded: Some(Exclusion::Full), ..prefill(0) };
    let decision = choose(PolicyName::Kv, &ask(50), &[full, failed]);
    assert_eq!(decision.where_it_failed(), Some(vec![WorkerId(1)]));
}
