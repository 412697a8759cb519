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
