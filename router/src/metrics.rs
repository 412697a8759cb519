//! All that the router counts, by subject, and its text for Prometheus.

mod edges;
mod exposition;
mod grammars;
mod http;
mod kinds;
mod legs;
mod links;
mod models;
mod recent;
mod requests;
mod responses;
mod scheduling;
mod scrape;
mod spans;
mod this_process;
mod transfers;

use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

pub use edges::{ByReload, Edges};
pub use exposition::Exposition;
pub use grammars::Grammars;
pub use http::Http;
pub use kinds::labels::{ByAnswer, ByOutcome, ByPolicy, ByPull, ByReason, ByResult, ByStage};
pub use kinds::{
    Counter, Gauge, Histogram, Labelled, Observations, Seconds, SecondsCounter, Size, Tokens,
    WordCounts,
};
pub use legs::Legs;
pub use links::Links;
pub use models::{AllTokens, ModelMetrics, Models, UNKNOWN};
pub use recent::{Recent, RecentTimes};
pub use requests::Requests;
pub use responses::Responses;
pub use scheduling::Scheduling;
pub use scrape::Scrape;
pub use spans::Spans;
pub use this_process::{Tasks, ThisProcess};
pub use transfers::Transfers;
pub(crate) use transfers::backend_label;

/// All that the router counts; `/metrics` adds what is read off at that moment.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Clients and their connections.
    pub http: Http,
    /// Who comes in.
    pub edges: Edges,
    /// Requests of all models.
    pub requests: Requests,
    /// Requests and their tokens, by model.
    pub models: Models,
    /// Grammars that answers are to follow.
    pub grammars: Grammars,
    /// Responses that are kept for clients.
    pub responses: Responses,
    /// Their parts on one worker each.
    pub legs: Legs,
    /// KV from worker to worker.
    pub transfers: Transfers,
    /// Workers that come, go and fail.
    pub links: Links,
    /// Placements, and what they rely on.
    pub scheduling: Scheduling,
    /// What is told of requests elsewhere.
    pub spans: Spans,
    /// Times of the last requests, for the dashboard; scrapers have the histograms.
    pub recent: Recent,
}

impl Metrics {
    /// Has everything counted here shown.
    pub fn register(&self, registry: &mut Registry) {
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("headrace_build", "Version of the router; always 1", version);
        self.http.register(registry);
        self.edges.register(registry);
        self.requests.register(registry);
        registry.register_collector(Box::new(self.models.clone()));
        self.grammars.register(registry);
        self.responses.register(registry);
        self.legs.register(registry);
        self.transfers.register(registry);
        self.links.register(registry);
        self.scheduling.register(registry);
        self.spans.register(registry);
    }

    /// Everything counted here, as text.
    #[cfg(test)]
    pub(crate) fn text(&self) -> String {
        let mut registry = Registry::default();
        self.register(&mut registry);
        Exposition::Text.render(&registry)
    }
}
