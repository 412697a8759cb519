//! The fit finds the truth, forgets it, and cannot be led astray.

use proptest::prelude::*;

use super::*;

fn learnt(latency_ms: f64, mib_ms: f64) -> TransferFit {
    let mut fit = TransferFit::default();
    for n in 1..=20 {
        let mib = f64::from(n * n);
        fit.observe(mib, latency_ms + mib_ms * mib, 0.0);
    }
    fit
}

#[test]
fn latency_and_bandwidth_are_told_apart() {
    for (latency_ms, mib_ms) in [(0.2, 0.02), (3.0, 0.9), (40.0, 10.0)] {
        let cost = learnt(latency_ms, mib_ms).cost(None, 0.0);
        assert!((cost.latency_ms / latency_ms - 1.0).abs() < 0.1, "{cost:?}");
        assert!((cost.mib_ms / mib_ms - 1.0).abs() < 0.1, "{cost:?}");
        assert_eq!(cost.failing, 0.0);
    }
}

#[test]
fn what_is_not_known_is_as_elsewhere_and_becomes_so_again() {
    assert_eq!(TransferFit::default().cost(None, 0.0), UNKNOWN.rounded());
    let slow = learnt(10.0, 5.0);
    let others = learnt(1.0, 0.1).cost(None, 0.0);
    assert_eq!(TransferFit::default().cost(Some(&others), 0.0), others);
    let now = slow.cost(Some(&others), 0.0).mib_ms;
    let later = slow.cost(Some(&others), 1e7).mib_ms;
    assert!(now > 4.5 && later < 0.2, "{now} {later}");
}

#[test]
fn a_failure_counts_for_a_while_and_successes_make_up_for_it() {
    let mut fit = TransferFit::default();
    fit.failed(0.0);
    assert_eq!(fit.cost(None, 0.0).failing, 0.5);
    fit.failed(0.0);
    assert_eq!(fit.cost(None, 0.0).failing, 0.6667);
    assert!(fit.cost(None, 5.0 * FORGOTTEN_MS).failing < 0.02);
    (0..18).for_each(|_| fit.observe(1.0, 1.0, 1.0));
    assert!(fit.cost(None, 1.0).failing < 0.1);
}

#[test]
fn each_source_is_known_by_itself_and_a_failure_is_held_against_it_alone() {
    let mut inbound = Inbound::default();
    for _ in 0..20 {
        inbound.ended(Some(WorkerId(3)), Some((100.0, 10.0)), 0.0);
        inbound.ended(Some(WorkerId(5)), Some((100.0, 1000.0)), 0.0);
    }
    inbound.ended(Some(WorkerId(7)), None, 0.0);
    inbound.ended(None, Some((100.0, 100.0)), 0.0);
    inbound.refresh(0.0);
    let ids = [1, 3, 5, 6, 7].map(WorkerId);
    let costs: Vec<TransferCost> = inbound.costs().each(ids.into_iter()).copied().collect();
    assert_eq!((costs[0], costs[3]), (inbound.costs().any, inbound.costs().any));
    assert!(costs[1].mib_ms < 0.2 && costs[2].mib_ms > 5.0, "{costs:?}");
    let failing: Vec<f64> = costs.iter().map(|cost| cost.failing).collect();
    assert_eq!(failing, [0.0, 0.0, 0.0, 0.0, 0.5]);
    inbound.forget(WorkerId(5));
    inbound.refresh(0.0);
    assert_eq!(inbound.costs().each(ids.into_iter()).nth(2), Some(&inbound.costs().any));
}

/// Pulls of so many MiB in so many ms, one after the other, again and again.
fn pulled(pulls: &[(f64, f64)], times: usize) -> TransferFit {
    let mut fit = TransferFit::default();
    for _ in 0..times {
        pulls.iter().for_each(|(mib, ms)| fit.observe(*mib, *ms, 0.0));
    }
    fit
}

/// A pull of this size is thought to take 1 ms and 1 ms.
const MIB: f64 = 4.096;

fn close(got: f64, expected: f64, tolerance: f64) {
    assert!((got / expected - 1.0).abs() < tolerance, "{got}, not {expected}");
}

#[test]
fn the_order_of_magnitude_comes_from_the_pulls_and_little_from_the_guess() {
    // a guess counts for a tenth of a pull; a pull counts 0.95 once another has come
    for (pulls, known) in [(1, 1.0), (2, 1.95)] {
        let fit = pulled(&[(MIB, 2e6)], pulls);
        let prior = fit.prior(&UNKNOWN, 0.0);
        close(prior.latency_ms, 1e6_f64.powf(known / (known + 0.1)), 1e-9);
        close(prior.mib_ms * MIB, 1e6_f64.powf(known / (known + 0.1)), 1e-9);
    }
}

#[test]
fn a_pull_tells_as_much_as_noise_leaves_of_it() {
    // Either half of the prior is taken for right to a tenth or ten times, and a fifth of the pull's 2e6 ms for noise.
    let half_ms = 1e6_f64.powf(1.0 / 1.1);
    let told = 2.0 * (10.0 * half_ms).powi(2) / (0.2 * 2e6_f64).powi(2);
    let expected = 2.0 * half_ms + (2e6 - 2.0 * half_ms) * told / (told + 1.0);
    let cost = pulled(&[(MIB, 2e6)], 1).cost(None, 0.0);
    close(cost.latency_ms + MIB * cost.mib_ms, expected, 1e-8);
}

