//! The scheduler's book-keeping: what is booked is given back, what is promised is checked, what is announced is counted.

mod apply;
mod asked;
mod bookings;
mod claims;
mod credit;
mod figures;
mod groups;
mod learning;
mod queue;
mod random;
mod reports;
mod room;
mod shortlist;
mod split;

use proptest::prelude::*;

use super::*;
use crate::core::candidate::{Candidate, Exclusion, GroupRank};
use crate::core::cost::StepFeatures;
use crate::core::decision::NoPlace;
use crate::core::frame::{Load, QueueRule};

impl Scheduler {
    /// All workers, as a decision now would find them.
    fn candidates_at(&mut self, wanted: &PlacementRequest, now_ms: f64) -> Weighed {
        let ask = self.ask(wanted, now_ms);
        let asking = self.asking(wanted, &ask, now_ms);
        self.candidates(&asking)
    }
}

const BLOCK: u32 = 16;
const COST: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 0.0, row_ms: 0.1, kv_ms: 1e-5 };

fn capacity() -> Capacity {
    Capacity {
        blocks: 1000,
        sequences: 8,
        batched_tokens: 2048,
        waiting: 8,
        host_blocks: 100,
        disk_blocks: 0,
    }
}

fn scheduler(workers: u32) -> Scheduler {
    let rules = RoutingRules {
        policy: PolicyName::Kv,
        shadow: Some(PolicyName::RoundRobin),
        worker_queue_ms: 1e6,
        gather_ms: 0.0,
        seed: 7,
    };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    for id in 0..workers {
        join(&mut scheduler, id);
    }
    scheduler
}

fn join(scheduler: &mut Scheduler, id: u32) {
    join_as(scheduler, id, Role::Both);
}

fn join_as(scheduler: &mut Scheduler, id: u32, role: Role) {
    join_with(scheduler, id, role, capacity());
}

/// A worker for whole requests, whose KV cannot be moved.
fn joining(id: u32) -> Joining {
    Joining {
        id: WorkerId(id),
        name: format!("w{id}").into(),
        role: Role::Both,
        kv_block_bytes: 0,
        index_room: capacity().tiers(),
        capacity: capacity(),
        group: None,
        queue_rule: QueueRule::default(),
        step_prior: Some(COST),
    }
}

fn join_with(scheduler: &mut Scheduler, id: u32, role: Role, capacity: Capacity) {
    let (kv_block_bytes, index_room) = (4 << 20, capacity.tiers());
    scheduler.join(Joining { role, kv_block_bytes, index_room, capacity, ..joining(id) }, ());
    scheduler.snapshot_begins(WorkerId(id));
    scheduler.snapshot_complete(WorkerId(id));
    scheduler.set_open(WorkerId(id), true);
}

/// One that says this of its speed.
fn join_unknown(scheduler: &mut Scheduler, id: u32, step_prior: Option<StepCost>) {
    scheduler.join(Joining { step_prior, ..joining(id) }, ());
    scheduler.set_open(WorkerId(id), true);
}

