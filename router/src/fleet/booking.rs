//! What a request wants of the fleet, and what it holds of it. All of these give back what they hold when they drop.

use std::sync::Arc;

use super::link::Link;
use super::registry::Registry;
use crate::core::frame::{RequestId, Submit};
use crate::core::schedule::WorkerId;
use crate::error::RouteError;
use crate::prompt::PromptEngine;
use crate::stream::TokenStream;

/// A place on a worker, booked until this drops or is used.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    link: Arc<Link>,
    request: RequestId,
    tokens: u64,
    used: bool,
}

impl Reservation {
    /// For `tokens`, which are booked already.
    pub(super) fn new(
        registry: Arc<Registry>,
        link: Arc<Link>,
        request: RequestId,
        tokens: u64,
    ) -> Self {
        Self { registry, link, request, tokens, used: false }
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

    /// Sends the request there.
    ///
    /// # Errors
    /// The link broke, or took nothing within `--submit-timeout-ms`.
    ///
    /// # Cancel safety
    /// A dropped call submits nothing.
    pub(crate) async fn submit(mut self, submit: Submit) -> Result<TokenStream, RouteError> {
        self.used = true; // from here on the link releases it
        self.link.submit(submit, self.tokens).await
    }

    pub(super) fn forget(mut self) {
        self.used = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.used {
            self.registry.release(self.link.id, &[self.tokens]);
        }
    }
}

/// What a request needs from a worker.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// Name of the model.
    pub(crate) model: String,
    /// The tokens are those of this engine.
    pub(crate) engine: Arc<PromptEngine>,
    /// Of the prompt.
    pub(crate) prompt_tokens: usize,
    /// Longest answer.
    pub(crate) max_tokens: u32,
    /// Key for `session-hash`.
    pub(crate) session: Option<String>,
    /// Higher goes first.
    pub(crate) priority: i8,
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
