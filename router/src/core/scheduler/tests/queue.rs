//! What the scheduler thinks that each worker has ahead: its own prompts step by step, and those of other routers.

use super::*;
use crate::core::estimate::{PromptQueue, QueuedPrompt};
use crate::core::frame::OtherPrompt;

/// What is left of each prompt after the step that runs, with what that computes.
fn queue(scheduler: &mut Scheduler) -> Vec<(u32, u32)> {
    let request = want(99, &keys(99, 1, 0));
    let weighed = scheduler.candidates_at(&request, 0.0);
    weighed.candidates[0].queue.prompts.iter().map(|prompt| (prompt.running, prompt.left)).collect()
}

fn step(scheduler: &mut Scheduler, number: u64, prefill_tokens: u32, running: u32) {
    let load = Load { running, ..Load::default() };
    let step = report(number, prefill_tokens, load);
    assert_eq!(scheduler.step(WorkerId(0), &step, Given::default(), 100.0 * number as f64), None);
}

#[test]
fn a_step_is_shared_out_as_the_engine_does_it() {
    let mut scheduler = scheduler(1);
    // 4,803, 1,603 and 163 tokens; a step takes 2,048
    for (n, blocks) in [(1, 300), (2, 100), (3, 10)] {
        scheduler.place(&want(n, &keys(n, blocks, 0)), 0.0).unwrap();
    }
    // nothing ran before the first one, which has its step for itself
    assert_eq!(queue(&mut scheduler), [(2048, 2755), (0, 1603), (0, 163)]);
    step(&mut scheduler, 1, 2048, 3);
    // half of a step, half of the rest, and what is left of that; nobody else wanted the last tokens
    assert_eq!(queue(&mut scheduler), [(1373, 1382), (512, 1091), (163, 0)]);
    step(&mut scheduler, 2, 2048, 3);
    scheduler.begun(RequestId(3), 0, 200.0).unwrap();
    // whoever came meanwhile is not in the step that runs
    scheduler.place(&want(4, &keys(4, 1, 0)), 210.0).unwrap();
    assert_eq!(queue(&mut scheduler), [(1382, 0), (665, 426), (0, 19)]);
    // a step that did less than was thought: in their order
    step(&mut scheduler, 3, 1100, 4);
    let lefts: Vec<u32> =
        queue(&mut scheduler).iter().map(|(running, left)| running + left).collect();
    assert_eq!(lefts, [282, 1091, 19]);
}

#[test]
fn a_prompt_waits_for_the_one_that_computes_what_it_counts_on() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 300, 200)), 0.0).unwrap();
    scheduler.place(&want(2, &keys(2, 250, 200)), 0.0).unwrap();
    let request = want(3, &keys(3, 220, 200));
    let candidate = &scheduler.candidates_at(&request, 0.0).candidates[0];
    assert_eq!((candidate.held_tokens, candidate.cached_tokens), (0, 3200));
    let awaited = candidate.queue.prompts[1].awaits.unwrap();
    // of the 4,803 tokens of the first one 3,200 are what they share
    assert_eq!((awaited.place, awaited.left), (0, 1603));
    assert_eq!(candidate.queue.awaits, Some(awaited));
    step(&mut scheduler, 1, 2048, 2);
    assert_eq!(queue(&mut scheduler), [(2048, 707), (0, 803)], "not yet");
    scheduler.end(RequestId(1), LegOutput::default(), 150.0).unwrap();
    let candidate = &scheduler.candidates_at(&request, 0.0).candidates[0];
    assert_eq!(candidate.queue.prompts[0].awaits, None, "who is gone is not waited for");
}

