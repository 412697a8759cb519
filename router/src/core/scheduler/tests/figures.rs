//! The figures that a decision goes by and a booking keeps, worked out by hand: each would be another one if a term of it were
//! left out, counted twice or taken from elsewhere.

use super::*;
use crate::core::estimate::WorkerLoad;

fn loads(scheduler: &mut Scheduler, request: &PlacementRequest, now_ms: f64) -> Vec<WorkerLoad> {
    let candidates = scheduler.candidates_at(request, now_ms).candidates;
    candidates.iter().map(|candidate| candidate.worker_load).collect()
}

fn load(scheduler: &mut Scheduler, now_ms: f64) -> WorkerLoad {
    loads(scheduler, &want(99, &keys(99, 1, 0)), now_ms)[0]
}

/// A worker that reports so much at work.
fn reports(scheduler: &mut Scheduler, id: u32, number: u64, load: Load) {
    let step = Step { waiting_tokens: 0, ..report(number, 0, load) };
    let _ = scheduler.step(WorkerId(id), &step, Given::default(), 0.0);
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9 * expected.abs().max(1.0), "{got}, not {expected}");
}

#[test]
fn what_prompts_find_in_caches_is_what_an_evicted_block_is_worth() {
    let mut scheduler = scheduler(1);
    assert_eq!(load(&mut scheduler, 0.0).reuse, 0.0, "nothing was found yet");
    for n in 0..50 {
        scheduler.place(&want(n, &keys(n, 10, 0)), 0.0).unwrap(); // 163 tokens
        scheduler.begun(RequestId(n), 40, 1.0).unwrap();
        scheduler.end(RequestId(n), LegOutput::default(), 1.0).unwrap();
    }
    // each prompt counts a fiftieth
    close(load(&mut scheduler, 1.0).reuse, 40.0 / 163.0 * (1.0 - 0.98_f64.powi(50)));
}

#[test]
fn who_comes_later_waits_for_workers_of_his_kind() {
    let mut scheduler = split::scheduler_of(PolicyName::Kv, &[Role::Prefill, Role::Decode]);
    let busy = report(1, 2_000, Load::default()); // 200 ms of prompts
    let _ = scheduler.step(WorkerId(0), &busy, Given::default(), 400.0);
    let seen = loads(&mut scheduler, &want(1, &keys(1, 1, 0)), 400.0);
    assert!(seen[0].pressure > 0.5, "{}", seen[0].pressure);
    assert_eq!(seen[1].pressure, 0.0, "nobody waits for prompts there");
}

#[test]
fn a_fleet_without_a_pause_is_nine_tenths_busy_at_most() {
    let mut pressure = demand::pressure::Pressure::default();
    for n in 1..10_000 {
        pressure.computed(100.0, 100.0 * f64::from(n));
    }
    close(pressure.at(1, 1e6), 9.0);
    // what was computed fades over half a minute
    let now = pressure.at(4, 1e6);
    let later = pressure.at(4, 1e6 + 30_000.0);
    let busy = |pressure: f64| pressure / (1.0 + pressure);
    assert!((busy(later) / busy(now) - (-1.0_f64).exp()).abs() < 1e-3, "{now} {later}");
}

#[test]
fn blocks_that_prompts_on_their_way_will_need_are_in_use() {
    let mut scheduler = scheduler(1);
    let used = Load { blocks_used: 100, ..Load::default() };
    reports(&mut scheduler, 0, 1, used);
    close(load(&mut scheduler, 0.0).blocks_used, 100.0);
    scheduler.place(&want(1, &keys(1, 50, 0)), 0.0).unwrap();
    close(load(&mut scheduler, 0.0).blocks_used, 100.0 + 803.0 / 16.0);

    let mut split = split::scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let placement = split.place(&want(1, &keys(1, 50, 0)), 0.0).unwrap();
    let output = placement.decision.ask.output_tokens;
    let seen = loads(&mut split, &want(2, &keys(2, 1, 0)), 0.0);
    close(seen[0].blocks_used, 803.0 / 16.0);
    close(seen[1].blocks_used, (803.0 + output) / 16.0); // the answer, too
}

