//! Placed at once, waiting in order, or refused with a reason and a time: never lost, never twice.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::core::frame::{Capacity, Load, Role, Step, StepCost};
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
    let rules = RoutingRules { policy: PolicyName::Kv, shadow: None, worker_queue_ms, seed: 1 };
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
                step_prior: Some(COST),
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
        name: format!("request-{request}"),
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
    }
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
fn who_has_many_answers_leaves_the_last_places_to_others() {
    let mut dispatch = dispatch_of(&[(0, 4, 8)], 16);
    let greedy = |n| PlacementRequest { tenant: 7, yields: true, ..want(n) };
    let placed = |submitted| matches!(submitted, Submitted::Placed(..));
    let taken = (1..=12).filter(|n| placed(submit(&mut dispatch, greedy(*n), 0.0))).count();
    assert_eq!(taken, 10, "of four rows and a queue of eight");
    // those that wait are passed over by one that may take the last places, and only by that one
    assert!(matches!(submit(&mut dispatch, want(100), 0.0), Submitted::Waits));
    assert_eq!(dispatch_waiting(&mut dispatch, 1.0), [(100, Ok(WorkerId(0)))]);
    // the same in the queue of the router
    let waits = |submitted: &Submitted<u64>| matches!(submitted, Submitted::Waits);
    let waiting = (13..40).filter(|n| waits(&submit(&mut dispatch, greedy(*n), 2.0))).count();
    assert_eq!(dispatch.queue().len(), 14, "{waiting}");
    let refused = submit(&mut dispatch, greedy(50), 2.0);
    assert!(matches!(refused, Submitted::Refused(Refusal::QueueFull { .. }, _)));
    dispatch.scheduler.set_open(WorkerId(0), false);
    assert!(matches!(submit(&mut dispatch, want(101), 2.0), Submitted::Waits));
}

#[test]
fn one_that_makes_way_and_finds_no_room_holds_nobody_up() {
    let mut dispatch = dispatch_of(&[(0, 4, 8)], 16);
    let greedy = |n| PlacementRequest { tenant: 7, yields: true, priority: 1, ..want(n) };
    let placed = |submitted| matches!(submitted, Submitted::Placed(..));
    let taken = (1..=16).filter(|n| placed(submit(&mut dispatch, greedy(*n), 0.0))).count();
    assert_eq!((taken, dispatch.queue().len()), (10, 6));
    assert!(matches!(submit(&mut dispatch, want(100), 0.0), Submitted::Waits));
    assert_eq!(
        dispatch_waiting(&mut dispatch, 1.0),
        [(100, Ok(WorkerId(0)))],
        "although they are before it"
    );
}

#[test]
fn a_long_queue_of_what_makes_way_is_not_long_for_others() {
    let mut dispatch = dispatch_with(&[(0, 4, 100)], 100, 5_000.0);
    let greedy = |n| PlacementRequest { tenant: 7, yields: true, ..want(n) };
    let placed = |submitted| matches!(submitted, Submitted::Placed(..));
    let taken = (1..=40).filter(|n| placed(submit(&mut dispatch, greedy(*n), 0.0))).count();
    assert!(
        (5..20).contains(&taken),
        "as long as the queue is not three quarters as long: {taken}"
    );
    assert!(matches!(submit(&mut dispatch, want(100), 0.0), Submitted::Waits));
    assert_eq!(dispatch_waiting(&mut dispatch, 1.0), [(100, Ok(WorkerId(0)))]);
    assert!(matches!(submit(&mut dispatch, greedy(50), 1.0), Submitted::Waits));
}