#[test]
fn a_full_pool_has_room_when_answers_end_the_soonest_first() {
    let mut scheduler = scheduler(1);
    let room_ms = |scheduler: &mut Scheduler, blocks: u32| {
        let request = want(99, &keys(99, blocks, 0));
        scheduler.candidates_at(&request, 300.0).candidates[0].queue.room_ms
    };
    for (n, blocks) in [(1, 400), (2, 500)] {
        scheduler.place(&want(n, &keys(n, blocks, 0)), 0.0).unwrap();
    }
    let load = Load { running: 2, blocks_used: 904, ..Load::default() };
    // one begins with the first step, one with the twentieth; both run
    for (number, begins) in [(1, Some(1)), (20, Some(2)), (39, None)] {
        let step = report(number, 0, load);
        let _ = scheduler.step(WorkerId(0), &step, Given::default(), 5.2 * number as f64);
        begins.map(|request| scheduler.begun(RequestId(request), 0, 0.0).unwrap());
    }
    assert_eq!(room_ms(&mut scheduler, 40), None, "there is room");
    // answers end with 50 tokens at the latest, a step of two rows takes 5.2 ms: 260 ms, of which 38 and 19 steps are over
    let first = room_ms(&mut scheduler, 300).unwrap();
    assert!((first - 12.0 * 5.2).abs() < 1e-6, "{first}");
    let both = room_ms(&mut scheduler, 900).unwrap();
    assert!((both - 31.0 * 5.2).abs() < 1e-6, "{both}");
    scheduler.end(RequestId(1), LegOutput::default(), 310.0).unwrap();
    assert_eq!(room_ms(&mut scheduler, 300), Some(both), "the first one is gone");
}

#[test]
fn two_routers_see_each_others_prompts_in_what_the_workers_report() {
    for told in [false, true] {
        let mut routers = [scheduler(2), scheduler(2)];
        let first = routers[0].place(&want(1, &keys(1, 90, 0)), 0.0).unwrap().worker;
        if told {
            // no step has ended; the worker tells the other router what it has now
            let waits = Load { running: 0, waiting: 1, ..Load::default() };
            let heartbeat = Step { waiting_tokens: 1443, ..report(0, 0, waits) };
            let _ = routers[1].step(first, &heartbeat, Given::default(), 1.0);
        }
        let second = routers[1].place(&want(2, &keys(2, 90, 0)), 2.0).unwrap();
        assert_eq!(second.worker != first, told);
        let seen = &second.decision.candidates[first.0 as usize].worker_load;
        assert_eq!(seen.backlog_tokens, if told { 1443.0 } else { 0.0 });
    }
}

/// One that has `left` of its tokens to compute, behind so many own ones.
fn other(behind: u32, tokens: u32, left: u32) -> OtherPrompt {
    OtherPrompt { behind, tokens, left, prompts: 1 }
}

#[test]
fn prompts_that_a_worker_tells_of_stand_at_their_places_and_take_no_rows() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    let others = OtherPrompts { prompts: vec![other(0, 5_000, 3_000), other(1, 700, 700)] };
    scheduler.other_prompts(WorkerId(0), &others);
    let load = Load { running: 2, waiting: 3, ..Load::default() };
    let heartbeat = Step { waiting_tokens: 8_000, ..report(0, 0, load) };
    let _ = scheduler.step(WorkerId(0), &heartbeat, Given::default(), 1.0);
    let candidate = &scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 2.0).candidates[0];
    let places: Vec<_> =
        candidate.queue.prompts.iter().map(|p| (p.from, p.left, p.prompts)).collect();
    assert_eq!((places[0], places[2]), ((2_000, 3_000, 1), (0, 700, 1)));
    assert_eq!(places.len(), 3, "its own is between them");
    assert_eq!(candidate.worker_load.rows, 2.0, "five, less three prompts");
    assert_eq!(candidate.worker_load.backlog_tokens, 1603.0 + 3_700.0);
    scheduler.other_prompts(WorkerId(0), &OtherPrompts::default());
    let candidate = &scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 2.0).candidates[0];
    assert_eq!((candidate.queue.prompts.len(), candidate.worker_load.rows), (1, 4.0));
}

#[test]
fn what_a_step_computed_of_others_is_no_progress_of_its_own() {
    let mut scheduler = scheduler(1);
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other(0, 5_000, 5_000)] });
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    let left = |scheduler: &mut Scheduler| {
        scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 50.0).candidates[0]
            .worker_load
            .backlog_tokens
    };
    assert_eq!(left(&mut scheduler), 5_000.0 + 1_603.0);
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other(0, 5_000, 4_400)] });
    let load = Load { running: 2, ..Load::default() };
    let _ = scheduler.step(WorkerId(0), &report(1, 1_000, load), Given::default(), 40.0);
    assert_eq!(left(&mut scheduler), 4_400.0 + 1_203.0, "600 of the 1000 were theirs");
    // done or gone: whatever was left of it is none of its own
    scheduler.other_prompts(WorkerId(0), &OtherPrompts::default());
    let _ = scheduler.step(WorkerId(0), &report(2, 4_400, load), Given::default(), 80.0);
    assert_eq!(left(&mut scheduler), 1_203.0);
}

