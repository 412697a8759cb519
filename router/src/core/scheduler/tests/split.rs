//! Both halves of a split request: each is booked where it goes, and given back by itself.

use super::*;
use crate::core::decision::Decision;

/// Prefill workers most of all.
pub(super) fn role() -> impl Strategy<Value = Role> {
    proptest::sample::select(vec![Role::Prefill, Role::Prefill, Role::Decode, Role::Both])
}

pub(super) fn scheduler_of(policy: PolicyName, roles: &[Role]) -> Scheduler {
    let rules = RoutingRules {
        policy,
        shadow: Some(PolicyName::Kv),
        worker_queue_ms: 1e6,
        gather_ms: 0.0,
        seed: 7,
    };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    for (id, role) in (0..).zip(roles) {
        join_as(&mut scheduler, id, *role);
    }
    scheduler
}

/// Two that compute prompts and two that decode, always split.
fn always_split() -> Scheduler {
    use Role::{Decode, Prefill};
    scheduler_of(PolicyName::RoundRobin, &[Prefill, Prefill, Decode, Decode])
}

fn place(scheduler: &mut Scheduler, want: &PlacementRequest, now_ms: f64) -> (WorkerId, WorkerId) {
    let placement = scheduler.place(want, now_ms).unwrap();
    (placement.prefill.unwrap().worker, placement.worker)
}

fn backlog(scheduler: &Scheduler, id: WorkerId) -> (u64, u64, u32) {
    let view = scheduler.view(id).unwrap();
    (view.backlog_tokens, view.arriving_tokens, view.pinned_requests)
}

fn seen(decision: &Decision, id: WorkerId) -> &Candidate {
    decision.candidates.iter().find(|candidate| candidate.id == id).unwrap()
}

#[test]
fn the_prompt_is_booked_on_one_worker_and_the_answer_on_the_other() {
    let mut scheduler = always_split();
    let want = want(1, &keys(1, 100, 0));
    let (p, d) = place(&mut scheduler, &want, 0.0);
    assert_eq!((p, d), (WorkerId(0), WorkerId(2)));
    assert_eq!(backlog(&scheduler, p), (1603, 0, 0));
    assert_eq!(backlog(&scheduler, d), (0, 1603, 0));
    let view = |scheduler: &Scheduler, id| scheduler.view(id).unwrap();
    assert_eq!(
        (view(&scheduler, p).booked_tokens, view(&scheduler, d).booked_tokens),
        (1603, 1653)
    );

    let running = Load { running: 1, ..Load::default() };
    let _ = scheduler.step(p, &report(1, 1603, running), Given::default(), 200.0);
    scheduler.begun(want.prefill_request, 0, 200.0).unwrap();
    let _ = scheduler.step(p, &report(2, 0, Load::default()), Given::default(), 210.0);
    assert_eq!(backlog(&scheduler, p), (0, 0, 1), "its KV is still there");
    assert_eq!(view(&scheduler, p).booked_requests, 1);
    assert_eq!(scheduler.workers[0].occupied(), 0, "and takes no place");
    scheduler.end(want.prefill_request, LegOutput { tokens: 1, complete: false }, 220.0).unwrap();
    assert_eq!(backlog(&scheduler, p), (0, 0, 0));
    assert_eq!(backlog(&scheduler, d), (0, 1603, 0));
    let begun = scheduler.begun(want.request, 0, 240.0).unwrap();
    assert_eq!((begun.worker, backlog(&scheduler, d)), (d, (0, 0, 0)));
    assert_eq!(view(&scheduler, d).booked_requests, 1);
    scheduler.end(want.request, LegOutput { tokens: 50, complete: true }, 900.0).unwrap();
    assert_eq!((scheduler.legs(), view(&scheduler, d).booked_tokens), (0, 0));
}

#[test]
fn what_both_legs_are_likely_to_take_is_charged_in_one() {
    let mut scheduler = always_split();
    let want = want(1, &keys(1, 100, 0));
    let expected = scheduler.place(&want, 0.0).unwrap().expected_block_seconds;
    let of = |scheduler: &mut Scheduler, request| {
        scheduler.end(request, LegOutput::default(), 0.0).unwrap().expected_block_seconds
    };
    let legs = [of(&mut scheduler, want.request), of(&mut scheduler, want.prefill_request)];
    assert!(legs.iter().all(|leg| *leg > 0.0));
    assert!((legs.iter().sum::<f64>() - expected).abs() < 1e-9);
}

