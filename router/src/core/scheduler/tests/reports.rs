//! What one report changes of what is thought of its worker, in figures.

use super::split::scheduler_of;
use super::*;
use crate::core::cost::context;
use crate::core::estimate::WorkerLoad;
use crate::core::frame::OtherPrompt;
use crate::core::scheduler::measured::Measured;
use crate::core::scheduler::worker::own_ms;

fn running(running: u32) -> Load {
    Load { running, ..Load::default() }
}

/// A report without work for this router's rows.
fn tell(scheduler: &mut Scheduler, id: u32, step: &Step, now_ms: f64) {
    let _ = scheduler.step(WorkerId(id), step, Given::default(), now_ms);
}

fn load(scheduler: &Scheduler, now_ms: f64) -> WorkerLoad {
    scheduler.workers[0].worker_load(BLOCK, now_ms)
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9 * expected.abs().max(1.0), "{got}, not {expected}");
}

#[test]
fn a_step_takes_what_its_own_rank_took() {
    let step = Step { ms: 90.0, waited_us: 80_000, ..report(1, 0, running(1)) };
    assert_eq!(own_ms(&step), 10.0);
    assert_eq!(own_ms(&Step { waited_us: 95_000, ..step.clone() }), 0.0);
    let mut scheduler = scheduler(1);
    let mut fit = scheduler.workers[0].fit.clone();
    let step = Step { decode_rows: 1, ..step };
    fit.observe(&StepFeatures::of(&step), 10.0);
    tell(&mut scheduler, 0, &step, 0.0);
    assert_eq!(scheduler.workers[0].fit.cost(), fit.cost());
}

#[test]
fn a_step_without_work_teaches_nothing() {
    let mut scheduler = scheduler(1);
    tell(&mut scheduler, 0, &report(1, 0, running(1)), 0.0);
    assert_eq!(scheduler.workers[0].fit.steps(), 0);
    tell(&mut scheduler, 0, &report(2, 1, running(1)), 0.0);
    assert_eq!(scheduler.workers[0].fit.steps(), 1);
}

#[test]
fn a_row_gets_a_twentieth_of_what_drafts_gave_here_and_no_more_than_the_worker_says() {
    // drafted, accepted, rows and tokens of this router, and the tokens that a row then got from the step
    for (drafted, accepted, given, got) in [
        (20, 10, (10, 20), 2.0),
        (5, 10, (10, 20), 1.5),
        (20, 10, (10, 15), 1.5),
        (20, 5, (10, 30), 1.5),
        (20, 10, (10, 5), 1.0),
        (20, 10, (0, 0), 1.0),
    ] {
        let mut scheduler = scheduler(1);
        let step = Step { decode_rows: 10, drafted, accepted, ..report(1, 0, running(10)) };
        let (rows, tokens) = given;
        let _ = scheduler.step(WorkerId(0), &step, Given { rows, tokens }, 0.0);
        let learnt = scheduler.workers[0].accepted;
        close(learnt, 1.0 + 0.05 * (got - 1.0));
    }
}

#[test]
fn prompts_take_their_tokens_and_what_these_attend_to() {
    let mut scheduler = scheduler(0);
    let cost = StepCost { context_ms: 1e-3, ..COST };
    join_unknown(&mut scheduler, 0, Some(cost));
    let step = Step { prefill_context: 5_000, ..report(1, 100, running(1)) };
    close(scheduler.workers[0].report(&step, Given::default(), false, 0.0), 10.0 + 5.0);
    for _ in 0..100 {
        scheduler.workers[0].claims.step(0.0, 1, 100.0);
    }
    let step = Step { step: 2, ..step };
    let untold = scheduler.workers[0].report(&step, Given::default(), false, 0.0);
    assert_eq!(untold, 0.0, "nobody knows what a worker that is not believed computed");
}

