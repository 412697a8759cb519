//! Requests that would wait in a worker wait for each other, and go the longest first.

use super::*;

/// One that gathers, of such workers.
pub(super) fn gathering(
    gather_ms: f64,
    workers: &[(u32, u32, u32)],
    queue: usize,
) -> Dispatch<u64> {
    dispatch_by(rules(PolicyName::Kv, gather_ms), workers, queue)
}

fn rules(policy: PolicyName, gather_ms: f64) -> RoutingRules {
    RoutingRules { policy, shadow: None, worker_queue_ms: f64::INFINITY, gather_ms, seed: 1 }
}

/// Two workers, each with a prompt, so that whoever comes next waits behind 105 ms of it.
fn busy(gather_ms: f64) -> Dispatch<u64> {
    let mut dispatch = gathering(gather_ms, &[(0, 8, 0), (1, 8, 0)], 10);
    for n in [1, 2] {
        placed(submit(&mut dispatch, want(n), 0.0));
    }
    dispatch
}

fn of(tokens: u32, n: u64) -> PlacementRequest {
    PlacementRequest { prompt_tokens: tokens, ..want(n) }
}

fn placed(submitted: Submitted<u64>) -> Placement {
    match submitted {
        Submitted::Placed(placement, _) => placement,
        other @ (Submitted::Waits | Submitted::Refused(..)) => panic!("{other:?}"),
    }
}

fn waits(dispatch: &mut Dispatch<u64>, wanted: PlacementRequest, now_ms: f64) {
    assert!(matches!(submit(dispatch, wanted, now_ms), Submitted::Waits));
}

fn order(told: &[(u64, Result<WorkerId, Refusal>)]) -> Vec<u64> {
    assert!(told.iter().all(|(_, placed)| placed.is_ok()), "{told:?}");
    told.iter().map(|(n, _)| *n).collect()
}

#[test]
fn those_of_one_moment_are_placed_together_the_longest_first() {
    let mut dispatch = busy(2.0);
    waits(&mut dispatch, of(100, 3), 1.0);
    waits(&mut dispatch, of(5_000, 4), 1.5);
    waits(&mut dispatch, of(100, 5), 2.0);
    waits(&mut dispatch, of(3_000, 6), 2.5);
    assert_eq!(dispatch.gathers_until_ms(), Some(3.0), "of the first");
    assert!(dispatch_waiting(&mut dispatch, 2.999).is_empty());
    let told = dispatch_waiting(&mut dispatch, 3.0);
    assert_eq!(order(&told), [4, 6, 3, 5]);
    assert_ne!(told[0].1, told[1].1, "the two long ones go apart");
    assert_eq!(dispatch.gathers_until_ms(), None);
    assert!(dispatch.nobody_waits());
    assert_eq!(dispatch.scheduler.legs(), 6);
}

#[test]
fn one_with_which_a_worker_begins_at_once_is_placed_at_once() {
    let mut dispatch = gathering(2.0, &[(0, 8, 0), (1, 8, 0)], 10);
    let first = placed(submit(&mut dispatch, want(1), 0.0));
    let second = placed(submit(&mut dispatch, want(2), 0.0));
    assert_ne!(first.worker, second.worker);
    waits(&mut dispatch, want(3), 0.0);
    dispatch.end(RequestId(1), LegOutput { tokens: 1, complete: true }, 1.0);
    assert_eq!(placed(submit(&mut dispatch, want(4), 1.0)).worker, first.worker, "others gather");
    assert_eq!(order(&dispatch_waiting(&mut dispatch, 2.0)), [3]);
}

#[test]
fn one_gathers_if_it_would_wait_twice_as_long_as_that_takes() {
    let wait_ms = {
        let placement = placed(submit(&mut busy(0.0), want(3), 1.0));
        placement.decision.chosen().unwrap().1.queue_ms
    };
    assert!(wait_ms > 50.0, "{wait_ms}");
    waits(&mut busy(wait_ms / 2.0), want(3), 1.0);
    placed(submit(&mut busy(wait_ms / 2.0 * 1.000_001), want(3), 1.0));
}

#[test]
fn nobody_waits_for_what_is_only_a_guess() {
    let workers = [(0, 20, 0)];
    let mut dispatch = dispatch_of_cost(None, rules(PolicyName::Kv, 2.0), &workers, 10);
    placed(submit(&mut dispatch, want(1), 0.0));
    placed(submit(&mut dispatch, want(2), 1.0));
    for number in 1..9 {
        let at_ms = 100.0 * number as f64;
        placed(submit(&mut dispatch, want(10 + number), at_ms));
        learns(&mut dispatch, number, at_ms);
    }
    waits(&mut dispatch, want(20), 801.0); // the eighth step said what one costs
}

/// The worker took a step of 100 ms for 1,000 tokens of prompts.
fn learns(dispatch: &mut Dispatch<u64>, number: u64, now_ms: f64) {
    let step = Step {
        step: number,
        ms: 100.0,
        waited_us: 0,
        prefill_tokens: 1_000,
        prefill_context: 0,
        decode_rows: 0,
        kv_tokens: 0,
        waiting_tokens: 9_000,
        drafted: 0,
        accepted: 0,
        load: Load::default(),
        outputs: Vec::new(),
    };
    let _ = dispatch.scheduler.step(WorkerId(0), &step, Given::default(), now_ms);
}

