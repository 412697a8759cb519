//! Workers that come, go and fail, and how they find this router.

use super::kinds::labels::{ByOutcome, ByReason};
use super::kinds::{Counter, Gauge, Labelled, group};

group! {
    /// Workers that come, go and fail, and how they find this router.
    Links {
        joined: Counter = "headrace_links_total",
            "Workers that joined.";
        suspects: Counter = "headrace_suspects_total",
            "Workers that missed three heartbeats: their requests went on elsewhere.";
        groups_lost: Counter = "headrace_groups_lost_total",
            "Whole groups that lost a rank: the requests of all ranks went on elsewhere.";
        errors: Labelled<ByReason> = "headrace_link_errors_total",
            "Links that were refused or broke, by reason.";
        drains: Labelled<ByOutcome> = "headrace_drains_total",
            "Workers that were drained, by whether they left in time.";
        blocks_handed_over: Counter = "headrace_drain_blocks_handed_over_total",
            "Cached blocks that others pulled from workers that leave.";
        circuits_opened: Counter = "headrace_circuits_opened_total",
            "Times that a worker's dials began to be refused because it came and went too often.";
        registered: Gauge = "headrace_discovery_registered",
            "1 while etcd is known to hold this router's entry (--register).";
        discovery_errors: Labelled<ByReason> = "headrace_discovery_errors_total",
            "Failures to be registered in etcd, by reason.";
    }
}