/// Keys of prompt `n`; the first `shared` blocks are those of all prompts.
fn keys(n: u64, blocks: u32, shared: u32) -> Arc<[u64]> {
    let key = |i: u32| if i < shared { u64::from(i) } else { (n << 32) | u64::from(i) };
    (0..blocks).map(|i| (key(i) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn want(request: u64, keys: &Arc<[u64]>) -> PlacementRequest {
    PlacementRequest {
        request: RequestId(request),
        prefill_request: RequestId(u64::MAX - request),
        name: format!("request-{request}").into(),
        prompt_tokens: u32::try_from(keys.len()).unwrap() * BLOCK + 3,
        max_tokens: 50,
        keys: Arc::clone(keys),
        reuses: true,
        session: None,
        tenant: 0,
        priority: 0,
        yields: false,
        deadline_ms: None,
        excluded: Vec::new(),
        resumes: false,
        explains: false,
    }
}

fn report(number: u64, prefill_tokens: u32, load: Load) -> Step {
    let ms = COST.fixed_ms + COST.prefill_ms * f64::from(prefill_tokens);
    Step {
        step: number,
        ms,
        waited_us: 0,
        prefill_tokens,
        prefill_context: 0,
        decode_rows: 0,
        kv_tokens: 0,
        waiting_tokens: 0,
        drafted: 0,
        accepted: 0,
        load,
        outputs: Vec::new(),
    }
}

fn chosen(placement: &Placement) -> &Candidate {
    placement.decision.chosen().unwrap().0
}

#[test]
fn what_a_worker_announced_is_counted_on_but_never_the_last_token() {
    let mut scheduler = scheduler(3);
    let keys = keys(1, 10, 0);
    assert_eq!(scheduler.stored(WorkerId(1), Tier::Device, &keys), None);
    let mut want = want(1, &keys);
    let placement = scheduler.place(&want, 0.0).unwrap();
    assert_eq!((placement.worker, chosen(&placement).held_tokens), (WorkerId(1), 160));
    want.request = RequestId(2);
    want.prompt_tokens = 160; // the last block holds the last token
    let placement = scheduler.place(&want, 0.0).unwrap();
    assert_eq!(chosen(&placement).held_tokens, 144);
}

#[test]
fn a_burst_with_one_prefix_stays_together_before_anything_is_stored() {
    let mut scheduler = scheduler(4);
    let first = scheduler.place(&want(1, &keys(1, 60, 58)), 0.0).unwrap().worker;
    for n in 2..5 {
        let placement = scheduler.place(&want(n, &keys(n, 60, 58)), 80.0).unwrap();
        assert_eq!(placement.worker, first);
        assert_eq!((chosen(&placement).held_tokens, chosen(&placement).cached_tokens), (0, 928));
    }
}

#[test]
fn a_prediction_ends_with_its_leg_and_what_the_worker_announced_stays() {
    let mut scheduler = scheduler(2);
    let keys = keys(1, 20, 0);
    let worker = scheduler.place(&want(1, &keys), 0.0).unwrap().worker;
    let cached = |scheduler: &mut Scheduler, request| {
        let placement = scheduler.place(&want(request, &keys), 0.0).unwrap();
        scheduler.end(placement.request, LegOutput::default(), 0.0).unwrap();
        let candidates = &placement.decision.candidates;
        candidates.iter().find(|c| c.id == worker).unwrap().cached_tokens
    };
    assert_eq!(cached(&mut scheduler, 2), 320);
    scheduler.end(RequestId(1), LegOutput::default(), 1.0).unwrap();
    assert_eq!(cached(&mut scheduler, 3), 0, "rolled back");
    let worker_now = scheduler.place(&want(4, &keys), 0.0).unwrap().worker;
    assert_eq!(scheduler.stored(worker_now, Tier::Device, &keys), None);
    assert!(scheduler.begun(RequestId(4), 0, 9.0).is_some());
    scheduler.end(RequestId(4), LegOutput { tokens: 7, complete: true }, 10.0).unwrap();
    let placement = scheduler.place(&want(5, &keys), 11.0).unwrap();
    assert_eq!((placement.worker, chosen(&placement).held_tokens), (worker_now, 320));
}

#[test]
fn a_prediction_lasts_as_long_as_one_of_its_legs() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    let mut cached = |give_up: Option<u64>, request| {
        give_up.map(|leg| scheduler.end(RequestId(leg), LegOutput::default(), 0.0).unwrap());
        chosen(&scheduler.place(&want(request, &keys), 0.0).unwrap()).cached_tokens
    };
    assert_eq!([cached(None, 1), cached(None, 2)], [0, 320]);
    assert_eq!(cached(Some(1), 3), 320, "the second one computes it now");
    assert_eq!([cached(Some(2), 4), cached(Some(3), 5)], [320, 320]);
}

#[test]
fn a_lease_runs_out_when_the_first_token_is_overdue() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    let placement = scheduler.place(&want(1, &keys), 0.0).unwrap();
    assert_eq!(scheduler.expire_leases(9_999.0), 0);
    assert_eq!(scheduler.expire_leases(10_000.0), 1);
    assert_eq!(scheduler.expire_leases(20_000.0), 0, "once");
    let again = scheduler.place(&want(2, &keys), 20_000.0).unwrap();
    assert_eq!(chosen(&again).cached_tokens, 0);
    scheduler.end(placement.request, LegOutput::default(), 20_001.0).unwrap();
    let third = scheduler.place(&want(3, &keys), 20_002.0).unwrap();
    assert_eq!(chosen(&third).cached_tokens, 320, "the second leg's own prediction is untouched");
}

#[test]
fn tiers_are_kept_apart_and_only_the_device_counts() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Host, &keys), None);
    assert_eq!(
        scheduler.stored(WorkerId(0), Tier::Disk, &keys),
        None,
        "not announced: passed over"
    );
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys[..5]), None);
    let placement = scheduler.place(&want(1, &keys), 0.0).unwrap();
    let candidate = chosen(&placement);
    assert_eq!((candidate.held_tokens, candidate.lower_tier_tokens), (80, 320));
    scheduler.cleared(WorkerId(0), Tier::Host);
    let placement = scheduler.place(&want(2, &keys), 0.0).unwrap();
    assert_eq!(chosen(&placement).lower_tier_tokens, 0);
    assert_eq!(chosen(&placement).held_tokens, 80);
}

