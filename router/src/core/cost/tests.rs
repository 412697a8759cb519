//! The fit finds the truth, follows it, and cannot be led astray; estimates mean what their names say.

use proptest::prelude::*;

use super::*;
use crate::core::candidate::Random;

const TRUE: StepCost =
    StepCost { fixed_ms: 12.0, prefill_ms: 0.05, context_ms: 2e-6, row_ms: 0.08, kv_ms: 3e-5 };

fn steps(seed: u64, n: usize) -> Vec<StepFeatures> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|_| {
            let tokens = if random.below(3) == 0 { random.below(8192) as f64 } else { 0.0 };
            let rows = random.below(64) as f64;
            StepFeatures {
                prefill_tokens: tokens,
                prefill_context: context(random.below(30_000) as f64, tokens),
                rows,
                kv_tokens: rows * random.below(8_000) as f64,
            }
        })
        .collect()
}

fn noisy(random: &mut Random, ms: f64) -> f64 {
    ms * (1.0 + (random.below(1001) as f64 - 500.0) / 10_000.0)
}

/// Median relative error on steps that it has not seen.
fn error(fit: &StepFit, truth: &StepCost) -> f64 {
    let mut errors: Vec<f64> = steps(99, 500)
        .iter()
        .map(|step| (fit.cost().step_ms(step) / truth.step_ms(step) - 1.0).abs())
        .collect();
    errors.sort_by(f64::total_cmp);
    errors[250]
}

#[test]
fn it_learns_a_worker_from_nothing_within_a_few_dozen_steps() {
    let mut fit = StepFit::new(None, None);
    let mut random = Random::new(5);
    for step in steps(1, 60) {
        let ms = noisy(&mut random, TRUE.step_ms(&step));
        fit.observe(&step, ms);
    }
    assert!(error(&fit, &TRUE) < 0.05, "{} {:?}", error(&fit, &TRUE), fit.cost());
}

#[test]
fn it_follows_a_worker_that_becomes_three_times_as_slow() {
    let mut fit = StepFit::new(Some(TRUE), None);
    let slow = StepCost::from_vector(TRUE.vector().map(|value| 3.0 * value));
    for step in steps(2, 300) {
        fit.observe(&step, TRUE.step_ms(&step));
    }
    for step in steps(3, 600) {
        fit.observe(&step, slow.step_ms(&step));
    }
    assert!(error(&fit, &slow) < 0.1, "{}", error(&fit, &slow));
}

#[test]
fn a_single_stall_teaches_little() {
    let mut fit = StepFit::new(Some(TRUE), None);
    for step in steps(4, 300) {
        fit.observe(&step, TRUE.step_ms(&step));
    }
    fit.observe(&steps(5, 1)[0], 60_000.0);
    assert!(error(&fit, &TRUE) < 0.15, "{}", error(&fit, &TRUE));
}

#[test]
fn long_silence_about_prefill_does_not_unlearn_it() {
    let mut fit = StepFit::new(Some(TRUE), None);
    for step in steps(6, 100) {
        fit.observe(&step, TRUE.step_ms(&step));
    }
    for step in steps(7, 20_000) {
        let step = StepFeatures { prefill_tokens: 0.0, prefill_context: 0.0, ..step };
        fit.observe(&step, TRUE.step_ms(&step));
    }
    assert!(error(&fit, &TRUE) < 0.02, "{}", error(&fit, &TRUE));
}

#[test]
fn a_prior_that_is_no_cost_is_passed_over() {
    let bad = StepCost { fixed_ms: f64::NAN, ..TRUE };
    assert_eq!(StepFit::new(Some(bad), Some(TRUE)).cost(), TRUE);
    let negative = StepCost { row_ms: -1.0, ..TRUE };
    assert_eq!(StepFit::new(Some(negative), None).cost(), UNKNOWN);
}

proptest! {
    #[test]
    fn whatever_is_reported_the_coefficients_stay_finite_and_not_negative(
        reports in proptest::collection::vec(
            (0.0..1e9f64, 0.0..1e15f64, 0.0..1e5f64, 0.0..1e9f64,
             prop_oneof![Just(f64::NAN), Just(-1.0), Just(0.0), 1e-6..1e9f64]),
            0..60,
        ),
    ) {
        let mut fit = StepFit::new(None, None);
        for (prefill_tokens, prefill_context, rows, kv_tokens, ms) in reports {
            let features = StepFeatures { prefill_tokens, prefill_context, rows, kv_tokens };
            fit.observe(&features, ms);
            prop_assert!(fit.cost().is_sane(), "{:?}", fit.cost());
        }
    }
}

