//! What reports and answers teach, of one worker and of all.

use super::*;

/// Reports of steps that cost `times` what `COST` says.
pub(super) fn teach(scheduler: &mut Scheduler, id: u32, times: f64, steps: std::ops::Range<u64>) {
    for number in steps {
        let (tokens, rows) = (37 * number % 2_000, number % 8);
        let mut step = report(number, u32::try_from(tokens).unwrap(), Load::default());
        step.decode_rows = u32::try_from(rows).unwrap();
        step.kv_tokens = rows * (100 + 91 * number % 3_000);
        step.ms = times * COST.step_ms(&StepFeatures::of(&step));
        let _ = scheduler.step(WorkerId(id), &step, Given::default(), 0.0);
    }
}

/// What a full step of prompts is thought to take, by what it takes.
fn believed(scheduler: &Scheduler, id: u32, times: f64) -> f64 {
    let features = StepFeatures { prefill_tokens: 2_048.0, ..StepFeatures::default() };
    let cost = scheduler.view(WorkerId(id)).unwrap().cost;
    cost.step_ms(&features) / (times * COST.step_ms(&features))
}

#[test]
fn a_guess_is_no_knowledge_of_peers_and_what_was_learnt_is() {
    let mut scheduler = scheduler(0);
    let joins = |scheduler: &mut Scheduler, id| {
        join_unknown(scheduler, id, None);
    };
    joins(&mut scheduler, 0);
    teach(&mut scheduler, 0, 0.01, 1..10);
    for id in 1..4 {
        joins(&mut scheduler, id); // nobody knows anything yet
        teach(&mut scheduler, id, 0.01, 1..200);
        let believed = believed(&scheduler, id, 0.01);
        assert!((0.95..1.05).contains(&believed), "worker {id}: {believed} of its own speed");
    }
    joins(&mut scheduler, 4);
    let believed = believed(&scheduler, 4, 0.01);
    assert!((0.9..1.1).contains(&believed), "it begins with what is known of others: {believed}");
}

#[test]
fn what_a_worker_taught_counts_for_others_from_its_fiftieth_step_on() {
    let mut scheduler = scheduler(0);
    join_unknown(&mut scheduler, 0, None);
    let other = WorkerId(1);
    for number in 1..100 {
        let enough = scheduler.workers[0].fit.steps() >= 50;
        assert_eq!(scheduler.taught_by_others(other).is_some(), enough, "step {number}");
        teach(&mut scheduler, 0, 1.0, number..number + 1);
    }
    assert!(scheduler.taught_by_others(other).is_some());
    assert_eq!(scheduler.taught_by_others(WorkerId(0)), None, "of nobody but itself");
}

#[test]
fn accepted_drafts_are_learnt() {
    let mut scheduler = scheduler(1);
    for n in 1..200 {
        let step =
            Step { decode_rows: 10, drafted: 20, accepted: 9, ..report(n, 0, Load::default()) };
        let _ = scheduler.step(WorkerId(0), &step, Given { rows: 10, tokens: 19 }, 0.0);
    }
    let accepted = scheduler.view(WorkerId(0)).unwrap().accepted;
    assert!((accepted - 1.9).abs() < 0.01, "{accepted}");
}

#[test]
fn answers_teach_how_long_answers_are() {
    let mut scheduler = scheduler(1);
    for n in 0..400 {
        let placement =
            scheduler.place(&PlacementRequest { max_tokens: 4000, ..want(n, &keys(n, 1, 0)) }, 0.0);
        let placement = placement.unwrap();
        if n == 399 {
            let expected = placement.decision.ask.output_tokens;
            assert!((expected - 40.0).abs() < 1.0, "{expected}");
        }
        scheduler.end(RequestId(n), LegOutput { tokens: 40, complete: true }, 1.0);
    }
}

#[test]
fn a_busy_fleet_holds_work_dearer_than_an_idle_one() {
    let mut pressure = demand::pressure::Pressure::default();
    assert_eq!(pressure.at(2, 0.0), 0.0);
    let mut now_ms = 0.0;
    while now_ms < 300_000.0 {
        now_ms += 100.0;
        pressure.computed(100.0, now_ms); // one of two workers is always at it
    }
    assert!((pressure.at(2, now_ms) - 1.0).abs() < 0.05, "{}", pressure.at(2, now_ms));
    assert!(pressure.at(1, now_ms) >= 8.9, "bounded");
    assert!(pressure.at(2, now_ms + 300_000.0) < 0.01, "it is forgotten");
}