#[test]
fn a_higher_class_goes_before_a_longer_prompt_and_the_first_before_its_equals() {
    let mut dispatch = busy(2.0);
    let low = PlacementRequest { priority: -1, ..of(9_000, 3) };
    let high = PlacementRequest { priority: 1, ..of(10, 4) };
    for wanted in [low, high, of(20, 5), of(20, 6), of(30, 7)] {
        waits(&mut dispatch, wanted, 1.0);
    }
    assert_eq!(order(&dispatch_waiting(&mut dispatch, 3.0)), [4, 7, 5, 6, 3]);
}

#[test]
fn one_that_comes_when_the_time_is_over_is_placed_with_those_before() {
    let mut dispatch = busy(2.0);
    waits(&mut dispatch, of(100, 3), 1.0);
    waits(&mut dispatch, of(5_000, 4), 50.0);
    assert_eq!(dispatch.gathers_until_ms(), Some(3.0));
    assert_eq!(order(&dispatch_waiting(&mut dispatch, 50.0)), [4, 3]);
}

#[test]
fn one_that_is_left_alone_does_not_shorten_the_time_of_those_who_come_later() {
    let mut dispatch = busy(2.0);
    waits(&mut dispatch, want(3), 1.0);
    assert_eq!(dispatch.leave(RequestId(3)), Some(3));
    assert_eq!(dispatch.gathers_until_ms(), None, "nobody is there");
    waits(&mut dispatch, want(4), 2.5);
    assert_eq!(dispatch.gathers_until_ms(), Some(4.5));
    assert_eq!(dispatch.refuse_all(), [4]);
}

#[test]
fn only_kv_gathers_and_only_where_it_is_told_to() {
    for policy in PolicyName::ALL {
        for gather_ms in [0.0, 2.0] {
            let mut dispatch = dispatch_by(rules(policy, gather_ms), &[(0, 8, 0)], 10);
            placed(submit(&mut dispatch, want(1), 0.0));
            let gathers = matches!(submit(&mut dispatch, want(2), 1.0), Submitted::Waits);
            assert_eq!(gathers, policy == PolicyName::Kv && gather_ms > 0.0, "{policy:?}");
        }
    }
}

#[test]
fn where_the_queue_has_no_room_nobody_gathers_and_nobody_is_refused() {
    let mut dispatch = gathering(2.0, &[(0, 20, 0)], 8);
    placed(submit(&mut dispatch, want(1), 0.0));
    for n in 2..9 {
        waits(&mut dispatch, want(n), 1.0);
    }
    let greedy = |n| PlacementRequest { yields: true, ..want(n) };
    assert!(dispatch.queue().crowded().is_some());
    waits(&mut dispatch, greedy(9), 1.0); // whoever has no place is refused then
    placed(submit(&mut dispatch, greedy(10), 1.0));
    placed(submit(&mut dispatch, want(11), 1.0));
    assert_eq!(order(&dispatch_waiting(&mut dispatch, 3.0)), [2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn those_for_whom_there_is_no_room_then_wait_in_order() {
    let mut dispatch = gathering(2.0, &[(0, 3, 0)], 10);
    placed(submit(&mut dispatch, want(1), 0.0));
    for (n, tokens) in [(2, 10), (3, 20), (4, 40), (5, 30)] {
        waits(&mut dispatch, of(tokens, n), 1.0);
    }
    assert_eq!(order(&dispatch_waiting(&mut dispatch, 3.0)), [4, 5]);
    assert_eq!((dispatch.queue().len(), dispatch.gathers_until_ms()), (2, None));
    waits(&mut dispatch, of(9_000, 6), 4.0);
    for (ended, next) in [(4, 2), (5, 3), (2, 6)] {
        dispatch.end(RequestId(ended), LegOutput { tokens: 1, complete: true }, 5.0);
        assert_eq!(
            order(&dispatch_waiting(&mut dispatch, 5.0)),
            [next],
            "first come, first served"
        );
    }
}

#[test]
fn one_that_goes_on_is_placed_at_once() {
    let mut dispatch = busy(2.0);
    waits(&mut dispatch, want(3), 1.0);
    placed(submit(&mut dispatch, patient(4), 1.0));
}

#[test]
fn who_gathers_changes_nothing_about_whose_turn_it_is() {
    let turns = |gathers: bool| {
        let mut dispatch = gathering(0.0, &[(0, 8, 0), (1, 8, 0), (2, 8, 0)], 10);
        let turns = (1..7).map(|n| {
            let now_ms = 1_000.0 * n as f64;
            if gathers {
                let none = dispatch.scheduler.place_if_soon(&want(n), 0.0, now_ms);
                assert!(none.unwrap().is_none());
                assert_eq!(dispatch.scheduler.legs(), 0);
            }
            let placement = placed(submit(&mut dispatch, want(n), now_ms));
            dispatch.end(placement.request, LegOutput { tokens: 1, complete: true }, now_ms);
            placement.worker.0
        });
        turns.collect::<Vec<_>>()
    };
    assert_eq!(turns(true), turns(false));
    assert_eq!(turns(true), [0, 1, 2, 0, 1, 2]);
}
