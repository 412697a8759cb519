//! Where legs were placed, and whether what the choice relied on was true.

use std::time::Duration;

use super::kinds::labels::{ByPolicy, ByReason};
use super::kinds::{Counter, Histogram, Labelled, SecondsCounter, group};
use crate::core::decision::Decision;
use crate::core::scheduler::Begun;

group! {
    /// Where legs were placed, and whether what the choice relied on was true.
    Scheduling {
        placements: Labelled<ByPolicy> = "headrace_placements_total",
            "Legs placed on a worker, by policy.";
        refused: Labelled<ByReason> = "headrace_refused_total",
            "Requests turned away on arrival or out of the queue, by the bound or deadline that stood against them.";
        block_events_ignored: Labelled<ByReason> = "headrace_block_events_ignored_total",
            "Block events of workers that changed nothing, by reason.";
        blocks_lost: Labelled<ByReason> = "headrace_blocks_lost_total",
            "Times that it was not known any more which blocks a worker holds, by reason.";
        speed_doubted: Labelled<ByReason> = "headrace_speed_doubted_total",
            "Times that a worker's word about its speed began to count for nothing, by reason.";
        resyncs: Counter = "headrace_resyncs_total",
            "Snapshots asked for again.";
        blocks_removed_unknown: Counter = "headrace_blocks_removed_unknown_total",
            "Blocks that workers removed without having said that they hold them.";
        leases_expired: Counter = "headrace_leases_expired_total",
            "Booked blocks of legs whose first token was overdue, taken back.";
        promised_tokens: Counter = "headrace_promised_tokens_total",
            "Prompt tokens that the chosen workers had said they hold.";
        missing_tokens: Counter = "headrace_missing_tokens_total",
            "Of the promised tokens, those that came from no cache.";
        ttft_error_seconds: Histogram = "headrace_ttft_prediction_error_seconds",
            "Distance between predicted and actual time from placement to first token.";
        shadow_differs: Counter = "headrace_shadow_differs_total",
            "Placements where the shadow policy would have chosen another worker.";
        shadow_regret_seconds: SecondsCounter = "headrace_shadow_regret_seconds_total",
            "Predicted cost of following the shadow policy there, where it was worse.";
        log_dropped: Counter = "headrace_decision_log_dropped_total",
            "Decisions that were not written because the disk was too slow, or they were too long.";
        log_errors: Counter = "headrace_decision_log_errors_total",
            "Decisions that could not be written to --decision-log.";
        log_reopened: Counter = "headrace_decision_log_reopened_total",
            "Times that --decision-log was removed or replaced and opened anew.";
    }
}

impl Scheduling {
    /// A leg was placed.
    pub(crate) fn placed(&self, decision: &Decision) {
        self.placements.inc(decision.chooser.policy.name().as_str());
        if let Some(shadow) = &decision.shadow
            && decision.shadow_differs()
        {
            self.shadow_differs.inc();
            if shadow.regret_ms > 0.0 {
                self.shadow_regret_seconds.inc_by((shadow.regret_ms / 1e3).min(1e6));
            }
        }
    }

    /// A leg got its first token.
    pub(crate) fn begun(&self, begun: &Begun) {
        self.promised_tokens.inc_by(begun.held_tokens.into());
        self.missing_tokens.inc_by(begun.held_tokens.saturating_sub(begun.cached_tokens).into());
        let error_ms = (begun.predicted_ttft_ms - begun.ttft_ms).abs();
        self.ttft_error_seconds.observe(Duration::from_secs_f64((error_ms / 1e3).min(1e6)));
    }
}
