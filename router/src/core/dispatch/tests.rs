//! Placed at once, waiting in order, or refused with a reason and a time: never lost, never twice.

mod gathering;
mod passed_over;
mod random;

use std::sync::Arc;

use super::*;
use crate::core::frame::{Capacity, Load, QueueRule, Role, Step, StepCost};
use crate::core::policy::PolicyName;
use crate::core::scheduler::{Given, Joining, RoutingRules};

const COST: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 0.0, row_ms: 0.1, kv_ms: 0.0 };

fn dispatch(workers: u32, slots: u32, queue: usize) -> Dispatch<u64> {
    let workers: Vec<_> = (0..workers).map(|id| (id, slots, 0)).collect();
    dispatch_of(&workers, queue)
}

/// Of workers with so many rows, and so many places to wait.
fn dispatch_of(workers: &[(u32, u32, u32)], queue: usize) -> Dispatch<u64> {
    dispatch_with(workers, queue, f64::INFINITY)
}

fn dispatch_with(workers: &[(u32, u32, u32)], queue: usize, worker_queue_ms: f64) -> Dispatch<u64> {
    let rules = RoutingRules {
        policy: PolicyName::Kv,
        shadow: None,
        worker_queue_ms,
        gather_ms: 0.0,
        seed: 1,
    };
    dispatch_by(rules, workers, queue)
}

fn dispatch_by(rules: RoutingRules, workers: &[(u32, u32, u32)], queue: usize) -> Dispatch<u64> {
    dispatch_of_cost(Some(COST), rules, workers, queue)
}

fn dispatch_of_cost(
    step_prior: Option<StepCost>,
    rules: RoutingRules,
    workers: &[(u32, u32, u32)],
    queue: usize,
) -> Dispatch<u64> {
    let mut scheduler = Scheduler::new(rules, 16);
    for &(id, slots, waiting) in workers {
        scheduler.join(
            Joining {
                id: WorkerId(id),
                name: format!("w{id}").into(),
                role: Role::Both,
                kv_block_bytes: 0,
                index_room: [10_000, 0, 0],
                capacity: Capacity {
                    blocks: 10_000,
                    sequences: slots,
                    batched_tokens: 2048,
                    waiting,
                    host_blocks: 0,
                    disk_blocks: 0,
                },
                group: None,
                queue_rule: QueueRule::Fifo, // so that nobody overtakes a long prompt
                step_prior,
            },
            (),
        );
        scheduler.set_open(WorkerId(id), true);
    }
    let rules = QueueRules {
        requests: queue,
        tokens: 1 << 30,
        bytes: 1 << 30,
        ageing_ms: 1_000.0,
        floors: [0.0; 3],
    };
    Dispatch::new(scheduler, rules)
}