#[test]
fn what_makes_way_fills_less_of_a_queue_and_takes_none_of_it_from_others() {
    let fill = |dispatch: &mut Dispatch<u64>, first: u64, yields: bool| {
        let wants = (first..).map(|n| PlacementRequest { yields, tenant: first, ..want(n) });
        for (taken, want) in (0..).zip(wants) {
            let request = want.request;
            if !matches!(submit(dispatch, want, 0.0), Submitted::Placed(..)) {
                dispatch.leave(request);
                return taken;
            }
        }
        unreachable!("the queue is bounded")
    };
    let empty = || dispatch_with(&[(0, 4, 1_000)], 100, 5_000.0);
    let (mut alone, mut shared) = (empty(), empty());
    let others_alone: u32 = fill(&mut alone, 1, false);
    let yielding: u32 = fill(&mut shared, 1, true);
    let others = fill(&mut shared, 1_000, false);
    assert!(yielding < others_alone, "{yielding} of {others_alone}");
    assert!(2 * others > others_alone, "{others} beside {yielding}, and {others_alone} alone");
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
fn one_that_makes_way_and_may_not_go_where_there_is_room_does_not_hold_up_its_like() {
    let mut dispatch = dispatch(2, 1, 8);
    for n in [1, 2] {
        assert!(matches!(submit(&mut dispatch, want(n), 0.0), Submitted::Placed(..)));
    }
    let greedy = |n| PlacementRequest { tenant: 7, yields: true, ..want(n) };
    let picky = PlacementRequest { excluded: vec![WorkerId(0)], ..greedy(3) };
    assert!(matches!(submit(&mut dispatch, picky, 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, greedy(4), 0.0), Submitted::Waits));
    let first = |leg: &u64| dispatch.scheduler.worker_of(RequestId(*leg)) == Some(WorkerId(0));
    let leg = [1, 2].into_iter().find(first).unwrap();
    dispatch.end(RequestId(leg), LegOutput::default(), 1.0);
    assert_eq!(dispatch_waiting(&mut dispatch, 1.0), [(4, Ok(WorkerId(0)))]);
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

#[test]
fn one_that_every_worker_failed_does_not_hold_up_the_others() {
    let mut dispatch = dispatch(2, 1, 10);
    submit(&mut dispatch, want(1), 0.0);
    submit(&mut dispatch, want(2), 0.0);
    let picky = PlacementRequest { excluded: vec![WorkerId(0)], ..want(3) };
    assert!(matches!(submit(&mut dispatch, picky, 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, want(4), 0.0), Submitted::Waits));
    let on_first = [1, 2].into_iter().find(|n| {
        dispatch
            .end(RequestId(*n), LegOutput::default(), 1.0)
            .is_some_and(|ended| ended.worker == WorkerId(0))
    });
    assert!(on_first.is_some());
    let told = dispatch_waiting(&mut dispatch, 1.0);
    assert!(told.contains(&(4, Ok(WorkerId(0)))), "{told:?}");
}

fn patient(n: u64) -> PlacementRequest {
    PlacementRequest { resumes: true, ..want(n) }
}

#[test]
fn one_that_began_before_waits_for_whoever_comes_and_goes_before_all_others() {
    let mut dispatch = dispatch(1, 1, 0); // a queue that takes nobody
    assert!(matches!(submit(&mut dispatch, want(1), 0.0), Submitted::Placed(..)));
    assert!(matches!(submit(&mut dispatch, want(2), 0.0), Submitted::Refused(..)));
    let hopeless =
        PlacementRequest { deadline_ms: Some(1.0), excluded: vec![WorkerId(0)], ..patient(3) };
    assert!(matches!(submit(&mut dispatch, hopeless, 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, patient(4), 0.0), Submitted::Waits));
    assert!(!dispatch.nobody_waits() && dispatch.returning() == 2);
    dispatch.end(RequestId(1), LegOutput::default(), 10.0);
    let other = submit(&mut dispatch, want(5), 10.0);
    assert!(matches!(other, Submitted::Refused(..)), "{other:?}: it is not its turn");
    assert_eq!(
        dispatch_waiting(&mut dispatch, 10.0),
        [(3, Ok(WorkerId(0)))],
        "who failed it is better than none"
    );
    dispatch.scheduler.set_open(WorkerId(0), false);
    dispatch.end(RequestId(3), LegOutput::default(), 20.0);
    let mut told = 0;
    dispatch.dispatch_waiting(false, 20.0, |_, _, _| {
        told += 1;
        true
    });
    assert_eq!((told, dispatch.leave(RequestId(4)), dispatch.nobody_waits()), (0, Some(4), true));
    submit(&mut dispatch, patient(6), 20.0);
    assert_eq!(dispatch.refuse_all(), [6]);
}

#[test]
fn one_that_waits_for_another_worker_than_that_which_failed_it_holds_nobody_up() {
    let mut dispatch = dispatch(2, 1, 8);
    let placed: Vec<_> = (1..3).map(|n| submit(&mut dispatch, want(n), 0.0)).collect();
    assert!(placed.iter().all(|one| matches!(one, Submitted::Placed(..))));
    let picky = PlacementRequest { excluded: vec![WorkerId(0)], ..patient(3) };
    assert!(matches!(submit(&mut dispatch, picky, 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, want(4), 0.0), Submitted::Waits));
    dispatch.end(RequestId(1), LegOutput::default(), 1.0);
    assert_eq!(dispatch_waiting(&mut dispatch, 1.0), [(4, Ok(WorkerId(0)))]);
    dispatch.end(RequestId(2), LegOutput::default(), 2.0);
    let mut gone = Vec::new();
    let served = dispatch.queue().served(0);
    dispatch.dispatch_waiting(true, 2.0, |item, _, _| {
        gone.push(item);
        false // it hung up
    });
    assert_eq!((gone, dispatch.scheduler.legs()), (vec![3], 1));
    assert_eq!(dispatch.queue().served(0), served);
}

#[test]
fn however_many_may_not_go_to_the_worker_with_room_the_one_who_may_goes() {
    let mut dispatch = dispatch(3, 1, 8);
    for n in 1..4 {
        assert!(matches!(submit(&mut dispatch, want(n), 0.0), Submitted::Placed(..)));
    }
    // each was failed by the worker that will be free, and some by another one, too
    for n in 10..210 {
        let excluded = if n % 3 == 0 { vec![WorkerId(1), WorkerId(0)] } else { vec![WorkerId(0)] };
        submit(&mut dispatch, PlacementRequest { excluded, ..patient(n) }, 0.0);
    }
    let may = PlacementRequest { excluded: vec![WorkerId(2)], ..patient(300) };
    assert!(matches!(submit(&mut dispatch, may, 0.0), Submitted::Waits));
    assert!(matches!(submit(&mut dispatch, want(400), 0.0), Submitted::Waits));
    let on = |dispatch: &mut Dispatch<u64>, id| {
        let mut ended = Vec::new();
        for leg in (1..4).filter(|leg| dispatch.scheduler.worker_of(RequestId(*leg)) == Some(id)) {
            ended.push(leg);
        }
        dispatch.end(RequestId(ended[0]), LegOutput::default(), 1.0);
    };
    on(&mut dispatch, WorkerId(0));
    assert_eq!(dispatch_waiting(&mut dispatch, 1.0), [(300, Ok(WorkerId(0)))]);
    on(&mut dispatch, WorkerId(1));
    assert_eq!(dispatch_waiting(&mut dispatch, 2.0), [(10, Ok(WorkerId(1)))], "the first who may");
    on(&mut dispatch, WorkerId(2));
    assert_eq!(dispatch_waiting(&mut dispatch, 3.0), [(11, Ok(WorkerId(2)))]);
    assert_eq!((dispatch.returning(), dispatch.queue().len()), (198, 1));
}

#[derive(Debug, Clone)]
enum Event {
    Submit { priority: i8, tenant: u64, deadline: bool, resumes: bool },
    End(usize),
    Leave(u64),
    Step(u32),
    WorkerLeaves(u32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => (-1..2i8, 0..3u64, any::<bool>(), proptest::bool::weighted(0.2)).prop_map(
            |(priority, tenant, deadline, resumes)| Event::Submit { priority, tenant, deadline, resumes }
        ),
        3 => (0..50usize).prop_map(Event::End),
        1 => (0..80u64).prop_map(Event::Leave),
        2 => (0..3u32).prop_map(Event::Step),
        1 => (0..3u32).prop_map(Event::WorkerLeaves),
    ]
}

proptest! {
    /// Each request is placed once, refused once, or left; nothing else happens to it.
    #[test]
    fn every_request_ends_in_exactly_one_way(events in proptest::collection::vec(event(), 1..150)) {
        let mut dispatch = dispatch(3, 2, 8);
        let (mut fate, mut running, mut now_ms, mut next) = (BTreeMap::new(), Vec::new(), 0.0, 0);
        for event in events {
            now_ms += 300.0;
            match event {
                Event::Submit { priority, tenant, deadline, resumes } => {
                    next += 1;
                    let deadline_ms = deadline.then_some(now_ms + 900.0);
                    let want = PlacementRequest { priority, tenant, deadline_ms, resumes, ..want(next) };
                    match submit(&mut dispatch, want, now_ms) {
                        Submitted::Placed(placement, item) => {
                            prop_assert_eq!(placement.request.0, item);
                            prop_assert!(fate.insert(item, "placed").is_none());
                            running.push(item);
                        }
                        Submitted::Waits => {}
                        Submitted::Refused(_, item) => {
                            prop_assert!(fate.insert(item, "refused").is_none());
                        }
                    }
                }
                Event::End(i) if !running.is_empty() => {
                    let item = running.swap_remove(i % running.len());
                    dispatch.end(RequestId(item), LegOutput { tokens: 3, complete: true }, now_ms);
                }
                Event::End(_) => {}
                Event::Leave(ticket) => {
                    if dispatch.leave(RequestId(ticket)).is_some() {
                        prop_assert!(fate.insert(ticket, "left").is_none());
                    }
                }
                Event::Step(id) => {
                    let step = Step {
                        step: next,
                        ms: 10.0,
                        prefill_tokens: 100,
                        prefill_context: 0,
                        decode_rows: 1,
                        kv_tokens: 10,
                        waiting_tokens: 0,
                        drafted: 0,
                        accepted: 0,
                        load: Load::default(),
                        outputs: Vec::new(),
                    };
                    let _ = dispatch.scheduler.step(WorkerId(id), &step, Given::default(), now_ms);
                }
                Event::WorkerLeaves(id) => drop(dispatch.worker_left(WorkerId(id), now_ms)),
            }
            for (item, placed) in dispatch_waiting(&mut dispatch, now_ms) {
                let what = if placed.is_ok() { "placed" } else { "refused" };
                prop_assert!(fate.insert(item, what).is_none(), "{item} twice");
                if placed.is_ok() {
                    running.push(item);
                }
            }
        }
        let left = dispatch.refuse_all().len();
        prop_assert_eq!(fate.len() + left, usize::try_from(next).unwrap());
        prop_assert!(dispatch.nobody_waits());
    }
}