#[test]
fn a_lost_prefill_worker_leaves_the_prompt_to_the_other() {
    let mut scheduler = always_split();
    let want = want(1, &keys(1, 100, 0));
    let (p, d) = place(&mut scheduler, &want, 0.0);
    let ((), ended) = scheduler.leave(p, 10.0).unwrap();
    assert_eq!((ended.len(), ended[0].worker, scheduler.legs()), (1, p, 1));
    assert_eq!(backlog(&scheduler, d), (0, 1603, 0));
    scheduler.alone(want.request, 10.0);
    assert_eq!(backlog(&scheduler, d), (1603, 0, 0));
    scheduler.alone(want.request, 10.0);
    assert_eq!(backlog(&scheduler, d), (1603, 0, 0), "once");
    scheduler.begun(want.request, 0, 300.0).unwrap();
    scheduler.alone(want.request, 301.0);
    assert_eq!(backlog(&scheduler, d), (0, 0, 0), "it has begun");
    scheduler.alone(RequestId(99), 301.0);
}

#[test]
fn a_lost_decode_worker_takes_only_its_own_leg_along() {
    let mut scheduler = always_split();
    let want = want(1, &keys(1, 100, 0));
    let (p, d) = place(&mut scheduler, &want, 0.0);
    assert_eq!(scheduler.leave(d, 10.0).unwrap().1.len(), 1);
    assert_eq!((scheduler.legs(), backlog(&scheduler, p).0), (1, 1603));
    assert!(scheduler.end(want.prefill_request, LegOutput::default(), 20.0).is_some());
}

#[test]
fn a_burst_with_one_prefix_stays_together_on_both_sides() {
    let mut scheduler = scheduler_of(PolicyName::Kv, &[Role::Prefill, Role::Prefill]);
    for id in [2, 3] {
        let capacity = Capacity { sequences: 64, ..capacity() };
        join_with(&mut scheduler, id, Role::Decode, capacity);
        let rows = Load { running: 30, ..Load::default() };
        let _ = scheduler.step(
            WorkerId(id),
            &Step { decode_rows: 30, ..report(1, 0, rows) },
            Given::default(),
            0.0,
        );
    }
    let first = place(&mut scheduler, &want(1, &keys(1, 60, 58)), 0.0);
    for n in 2..5 {
        let placement = scheduler.place(&want(n, &keys(n, 60, 58)), 80.0).unwrap();
        assert_eq!((placement.prefill.unwrap().worker, placement.worker), first, "{n}");
        let [p, d] = [first.0, first.1].map(|id| seen(&placement.decision, id));
        assert_eq!((p.held_tokens, p.cached_tokens, p.coming_tokens), (0, 928, 0));
        assert_eq!((d.held_tokens, d.cached_tokens, d.coming_tokens), (0, 0, 928));
    }
}

#[test]
fn each_leg_is_held_to_what_its_own_worker_had_said() {
    let mut scheduler = always_split();
    let keys = keys(1, 40, 0);
    for id in [0, 1, 2, 3] {
        assert_eq!(scheduler.stored(WorkerId(id), Tier::Device, &keys), None);
    }
    let mut withdrawn = Vec::new();
    for n in 0..40 {
        let want = want(n, &keys);
        let (_, d) = place(&mut scheduler, &want, 0.0);
        assert!(scheduler.begun(want.prefill_request, 640, 1.0).unwrap().withdrawn.is_none());
        let begun = scheduler.begun(want.request, if d.0 == 2 { 0 } else { 640 }, 1.0).unwrap();
        withdrawn.extend(begun.withdrawn.map(|why| (d.0, why)));
        scheduler.end(want.request, LegOutput::default(), 2.0);
        scheduler.end(want.prefill_request, LegOutput::default(), 2.0);
    }
    assert_eq!(withdrawn, [(2, Withdrawal::Overclaimed)]);
    // evicted while it waits for its KV: no lie
    let want = want(99, &keys);
    let (_, d) = place(&mut scheduler, &want, 3.0);
    assert_eq!(scheduler.removed(d, Tier::Device, &keys), if d.0 == 2 { 40 } else { 0 });
    assert_eq!(scheduler.begun(want.request, 0, 4.0).unwrap().held_tokens, 0);
}

