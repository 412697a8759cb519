//! The clock of a hang-up: it runs from the moment when nobody reads an answer any more to the last of its blocks that is
//! free again, on whichever worker.

use std::sync::{Arc, OnceLock};

use tokio::time::Instant;

use crate::metrics::Metrics;

/// Shared by the legs of one request; the last one to end lets go of it, and that is when the time is taken.
#[derive(Debug)]
pub(crate) struct Hangup {
    metrics: Arc<Metrics>,
    since: OnceLock<Instant>,
    /// A worker was lost before it said that its blocks are free: nobody knows when they were.
    void: OnceLock<()>,
}

impl Hangup {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { metrics, since: OnceLock::new(), void: OnceLock::new() })
    }

    /// Nobody reads the answer any more.
    pub(crate) fn begin(&self) {
        self.since.get_or_init(Instant::now);
    }

    /// The time will mean nothing.
    pub(super) fn void(&self) {
        self.void.get_or_init(|| ());
    }
}

impl Drop for Hangup {
    fn drop(&mut self) {
        if let (Some(since), None) = (self.since.get(), self.void.get()) {
            self.metrics.legs.hangup_to_freed_seconds.observe(since.elapsed());
        }
    }
}