#[test]
fn a_worker_that_reports_too_little_has_what_is_booked_and_what_comes() {
    let mut scheduler = scheduler(1);
    for n in 1..=2 {
        scheduler.place(&want(n, &keys(n, 4, 0)), 0.0).unwrap();
    }
    tell(&mut scheduler, 0, &report(1, 0, running(0)), 0.0);
    assert_eq!(load(&scheduler, 0.0).occupied, 2.0);
    let mut split = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    split.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    assert_eq!(split.workers[1].occupied(), 1, "its KV is on the way");
}

#[test]
fn a_decision_sees_what_a_worker_said_and_what_is_booked() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    tell(&mut scheduler, 0, &report(1, 0, Load { blocks_cached: 40, ..running(3) }), 0.0);
    scheduler.workers[0].accepted = 1.5;
    let seen = &scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 0.0).candidates[0];
    assert_eq!((seen.occupied, seen.booked_tokens), (3, 67 + 50));
    let WorkerLoad { blocks, blocks_cached, accepted, .. } = seen.worker_load;
    assert_eq!((blocks, blocks_cached, accepted), (1_000.0, 40.0, 1.5));
}

#[test]
fn people_see_what_pulls_from_anywhere_cost_a_worker() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    (0..20).for_each(|_| scheduler.transferred(WorkerId(1), "w0", 8 << 20, 80.0, 0.0));
    scheduler.place(&want(1, &keys(1, 1, 0)), 0.0).unwrap();
    let cost = scheduler.view(WorkerId(1)).unwrap().pull_cost;
    close((cost.latency_ms + 8.0 * cost.mib_ms).round(), 80.0);
}

#[test]
fn a_leg_that_waits_for_kv_takes_none_of_those_that_were_not_reported_along() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    tell(&mut scheduler, 1, &report(1, 0, running(1)), 0.0);
    scheduler.set_open(WorkerId(0), false);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.set_open(WorkerId(0), true);
    assert!(scheduler.place(&want(2, &keys(2, 4, 0)), 0.0).unwrap().prefill.is_some());
    scheduler.end(RequestId(2), LegOutput::default(), 0.0).unwrap();
    assert_eq!(scheduler.workers[1].occupied(), 2, "the one that was reported, and the whole one");
}

#[test]
fn time_runs_from_the_first_booking_and_not_where_nothing_runs() {
    let mut scheduler = scheduler(1);
    assert_eq!(load(&scheduler, 500.0).elapsed_ms, 0.0);
    scheduler.place(&want(1, &keys(1, 4, 0)), 1_000.0).unwrap();
    let seen = load(&scheduler, 1_050.0);
    assert_eq!((seen.elapsed_ms, seen.backlog_runs), (50.0, true));
    assert_eq!(load(&scheduler, 900.0).elapsed_ms, 0.0, "a clock that ran back");
}

#[test]
fn the_step_that_runs_works_on_prompts_if_a_token_of_one_was_left() {
    for (computed, runs) in [(66, true), (67, false)] {
        let mut scheduler = scheduler(1);
        scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
        tell(&mut scheduler, 0, &report(1, computed, running(1)), 10.0);
        assert_eq!(load(&scheduler, 10.0).backlog_runs, runs);
    }
}

#[test]
fn counts_that_no_worker_has_are_bounded() {
    let mut scheduler = scheduler(1);
    let (waiting_tokens, kv_tokens) = (u64::MAX, u64::MAX);
    let step = Step { waiting_tokens, kv_tokens, ..report(1, 0, running(1)) };
    tell(&mut scheduler, 0, &step, 0.0);
    let seen = load(&scheduler, 0.0);
    assert_eq!([seen.backlog_tokens, seen.kv_tokens], [2.0_f64.powi(36); 2]);
}

#[test]
fn who_only_computes_prompts_has_no_rows_and_nobody_has_less_than_none() {
    let mut split = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill]);
    tell(&mut split, 0, &report(1, 0, running(3)), 0.0);
    assert_eq!(load(&split, 0.0).rows, 0.0);
    let mut scheduler = scheduler(1);
    let other = OtherPrompt { behind: 0, tokens: 900, left: 600, prompts: 3 };
    scheduler.other_prompts(WorkerId(0), &OtherPrompts { prompts: vec![other] });
    let seen = load(&scheduler, 0.0);
    assert_eq!((seen.occupied, seen.rows), (0.0, 0.0));
    // three prompts of 300 tokens, of each of which 200 are left
    assert_eq!(seen.backlog_context, 3.0 * context(100.0, 200.0));
    assert_eq!(seen.blocks_used, 600.0 / 16.0);
}

