//! Who cannot or need not go now, and that nobody waits for them.

use super::*;

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
