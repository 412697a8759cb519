//! Legs that take too long: those whose readers take nothing, and cancels without an answer. A leg is looked at when that may be so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Link;
use super::leg::LegState;
use super::legs::Legs;
use crate::core::frame::RequestId;
use crate::error::RouteError;

/// A worker frees the blocks of a cancelled request in this time. A guess: a long prefill step on a CPU fits in.
pub(super) const FREED_TIMEOUT: Duration = Duration::from_secs(60);

impl Legs {
    /// A leg is to be looked at then.
    pub(super) fn look_at(&mut self, request: RequestId, at_ms: f64) {
        self.deadlines.set(request, at_ms);
        let legs = &self.by_request;
        self.deadlines.tidy(legs.len(), |request| legs.contains_key(&request));
    }

    /// Legs that are due, and so may have taken too long.
    fn due(&mut self, now_ms: f64) -> Vec<RequestId> {
        std::iter::from_fn(|| self.deadlines.next_due(now_ms)).collect()
    }
}

impl Link {
    /// Ends what takes too long: legs whose reader takes nothing, cancels without an answer. Each leg is looked at when that
    /// may be so for the first time, and from then on as often as a stall is long.
    pub(super) fn sweep_legs(&self, now: Instant, stall: Duration) {
        let (mut stalled, mut released) = (Vec::new(), Vec::new());
        let mut legs = self.legs();
        for request in legs.due(self.registry.at_ms(now)) {
            let Some(leg) = legs.by_request.get(&request) else { continue };
            let again = match &leg.state {
                LegState::Cancelled(since) => {
                    let until = *since + FREED_TIMEOUT;
                    if until <= now {
                        released.push((request, leg.output(false)));
                        continue;
                    }
                    until
                }
                LegState::Sent(mailbox) => match mailbox.unread_since() {
                    Some(since) if now - since > stall => {
                        stalled.push((request, Arc::clone(mailbox)));
                        continue; // it is cancelled below, and looked at again for that
                    }
                    unread => unread.unwrap_or(now) + stall,
                },
                LegState::Queued(_) => continue,
            };
            legs.look_at(request, self.registry.at_ms(again));
        }
        for (request, _) in &released {
            let Some(leg) = legs.by_request.remove(request) else { continue };
            tracing::warn!(worker = self.worker, request = request.0, "cancelled, never freed");
            self.registry.metrics.legs.ended.inc("never_freed");
            leg.hangup.void();
        }
        drop(legs);
        for (request, mailbox) in stalled {
            tracing::info!(worker = self.worker, request = request.0, "the client takes nothing");
            self.registry.metrics.legs.stalled.inc();
            self.cancel(request, Some("stalled"));
            mailbox.fail(RouteError::ClientGone, self.id);
        }
        self.registry.ended(self.id, &released);
    }
}