#[test]
fn prompts_of_others_that_are_not_told_apart_are_of_one_length() {
    let mut scheduler = scheduler(1);
    let load_of_two = Load { waiting: 2, ..Load::default() };
    tell(&mut scheduler, 0, &Step { waiting_tokens: 600, ..report(0, 0, load_of_two) }, 0.0);
    close(load(&scheduler, 0.0).backlog_context, context(0.0, 600.0) / 2.0);
    scheduler.place(&want(1, &keys(1, 1, 0)), 0.0).unwrap();
    tell(&mut scheduler, 0, &Step { waiting_tokens: 2, ..report(0, 0, load_of_two) }, 0.0);
    let candidate = &scheduler.candidates_at(&want(2, &keys(2, 1, 0)), 0.0).candidates[0];
    assert_eq!(candidate.queue.prompts.len(), 2, "half of them is a prompt, too");
}

#[test]
fn who_yields_and_waits_to_be_fetched_takes_no_place_that_could_be_given_away() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    for n in 0..6 {
        let wanted = PlacementRequest { yields: true, ..want(n, &keys(n, 1, 0)) };
        scheduler.place(&wanted, 0.0).unwrap();
        scheduler.begun(wanted.prefill_request, 0, 1.0).unwrap();
    }
    tell(&mut scheduler, 0, &report(1, 0, running(0)), 1.0);
    let worker = &scheduler.workers[0];
    let load = worker.worker_load(BLOCK, 1.0);
    assert_eq!((load.occupied, worker.load_before_yielding(&load).occupied), (0.0, 0.0));
}

#[test]
fn who_ends_gives_back_what_was_its_own() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    let asks = |n: u64, yields| PlacementRequest { yields, ..want(n, &keys(n, 1, 0)) };
    for n in 0..8 {
        scheduler.place(&asks(n, n < 6), 0.0).unwrap();
    }
    scheduler.begun(asks(0, true).prefill_request, 0, 1.0).unwrap();
    // six yield, and half of the eight batch rows are theirs; one of the six waits to be fetched
    let figures = |scheduler: &Scheduler| {
        let worker = &scheduler.workers[0];
        let load = worker.worker_load(BLOCK, 1.0);
        (worker.pinned, load.occupied - worker.load_before_yielding(&load).occupied)
    };
    assert_eq!(figures(&scheduler), (1, 2.0));
    scheduler.end(asks(7, false).prefill_request, LegOutput::default(), 1.0).unwrap();
    assert_eq!(figures(&scheduler), (1, 2.0), "it neither yielded nor waited");
    scheduler.end(asks(0, true).prefill_request, LegOutput::default(), 1.0).unwrap();
    assert_eq!(figures(&scheduler), (0, 1.0));
}

#[test]
fn a_worker_whose_prompts_are_done_rests_while_their_kv_is_fetched() {
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    for n in 1..100 {
        let (wanted, now_ms) = (want(n, &keys(n, 1, 0)), 1_000.0 * n as f64);
        scheduler.place(&wanted, now_ms).unwrap();
        tell(&mut scheduler, 0, &report(2 * n, 19, running(1)), now_ms + 10.0);
        scheduler.begun(wanted.prefill_request, 0, now_ms + 10.0).unwrap();
        tell(&mut scheduler, 0, &report(2 * n + 1, 0, running(0)), now_ms + 900.0);
        scheduler.end(wanted.prefill_request, LegOutput::default(), now_ms + 900.0).unwrap();
        scheduler.end(wanted.request, LegOutput::default(), now_ms + 900.0).unwrap();
    }
    assert_eq!(scheduler.take_doubts(), []);
}

