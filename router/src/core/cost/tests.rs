//! The fit finds the truth, follows it, and cannot be led astray.

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
    for prior in [Some(TRUE), None] {
        let mut fit = StepFit::new(prior, None);
        for step in steps(6, 100) {
            fit.observe(&step, TRUE.step_ms(&step));
        }
        for step in steps(7, 20_000) {
            let step = StepFeatures { prefill_tokens: 0.0, prefill_context: 0.0, ..step };
            fit.observe(&step, TRUE.step_ms(&step));
        }
        assert!(error(&fit, &TRUE) < 0.02, "{prior:?}: {}", error(&fit, &TRUE));
    }
}

#[test]
fn a_prior_that_is_far_from_the_truth_is_forgotten() {
    for factor in [0.01, 0.1, 10.0, 1_000.0] {
        let prior = StepCost::from_vector(TRUE.vector().map(|value| factor * value));
        let mut fit = StepFit::new(Some(prior), None);
        let mut random = Random::new(8);
        for step in steps(8, 600) {
            fit.observe(&step, noisy(&mut random, TRUE.step_ms(&step)));
        }
        assert!(error(&fit, &TRUE) < 0.1, "{factor}: {} {:?}", error(&fit, &TRUE), fit.cost());
    }
}

#[test]
fn what_a_prior_leaves_out_is_found() {
    // as workers that time two steps know no more than that
    let prior = StepCost { context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0, ..TRUE };
    let mut fit = StepFit::new(Some(prior), None);
    for step in steps(9, 300) {
        fit.observe(&step, TRUE.step_ms(&step));
    }
    assert!(error(&fit, &TRUE) < 0.02, "{} {:?}", error(&fit, &TRUE), fit.cost());
    let cost = fit.cost();
    assert!((cost.context_ms / TRUE.context_ms - 1.0).abs() < 0.2, "{cost:?}");
}

#[test]
fn what_no_step_tells_about_stays_what_it_was() {
    let mut fit = StepFit::new(Some(TRUE), None);
    for step in steps(10, 2_000) {
        let step = StepFeatures { prefill_tokens: 0.0, prefill_context: 0.0, ..step };
        fit.observe(&step, 2.0 * TRUE.step_ms(&step));
    }
    let cost = fit.cost();
    assert_eq!((cost.prefill_ms, cost.context_ms), (TRUE.prefill_ms, TRUE.context_ms));
    assert!(cost.row_ms > 1.5 * TRUE.row_ms, "{cost:?}");
}

#[test]
fn a_prior_that_is_no_cost_is_passed_over() {
    let bad = StepCost { fixed_ms: f64::NAN, ..TRUE };
    assert_eq!(StepFit::new(Some(bad), Some(TRUE)).cost(), TRUE);
    let negative = StepCost { row_ms: -1.0, ..TRUE };
    assert_eq!(StepFit::new(Some(negative), None).cost(), UNKNOWN);
}

/// A step of 1,000 prompt tokens, and one of ten rows, whose durations [`steady`] learns as a whole.
const PROMPT_STEP: StepFeatures =
    StepFeatures { prefill_tokens: 1_000.0, prefill_context: 0.0, rows: 0.0, kv_tokens: 0.0 };
const ROW_STEP: StepFeatures =
    StepFeatures { prefill_tokens: 0.0, prefill_context: 0.0, rows: 10.0, kv_tokens: 0.0 };

/// Has seen so many steps that took as long as it thought.
fn steady(step: &StepFeatures, steps: usize) -> StepFit {
    let mut fit = StepFit::new(Some(TRUE), None);
    (0..steps).for_each(|_| fit.observe(step, TRUE.step_ms(step)));
    fit
}

#[test]
fn half_of_what_steps_taught_is_gone_after_23_with_prompts_or_69_without() {
    for (step, steps) in [(PROMPT_STEP, 23), (ROW_STEP, 69)] {
        let mut fit = steady(&step, 1_000);
        let ms = TRUE.step_ms(&step);
        (0..steps).for_each(|_| fit.observe(&step, 2.0 * ms));
        // least squares of relative errors of a half at 1 and a half at 2: (1 + 1/2) / (1 + 1/4)
        let learnt = fit.cost().step_ms(&step) / ms;
        assert!((learnt - 1.2).abs() < 0.01, "{learnt}");
    }
}

