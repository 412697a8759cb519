//! Who may have one more request: places, queues that are too long, and workers that are left out.

use super::split::scheduler_of;
use super::*;
use crate::core::estimate::WorkerLoad;

fn with_queue_ms(policy: PolicyName, worker_queue_ms: f64) -> Scheduler {
    Scheduler::new(
        RoutingRules { policy, shadow: None, worker_queue_ms, gather_ms: 0.0, seed: 1 },
        BLOCK,
    )
}

fn excluded(scheduler: &mut Scheduler, request: &PlacementRequest) -> Vec<Option<Exclusion>> {
    scheduler.candidates_at(request, 0.0).candidates.iter().map(|c| c.excluded).collect()
}

#[test]
fn a_worker_is_full_with_its_batch_and_its_queue_and_who_yields_leaves_a_quarter_of_that() {
    let mut scheduler = scheduler(0);
    join_with(&mut scheduler, 0, Role::Both, Capacity { waiting: 9, ..capacity() });
    let ask = |n: u64, yields| PlacementRequest { yields, ..want(n, &keys(n, 1, 0)) };
    for n in 0..17 {
        let full = [true, false].map(|yields| excluded(&mut scheduler, &ask(99, yields))[0]);
        // of 8 and 9 places, three of which are for those who do not yield
        assert_eq!(full, [(n >= 14).then_some(Exclusion::Full), None], "{n}");
        assert!(scheduler.has_room(WorkerId(0), 0.0));
        scheduler.place(&ask(n, false), 0.0).unwrap();
    }
    assert_eq!(excluded(&mut scheduler, &ask(99, false)), [Some(Exclusion::Full)]);
    assert!(!scheduler.has_room(WorkerId(0), 0.0));
    scheduler.end(RequestId(0), LegOutput::default(), 0.0).unwrap();
    assert!(scheduler.has_room(WorkerId(0), 0.0));
    scheduler.set_open(WorkerId(0), false);
    assert!(!scheduler.has_room(WorkerId(0), 0.0), "it takes no work");
}

#[test]
fn a_queue_of_prompts_leaves_room_for_who_need_not_wait_for_it() {
    let has_room = |policy, yields| {
        let mut scheduler = with_queue_ms(policy, 100.0);
        join(&mut scheduler, 0);
        let long = PlacementRequest { yields, ..want(1, &keys(1, 100, 0)) };
        scheduler.place(&long, 0.0).unwrap();
        scheduler.has_room(WorkerId(0), 0.0)
    };
    assert!(!has_room(PolicyName::Kv, false));
    assert!(has_room(PolicyName::Kv, true), "prompts that yield wait behind the next one");
    assert!(has_room(PolicyName::LeastLoaded, false), "it knows nothing of ms");
}

#[test]
fn who_yields_is_kept_back_at_three_quarters_of_a_long_queue_whoever_stands_in_it() {
    // 1,603 tokens that are computed: 165.3 ms
    for (long_ms, full) in [(215.0, [true, false]), (225.0, [false, false]), (160.0, [true, true])]
    {
        let mut scheduler = with_queue_ms(PolicyName::Kv, long_ms);
        join(&mut scheduler, 0);
        scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
        let ask = |yields| PlacementRequest { yields, ..want(2, &keys(2, 1, 0)) };
        let held = [true, false].map(|yields| excluded(&mut scheduler, &ask(yields))[0].is_some());
        assert_eq!(held, full, "{long_ms}");
    }
    let mut scheduler = with_queue_ms(PolicyName::Kv, 200.0);
    join(&mut scheduler, 0);
    let ask = |n, yields| PlacementRequest { yields, ..want(n, &keys(n, 100, 0)) };
    scheduler.place(&ask(1, true), 0.0).unwrap();
    assert!(excluded(&mut scheduler, &ask(2, true))[0].is_some(), "it waits behind its own kind");
}

