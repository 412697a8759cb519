//! Tasks of the runtime, read off when `/metrics` is: whatever leaks a task shows here first.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::runtime::Handle;

use crate::metrics::scrape::Scrape;

/// Tasks that are alive in the runtime in which this was made.
#[derive(Debug)]
pub struct Tasks(Handle);

impl Tasks {
    /// Of this runtime.
    ///
    /// # Panics
    /// Outside of one.
    #[must_use]
    pub fn of_this_runtime() -> Self {
        Self(Handle::current())
    }
}

impl Collector for Tasks {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let alive = self.0.metrics().num_alive_tasks();
        let help =
            "Tasks of the router's runtime: those of its connections and links, and its own.";
        Scrape::new(encoder).gauge("headrace_tasks", help, i64::try_from(alive).unwrap_or(i64::MAX))
    }
}