#[test]
fn a_backlog_shrinks_with_the_steps_and_ends_with_the_first_token() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    scheduler.place(&want(2, &keys(2, 100, 0)), 0.0).unwrap();
    let backlog = |scheduler: &Scheduler| scheduler.view(WorkerId(0)).unwrap().backlog_tokens;
    assert_eq!(backlog(&scheduler), 2 * 1603);
    let running = Load { running: 2, ..Load::default() };
    assert_eq!(
        scheduler.step(WorkerId(0), &report(1, 1000, running), Given::default(), 100.0),
        None
    );
    assert_eq!(backlog(&scheduler), 2 * 1603 - 1000);
    scheduler.begun(RequestId(1), 0, 160.0).unwrap();
    assert_eq!(backlog(&scheduler), 1603);
    scheduler.end(RequestId(2), LegOutput::default(), 170.0).unwrap();
    assert_eq!(backlog(&scheduler), 0);
}

#[test]
fn a_worker_with_too_long_a_queue_gets_no_more() {
    let rules = RoutingRules {
        policy: PolicyName::Kv,
        shadow: None,
        worker_queue_ms: 300.0,
        gather_ms: 0.0,
        seed: 1,
    };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    join(&mut scheduler, 0);
    assert!(scheduler.place(&want(1, &keys(1, 150, 0)), 0.0).is_ok());
    assert!(scheduler.place(&want(2, &keys(2, 100, 0)), 0.0).is_ok());
    let refused = scheduler.place(&want(3, &keys(3, 100, 0)), 0.0).unwrap_err();
    assert_eq!(refused.no_place, NoPlace::AllFull);
    assert_eq!(refused.decision.candidates[0].excluded, Some(Exclusion::Backlog));
    assert_eq!(scheduler.legs(), 2);
}

#[test]
fn a_decision_sees_what_is_left_of_a_deadline_and_of_an_answer() {
    let mut scheduler = scheduler(1);
    let hurried =
        PlacementRequest { deadline_ms: Some(2_000.0), max_tokens: 3, ..want(1, &keys(1, 4, 0)) };
    let ask = scheduler.place(&hurried, 500.0).unwrap().decision.ask.clone();
    assert_eq!((ask.deadline_ms, ask.output_tokens), (Some(1_500.0), 3.0));
    assert_eq!(ask.block_bytes, 0, "nothing has to be moved where nobody only computes prompts");
}

