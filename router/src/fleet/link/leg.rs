//! One leg: what a worker does for a request, how far it is, and what its end means.

use std::sync::Arc;

use tokio::time::Instant;

use super::Link;
use super::hangup::Hangup;
use super::leg_span::LegSpan;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Frame, RequestId};
use crate::core::scheduler::LegOutput;
use crate::error::RouteError;
use crate::fleet::stream::Mailbox;

#[derive(Debug)]
pub(super) struct LegHandle {
    pub(super) state: LegState,
    pub(super) part: LegWork,
    /// Tokens that came from this worker.
    pub(super) generated: u32,
    /// Tokens of the answer that were there before.
    pub(super) before: u32,
    pub(super) hangup: Arc<Hangup>,
    pub(super) span: LegSpan,
}

#[derive(Debug)]
pub(super) enum LegState {
    /// Its submit waits for the socket.
    Queued(Arc<Mailbox>),
    /// The worker has it.
    Sent(Arc<Mailbox>),
    /// The worker was told to stop, and has not said yet that the blocks are free.
    Cancelled(Instant),
}

/// What a worker does for a request.
#[derive(Debug)]
pub(crate) enum LegWork {
    /// All of it.
    Whole,
    /// Prompt and first token.
    Prefill(Partner),
    /// The rest. What is to be said of the prompt before the submit is sent waits here: at most a ticket and a word to
    /// go on.
    Decode { later: Vec<Frame>, goes_on: bool },
}

impl LegWork {
    pub(crate) fn decode() -> Self {
        Self::Decode { later: Vec::new(), goes_on: false }
    }
}

/// The decode leg of a prefill leg.
#[derive(Debug)]
pub(crate) struct Partner {
    pub(crate) link: Arc<Link>,
    pub(crate) request: RequestId,
    /// The first token came: from here on only the blocks are left of this leg.
    pub(crate) handed_off: bool,
    /// It was told where to pull from; once is enough.
    pub(crate) ticketed: bool,
}

impl LegHandle {
    pub(super) fn output(&self, complete: bool) -> LegOutput {
        LegOutput { tokens: self.before + self.generated, complete }
    }

    /// Says how it ended, in the words of the metrics.
    pub(super) fn ends(&self, outcome: &'static str) {
        self.span.end(outcome, self.generated);
    }

    /// The decode leg, if it still depends on this one.
    pub(super) fn waiting_partner(&self) -> Option<(Arc<Link>, RequestId)> {
        match &self.part {
            LegWork::Prefill(partner) if !partner.handed_off => {
                Some((Arc::clone(&partner.link), partner.request))
            }
            LegWork::Prefill(_) | LegWork::Whole | LegWork::Decode { .. } => None,
        }
    }

    /// It is over: the request's reader is told, or the decode leg, if that one can do without it.
    pub(super) fn fail(self, error: RouteError, worker: WorkerId, may_go_on: bool) {
        let partner = self.waiting_partner();
        if !matches!(self.state, LegState::Cancelled(_)) {
            self.span.fail(&error);
        }
        match (self.state, partner) {
            (LegState::Cancelled(_), _) => {}
            (LegState::Queued(_) | LegState::Sent(_), Some((link, request))) if may_go_on => {
                link.goes_alone(request, &error);
            }
            (LegState::Queued(mailbox) | LegState::Sent(mailbox), partner) => {
                let only_blocks_left =
                    partner.is_none() && matches!(self.part, LegWork::Prefill(_));
                if !only_blocks_left {
                    mailbox.fail(error, worker);
                }
            }
        }
    }
}