#[test]
fn whoever_is_placed_later_delays_the_predictions_of_those_before_it() {
    let mut scheduler = scheduler(1);
    for (request, at_ms) in [(1, 0.0), (2, 5.0), (3, 200.0)] {
        let keys = keys(request, 300, 0);
        scheduler.place(&want(request, &keys), at_ms).unwrap();
    }
    let first = scheduler.begun(RequestId(1), 0, 300.0).unwrap();
    assert!(first.predicted_ttft_ms < first.settled_ttft_ms, "{first:?}");
    // it has half of each step since the second one came, and keeps that
    assert_eq!(first.settled_ttft_ms, first.last_ttft_ms);
    let second = scheduler.begun(RequestId(2), 0, 300.0).unwrap();
    assert_eq!(second.predicted_ttft_ms, second.settled_ttft_ms, "195 ms are no moment");
    assert!(second.predicted_ttft_ms < second.last_ttft_ms, "{second:?}");
    let last = scheduler.begun(RequestId(3), 0, 300.0).unwrap();
    assert_eq!(last.predicted_ttft_ms, last.last_ttft_ms);
}

#[test]
fn prompts_of_other_routers_stand_in_the_queue_with_its_own() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    let load = Load { running: 1, waiting: 3, ..Load::default() };
    let heartbeat = Step { waiting_tokens: 8_000, ..report(0, 0, load) };
    let _ = scheduler.step(WorkerId(0), &heartbeat, Given::default(), 1.0);
    let candidate = &scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 2.0).candidates[0];
    let foreign = QueuedPrompt { running: 0, left: 6_000, from: 0, prompts: 3, awaits: None };
    assert_eq!(candidate.queue.prompts[1], foreign, "three of the four that it has");
    assert_eq!(candidate.worker_load.backlog_tokens, 1603.0 + 6_000.0);
    assert_eq!(candidate.worker_load.rows, 3.0);
}

#[test]
fn what_a_prompt_counts_on_is_there_with_its_last_token() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 300, 200)), 0.0).unwrap();
    scheduler.place(&want(2, &keys(2, 250, 200)), 0.0).unwrap();
    let seen = |scheduler: &mut Scheduler| {
        let prompts =
            scheduler.candidates_at(&want(3, &keys(3, 1, 0)), 0.0).candidates[0].queue.clone();
        prompts.prompts.iter().map(|prompt| (prompt.from, prompt.running)).collect::<Vec<_>>()
    };
    assert_eq!(seen(&mut scheduler), [(2_048, 2_048), (3_200, 0)]);
    step(&mut scheduler, 1, 2_048, 2);
    step(&mut scheduler, 2, 1_151, 2);
    assert_eq!(seen(&mut scheduler)[1].1, 0, "a token is lacking");
    step(&mut scheduler, 3, 1, 2);
    assert_eq!(seen(&mut scheduler)[1], (3_645, 445)); // the first one takes 1,603 of 2,048
}

#[test]
fn the_tenth_of_a_queue_is_the_last_one_that_can_be_waited_for() {
    for (before, awaits) in [(9, Some(9)), (10, None)] {
        let mut scheduler = scheduler(0);
        join_with(&mut scheduler, 0, Role::Both, Capacity { sequences: 64, ..capacity() });
        for n in 0..before {
            scheduler.place(&want(n, &keys(n, 30, 0)), 0.0).unwrap();
        }
        let long = keys(50, 300, 0);
        scheduler.place(&want(50, &long), 0.0).unwrap();
        let queue = &scheduler.candidates_at(&want(51, &long), 0.0).candidates[0].queue;
        assert_eq!(queue.awaits.map(|awaited| awaited.place), awaits);
    }
}

