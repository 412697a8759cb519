//! What a request wants of the fleet, and what it holds of it. All of these give back what they hold when they drop.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::link::Link;
use super::registry::Registry;
use crate::core::candidate::WorkerId;
use crate::core::decision::Decision;
use crate::core::frame::{RequestId, Submit};
use crate::core::scheduler::Output;
use crate::error::RouteError;
use crate::prompt::PromptEngine;
use crate::stream::TokenStream;

/// A place on a worker, booked until this drops or is used.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    link: Arc<Link>,
    request: RequestId,
    decision: Arc<Decision>,
    waited: Duration,
    used: bool,
}

impl Reservation {
    /// Of a place that is booked already.
    pub(super) fn new(
        registry: Arc<Registry>,
        link: Arc<Link>,
        request: RequestId,
        decision: Arc<Decision>,
    ) -> Self {
        Self { registry, link, request, decision, waited: Duration::ZERO, used: false }
    }

    /// Which worker.
    #[must_use]
    pub(crate) fn worker(&self) -> WorkerId {
        self.link.id
    }

    /// Its name.
    #[must_use]
    pub(crate) fn worker_name(&self) -> &str {
        &self.link.worker
    }

    /// Name of the request on its link.
    #[must_use]
    pub(crate) fn request(&self) -> RequestId {
        self.request
    }

    /// How it came about.
    #[must_use]
    pub(crate) fn decision(&self) -> &Arc<Decision> {
        &self.decision
    }

    /// How long it was waited for.
    #[must_use]
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    pub(super) fn after(mut self, waited: Duration) -> Self {
        self.waited = waited;
        self
    }

    /// Sends the request there.
    ///
    /// # Errors
    /// The link broke, or took nothing within `--submit-timeout-ms`.
    ///
    /// # Cancel safety
    /// A dropped call submits nothing.
    pub(crate) async fn submit(mut self, submit: Submit) -> Result<TokenStream, RouteError> {
        self.used = true; // from here on the link gives it back
        self.link.submit(submit).await
    }

    /// What it holds was given back by other means.
    pub(super) fn forget(mut self) {
        self.used = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.used {
            self.registry.ended(self.link.id, &[(self.request, Output::default())]);
        }
    }
}

/// What a request needs from a worker.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// Name that its client knows.
    pub(crate) name: String,
    /// Name of the model.
    pub(crate) model: String,
    /// The tokens are those of this engine.
    pub(crate) engine: Arc<PromptEngine>,
    /// Of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Keys of its full blocks.
    pub(crate) keys: Arc<[u64]>,
    /// It can use what is cached.
    pub(crate) reuses: bool,
    /// Longest answer.
    pub(crate) max_tokens: u32,
    /// Key for `session-hash`, a hint for `kv`.
    pub(crate) session: Option<String>,
    /// Whose request it is.
    pub(crate) tenant: u64,
    /// Higher goes first.
    pub(crate) priority: i8,
    /// The first token is wanted by then.
    pub(crate) first_token_by: Option<Instant>,
    /// Workers that failed this request.
    pub(crate) excluded: Vec<WorkerId>,
}

/// Counts answers under way until it drops.
#[derive(Debug)]
pub(crate) struct StreamPermit {
    pub(super) registry: Arc<Registry>,
    pub(super) n: usize,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.registry.end_streams(self.n);
    }
}
