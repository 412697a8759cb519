//! What a request holds of the fleet. All of it is given back when it drops.

use std::sync::Arc;
use std::time::Duration;

pub(crate) use super::link::LegParent;
use super::link::{Hangup, LegWork, Link, Partner};
use super::registry::Registry;
use crate::config::FleetConfig;
use crate::core::candidate::WorkerId;
use crate::core::decision::Decision;
use crate::core::frame::{KvFrom, KvTransfer, RequestId, Submit};
use crate::core::scheduler::LegOutput;
use crate::core::secret::PullKey;
use crate::error::RouteError;
use crate::fleet::stream::{Mailbox, TokenStream};
use crate::limits::memory::MemoryShare;

/// Places for the legs of a request, booked until this drops or is used.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    decode: BookedPlace,
    prefill: Option<PrefillPlace>,
    decision: Arc<Decision>,
    waited: Duration,
    used: bool,
}

/// A place on one worker.
#[derive(Debug, Clone)]
pub(super) struct BookedPlace {
    pub(super) link: Arc<Link>,
    /// Name of the leg on that link.
    pub(super) request: RequestId,
}

/// A place for the prompt on another worker than the one that decodes.
#[derive(Debug, Clone)]
pub(super) struct PrefillPlace {
    pub(super) place: BookedPlace,
    /// Ways to pull KV from there.
    pub(super) transfer: Vec<String>,
}

impl Reservation {
    /// Of places that are booked already.
    pub(super) fn new(
        registry: Arc<Registry>,
        decode: BookedPlace,
        prefill: Option<PrefillPlace>,
        decision: Arc<Decision>,
    ) -> Self {
        Self { registry, decode, prefill, decision, waited: Duration::ZERO, used: false }
    }

    /// The worker that decodes.
    #[must_use]
    pub(crate) fn worker(&self) -> WorkerId {
        self.decode.link.id
    }

    /// The name of the worker that decodes.
    #[must_use]
    pub(crate) fn worker_name(&self) -> &str {
        &self.decode.link.worker
    }

    /// Name of the worker that computes the prompt, where it is another one.
    #[must_use]
    pub(crate) fn prefill_name(&self) -> Option<&str> {
        self.prefill.as_ref().map(|prefill| prefill.place.link.worker.as_str())
    }

    /// The number by which that worker knows the request.
    #[must_use]
    pub(crate) fn leg(&self) -> u64 {
        self.decode.request.0
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

    /// Sends the request there; `submit` is that of the whole request, and each leg gets what it needs of it. A prefill
    /// worker that cannot be reached costs nothing but time: the decode worker does its part, too. Log-probabilities that
    /// wait for the reader are charged to `memory`. A pooled prompt is a vector of `pooled_width`. Spans of the legs are parts of
    /// `parent`.
    ///
    /// # Errors
    /// The link of the decode worker broke, or had no room within `--submit-timeout-ms`.
    ///
    /// # Cancel safety
    /// A dropped call submits nothing, or cancels what it submitted.
    pub(crate) async fn submit(
        mut self,
        mut submit: Box<Submit>,
        pooled_width: u32,
        memory: MemoryShare,
        parent: Option<LegParent>,
    ) -> Result<TokenStream, RouteError> {
        self.used = true; // from here on the links give it back
        let BookedPlace { link, request } = self.decode.clone();
        let resumed = submit.resume.as_ref().map_or(0, |resume| resume.generated.len() / 4);
        let resumed = u32::try_from(resumed).unwrap_or(u32::MAX);
        let first = self.prefill.as_ref().map_or(link.id, |prefill| prefill.place.link.id);
        let mailbox = Mailbox::new(submit.max_tokens.saturating_sub(resumed), first, memory);
        let pools = submit.pooling.is_some();
        let mailbox = Arc::new(if pools { mailbox.pooling(pooled_width) } else { mailbox });
        let hangup = Hangup::new(Arc::clone(&self.registry.metrics));
        submit.request = request;
        let parent = parent.as_ref();
        let Some(prefill) = &self.prefill else {
            let lease = link.submit(submit, LegWork::Whole, &mailbox, &hangup, parent).await?;
            return Ok(TokenStream::new(mailbox, hangup, lease, None));
        };
        let (decode_submit, prefill_submit) = self.legs(submit, prefill);
        let from = &prefill.place.link;
        let partner =
            Partner { link: Arc::clone(&link), request, handed_off: false, ticketed: false };
        // both at once; the decode leg is known first, so that nothing is said of a leg that is not there
        let (decode, prefill) = tokio::join!(
            link.submit(decode_submit, LegWork::decode(), &mailbox, &hangup, parent),
            from.submit(prefill_submit, LegWork::Prefill(partner), &mailbox, &hangup, parent),
        );
        let decode = decode?;
        let prefill = prefill.map_err(|error| link.goes_alone(request, &error)).ok();
        Ok(TokenStream::new(mailbox, hangup, decode, prefill))
    }

    fn legs(&self, submit: Box<Submit>, prefill: &PrefillPlace) -> (Box<Submit>, Box<Submit>) {
        let FleetConfig { kv_lease, transfer_timeout, .. } = self.registry.setup.config.fleet;
        // drawn for these two legs alone: no other worker can pull with their ticket
        let pull_key = PullKey(self.registry.setup.random_bytes());
        let (mut of_decode, mut of_prefill) = (submit.clone(), submit);
        of_prefill.request = prefill.place.request;
        of_prefill.kv_transfer = Some(KvTransfer { lease_ms: millis(kv_lease), pull_key });
        of_decode.kv_from = Some(KvFrom {
            worker: prefill.place.link.worker.clone(),
            transfer: prefill.transfer.clone(),
            timeout_ms: millis(transfer_timeout),
            pull_key,
        });
        (of_decode, of_prefill)
    }

    /// What it holds was given back by other means.
    pub(super) fn forget(mut self) {
        self.used = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.used {
            return;
        }
        let prefill = self.prefill.as_ref().map(|prefill| &prefill.place);
        for BookedPlace { link, request } in [Some(&self.decode), prefill].into_iter().flatten() {
            self.registry.ended(link.id, &[(*request, LegOutput::default())]);
        }
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