#[test]
fn counters_that_ran_backwards_make_no_absurd_time() {
    let mut scheduler = scheduler(1);
    let load = Load { running: u32::MAX, waiting: u32::MAX, ..Load::default() };
    let broken = Step { waiting_tokens: u64::MAX, kv_tokens: u64::MAX, ..report(1, 0, load) };
    let _ = scheduler.step(WorkerId(0), &broken, Given::default(), 0.0);
    let soonest = scheduler.soonest_ms(&want(1, &keys(1, 4, 0)), 0.0);
    assert!(soonest.is_none_or(f64::is_finite), "{soonest:?}");
}

#[test]
fn an_idle_worker_is_not_held_to_what_it_read_last() {
    let mut scheduler = scheduler(2);
    let running = Load { running: 64, ..Load::default() };
    let heavy = Step { kv_tokens: 900_000, decode_rows: 64, ms: 20.0, ..report(1, 0, running) };
    let _ = scheduler.step(WorkerId(0), &heavy, Given::default(), 0.0);
    let _ = scheduler.step(
        WorkerId(0),
        &Step { load: Load::default(), ..heavy },
        Given::default(),
        1.0,
    );
    let placed = scheduler.place(&want(1, &keys(1, 4, 0)), 2.0).unwrap();
    let kv_tokens = placed.decision.candidates.iter().map(|c| c.worker_load.kv_tokens);
    assert_eq!(kv_tokens.collect::<Vec<_>>(), [0.0, 0.0]);
}

#[test]
fn what_is_known_of_pulls_from_a_worker_goes_with_it() {
    let mut scheduler = scheduler(3);
    for from in ["w0", "w1"] {
        scheduler.transferred(WorkerId(2), from, 1 << 20, 5.0, 0.0);
    }
    let sources = |scheduler: &mut Scheduler| -> Vec<WorkerId> {
        let inbound = &mut scheduler.worker(WorkerId(2)).unwrap().inbound;
        inbound.refresh(1.0);
        inbound.costs().known.iter().map(|(id, _)| *id).collect()
    };
    assert_eq!(sources(&mut scheduler), [WorkerId(0), WorkerId(1)]);
    scheduler.leave(WorkerId(0), 1.0);
    assert_eq!(sources(&mut scheduler), [WorkerId(1)], "workers that come and go leave nothing");
}

#[test]
fn of_peers_the_one_that_made_most_steps_is_asked() {
    let mut scheduler = scheduler(2);
    teach(&mut scheduler, 0, 3.0, 1..200);
    teach(&mut scheduler, 1, 1.0, 1..100);
    let known = scheduler.taught_by_others(WorkerId(9)).unwrap();
    assert_eq!(known, scheduler.view(WorkerId(0)).unwrap().cost);
}

#[test]
fn more_than_twice_as_fast_in_prompts_or_in_rows_of_a_thousand_tokens_is_not_taken_on_trust() {
    // a step of 2,048 prompt tokens takes 209.8 ms, one of eight rows 5.88
    let faster = |own: StepCost| is_much_faster(&own, &COST, &capacity());
    let times = |share: f64| StepCost {
        fixed_ms: COST.fixed_ms * share,
        prefill_ms: COST.prefill_ms * share,
        row_ms: COST.row_ms * share,
        kv_ms: COST.kv_ms * share,
        ..COST
    };
    assert_eq!([0.5, 0.49, 0.34].map(|share| faster(times(share))), [false, true, true]);
    // of 8 ms of attention more nothing is said
    let attends = StepCost { kv_ms: 1e-3, ..COST };
    assert!(is_much_faster(&COST, &attends, &capacity()));
}

#[test]
fn who_is_not_taken_at_his_word_begins_with_a_guess_that_the_first_steps_replace() {
    let mut scheduler = scheduler(0);
    join_unknown(&mut scheduler, 0, Some(COST));
    teach(&mut scheduler, 0, 1.0, 1..100);
    let peers = scheduler.view(WorkerId(0)).unwrap().cost;
    join_unknown(&mut scheduler, 1, Some(StepCost { fixed_ms: 0.1, prefill_ms: 0.0, ..COST }));
    let step = report(1, 1_000, Load::default());
    let mut guess = StepFit::guess(Some(peers));
    guess.observe(&StepFeatures::of(&step), 10.0);
    let _ = scheduler.step(WorkerId(1), &Step { ms: 10.0, ..step }, Given::default(), 0.0);
    assert_eq!(scheduler.view(WorkerId(1)).unwrap().cost, guess.cost());
}