#[test]
fn of_a_long_queue_the_tenth_stands_for_all_behind_it() {
    let mut scheduler = scheduler(0);
    let many = Capacity { sequences: 64, blocks: 10_000, ..capacity() };
    join_with(&mut scheduler, 0, Role::Both, many);
    for n in 0..13 {
        scheduler.place(&want(n, &keys(n, 100, 0)), 0.0).unwrap();
    }
    // two of them among those that are told apart, one behind them, one behind all
    let prompts = [(3, 900), (3, 800), (11, 70), (99, 6)];
    let prompts = prompts.map(|(behind, left)| other(behind, 1_000, left)).to_vec();
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts });
    let seen = scheduler.candidates_at(&want(99, &keys(99, 1, 0)), 0.0).candidates[0].queue.clone();
    let ten: Vec<u32> = seen.prompts.iter().map(|prompt| prompt.running + prompt.left).collect();
    assert_eq!(ten[..9], [1_603, 1_603, 1_603, 900, 800, 1_603, 1_603, 1_603, 1_603]);
    assert_eq!(ten[9..], [6 * 1_603 + 70 + 6]);
    assert_eq!(seen.prompts.iter().map(|prompt| prompt.prompts).collect::<Vec<_>>()[8..], [1, 8]);
    // nothing ran before the first one; then a step is shared out among sixteen
    let running = |seen: &PromptQueue| seen.prompts.iter().map(|p| p.running).sum::<u32>();
    assert_eq!(running(&seen), 1_603);
    step(&mut scheduler, 1, 1_603, 17);
    let seen = scheduler.candidates_at(&want(99, &keys(99, 1, 0)), 0.0).candidates[0].queue.clone();
    assert_eq!(running(&seen), 2_048);
    let left: u32 = seen.prompts.iter().map(|prompt| prompt.left).sum();
    assert_eq!(left, 12 * 1_603 + 900 + 800 + 70 + 6 - 2_048);
}

#[test]
fn of_more_prompts_than_a_step_is_thought_out_for_the_last_of_them_leaves_half_to_those_behind() {
    let mut scheduler = scheduler(0);
    let many = Capacity { sequences: 64, blocks: 10_000, ..capacity() };
    join_with(&mut scheduler, 0, Role::Both, many);
    step(&mut scheduler, 1, 0, 0);
    let load = Load { running: 17, ..Load::default() };
    // a long one, fourteen of 19 tokens, two long ones
    for n in 0..17 {
        let blocks = if (1..15).contains(&n) { 1 } else { 300 };
        scheduler.place(&want(n, &keys(n, blocks, 0)), 0.0).unwrap();
    }
    let _ = scheduler.step(WorkerId(0), &report(2, 0, load), Given::default(), 200.0);
    // 1,024 of 2,048, and of the 758 that the short ones leave half; what nobody else takes goes to the first one
    let _ = scheduler.step(WorkerId(0), &report(3, 1_024 + 379, load), Given::default(), 300.0);
    let (running, left) = queue(&mut scheduler)[0];
    assert_eq!(running + left, 4_803 - 1_403);
}

/// Tokens that the step which runs is thought to compute, of whosever prompts.
fn running(scheduler: &mut Scheduler) -> u32 {
    queue(scheduler).iter().map(|(running, _)| running).sum()
}

#[test]
fn a_prompt_that_falls_behind_many_others_is_not_in_the_step_any_more() {
    let mut scheduler = scheduler(0);
    join_with(&mut scheduler, 0, Role::Both, Capacity { sequences: 64, ..capacity() });
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    step(&mut scheduler, 1, 0, 1);
    assert_eq!(running(&mut scheduler), 1_603);
    let prompts = (0..20).map(|_| other(0, 50, 50)).collect();
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts });
    step(&mut scheduler, 2, 0, 21);
    assert_eq!(running(&mut scheduler), 16 * 50, "those for whom a step is thought out");
}

#[test]
fn one_of_others_that_falls_behind_many_is_not_in_the_step_any_more() {
    let mut scheduler = scheduler(0);
    join_with(&mut scheduler, 0, Role::Both, Capacity { sequences: 64, ..capacity() });
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other(0, 700, 700)] });
    scheduler.place(&want(0, &keys(0, 1, 0)), 0.0).unwrap();
    step(&mut scheduler, 1, 0, 2);
    assert_eq!(running(&mut scheduler), 700 + 19);
    (1..20).for_each(|n| drop(scheduler.place(&want(n, &keys(n, 1, 0)), 0.0).unwrap()));
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other(20, 700, 700)] });
    step(&mut scheduler, 2, 0, 21);
    assert_eq!(running(&mut scheduler), 16 * 19);
}

#[test]
fn others_behind_more_prompts_than_there_are_stand_at_the_end() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other(5, 700, 600)] });
    assert_eq!(queue(&mut scheduler), [(1_603, 0), (0, 600)]);
}