#[test]
fn a_request_that_was_not_reported_yet_counts_until_it_is() {
    let mut scheduler = scheduler(1);
    let running = |running| Load { running, ..Load::default() };
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    reports(&mut scheduler, 0, 1, running(2)); // it, and one of another router
    scheduler.place(&want(2, &keys(2, 4, 0)), 0.0).unwrap();
    assert_eq!(load(&mut scheduler, 0.0).occupied, 3.0);
    // the end of a request that was reported says nothing of one that was not
    scheduler.end(RequestId(1), LegOutput::default(), 0.0).unwrap();
    assert_eq!(load(&mut scheduler, 0.0).occupied, 3.0);
    scheduler.end(RequestId(2), LegOutput::default(), 0.0).unwrap();
    assert_eq!(load(&mut scheduler, 0.0).occupied, 2.0);
}

#[test]
fn a_booking_keeps_what_the_estimate_said() {
    let mut scheduler = scheduler(1);
    let placement = scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    let (_, estimate) = placement.decision.chosen().unwrap();
    let leg = &scheduler.legs[&RequestId(1)];
    close(estimate.ttft_ms(), 165.3); // 5 + 1603 * 0.1
    assert_eq!(leg.predicted_ttft_ms, estimate.ttft_ms());
    close(leg.predicted_tpot_ms, estimate.decode_ms / 49.0); // of 50 tokens
    // half of the answer is there on average
    let seconds = (estimate.ttft_ms() + estimate.decode_ms) / 1e3;
    close(leg.expected_block_seconds, (1603.0 + 25.0) / 16.0 * seconds);
    assert_eq!(placement.expected_block_seconds, leg.expected_block_seconds);
}

#[test]
fn the_first_token_of_a_decode_leg_comes_after_the_transfer_and_a_step() {
    let mut scheduler = split::scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let wanted = want(1, &keys(1, 100, 0));
    let placement = scheduler.place(&wanted, 0.0).unwrap();
    let (_, estimate) = placement.decision.chosen().unwrap();
    assert!(estimate.transfer_ms > 1.0);
    let step_ms = estimate.decode_ms / 49.0;
    let first = scheduler.begun(wanted.prefill_request, 0, 200.0).unwrap();
    close(first.predicted_ttft_ms, estimate.ttft_ms());
    let second = scheduler.begun(wanted.request, 0, 300.0).unwrap();
    close(second.predicted_ttft_ms, estimate.ttft_ms() + estimate.transfer_ms + step_ms);
}

#[test]
fn blocks_are_booked_for_three_times_as_long_as_the_first_token_should_take() {
    let mut scheduler = scheduler(1);
    let rest = |n: u64| want(n, &keys(1, 4, 0));
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.end(RequestId(1), LegOutput::default(), 0.0).unwrap();
    let long = PlacementRequest { prompt_tokens: 40_000, ..rest(2) };
    scheduler.place(&long, 0.0).unwrap();
    let ttft_ms = scheduler.legs[&RequestId(2)].predicted_ttft_ms;
    assert!((4_000.0..5_000.0).contains(&ttft_ms), "{ttft_ms}");
    assert_eq!(scheduler.expire_leases(3.0 * ttft_ms - 1.0), 0);
    assert_eq!(scheduler.expire_leases(3.0 * ttft_ms + 1.0), 1);
}

#[test]
fn who_comes_within_ten_ms_came_at_the_same_moment() {
    for (after_ms, same_moment) in [(10.0, true), (11.0, false)] {
        let mut scheduler = scheduler(1);
        for (request, at_ms) in [(1, 0.0), (2, after_ms)] {
            scheduler.place(&want(request, &keys(request, 300, 0)), at_ms).unwrap();
        }
        let first = scheduler.begun(RequestId(1), 0, 300.0).unwrap();
        assert_eq!(first.settled_ttft_ms > first.predicted_ttft_ms, same_moment, "{first:?}");
        assert!(first.last_ttft_ms > first.predicted_ttft_ms);
    }
}