fn idle() -> Standing {
    Standing {
        cost: TRUE,
        step_tokens: 4096.0,
        slots: 64.0,
        occupied: 0.0,
        rows: 0.0,
        kv_tokens: 0.0,
        backlog_tokens: 0.0,
        backlog_context: 0.0,
        elapsed_ms: 0.0,
        backlog_runs: false,
        blocks_used: 0.0,
        blocks: 10_000.0,
        accepted: 1.0,
        group_ms: 0.0,
        group_rows: 0.0,
        pressure: 0.0,
    }
}

fn demand(prompt_tokens: f64, cached_tokens: f64) -> Demand {
    Demand { prompt_tokens, cached_tokens, output_tokens: 100.0, block_tokens: 16.0 }
}

#[test]
fn an_idle_worker_takes_its_prefill_in_whole_steps() {
    let estimate = estimate(&idle(), &demand(6000.0, 0.0));
    assert_eq!(estimate.queue_ms, 0.0);
    let expected = 2.0 * TRUE.fixed_ms + TRUE.prompt_ms(0.0, 6000.0);
    assert!((estimate.prefill_ms - expected).abs() < 1e-9);
    assert_eq!((estimate.transfer_ms, estimate.harm_ms), (0.0, 0.0));
}

#[test]
fn what_is_cached_is_not_computed_but_still_attended_to() {
    let warm = estimate(&idle(), &demand(6000.0, 5000.0)).prefill_ms;
    assert!((warm - (TRUE.fixed_ms + TRUE.prompt_ms(5000.0, 1000.0))).abs() < 1e-9);
    assert!(warm > estimate(&idle(), &demand(1000.0, 0.0)).prefill_ms);
}

#[test]
fn time_that_is_over_is_not_waited_for_again() {
    let busy = Standing {
        occupied: 2.0,
        rows: 1.0,
        backlog_tokens: 4000.0,
        backlog_context: context(0.0, 4000.0),
        backlog_runs: true,
        ..idle()
    };
    let later = Standing { elapsed_ms: 50.0, ..busy };
    let (now, then) = (estimate(&busy, &demand(100.0, 0.0)), estimate(&later, &demand(100.0, 0.0)));
    assert!((now.queue_ms - then.queue_ms - 50.0).abs() < 1e-9);
    let overdue = Standing { elapsed_ms: 1e9, ..busy };
    assert_eq!(estimate(&overdue, &demand(100.0, 0.0)).queue_ms, 0.0);
}

#[test]
fn accepted_drafts_shorten_decoding_and_a_slow_rank_lengthens_it() {
    let plain = estimate(&idle(), &demand(1000.0, 0.0)).decode_ms;
    let drafting = Standing { accepted: 2.0, ..idle() };
    assert!((estimate(&drafting, &demand(1000.0, 0.0)).decode_ms - plain / 2.0).abs() < 1e-9);
    let grouped = Standing { group_ms: 100.0, group_rows: 8.0, ..idle() };
    let grouped = estimate(&grouped, &demand(1000.0, 0.0));
    assert!((grouped.decode_ms - 99.0 * 100.0).abs() < 1e-9);
    assert!(grouped.harm_ms > 0.0, "the other ranks wait for this prefill, too");
}

#[test]
fn the_barrier_is_convex_and_out_of_the_way_of_a_pool_with_room() {
    let barrier = |used: f64| {
        estimate(&Standing { blocks_used: used, ..idle() }, &demand(160.0, 0.0)).barrier_ms
    };
    let service = {
        let estimate = estimate(&idle(), &demand(160.0, 0.0));
        estimate.prefill_ms + estimate.decode_ms
    };
    assert!(barrier(4_900.0) < 0.01 * service);
    assert!(barrier(9_500.0) > 2.0 * barrier(9_000.0));
    assert!(barrier(20_000.0).is_finite());
    let slopes: Vec<f64> = (50..95)
        .map(|i| barrier(f64::from(i + 1) * 100.0) - barrier(f64::from(i) * 100.0))
        .collect();
    assert!(slopes.is_sorted_by(|a, b| a <= b));
}

#[test]
fn a_worker_without_a_slot_makes_a_request_wait_for_one() {
    let full = Standing { occupied: 64.0, rows: 64.0, ..idle() };
    let nearly = Standing { occupied: 63.0, rows: 63.0, ..idle() };
    let wait = |standing| estimate(&standing, &demand(100.0, 0.0)).queue_ms;
    assert!(wait(full) > wait(nearly) + 10.0);
}