#[test]
fn a_stall_teaches_what_a_step_four_times_as_long_as_thought_does() {
    let ms = TRUE.step_ms(&PROMPT_STEP);
    let after = |mut fit: StepFit, times: f64| {
        fit.observe(&PROMPT_STEP, times * ms);
        fit.cost().step_ms(&PROMPT_STEP)
    };
    for seen in [8, 1_000] {
        let fit = steady(&PROMPT_STEP, seen);
        // what so many steps of 10 % noise leave open of one, 33 of which count
        let open = 0.1 / (seen.min(33) as f64).sqrt();
        let cut = after(fit.clone(), 100.0);
        assert_eq!(cut, after(fit.clone(), 4.0 * (1.0 + 1.3 * open)), "{seen}");
        assert_ne!(cut, after(fit, 4.0 * (1.0 + 0.7 * open)), "{seen}");
    }
    // the first few steps may tell that what was thought was far off
    let early = |times| after(steady(&PROMPT_STEP, 7), times);
    assert_ne!(early(100.0), early(50.0));
}

#[test]
fn the_first_step_moves_a_prediction_as_far_as_the_spread_of_its_prior_says() {
    // a step of 1,000 prompt tokens that takes twice as long as thought
    for (mut fit, gain) in [
        // the worker's own word: 12 and 50 ms, known to a half; a tenth of 124 ms is noise, and the prior has faded to 0.97
        (StepFit::new(Some(TRUE), None), 661.0 / (661.0 + 0.97 * 153.76)),
        // a guess: 5 and 200 ms, known to twenty times as much; noise is 41 ms, and a guess does not fade
        (StepFit::guess(None), 16_010_000.0 / (16_010_000.0 + 1_681.0)),
    ] {
        let thought_ms = fit.cost().step_ms(&PROMPT_STEP);
        fit.observe(&PROMPT_STEP, 2.0 * thought_ms);
        let moved = fit.cost().step_ms(&PROMPT_STEP) / thought_ms - 1.0;
        assert!((moved - gain).abs() < 1e-9, "{moved}, not {gain}");
    }
}

#[test]
fn a_prior_of_next_to_nothing_is_known_to_a_thousandth_of_the_guess() {
    let prior = StepCost::from_vector([1e-12; 5]);
    let mut fit = StepFit::new(Some(prior), None);
    fit.observe(&PROMPT_STEP, 62.0);
    // 0.005 ms and 0.2 ms for 1,000 tokens, where 6.2 ms are noise
    let told = (0.005_f64.powi(2) + 0.2_f64.powi(2)) / 6.2_f64.powi(2);
    let (learnt, expected) = (fit.cost().step_ms(&PROMPT_STEP), 62.0 * told / (told + 0.97));
    assert!((learnt / expected - 1.0).abs() < 1e-6, "{learnt}, not {expected}");
}

#[test]
fn a_step_that_was_thought_to_take_no_time_teaches_nevertheless() {
    let free = StepCost { fixed_ms: 0.0, row_ms: 0.0, kv_ms: 0.0, context_ms: 0.0, ..TRUE };
    let mut fit = StepFit::new(Some(free), None);
    for tokens in 1..20 {
        let step = StepFeatures { prefill_tokens: 100.0 * f64::from(tokens), ..PROMPT_STEP };
        fit.observe(&step, free.step_ms(&step));
    }
    assert!(fit.cost().step_ms(&ROW_STEP) < 1e-3, "{:?}", fit.cost());
    // no step told anything of rows, so what the first few say is believed
    (0..20).for_each(|_| fit.observe(&ROW_STEP, 20.0));
    let learnt = fit.cost().step_ms(&ROW_STEP);
    assert!((learnt - 20.0).abs() < 2.0, "{learnt}");
}

#[test]
fn a_worker_that_was_steady_for_ever_is_followed_all_the_same() {
    let mut fit = steady(&ROW_STEP, 40_000);
    let ms = 3.0 * TRUE.step_ms(&ROW_STEP);
    (0..1_000).for_each(|_| fit.observe(&ROW_STEP, ms));
    let learnt = fit.cost().step_ms(&ROW_STEP) / ms;
    assert!((learnt - 1.0).abs() < 0.01, "{learnt}");
}

