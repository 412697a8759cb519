//! Tasks of the router, read off when `/metrics` is: whatever leaks a task shows here first.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::runtime::Handle;

use crate::metrics::scrape::Scrape;

/// Tasks that are alive in these runtimes.
#[derive(Debug)]
pub struct Tasks(pub Vec<Handle>);

impl Collector for Tasks {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let alive: usize = self.0.iter().map(|runtime| runtime.metrics().num_alive_tasks()).sum();
        let help =
            "Tasks of the router's runtime: those of its connections and links, and its own.";
        Scrape::new(encoder).gauge("headrace_tasks", help, i64::try_from(alive).unwrap_or(i64::MAX))
    }
}
