//! Legs that take too long: those that wait for the socket, those whose readers take nothing, and cancels without an answer. A leg
//! is looked at when that may be so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::leg::{LegState, LegWork};
use super::legs::Legs;
use super::{Link, NotTaken};
use crate::core::frame::RequestId;
use crate::core::scheduler::LegOutput;
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
    /// Ends what takes too long: legs that were not sent in time, which then go elsewhere, legs whose reader takes nothing, cancels
    /// without an answer. Each leg is looked at when that may be so for the first time, and from then on as often as a stall
    /// is long.
    pub(super) fn sweep_legs(&self, now: Instant, stall: Duration) {
        let (mut unsent, mut stalled, mut released) = (Vec::new(), Vec::new(), Vec::new());
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
                // of two legs with one mailbox, the decode leg is looked at
                LegState::Sent(_) if matches!(leg.part, LegWork::Prefill(_)) => continue,
                LegState::Sent(mailbox) => match mailbox.unread_since() {
                    Some(since) if now - since > stall => {
                        stalled.push((request, Arc::clone(mailbox)));
                        continue; // it is cancelled below, and looked at again for that
                    }
                    unread => unread.unwrap_or(now) + stall,
                },
                LegState::Queued(_) => {
                    unsent.extend(legs.by_request.remove_entry(&request));
                    continue; // the writer sends no submit whose leg is gone
                }
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
        for (request, leg) in unsent {
            tracing::warn!(worker = self.worker, request = request.0, "not sent in time");
            released.push((request, LegOutput::default()));
            self.registry.metrics.legs.ended.inc("not_sent");
            leg.ends("not_sent");
            leg.fail(self.lost(Arc::new(NotTaken::Full)), self.id, true);
        }
        for (request, mailbox) in stalled {
            tracing::info!(worker = self.worker, request = request.0, "the client takes nothing");
            self.registry.metrics.legs.stalled.inc();
            self.cancel(request, Some("stalled"));
            mailbox.fail(RouteError::ClientGone, self.id);
        }
        self.registry.ended(self.id, &released);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::super::Hangup;
    use super::super::submits::tests::submit;
    use super::*;
    use crate::config::{Config, RouterArgs};
    use crate::core::candidate::WorkerId;
    use crate::fleet::link::SubmitQueue;
    use crate::fleet::stream::{Mailbox, TokenStream};
    use crate::limits::memory::MemoryPool;
    use crate::metrics::Metrics;

    const SUBMIT: Duration = Duration::from_secs(5);
    const STALL: Duration = Duration::from_secs(60);

    async fn link(metrics: &Arc<Metrics>) -> (Arc<Link>, SubmitQueue) {
        let args = RouterArgs { worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
        let config = Config::try_from(args).unwrap();
        let registry = crate::fleet::start(&config, Arc::clone(metrics)).await.unwrap();
        Link::new(WorkerId(7), "w".into(), registry, Arc::default(), SUBMIT)
    }

    async fn ask(link: &Arc<Link>, metrics: &Arc<Metrics>, request: u64) -> TokenStream {
        let memory = MemoryPool::private(1 << 20).share();
        let mailbox = Arc::new(Mailbox::new(9, WorkerId(7), memory));
        let hangup = Hangup::new(Arc::clone(metrics));
        let submit = submit(request, 300);
        let lease = link.submit(submit, LegWork::Whole, &mailbox, &hangup, None).await.unwrap();
        TokenStream::new(mailbox, hangup, lease, None)
    }

    #[tokio::test(start_paused = true)]
    async fn a_leg_that_is_not_sent_in_time_is_given_back_for_another_worker() {
        let metrics = Arc::default();
        let (link, mut queue) = link(&metrics).await;
        let mut sent = ask(&link, &metrics, 1).await;
        let late = link.registry.at_ms(Instant::now() + STALL);
        assert!(link.legs().sent(&queue.next_now().unwrap(), late).is_some());
        let mut waits = ask(&link, &metrics, 2).await;
        advance(SUBMIT - Duration::from_millis(1)).await;
        link.sweep_legs(Instant::now(), STALL);
        assert_eq!(link.in_flight(), 2);
        advance(Duration::from_millis(2)).await;
        link.sweep_legs(Instant::now(), STALL);
        assert_eq!(link.in_flight(), 1, "the one that was sent");
        let why = waits.next().await.unwrap_err();
        assert!(matches!(&why, RouteError::WorkerLost { worker, .. } if worker == "w"), "{why:?}");
        let submit = queue.next_now().unwrap();
        assert!(link.legs().sent(&submit, late).is_none(), "nobody wants it");
        let next = std::pin::pin!(sent.next());
        assert!(futures_util::FutureExt::now_or_never(next).is_none());
    }
}
