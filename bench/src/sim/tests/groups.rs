//! Groups of ranks in virtual time.

use super::*;

fn number(report: &Value, pointer: &str) -> f64 {
    report
        .pointer(pointer)
        .and_then(Value::as_f64)
        .unwrap_or_else(|| panic!("{pointer}: {report:#}"))
}

#[test]
fn ranks_answer_all_and_wait_for_one_another() {
    let trace = requests(10, 8);
    let report = sim("--workers 4 --ep 4 --util 0.5", &trace);
    assert_eq!((&report["requests"], &report["errors"]), (&80.into(), &0.into()));
    assert_eq!(report["completion_tokens"], 80 * 8);
    assert!(number(&report, "/groups/step_skew") > 0.0);
    let share = number(&report, "/groups/waited_share");
    assert!(share > 0.0 && share < 0.75, "one of four always works: {share}");
    assert_eq!(report, sim("--workers 4 --ep 4 --util 0.5", &trace));
    // who is not bound to others is sooner
    let alone = sim("--workers 4 --util 0.5", &trace);
    assert!(alone["groups"].is_null());
    assert!(number(&alone, "/e2e_ms/mean") < number(&report, "/e2e_ms/mean"));
}

#[test]
fn requests_of_a_group_that_loses_a_rank_go_on_elsewhere() {
    let trace = requests(10, 8);
    for fault in ["w1:die@20s-40s", "w2:freeze@20s-40s", "w3:freeze@20s-21s"] {
        let report = sim(&format!("--workers 4 --ep 2 --fault {fault}"), &trace);
        assert_eq!((&report["errors"], &report["requests"]), (&0.into(), &80.into()), "{fault}");
        assert_eq!(report["completion_tokens"], 80 * 8, "{fault}");
    }
}
