//! Prefill and decode workers in the simulation.

use super::*;

const PAIRS: &str = "--prefill 2 --decode 2";

fn answered(report: &Value) {
    assert_eq!((&report["requests"], &report["errors"]), (&80.into(), &0.into()), "{report:#}");
    assert_eq!(report["completion_tokens"], 80 * 8);
}

fn count(report: &Value, what: &str) -> u64 {
    report["split"][what].as_u64().unwrap()
}

#[test]
fn baselines_always_split_and_every_prompt_is_moved() {
    let trace = requests(10, 8);
    for policy in ["round-robin", "least-loaded", "power-of-two", "session-hash"] {
        let report = sim(&format!("{PAIRS} --policy {policy}"), &trace);
        answered(&report);
        assert_eq!((count(&report, "requests"), count(&report, "pulls")), (80, 80), "{policy}");
        assert!(count(&report, "bytes") > 0);
        let computed = report["uncached_tokens_by_worker"].as_object().unwrap();
        assert!(computed.keys().all(|worker| ["w0", "w1"].contains(&worker.as_str())), "{policy}");
    }
}

#[test]
fn kv_splits_or_not_and_the_same_seed_tells_the_same_story() {
    let trace = requests(10, 8);
    let report = sim(&format!("{PAIRS} --policy kv"), &trace);
    answered(&report);
    assert_eq!(report, sim(&format!("{PAIRS} --policy kv"), &trace));
    assert!(count(&report, "requests") <= 80);
}

#[test]
fn whole_workers_serve_beside_pairs() {
    let trace = requests(10, 8);
    answered(&sim("--prefill 1 --decode 1 --workers 1 --policy kv", &trace));
    answered(&sim("--prefill 1 --workers 2 --policy round-robin", &trace));
}

#[test]
fn a_slow_network_shows_in_the_second_token_and_not_in_the_first() {
    let trace = requests(10, 2);
    let run = |flags: &str| {
        sim(&format!("{PAIRS} --policy round-robin --noise 0 --util 0.05 {flags}"), &trace)
    };
    let (fast, slow) = (run(""), run("--kv-latency-ms 500"));
    let of = |report: &Value, what: &str| report.pointer(what).unwrap().as_f64().unwrap();
    assert!((of(&slow, "/ttft_ms/mean") / of(&fast, "/ttft_ms/mean") - 1.0).abs() < 0.05);
    assert!(of(&slow, "/itl_ms/max") > of(&fast, "/itl_ms/max") + 400.0);
}

#[test]
fn transfers_that_fail_cost_time_and_no_request() {
    let trace = requests(10, 8);
    let report = sim(&format!("{PAIRS} --policy round-robin --fault fail-transfer=1"), &trace);
    answered(&report);
    assert_eq!((count(&report, "pulls"), count(&report, "failed")), (0, 80));
    let slow = format!("{PAIRS} --policy round-robin --fault slow-transfer=1000000x");
    answered(&sim(&slow, &trace));
}

#[test]
fn whoever_dies_its_requests_go_on() {
    let trace = requests(10, 8);
    let busy = "--policy round-robin --util 1.5";
    for fault in ["w0:die@10s-30s", "w2:die@10s-30s", "w0:die@10s", "w2:die@10s"] {
        answered(&sim(&format!("{PAIRS} {busy} --fault {fault}"), &trace));
    }
    for fault in ["w1:freeze@5s-6s", "w1:freeze@5s-9s", "w3:freeze@5s-9s", "w3:freeze@5s-40s"] {
        answered(&sim(&format!("{PAIRS} {busy} --fault {fault}"), &trace));
    }
}