#[test]
fn a_worker_that_takes_nothing_keeps_nobody_from_waiting_here() {
    let mut scheduler = with_queue_ms(PolicyName::Kv, 100.0);
    join(&mut scheduler, 0);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    join(&mut scheduler, 1);
    scheduler.set_open(WorkerId(1), false);
    let refused = scheduler.place(&want(2, &keys(2, 1, 0)), 0.0).unwrap_err();
    assert_eq!(refused.no_place, NoPlace::AllFull);
}

#[test]
fn a_queue_is_long_when_it_takes_longer_than_it_may_and_waits_for_rows_as_long_as_answers_are() {
    // Ten requests too many for eight rows: answers of 256 tokens, of 5.8 ms each and some for the KV of 101 tokens.
    let full = WorkerLoad {
        occupied: 17.0,
        rows: 8.0,
        slots: 8.0,
        backlog_tokens: 100.0,
        backlog_runs: true,
        ..WorkerLoad::idle(COST)
    };
    let tpot_ms = 5.0 + 0.8 + 101.0 * 1e-5;
    let queue_ms = 10.0 * 256.0 * tpot_ms / 8.0 + 10.0 + 100.0 / 4_088.0 * 5.8;
    for (longest_ms, long) in [(queue_ms - 1e-6, true), (queue_ms + 1e-6, false)] {
        let scheduler = with_queue_ms(PolicyName::Kv, longest_ms);
        assert_eq!(scheduler.has_long_queue(Role::Both, &full), long, "{longest_ms}");
    }
    let just = WorkerLoad { backlog_tokens: 1_000.0, backlog_runs: true, ..WorkerLoad::idle(COST) };
    let just = WorkerLoad { occupied: 1.0, elapsed_ms: 1e9, ..just };
    let scheduler = with_queue_ms(PolicyName::Kv, 0.0);
    assert!(!scheduler.has_long_queue(Role::Both, &just), "nothing of it is left");
}

#[test]
fn who_gets_no_answer_is_not_split() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let scored = PlacementRequest { max_tokens: 0, ..want(1, &keys(1, 100, 0)) };
    let placement = scheduler.place(&scored, 0.0).unwrap();
    assert_eq!((placement.worker, placement.prefill), (WorkerId(1), None));
}

#[test]
fn one_prefill_worker_whose_kv_stays_does_not_keep_that_of_others() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    scheduler.join(Joining { role: Role::Prefill, ..joining(2) }, ());
    scheduler.set_open(WorkerId(2), true);
    let placement = scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    assert_eq!(placement.prefill.unwrap().worker, WorkerId(0));
}

#[test]
fn who_began_before_goes_back_to_who_failed_it_while_others_take_no_work() {
    let mut scheduler = scheduler(2);
    scheduler.set_open(WorkerId(1), false);
    let resumes =
        PlacementRequest { resumes: true, excluded: vec![WorkerId(0)], ..want(1, &keys(1, 4, 0)) };
    assert_eq!(scheduler.place(&resumes, 0.0).unwrap().worker, WorkerId(0));
}

#[test]
fn blocks_that_are_there_already_are_not_waited_for() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 300, 0);
    scheduler.place(&want(1, &keys), 0.0).unwrap();
    let awaits = |scheduler: &mut Scheduler| {
        scheduler.candidates_at(&want(2, &keys), 0.0).candidates[0].queue.awaits.is_some()
    };
    assert!(awaits(&mut scheduler));
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    assert!(!awaits(&mut scheduler));
}

#[test]
fn a_pool_is_booked_to_its_last_block_and_one_without_blocks_says_that_it_holds_none() {
    for (blocks, booked) in [(1_000, true), (1_001, false)] {
        let mut scheduler = scheduler(1);
        scheduler.place(&want(1, &keys(1, blocks, 0)), 0.0).unwrap();
        assert_eq!(scheduler.legs[&RequestId(1)].booked, booked, "{blocks}");
    }
    let mut scheduler = scheduler(0);
    join_with(&mut scheduler, 0, Role::Both, Capacity { blocks: 0, ..capacity() });
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &[]), None);
    assert!(scheduler.stored(WorkerId(0), Tier::Device, &[7]).is_some());
}