#[test]
fn half_of_what_pulls_taught_is_gone_after_some_fourteen_others() {
    let mut fit = pulled(&[(100.0, 1_000.0)], 500);
    (0..14).for_each(|_| fit.observe(100.0, 2_000.0, 0.0));
    let cost = fit.cost(None, 0.0);
    // least squares of relative errors: 0.488 at 1 and 0.512 at 2
    close((cost.latency_ms + 100.0 * cost.mib_ms) / 1_000.0, 0.744 / 0.616, 0.01);
}

#[test]
fn a_coefficient_that_would_be_negative_is_none_and_the_other_one_is_found_anew() {
    // four times the time for twice as much: (1 + 1/2) / (1 + 1/4) ms a MiB
    let cost = pulled(&[(1.0, 1.0), (2.0, 4.0)], 300).cost(None, 0.0);
    assert_eq!(cost.latency_ms, 0.0);
    close(cost.mib_ms, 1.2, 0.05);
    // the more the sooner: (1/4 + 1) / (1/16 + 1) ms each
    let cost = pulled(&[(1.0, 4.0), (4.0, 1.0)], 300).cost(None, 0.0);
    assert_eq!(cost.mib_ms, 0.0);
    close(cost.latency_ms, 1.25 / 1.0625, 0.05);
}

#[test]
fn a_pull_in_no_time_counts_as_one_of_a_microsecond() {
    let fit = pulled(&[(MIB, 0.0)], 1);
    assert_eq!(fit.count, 1.0);
    close(fit.prior(&UNKNOWN, 0.0).latency_ms, (0.5e-3_f64).powf(1.0 / 1.1), 1e-9);
    let huge = pulled(&[(1e9, 0.0)], 1).prior(&UNKNOWN, 0.0);
    assert_eq!(huge.mib_ms, 1e-6, "and no cost is nothing at all");
}

#[test]
fn others_without_any_latency_do_not_outweigh_what_was_learnt() {
    let others = TransferCost { latency_ms: 0.0, mib_ms: 1.0, failing: 0.0 };
    let prior = pulled(&[(MIB, 2.0)], 1).prior(&others, 0.0);
    close(prior.latency_ms, 1e-6_f64.powf(0.1 / 1.1), 1e-9);
}

#[test]
fn a_minute_takes_all_but_a_third_and_time_that_runs_backwards_none() {
    let mut fit = TransferFit::default();
    fit.failed(70_000.0);
    let third = (-1.0_f64).exp();
    assert!((fit.cost(None, 130_000.0).failing - third / (third + 1.0)).abs() < 1e-4);
    assert_eq!(fit.cost(None, 0.0), fit.cost(None, 70_000.0));
}

#[test]
fn what_fades_is_looked_at_once_a_second() {
    let mut inbound = Inbound::default();
    inbound.ended(Some(WorkerId(1)), None, 0.0);
    inbound.refresh(0.0);
    let first = Arc::clone(inbound.costs());
    inbound.refresh(999.0);
    assert!(Arc::ptr_eq(inbound.costs(), &first));
    inbound.refresh(1_000.0);
    assert!(inbound.costs().known[0].1.failing < first.known[0].1.failing);
}

#[test]
fn a_source_of_which_only_a_failure_is_known_is_as_fast_as_the_others() {
    let mut inbound = Inbound::default();
    (0..20).for_each(|_| inbound.ended(Some(WorkerId(1)), Some((100.0, 9_000.0)), 0.0));
    inbound.ended(Some(WorkerId(2)), None, 0.0);
    inbound.refresh(0.0);
    let Sources { any, known } = &**inbound.costs();
    assert_eq!((known[1].1.mib_ms, known[1].1.latency_ms), (any.mib_ms, any.latency_ms));
}

proptest! {
    #[test]
    fn whatever_is_reported_a_cost_stays_a_cost(
        pulls in proptest::collection::vec(
            (prop_oneof![Just(f64::NAN), Just(0.0), 1e-9..1e9f64],
             prop_oneof![Just(f64::INFINITY), Just(-1.0), Just(0.0), 1e-9..1e12f64],
             0..10_000_000_u64),
            0..40,
        ),
        others in proptest::option::of((0.0..1e6f64, 0.0..1e6f64)),
    ) {
        let others = others.map(|(latency_ms, mib_ms)| TransferCost { latency_ms, mib_ms, failing: 0.0 });
        let mut fit = TransferFit::default();
        for (mib, ms, at_ms) in pulls {
            fit.observe(mib, ms, at_ms as f64);
            let TransferCost { latency_ms, mib_ms, failing } = fit.cost(others.as_ref(), at_ms as f64);
            prop_assert!(latency_ms.is_finite() && latency_ms >= 0.0, "{latency_ms}");
            prop_assert!(mib_ms.is_finite() && mib_ms >= 0.0, "{mib_ms}");
            prop_assert_eq!(failing, 0.0);
        }
    }
}