#[test]
fn without_a_worker_that_decodes_there_is_no_place_and_without_one_for_prompts_there_is() {
    let mut scheduler = scheduler_of(PolicyName::Kv, &[Role::Prefill]);
    let want = want(1, &keys(1, 100, 0));
    assert_eq!(scheduler.place(&want, 0.0).unwrap_err().no_place, NoPlace::NoneOpen);
    assert!(!scheduler.some_open());
    assert_eq!(scheduler.soonest_ms(&want, 0.0), None);
    for policy in PolicyName::ALL {
        let mut scheduler = scheduler_of(policy, &[Role::Prefill, Role::Decode]);
        scheduler.set_open(WorkerId(0), false);
        let placement = scheduler.place(&want, 0.0).unwrap();
        assert_eq!((placement.worker, placement.prefill), (WorkerId(1), None));
        assert_eq!(backlog(&scheduler, WorkerId(1)).0, 1603);
    }
}

#[test]
fn a_worker_whose_kv_cannot_be_moved_takes_no_part_in_a_split() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Decode]);
    scheduler.join(Joining { role: Role::Prefill, ..joining(5) }, ());
    scheduler.set_open(WorkerId(5), true);
    let placement = scheduler.place(&want(1, &keys(1, 9, 0)), 0.0).unwrap();
    assert_eq!(placement.prefill, None);
    assert_eq!(seen(&placement.decision, WorkerId(5)).excluded, Some(Exclusion::NoTransfer));
}

#[test]
fn the_soonest_first_token_may_be_that_of_a_prefill_worker() {
    let mut scheduler = scheduler_of(PolicyName::Kv, &[Role::Prefill, Role::Decode]);
    let mut blocker = want(1, &keys(1, 900, 0));
    blocker.excluded = vec![WorkerId(0)];
    assert_eq!(scheduler.place(&blocker, 0.0).unwrap().prefill, None);
    let soonest = scheduler.soonest_ms(&want(2, &keys(2, 100, 0)), 0.0).unwrap();
    assert!((soonest - 165.3).abs() < 1.0, "{soonest}");
    blocker.excluded.push(WorkerId(1));
    assert_eq!(scheduler.soonest_ms(&blocker, 0.0), None);
}

#[test]
fn pulls_teach_what_moving_costs_and_failures_send_elsewhere() {
    use Role::{Decode, Prefill};
    let mut scheduler = scheduler_of(PolicyName::Kv, &[Prefill, Prefill, Decode]);
    let rows = Load { running: 8, ..Load::default() };
    let step = Step { decode_rows: 8, kv_tokens: 80_000, ..report(1, 0, rows) };
    let _ = scheduler.step(WorkerId(2), &step, Given::default(), 0.0);
    for _ in 0..20 {
        scheduler.transferred(WorkerId(2), "w0", 8 << 20, 0.16, 0.0);
        scheduler.transferred(WorkerId(2), "w1", 8 << 20, 1.6, 0.0);
    }
    scheduler.transferred(WorkerId(2), "nobody", 8 << 20, 160.0, 0.0);
    scheduler.transferred(WorkerId(77), "w0", 8 << 20, 160.0, 0.0);
    let placement = scheduler.place(&want(1, &keys(1, 400, 0)), 0.0).unwrap();
    assert_eq!(placement.prefill.unwrap().worker, WorkerId(0));
    let sources = scheduler.sources(WorkerId(2));
    let mib_ms =
        |name: &str| sources.iter().find(|source| *source.worker == *name).unwrap().cost.mib_ms;
    assert!(mib_ms("w0") < 0.02 && mib_ms("w1") > 0.1, "{sources:?}");
    scheduler.end(RequestId(1), LegOutput::default(), 0.0);
    scheduler.end(placement.prefill.unwrap().request, LegOutput::default(), 0.0);

    (0..4).for_each(|_| scheduler.transfer_failed(WorkerId(2), "w0", 1.0));
    let next = scheduler.place(&want(2, &keys(2, 400, 0)), 1.0).unwrap();
    assert_ne!(next.prefill.map(|prefill| prefill.worker), Some(WorkerId(0)));
    assert!(scheduler.sources(WorkerId(2))[0].cost.failing > 0.15);
    scheduler.leave(WorkerId(0), 2.0);
    scheduler.place(&want(3, &keys(3, 400, 0)), 2_000.0).unwrap();
    assert_eq!(scheduler.sources(WorkerId(2)).len(), 1);
}