/// Whether a worker that says this of each of its steps is found to do more than there is to do.
fn says_too_much_work(scheduler: &mut Scheduler, id: u32, says: impl Fn(u32) -> Step) -> bool {
    (1..200).any(|number| {
        tell(scheduler, id, &says(number), 0.0);
        scheduler.view(WorkerId(id)).unwrap().doubt == Some(Doubt::Work)
    })
}

#[test]
fn a_worker_with_nothing_but_this_routers_requests_can_only_do_their_work() {
    for (others, doubted) in [(0, true), (1, false)] {
        let mut scheduler = scheduler(1);
        scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
        let step = |number: u32| report(number.into(), 1_000, running(1 + others));
        assert_eq!(says_too_much_work(&mut scheduler, 0, step), doubted);
    }
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    let rows = |number: u32| Step { decode_rows: 1_000, ..report(number.into(), 0, running(1)) };
    assert!(says_too_much_work(&mut scheduler, 0, rows), "rows are work");
}

#[test]
fn prompts_that_are_there_or_on_their_way_may_have_been_begun() {
    let prompt = PlacementRequest { prompt_tokens: 40_000, ..want(1, &keys(1, 4, 0)) };
    let all_of_it = |number: u32| report(number.into(), 200, running(1));
    let mut scheduler = scheduler(1);
    scheduler.place(&prompt, 0.0).unwrap();
    assert!(!says_too_much_work(&mut scheduler, 0, all_of_it));
    let mut split = scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode]);
    split.set_open(WorkerId(0), false);
    split.place(&want(2, &keys(2, 4, 0)), 0.0).unwrap();
    split.set_open(WorkerId(0), true);
    assert!(split.place(&prompt, 0.0).unwrap().prefill.is_some());
    assert!(!says_too_much_work(&mut split, 1, all_of_it));
}

#[test]
fn a_worker_that_counts_its_steps_anew_made_one() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 1.0).unwrap();
    for n in 1..200 {
        let step = Step { decode_rows: 1, ms: 20.0, ..report(1_000 - n, 0, running(1)) };
        let given = Given { rows: 1, tokens: 1 };
        let _ = scheduler.step(WorkerId(0), &step, given, 20.0 * n as f64);
    }
    assert_eq!(scheduler.take_doubts(), []);
}

/// A worker that is not believed, has nothing to do, and is measured from here on.
fn doubted() -> Scheduler {
    let mut scheduler = scheduler(1);
    for _ in 0..100 {
        scheduler.workers[0].claims.step(0.0, 1, 100.0);
    }
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().doubt, Some(Doubt::Steps));
    scheduler
}

/// What was measured up to now, once a frame comes that was not held back.
fn measured(scheduler: &mut Scheduler) -> (StepFeatures, f64) {
    let mut measured: Measured = scheduler.workers[0].measured;
    measured.frame(0, 0.0, 1e6).expect("there was some work")
}

#[test]
fn what_is_measured_runs_from_the_booking_and_is_of_what_had_to_be_computed() {
    let mut scheduler = doubted();
    let keys = keys(1, 10, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    scheduler.place(&want(1, &keys), 10_000.0).unwrap();
    tell(&mut scheduler, 0, &report(1, 0, running(1)), 10_500.0);
    scheduler.begun(RequestId(1), 160, 10_500.0).unwrap();
    let (work, ms) = measured(&mut scheduler);
    assert_eq!((work.prefill_tokens, ms), (3.0, 500.0)); // of 163
}

#[test]
fn rows_that_are_measured_read_no_more_than_was_booked() {
    let mut scheduler = doubted();
    scheduler.place(&want(1, &keys(1, 10, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 100.0).unwrap();
    scheduler.workers[0].measured = Measured::default();
    let step = Step { kv_tokens: 1 << 40, decode_rows: 1, ..report(1, 0, running(1)) };
    let _ = scheduler.step(WorkerId(0), &step, Given { rows: 1, tokens: 1 }, 400.0);
    assert_eq!(measured(&mut scheduler).0.kv_tokens, 213.0); // 163 and 50
}