#[test]
fn only_a_queue_of_prompts_is_a_long_queue_and_only_for_kv() {
    let with = |policy| {
        let rules =
            RoutingRules { policy, shadow: None, worker_queue_ms: 1.0, gather_ms: 0.0, seed: 1 };
        let mut scheduler = Scheduler::new(rules, BLOCK);
        join_with(&mut scheduler, 0, Role::Both, Capacity { sequences: 1, ..capacity() });
        assert!(scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).is_ok());
        scheduler
    };
    let mut kv = with(PolicyName::Kv);
    let second = want(2, &keys(2, 100, 0));
    let refused = kv.place(&second, 0.0).unwrap_err();
    assert_eq!(refused.decision.candidates[0].excluded, Some(Exclusion::Backlog));
    assert!(with(PolicyName::LeastLoaded).place(&second, 0.0).is_ok());
    kv.begun(RequestId(1), 0, 200.0).unwrap();
    assert!(kv.place(&second, 200.0).is_ok(), "it waits for the row, and nowhere better");
}

#[test]
fn ten_thousand_workers_come_and_go_and_leave_nothing() {
    let mut scheduler = scheduler(0);
    let mut sizes = Vec::new();
    for id in 0..10_000 {
        join(&mut scheduler, id);
        let keys = keys(id.into(), 50, 0);
        assert_eq!(scheduler.stored(WorkerId(id), Tier::Device, &keys), None);
        scheduler.place(&want(id.into(), &keys), 0.0).unwrap();
        if id >= 20 {
            scheduler.leave(WorkerId(id - 20), 0.0);
        }
        sizes.push(scheduler.index_size().1);
    }
    assert!(scheduler.legs() <= 21);
    let most = |range: std::ops::Range<usize>| *sizes[range].iter().max().unwrap();
    assert!(
        most(5_000..10_000) <= 2 * most(100..5_000),
        "{} {}",
        most(5_000..10_000),
        most(100..5_000)
    );
}

#[test]
fn calls_about_nobody_change_nothing() {
    let mut scheduler = scheduler(1);
    let nobody = WorkerId(77);
    let keys = keys(1, 3, 0);
    assert_eq!(scheduler.stored(nobody, Tier::Device, &keys), None);
    assert_eq!(scheduler.removed(nobody, Tier::Device, &keys), 0);
    assert_eq!(
        scheduler.step(nobody, &report(1, 10, Load::default()), Given::default(), 0.0),
        None
    );
    scheduler.cleared(nobody, Tier::Device);
    assert!(scheduler.leave(nobody, 0.0).is_none());
    assert!(scheduler.begun(RequestId(9), 0, 0.0).is_none());
    assert!(scheduler.end(RequestId(9), LegOutput::default(), 0.0).is_none());
    assert_eq!(
        scheduler.removed(WorkerId(0), Tier::Device, &keys),
        3,
        "unknown blocks are counted"
    );
}

#[test]
fn a_prompt_that_has_to_be_computed_is_promised_nothing() {
    let mut scheduler = scheduler(2);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(1), Tier::Device, &keys), None);
    for n in 0..10 {
        let placed =
            scheduler.place(&PlacementRequest { reuses: false, ..want(n, &keys) }, 0.0).unwrap();
        assert_eq!((chosen(&placed).held_tokens, chosen(&placed).cached_tokens), (0, 0));
        assert_eq!(scheduler.begun(RequestId(n), 0, 1.0).unwrap().withdrawn, None);
        scheduler.end(RequestId(n), LegOutput::default(), 1.0);
    }
}

#[test]
fn a_lost_worker_returns_its_legs_with_what_they_got() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    let ((), ended) = scheduler.leave(WorkerId(0), 0.0).unwrap();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].block_seconds, 0.0);
    assert!(ended[0].expected_block_seconds > 0.0);
    assert_eq!(scheduler.legs(), 0);
}