#[test]
fn a_prior_decides_next_to_nothing_once_steps_have_come() {
    // of a prompt that takes twice as long as thought, after a thousand steps without any
    let mut fit = steady(&ROW_STEP, 1_000);
    let thought_ms = TRUE.step_ms(&PROMPT_STEP);
    fit.observe(&PROMPT_STEP, 2.0 * thought_ms);
    let missed = 2.0 - fit.cost().step_ms(&PROMPT_STEP) / thought_ms;
    assert!((1e-7..1e-5).contains(&missed), "{missed}");
}

#[test]
fn a_coefficient_that_is_held_at_nothing_is_not_less_by_rounding() {
    // ten times the tokens take forty times the time, so that a step without any would take less than none
    let steps = [(100.0, 1.0), (1_000.0, 40.0)];
    for i in 1..100 {
        let prior = StepCost { fixed_ms: 1e-4 * f64::from(i) / 7.0, ..TRUE };
        let mut fit = StepFit::new(Some(prior), None);
        for (prefill_tokens, ms) in steps.into_iter().cycle().take(20) {
            fit.observe(&StepFeatures { prefill_tokens, ..PROMPT_STEP }, ms);
        }
        let fixed_ms = fit.cost().fixed_ms;
        assert!((0.0..1e-12).contains(&fixed_ms), "{fixed_ms}");
    }
}

#[test]
fn steps_of_a_microsecond_are_learnt_whatever_rounding_leaves_of_the_prior() {
    for step in steps(12, 40) {
        let mut fit = StepFit::guess(None);
        (0..50).for_each(|_| fit.observe(&step, 1e-3));
        let learnt = fit.cost().step_ms(&step);
        assert!((0.5e-3..2e-3).contains(&learnt), "{learnt} {step:?}");
    }
}

#[test]
fn the_positions_of_less_than_a_token_are_that_share_of_one() {
    assert_eq!(context(10.0, 0.5), 5.0);
    assert_eq!(context(10.0, 3.0), 10.0 + 11.0 + 12.0);
}

proptest! {
    #[test]
    fn whatever_is_reported_the_coefficients_stay_finite_and_not_negative(
        reports in proptest::collection::vec(
            (0.0..1e9f64, 0.0..1e15f64, 0.0..1e5f64, 0.0..1e9f64,
             prop_oneof![Just(f64::NAN), Just(-1.0), Just(0.0), 1e-6..1e9f64]),
            0..60,
        ),
        prior in proptest::option::of(proptest::array::uniform5(1e-12..1e-3f64)),
    ) {
        let mut fit = StepFit::new(prior.map(StepCost::from_vector), None);
        for (prefill_tokens, prefill_context, rows, kv_tokens, ms) in reports {
            let features = StepFeatures { prefill_tokens, prefill_context, rows, kv_tokens };
            fit.observe(&features, ms);
            prop_assert!(fit.cost().is_sane(), "{:?}", fit.cost());
        }
    }
}

#[test]
fn a_stall_is_believed_no_more_because_the_prior_has_faded() {
    let mut fit = steady(&ROW_STEP, 300);
    fit.observe(&PROMPT_STEP, 60_000.0);
    let (learnt, ms) = (fit.cost().step_ms(&PROMPT_STEP), TRUE.step_ms(&PROMPT_STEP));
    assert!(learnt < 10.0 * ms, "{learnt}");
}

#[test]
fn a_millisecond_is_learnt_where_microseconds_were_the_rule() {
    let prior = StepCost::from_vector([0.0, 1e-9, 0.0, 0.0, 0.0]);
    let mut fit = StepFit::new(Some(prior), None);
    (0..2_000).for_each(|_| fit.observe(&ROW_STEP, 1e-4));
    (0..3_000).for_each(|_| fit.observe(&ROW_STEP, 1.0));
    let learnt = fit.cost().step_ms(&ROW_STEP);
    assert!((learnt - 1.0).abs() < 0.1, "{learnt}");
}