/// One worker of which 904 blocks are in use by two answers with 38 and 19 of at most so many tokens. A step of two rows takes
/// 5.2 ms.
fn with_two_answers(shared: u32, max_tokens: u32) -> Scheduler {
    let mut scheduler = scheduler(1);
    for (n, blocks) in [(1, 400), (2, 500)] {
        let request = PlacementRequest { max_tokens, ..want(n, &keys(n, blocks, shared)) };
        scheduler.place(&request, 0.0).unwrap();
    }
    let load = Load { running: 2, blocks_used: 904, ..Load::default() };
    for (number, begins) in [(1, Some(1)), (20, Some(2)), (39, None)] {
        let step = report(number, 0, load);
        let _ = scheduler.step(WorkerId(0), &step, Given::default(), 5.2 * number as f64);
        begins.map(|request| scheduler.begun(RequestId(request), 0, 0.0).unwrap());
    }
    scheduler
}

fn room_ms(scheduler: &mut Scheduler, blocks: u32, shared: u32) -> Option<f64> {
    let request = want(99, &keys(99, blocks, shared));
    scheduler.candidates_at(&request, 300.0).candidates[0].queue.room_ms
}

#[test]
fn room_is_for_the_prompt_and_for_what_answers_are_still_to_write() {
    let mut scheduler = with_two_answers(0, 50);
    let (first, both) = (Some(12.0 * 5.2), Some(31.0 * 5.2));
    let near = |got: Option<f64>, expected: Option<f64>| {
        assert!((got.unwrap() - expected.unwrap()).abs() < 1e-6, "{got:?}, not {expected:?}");
    };
    // the first answer gives back 403.3 blocks; both are still to write 43 tokens, 2.7 blocks
    near(room_ms(&mut scheduler, 496, 0), first); // 402.9 are lacking
    near(room_ms(&mut scheduler, 498, 0), both); // 404.9 are lacking
    // each step gives two tokens: 38 steps are all of the first answer, of which one is thought to come nevertheless
    scheduler.workers[0].accepted = 2.0;
    near(room_ms(&mut scheduler, 300, 0), Some(2.6));
}

#[test]
fn a_worker_keeps_room_for_answers_as_long_as_answers_are_and_for_a_block_more_at_least() {
    // nothing is known yet: 256 tokens, of which 218 and 237 are to come, 28.4 blocks; of 1000 blocks 96 are free
    let mut scheduler = with_two_answers(0, 2_000);
    assert_eq!(room_ms(&mut scheduler, 67, 0), None);
    let full = room_ms(&mut scheduler, 68, 0).unwrap();
    assert!((full - 256.0 * 5.2).abs() < 1e-6, "{full}");
    // a prompt before it is to become an answer, too: 4.2 blocks and 3.1
    scheduler.place(&want(3, &keys(3, 4, 0)), 300.0).unwrap();
    assert_eq!(room_ms(&mut scheduler, 60, 0), None);
    assert!(room_ms(&mut scheduler, 61, 0).is_some());
    scheduler.end(RequestId(3), LegOutput::default(), 300.0).unwrap();
    for _ in 0..1_000 {
        scheduler.demand.lengths.ended(0, 10);
    }
    // both are longer than answers are: two blocks are kept, and 94 free
    assert_eq!(room_ms(&mut scheduler, 93, 0), None);
    assert!(room_ms(&mut scheduler, 94, 0).is_some());
}

#[test]
fn blocks_that_a_request_shares_with_one_that_runs_need_no_room_and_are_not_given_back() {
    let mut scheduler = with_two_answers(300, 50);
    assert_eq!(room_ms(&mut scheduler, 390, 300), Some(0.0), "90 are new where 96 are free");
    // 201 are new where 96 are free; the first one gives back the 103 that are its own alone
    let both = room_ms(&mut scheduler, 501, 300).unwrap();
    assert!((both - 31.0 * 5.2).abs() < 1e-6, "{both}");
}