#[test]
fn what_was_booked_on_a_lost_worker_is_not_booked_on_the_next_one_with_its_number() {
    let mut scheduler = scheduler(2);
    scheduler.set_open(WorkerId(1), false);
    let keys = keys(1, 20, 0);
    assert_eq!(scheduler.place(&want(1, &keys), 0.0).unwrap().worker, WorkerId(0));
    scheduler.leave(WorkerId(0), 0.0).unwrap();
    join(&mut scheduler, 2);
    let cached = |scheduler: &mut Scheduler, request| {
        chosen(&scheduler.place(&want(request, &keys), 0.0).unwrap()).cached_tokens
    };
    assert_eq!([cached(&mut scheduler, 2), cached(&mut scheduler, 3)], [0, 320]);
    for request in [2, 3] {
        scheduler.end(RequestId(request), LegOutput::default(), 0.0).unwrap();
    }
    assert_eq!(cached(&mut scheduler, 4), 0, "rolled back");
}

#[test]
fn whoever_does_not_yield_finds_the_prompts_of_those_who_do_behind_its_own() {
    let mut scheduler = scheduler(1);
    let ask = |n: u64, yields: bool| PlacementRequest { yields, ..want(n, &keys(n, 4, 0)) };
    for n in 1..=7 {
        scheduler.place(&ask(n, n <= 6), 0.0).unwrap();
    }
    let both = |scheduler: &Scheduler| {
        let worker = &scheduler.workers[0];
        let all = worker.worker_load(BLOCK, 0.0);
        (all, worker.load_before_yielding(&all))
    };
    let (all, before) = both(&scheduler);
    assert_eq!((all.backlog_tokens, before.backlog_tokens), (7.0 * 67.0, 67.0));
    assert!((before.backlog_context - all.backlog_context / 7.0).abs() < 1e-6);
    // of eight batch rows those who yield keep four
    assert_eq!((all.slots, all.occupied, before.occupied), (8.0, 7.0, 5.0));
    for n in 1..=3 {
        scheduler.end(RequestId(n), LegOutput::default(), 1.0);
    }
    let (all, before) = both(&scheduler);
    assert_eq!((all.occupied, before.occupied), (4.0, 4.0));
    assert_eq!((all.backlog_tokens, before.backlog_tokens), (4.0 * 67.0, 67.0));
}

#[test]
fn decisions_among_many_keep_the_best_unless_somebody_may_look_at_all() {
    let placed = |keeps: bool, shadow: Option<PolicyName>, explains: bool| {
        let rules = RoutingRules {
            policy: PolicyName::Kv,
            shadow,
            worker_queue_ms: 1e6,
            gather_ms: 0.0,
            seed: 1,
        };
        let mut scheduler = Scheduler::new(rules, BLOCK).keeping_candidates(keeps);
        (0..40).for_each(|id| join(&mut scheduler, id));
        let ask = |n: u64| PlacementRequest { explains, ..want(n, &keys(n, 20, 5)) };
        let placements = (1..200).map(|n| scheduler.place(&ask(n), n as f64).unwrap());
        placements.map(|placement| (placement.worker, placement.decision)).collect::<Vec<_>>()
    };
    let few = placed(false, None, false);
    for (worker, decision) in &few {
        let left_out = decision.left_out.unwrap();
        assert_eq!((left_out.candidates, left_out.excluded), (32, 0));
        assert_eq!((decision.candidates.len(), decision.estimates.len()), (8, 8));
        assert_eq!(decision.chosen().unwrap().0.id, *worker);
    }
    for all in [
        placed(true, None, false),
        placed(false, Some(PolicyName::RoundRobin), false),
        placed(false, None, true),
    ] {
        assert!(all.iter().all(|(_, decision)| decision.candidates.len() == 40));
        assert!(all.iter().all(|(_, decision)| decision.left_out.is_none()));
        assert!(few.iter().zip(&all).all(|(few, all)| few.0 == all.0), "the same workers");
    }
}
