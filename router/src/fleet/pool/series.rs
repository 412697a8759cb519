//! What is counted of each worker. All of it is reported under the registry's lock, so these are plain numbers.
//!
//! Their series end with the worker. Workers that join when many have series of their own share one, and what they counted
//! stays there, so that no sum ever falls.

use std::fmt;

use super::{PoolSnapshot, WorkerPool};
use crate::core::frame::Step;
use crate::metrics::{Observations, Scrape};

/// Workers with series of their own, of all models together. A guess: some 70 lines of `/metrics` each.
pub(in crate::fleet) const OWN_SERIES: usize = 256;

/// Who has none of its own is called so.
const OTHERS: &str = "other";

/// What one worker did, or all those that share a series.
#[derive(Debug, Clone, Default)]
pub(in crate::fleet) struct WorkerSeries {
    prompt_tokens: u64,
    output_tokens: u64,
    preemptions: u64,
    step_seconds: Observations,
    ttft_seconds: Observations,
    itl_seconds: Observations,
}

/// What a frame tells to be counted.
#[derive(Debug, Clone, Copy)]
pub(in crate::fleet) struct FrameReport<'a> {
    pub(super) step: &'a Step,
    /// No frame told of this step before.
    pub(super) is_new: bool,
    pub(super) tokens: u64,
    pub(super) gaps: &'a Observations,
    /// Since the frame before.
    pub(super) preemptions: u64,
}

impl WorkerSeries {
    pub(super) fn count(&mut self, told: &FrameReport<'_>) {
        let FrameReport { step, is_new, tokens, gaps, preemptions } = *told;
        self.output_tokens = self.output_tokens.saturating_add(tokens);
        self.preemptions = self.preemptions.saturating_add(preemptions);
        if tokens > 0 {
            self.itl_seconds.add_all(gaps);
        }
        if is_new {
            self.step_seconds.add(step.ms / 1e3);
            self.prompt_tokens = self.prompt_tokens.saturating_add(step.prefill_tokens.into());
        }
    }

    pub(super) fn first_token(&mut self, ttft_ms: f64) {
        self.ttft_seconds.add(ttft_ms / 1e3);
    }
}

type WorkerCount = (&'static str, &'static str, fn(&WorkerSeries) -> u64);

/// Counters of each worker.
const COUNTS: [WorkerCount; 3] = [
    ("headrace_worker_prompt_tokens_total", "Prompt tokens that it computed.", |one| {
        one.prompt_tokens
    }),
    ("headrace_worker_output_tokens_total", "Tokens that it gave this router.", |one| {
        one.output_tokens
    }),
    (
        "headrace_worker_preemptions_total",
        "Times that it took the blocks of a running request, to compute them again later.",
        |one| one.preemptions,
    ),
];

type WorkerSizes = (&'static str, &'static str, fn(&WorkerSeries) -> Observations);

/// Histograms of each worker.
const SIZES: [WorkerSizes; 3] = [
    ("headrace_worker_step_duration_seconds", "Steps, by how long each took.", |one| {
        one.step_seconds
    }),
    (
        "headrace_worker_ttft_seconds",
        "From the placement of a leg to the first token that its worker gave.",
        |one| one.ttft_seconds,
    ),
    ("headrace_worker_itl_seconds", "From step to step of one leg.", |one| one.itl_seconds),
];

impl WorkerPool {
    /// Workers that have series of their own.
    pub(in crate::fleet) fn own_series(&self) -> usize {
        self.workers().filter(|worker| worker.series.is_some()).count()
    }
}

impl PoolSnapshot {
    fn series(&self) -> impl Iterator<Item = ([(&'static str, &str); 2], &WorkerSeries)> {
        let own = self.workers.iter().filter_map(|one| {
            let name = one.worker.hello.worker.as_str();
            one.worker.series.as_deref().map(|series| (name, series))
        });
        let others = self.others.as_deref().map(|series| (OTHERS, series));
        own.chain(others)
            .map(|(worker, series)| ([("worker", worker), ("model", self.model.as_str())], series))
    }
}

/// Shows what was counted of all workers.
pub(in crate::fleet) fn show(pools: &[PoolSnapshot], scrape: &mut Scrape<'_>) -> fmt::Result {
    let all = || pools.iter().flat_map(PoolSnapshot::series);
    for (name, help, value) in COUNTS {
        scrape.counters(name, help, all().map(|(labels, series)| (labels, value(series))))?;
    }
    for (name, help, value) in SIZES {
        scrape.histograms(name, help, all().map(|(labels, series)| (labels, value(series))))?;
    }
    Ok(())
}

/// Series of its own for a worker that joins, where so many have some. One that is called as the others are is counted
/// among them.
pub(in crate::fleet) fn for_newcomer(name: &str, taken: usize) -> Option<Box<WorkerSeries>> {
    (taken < OWN_SERIES && name != OTHERS).then(Box::default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_ones_own_are_bounded_and_the_name_of_the_others_is_theirs() {
        assert!(for_newcomer("w", 0).is_some());
        assert!(for_newcomer("w", OWN_SERIES - 1).is_some());
        assert!(for_newcomer("w", OWN_SERIES).is_none());
        assert!(for_newcomer(OTHERS, 0).is_none());
    }
}