fn want(request: u64) -> PlacementRequest {
    PlacementRequest {
        request: RequestId(request),
        prefill_request: RequestId(u64::MAX - request),
        name: format!("request-{request}").into(),
        prompt_tokens: 1000,
        max_tokens: 50,
        keys: Arc::from([]),
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

fn patient(n: u64) -> PlacementRequest {
    PlacementRequest { resumes: true, ..want(n) }
}

fn submit(dispatch: &mut Dispatch<u64>, want: PlacementRequest, now_ms: f64) -> Submitted<u64> {
    let n = want.request.0;
    dispatch.submit(want, n, true, now_ms)
}

fn dispatch_waiting(
    dispatch: &mut Dispatch<u64>,
    now_ms: f64,
) -> Vec<(u64, Result<WorkerId, Refusal>)> {
    let mut told = Vec::new();
    dispatch.dispatch_waiting(true, now_ms, |item, placed, _| {
        told.push((item, placed.map(|placement| placement.worker)));
        true
    });
    told
}

#[test]
fn a_full_fleet_lets_requests_wait_and_an_end_lets_one_go_on() {
    let mut dispatch = dispatch(2, 1, 10);
    assert!(matches!(submit(&mut dispatch, want(1), 0.0), Submitted::Placed(..)));
    assert!(matches!(submit(&mut dispatch, want(2), 0.0), Submitted::Placed(..)));
    assert!(matches!(submit(&mut dispatch, want(3), 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, want(4), 0.0), Submitted::Waits));
    assert!(dispatch_waiting(&mut dispatch, 1.0).is_empty());
    let ended =
        dispatch.end(RequestId(2), LegOutput { tokens: 50, complete: true }, 2_000.0).unwrap();
    assert!(ended.block_seconds > 0.0);
    let told = dispatch_waiting(&mut dispatch, 2_000.0);
    assert_eq!(told, [(3, Ok(ended.worker))]);
    assert_eq!((dispatch.queue().len(), dispatch.scheduler.legs()), (1, 2));
}

#[test]
fn what_a_lost_worker_had_is_charged_to_nobody() {
    let mut dispatch = dispatch(2, 4, 10);
    let placed = |submitted| match submitted {
        Submitted::Placed(placement, _) => placement,
        other @ (Submitted::Waits | Submitted::Refused(..)) => panic!("{other:?}"),
    };
    let of = |tenant, n| PlacementRequest { tenant, ..want(n) };
    let lost = placed(submit(&mut dispatch, of(7, 1), 0.0));
    let kept = placed(submit(&mut dispatch, of(7, 2), 0.0));
    assert_ne!(lost.worker, kept.worker);
    let both = lost.expected_block_seconds + kept.expected_block_seconds;
    assert_eq!(dispatch.queue().served(7), Some(both));
    dispatch.worker_left(lost.worker, 0.0);
    assert_eq!(dispatch.queue().served(7), Some(both - lost.expected_block_seconds));
    assert!(dispatch.end(RequestId(1), LegOutput::default(), 5.0).is_none(), "it is over");
}

#[test]
fn one_who_is_gone_takes_no_place() {
    let mut dispatch = dispatch(1, 1, 10);
    assert!(matches!(submit(&mut dispatch, want(1), 0.0), Submitted::Placed(..)));
    for n in 2..5 {
        assert!(matches!(submit(&mut dispatch, want(n), 0.0), Submitted::Waits));
    }
    assert_eq!(dispatch.leave(RequestId(3)), Some(3));
    assert_eq!(dispatch.leave(RequestId(3)), None);
    dispatch.end(RequestId(1), LegOutput::default(), 1.0);
    let mut told = Vec::new();
    dispatch.dispatch_waiting(true, 1.0, |item, _, _| {
        told.push(item);
        item != 2 // 2 hung up in between
    });
    assert_eq!(told, [2, 4]);
    assert_eq!(dispatch.scheduler.legs(), 1);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let mut dispatch = dispatch(1, 1, 1);
    submit(&mut dispatch, want(1), 0.0);
    submit(&mut dispatch, PlacementRequest { prompt_tokens: 100_000, ..want(2) }, 0.0);
    let third = submit(&mut dispatch, want(3), 0.0);
    let Submitted::Refused(Refusal::QueueFull { what: QueueBound::Requests, retry_after_ms }, 3) =
        third
    else {
        panic!("{third:?}")
    };
    assert!((10_000.0..20_000.0).contains(&retry_after_ms), "{retry_after_ms}");
}

#[test]
fn an_impossible_deadline_is_refused_at_once_with_the_time_that_it_would_take() {
    let mut dispatch = dispatch(1, 8, 10);
    let soon = PlacementRequest { deadline_ms: Some(1_000.0), ..want(1) };
    assert!(matches!(submit(&mut dispatch, soon.clone(), 0.0), Submitted::Placed(..)));
    let long = PlacementRequest { prompt_tokens: 60_000, ..want(2) };
    assert!(matches!(submit(&mut dispatch, long, 0.0), Submitted::Placed(..)));
    let third = submit(&mut dispatch, PlacementRequest { request: RequestId(3), ..soon }, 0.0);
    let Submitted::Refused(Refusal::TooLate { predicted_ms, deadline_ms, retry_after_ms }, 3) =
        third
    else {
        panic!("{third:?}")
    };
    assert!(predicted_ms > 6_000.0 && deadline_ms == 1_000.0);
    assert!((retry_after_ms - (predicted_ms - deadline_ms)).abs() < 1e-6);
}

#[test]
fn a_deadline_counts_from_now_and_what_waits_before_counts_only_in_its_class_or_above() {
    let now = 50_000.0;
    let mut dispatch = dispatch(1, 1, 10);
    assert!(matches!(submit(&mut dispatch, want(1), now), Submitted::Placed(..)));
    let long = PlacementRequest { prompt_tokens: 100_000, ..want(2) };
    assert!(matches!(submit(&mut dispatch, long, now), Submitted::Waits));
    let within = |n, ms| PlacementRequest { deadline_ms: Some(now + ms), ..want(n) };
    let refused = submit(&mut dispatch, within(3, 5_000.0), now);
    let Submitted::Refused(Refusal::TooLate { predicted_ms, deadline_ms, .. }, 3) = refused else {
        panic!("{refused:?}: the long prompt is before it")
    };
    assert!(predicted_ms > 10_000.0 && deadline_ms == 5_000.0, "{predicted_ms} {deadline_ms}");
    let urgent = PlacementRequest { priority: 1, ..within(4, 5_000.0) };
    assert!(matches!(submit(&mut dispatch, urgent, now), Submitted::Waits), "it goes before that");
    let impossible = PlacementRequest { priority: 1, ..within(5, 1.0) };
    assert!(matches!(submit(&mut dispatch, impossible, now), Submitted::Refused(..)));
}

#[test]
fn one_whose_deadline_passed_is_told_how_long_it_would_have_taken_since_it_came() {
    let mut dispatch = dispatch(1, 1, 10);
    submit(&mut dispatch, want(1), 1_000.0);
    let late = PlacementRequest { deadline_ms: Some(5_000.0), ..want(2) };
    assert!(matches!(submit(&mut dispatch, late, 1_000.0), Submitted::Waits));
    let told = dispatch_waiting(&mut dispatch, 6_000.0);
    let [(2, Err(Refusal::TooLate { predicted_ms, deadline_ms, .. }))] = told[..] else {
        panic!("{told:?}")
    };
    assert_eq!(deadline_ms, 4_000.0);
    assert!((5_050.0..6_000.0).contains(&predicted_ms), "{predicted_ms}: and its own prompt");
}

#[test]
fn a_tenant_is_charged_for_what_is_placed_and_in_the_end_for_what_it_took() {
    let mut dispatch = dispatch(1, 1, 10);
    let of = |tenant, n| PlacementRequest { tenant, ..want(n) };
    let placed = |submitted| match submitted {
        Submitted::Placed(placement, _) => placement.expected_block_seconds,
        other @ (Submitted::Waits | Submitted::Refused(..)) => panic!("{other:?}"),
    };
    let expected =
        placed(submit(&mut dispatch, PlacementRequest { resumes: true, ..of(1, 1) }, 0.0));
    assert!(expected > 0.0);
    assert_eq!(dispatch.queue().served(1), Some(expected), "one that began before, too");
    for (tenant, n) in [(2, 2), (3, 3)] {
        assert!(matches!(submit(&mut dispatch, of(tenant, n), 0.0), Submitted::Waits));
    }
    let output = LegOutput { tokens: 50, complete: true };
    let ended = dispatch.end(RequestId(1), output, 9_000.0).unwrap();
    assert_ne!(ended.block_seconds, expected);
    let served = dispatch.queue().served(1).unwrap();
    assert!((served - ended.block_seconds).abs() < 1e-9, "{served} for {}", ended.block_seconds);
    let mut charge = 0.0;
    dispatch.dispatch_waiting(true, 9_000.0, |item, placed, _| {
        charge = placed.unwrap().expected_block_seconds;
        item != 2 // who hung up in between
    });
    assert_eq!(dispatch.queue().served(2), Some(0.0), "nobody took it");
    assert_eq!(dispatch.queue().served(3), Some(charge));
}

#[test]
fn without_workers_those_who_began_before_do_not_let_the_others_wait_in_vain() {
    let mut dispatch = dispatch(1, 1, 10);
    dispatch.scheduler.set_open(WorkerId(0), false);
    assert!(matches!(submit(&mut dispatch, patient(1), 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, want(2), 0.0), Submitted::Waits));
    assert!(dispatch_waiting(&mut dispatch, 1.0).is_empty(), "one may come");
    let mut told = Vec::new();
    dispatch.dispatch_waiting(false, 2.0, |item, placed, _| {
        told.push((item, placed.map(|_| ())));
        true
    });
    assert_eq!((told, dispatch.returning()), (vec![(2, Err(Refusal::NoneOpen))], 1));
}

#[test]
fn a_deadline_that_passes_in_the_queue_ends_the_wait() {
    let mut dispatch = dispatch(1, 1, 10);
    submit(&mut dispatch, want(1), 0.0);
    let late = PlacementRequest { deadline_ms: Some(5_000.0), ..want(2) };
    assert!(matches!(submit(&mut dispatch, late, 0.0), Submitted::Waits));
    assert!(dispatch_waiting(&mut dispatch, 4_999.0).is_empty());
    let told = dispatch_waiting(&mut dispatch, 5_001.0);
    assert!(matches!(told[..], [(2, Err(Refusal::TooLate { .. }))]), "{told:?}");
}

#[test]
fn without_workers_a_request_waits_only_if_one_may_come() {
    let mut dispatch = dispatch(0, 1, 10);
    let refused = dispatch.submit(want(1), 1, false, 0.0);
    assert!(matches!(refused, Submitted::Refused(Refusal::NoneOpen, 1)));
    assert!(matches!(submit(&mut dispatch, want(2), 0.0), Submitted::Waits));
    let mut told = Vec::new();
    dispatch.dispatch_waiting(false, 1.0, |item, placed, _| {
        told.push((item, placed.map(|_| ())));
        true
    });
    assert_eq!(told, [(2, Err(Refusal::NoneOpen))]);
}