#[test]
fn one_that_began_before_takes_a_worker_that_failed_it_rather_than_none() {
    let mut scheduler = scheduler(2);
    let patient = PlacementRequest {
        resumes: true,
        excluded: vec![WorkerId(0), WorkerId(1)],
        ..want(1, &keys(1, 9, 0))
    };
    assert!(scheduler.place(&patient, 0.0).is_ok());
    let picky = PlacementRequest { resumes: false, ..patient.clone() };
    assert_eq!(scheduler.place(&picky, 0.0).unwrap_err().no_place, NoPlace::AllExcluded);
    join(&mut scheduler, 2);
    let again = PlacementRequest { request: RequestId(2), ..patient };
    assert_eq!(scheduler.place(&again, 0.0).unwrap().worker, WorkerId(2), "there is a better one");
}

#[test]
fn one_that_began_before_is_forgiven_by_who_decodes_whoever_computes_prompts() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let patient = PlacementRequest { resumes: true, ..want(1, &keys(1, 9, 0)) };
    let failed_by = |excluded: &[u32]| {
        let excluded = excluded.iter().copied().map(WorkerId).collect();
        PlacementRequest { excluded, ..patient.clone() }
    };
    let placement = scheduler.place(&failed_by(&[1]), 0.0).unwrap();
    assert_eq!(placement.worker, WorkerId(1), "there is no other one that decodes");
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let placement = scheduler.place(&failed_by(&[0, 1]), 0.0).unwrap();
    assert_eq!((placement.worker, placement.prefill), (WorkerId(1), None));
    assert_eq!(seen(&placement.decision, WorkerId(0)).excluded, Some(Exclusion::Failed));
}

#[test]
fn whose_kv_has_no_known_size_pulls_none() {
    let mut scheduler = always_split();
    scheduler.join(Joining { role: Role::Decode, ..joining(5) }, ());
    scheduler.set_open(WorkerId(5), true);
    let placement = scheduler.place(&want(1, &keys(1, 9, 0)), 0.0).unwrap();
    let pulls = [0, 2, 5].map(|id| seen(&placement.decision, WorkerId(id)).sources.is_some());
    assert_eq!(pulls, [false, true, false]);
}

#[test]
fn the_load_of_prompts_counts_for_its_own_kind_and_by_those_who_are_open() {
    let pressure = |close: bool| {
        let mut scheduler = always_split();
        let running = Load { running: 1, ..Load::default() };
        for number in 1..40 {
            let now_ms = 200.0 * number as f64;
            let step = report(number, 1_000, running);
            let _ = scheduler.step(WorkerId(0), &step, Given::default(), now_ms);
        }
        scheduler.set_open(WorkerId(1), !close);
        let placement = scheduler.place(&want(1, &keys(1, 9, 0)), 8_000.0).unwrap();
        [0, 2].map(|id| seen(&placement.decision, WorkerId(id)).worker_load.pressure)
    };
    let ([two, decode], [one, _]) = (pressure(false), pressure(true));
    assert_eq!(decode, 0.0, "prompts are computed elsewhere");
    assert!(two > 0.0 && one > 1.5 * two, "{one} with one, {two} with two");
}

#[test]
fn prompts_are_held_back_while_all_prefill_workers_have_long_queues() {
    let rules = RoutingRules {
        policy: PolicyName::Kv,
        shadow: None,
        worker_queue_ms: 300.0,
        gather_ms: 0.0,
        seed: 1,
    };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    join_as(&mut scheduler, 0, Role::Prefill);
    join_with(&mut scheduler, 1, Role::Decode, Capacity { sequences: 64, ..capacity() });
    let rows = Load { running: 40, ..Load::default() };
    let _ = scheduler.step(
        WorkerId(1),
        &Step { decode_rows: 40, ..report(1, 0, rows) },
        Given::default(),
        0.0,
    );
    scheduler.transferred(WorkerId(1), "w0", 1 << 30, 10.0, 0.0);
    let mut placed = 0;
    let refused = loop {
        match scheduler.place(&want(placed, &keys(placed, 150, 0)), 0.0) {
            Ok(placement) => assert_eq!(placement.prefill.unwrap().worker, WorkerId(0)),
            Err(decision) => break decision,
        }
        placed += 1;
    };
    assert_eq!((placed, refused.no_place), (2, NoPlace::AllFull));
    assert_eq!(seen(&refused.decision, WorkerId(0)).excluded, Some(Exclusion::Backlog));
    assert_eq!(seen(&refused.decision, WorkerId(1)).excluded, None);
    assert!(!scheduler.has_room(WorkerId(0), 0.0) && scheduler.has_room(WorkerId(1), 0.0));
    assert!(scheduler.place(&want(90, &keys(90, 1, 0)), 0.0).is_ok(), "short enough for the other");
}
