//! How well a mock fleet kept its times, and what it did.

use std::time::Duration;

use serde::Serialize;

use super::lockstep::RoundReport;

/// Sums over all workers.
#[derive(Debug, Default, Clone)]
pub(super) struct Pace {
    pub(super) requests: u64,
    pub(super) tokens: u64,
    pub(super) lost_links: u64,
    pub(super) resyncs: u64,
    steps: u64,
    asked_ms: f64,
    late_ms: f64,
    latest_ms: f64,
    /// Of the last steps before a worker had nothing to do: by so much did a busy time last too long.
    overrun_ms: f64,
}

/// What a fleet prints at its end.
#[derive(Debug, Serialize)]
pub(super) struct PaceReport {
    workers: usize,
    requests: u64,
    tokens: u64,
    lost_links: u64,
    resyncs: u64,
    steps: u64,
    /// Time that the steps should have taken, added up.
    asked_s: f64,
    /// Asked over taken: 1 when every worker was as fast as asked for.
    rate: Option<f64>,
    /// From when a step should have ended to when that was noticed. The next one begins at the former.
    late_mean_ms: Option<f64>,
    late_max_ms: f64,
    cpu_s: Option<f64>,
    cpu_us_per_step: Option<f64>,
    /// Where workers are ranks of groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<RoundReport>,
}

impl Pace {
    /// A step of `ms` was noticed `late`; `more` if another one follows at once.
    pub(super) fn step_ended(&mut self, ms: f64, late: Duration, more: bool) {
        let late_ms = late.as_secs_f64() * 1e3;
        self.steps += 1;
        self.asked_ms += ms;
        self.late_ms += late_ms;
        self.latest_ms = self.latest_ms.max(late_ms);
        if !more {
            self.overrun_ms += late_ms;
        }
    }

    pub(super) fn report(
        &self,
        workers: usize,
        cpu_s: Option<f64>,
        groups: Option<RoundReport>,
    ) -> PaceReport {
        let stepped = self.steps > 0;
        let taken_ms = self.asked_ms + self.overrun_ms;
        PaceReport {
            groups,
            workers,
            requests: self.requests,
            tokens: self.tokens,
            lost_links: self.lost_links,
            resyncs: self.resyncs,
            steps: self.steps,
            asked_s: self.asked_ms / 1e3,
            rate: (self.asked_ms > 0.0).then(|| self.asked_ms / taken_ms),
            late_mean_ms: stepped.then(|| self.late_ms / self.steps as f64),
            late_max_ms: self.latest_ms,
            cpu_s,
            cpu_us_per_step: cpu_s.filter(|_| stepped).map(|cpu_s| cpu_s * 1e6 / self.steps as f64),
        }
    }
}