#[test]
fn a_prompt_that_has_its_blocks_needs_no_more() {
    let mut scheduler = scheduler(1);
    for n in [1, 2] {
        scheduler.place(&want(n, &keys(n, 300, 0)), 0.0).unwrap();
    }
    let used = |scheduler: &mut Scheduler| load(scheduler, 0.0).blocks_used;
    close(used(&mut scheduler), 2.0 * 4_803.0 / 16.0);
    // the first step was the first one's alone; it has all its blocks since
    let step =
        report(1, 2_048, Load { running: 1, waiting: 1, blocks_used: 301, ..Load::default() });
    let _ = scheduler.step(WorkerId(0), &step, Given::default(), 210.0);
    close(used(&mut scheduler), 301.0 + 4_803.0 / 16.0);
}

#[test]
fn an_answer_does_not_become_longer_than_it_may() {
    let mut scheduler = with_two_answers(0, 50);
    scheduler.workers[0].accepted = 2.0;
    // Two tokens a step: the first answer is written, twelve tokens of the second are to come, 0.75 blocks.
    assert_eq!(room_ms(&mut scheduler, 95, 0), None);
    assert!(room_ms(&mut scheduler, 96, 0).is_some());
}

#[test]
fn room_for_exactly_what_is_lacking_is_room() {
    let mut scheduler = with_two_answers(0, 50);
    // 904 blocks, 2.6875 to be written and the prompt's 496.625 are 403.3125 more than 1000: the first answer's
    let request = PlacementRequest { prompt_tokens: 7_946, ..want(99, &keys(99, 496, 0)) };
    let first = scheduler.candidates_at(&request, 300.0).candidates[0].queue.room_ms.unwrap();
    assert!((first - 12.0 * 5.2).abs() < 1e-6, "{first}");
    let last = room_ms(&mut scheduler, 2_000, 0).unwrap();
    assert!(
        (last - 31.0 * 5.2).abs() < 1e-6,
        "what is never enough may be tried when all have ended: {last}"
    );
}

#[test]
fn what_is_shared_with_any_that_runs_is_there() {
    let mut scheduler = with_two_answers(300, 50);
    // 904 and 95.2 blocks are fewer than 1000; the 2.7 that answers are still to write are not lacking, as all 95 are there
    assert_eq!(room_ms(&mut scheduler, 95, 95), None, "there is room");
    // one more that runs shares nothing
    scheduler.place(&want(3, &keys(3, 1, 0)), 300.0).unwrap();
    scheduler.begun(RequestId(3), 0, 300.0).unwrap();
    assert_eq!(room_ms(&mut scheduler, 390, 300), Some(0.0));
}

#[test]
fn room_is_kept_for_the_answers_of_prompts_that_wait_as_for_others() {
    let mut scheduler = with_two_answers(0, 2_000);
    let long = PlacementRequest { max_tokens: 2_000, ..want(3, &keys(3, 4, 0)) };
    scheduler.place(&long, 300.0).unwrap();
    // 28.4 blocks for the two that run, 16 for the one that waits, and its 4.2: 47.4 are left of 96
    assert_eq!(room_ms(&mut scheduler, 47, 0), None);
    assert!(room_ms(&mut scheduler, 48, 0).is_some());
    // A block for each at least: of answers of some seven tokens on average three need as many.
    (0..1_000).for_each(|_| scheduler.demand.lengths.ended(0, 2));
    assert_eq!(room_ms(&mut scheduler, 88, 0), None);
    assert!(room_ms(&mut scheduler, 89, 0).is_some());
}

#[test]
fn a_prompt_of_which_one_token_is_computed_has_its_blocks() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 300, 0)), 0.0).unwrap();
    let step = report(1, 1, Load { running: 1, blocks_used: 301, ..Load::default() });
    let _ = scheduler.step(WorkerId(0), &step, Given::default(), 210.0);
    close(load(&mut scheduler, 0.0).blocks_used, 301.0);
}
