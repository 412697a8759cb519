//! The legs of one link: what a worker has of this router's requests, from the submit to the last word about each.
//!
//! A request that is split has two legs on two links and one mailbox. What the prefill worker says is passed on to the link
//! of the decode leg from here, and not by the request's task: that one may be waiting for a client that reads slowly.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::hangup::Hangup;
use super::leg::{LegHandle, LegState, LegWork};
use super::leg_span::{LegParent, LegSpan};
use super::overdue::FREED_TIMEOUT;
use super::{Lease, Link, LinkError, NotTaken};
use crate::core::blocks::tokens_le;
use crate::core::frame::{
    Cancel, Continue, Failed, Finish, Frame, KvReady, RequestId, Step, Submit, Ticket,
};
use crate::core::scheduler::{LegDeadlines, LegOutput, Withdrawal};
use crate::error::{Cause, RouteError};
use crate::fleet::registry::Said;
use crate::fleet::stream::{Appended, Burst, Mailbox};
use crate::limits::memory::Refused;
use crate::metrics::{Metrics, ModelMetrics};
use crate::process::lock::Held;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Legs {
    pub(super) closed: bool,
    pub(super) by_request: HashMap<RequestId, LegHandle>,
    /// When legs may have taken too long: those that wait for the socket, those that the worker has, as their readers may stall,
    /// and those that were cancelled.
    pub(super) deadlines: LegDeadlines,
    /// Frames that overtake submits. At most one cancel for each leg, and a few more.
    pub(super) urgent: Vec<Frame>,
    pub(super) pinged: bool,
}

/// What a step is to set off, once the lock is gone.
#[derive(Default)]
struct Follows {
    said: Said,
    wrong: Vec<(RequestId, Arc<Mailbox>, &'static str)>,
    /// What found no memory.
    refused: Vec<(RequestId, Arc<Mailbox>, Refused)>,
    go_on: Vec<(Arc<Link>, RequestId, Vec<u32>)>,
    needless: Vec<(Arc<Link>, RequestId)>,
}

impl Follows {
    /// Once for all outputs, so that links of a model do not meet at its counters for each token.
    fn count(&self, model: &ModelMetrics, metrics: &Metrics) {
        model.completion_tokens.inc_by(self.said.tokens);
        model.itl_seconds.observe_all(&self.said.gaps);
        for _ in &self.said.ended {
            metrics.legs.ended.inc("finished");
        }
    }
}

impl Legs {
    /// The leg's submit goes out now, and what waited for that; `None` if it is not wanted any more. Its reader is first looked at
    /// at `look_ms`.
    pub(super) fn sent(&mut self, submit: &Submit, look_ms: f64) -> Option<Vec<Frame>> {
        let leg = self.by_request.get_mut(&submit.request)?;
        let LegState::Queued(mailbox) = &leg.state else { return None };
        leg.state = LegState::Sent(Arc::clone(mailbox));
        let (later, has_reader) = match &mut leg.part {
            LegWork::Decode { later, .. } => (std::mem::take(later), true),
            LegWork::Whole => (Vec::new(), true),
            LegWork::Prefill(_) => (Vec::new(), false), // of two legs with one mailbox, the decode leg is looked at
        };
        if has_reader {
            self.look_at(submit.request, look_ms);
        }
        Some(later)
    }

    /// Tells the worker of a leg something about it, after its submit.
    fn tell(&mut self, request: RequestId, frame: Frame) -> bool {
        let Some(leg) = self.by_request.get_mut(&request) else { return false };
        match (&leg.state, &mut leg.part) {
            (LegState::Sent(_), _) => self.urgent.push(frame),
            (LegState::Queued(_), LegWork::Decode { later, .. }) => later.push(frame),
            (LegState::Queued(_), LegWork::Whole | LegWork::Prefill(_))
            | (LegState::Cancelled(_), _) => {
                return false;
            }
        }
        true
    }

    /// Takes one output in.
    fn take_in(
        &mut self,
        output: crate::core::frame::Output,
        now: Instant,
        follows: &mut Follows,
        burst: &mut Burst,
    ) {
        let (request, finish) = (output.request, output.finish);
        let complete = matches!(output.finish, Some(Finish::Stop | Finish::Length));
        let Some(leg) = self.by_request.get_mut(&request) else { return };
        // an output that crosses a cancel is of no use any more
        let LegState::Sent(mailbox) = &leg.state else { return };
        let mut wrong = |what| follows.wrong.push((request, Arc::clone(mailbox), what));
        match &leg.part {
            LegWork::Prefill(partner) if partner.handed_off => {
                return wrong("tokens after the one that it handed off");
            }
            // that its deadline passed it may say at any time
            LegWork::Decode { goes_on: false, .. } if output.finish != Some(Finish::Cancelled) => {
                return wrong("tokens before it was told to go on");
            }
            LegWork::Whole | LegWork::Prefill(_) | LegWork::Decode { .. } => {}
        }
        // a worker that does not say what its cache gave is held to have got nothing from it
        let first = leg.generated == 0 && !output.ids.is_empty();
        if first {
            leg.span.first_token(now);
        }
        if let Some(cached_tokens) = output.cached_tokens.or(first.then_some(0)) {
            follows.said.begun.push((request, cached_tokens));
        }
        if leg.generated > 0 && !output.ids.is_empty() {
            follows.said.given.add(output.ids.len());
        }
        follows.said.tokens += output.ids.len() as u64;
        leg.generated += u32::try_from(output.ids.len()).unwrap_or(u32::MAX);
        let ids = matches!(leg.part, LegWork::Prefill(_)).then(|| output.ids.clone());
        match mailbox.append(output, now, burst) {
            Appended::Fine(Some(gap)) => follows.said.gaps.observe(gap),
            Appended::Fine(None) => {}
            Appended::Wrong(what) => return wrong(what),
            Appended::Refused(refused) => {
                return follows.refused.push((request, Arc::clone(mailbox), refused));
            }
        }
        if let (LegWork::Prefill(partner), Some(ids)) = (&mut leg.part, ids) {
            let (link, decode) = (Arc::clone(&partner.link), partner.request);
            if finish.is_some() {
                follows.needless.push((link, decode));
            } else if !ids.is_empty() {
                partner.handed_off = true;
                mailbox.expects(link.id);
                follows.go_on.push((link, decode, ids));
            }
        }
        if let Some(finish) = finish {
            leg.span.finished(finish);
            leg.ends("finished");
            follows.said.ended.push((request, leg.output(complete)));
            self.by_request.remove(&request);
        }
    }
}

impl Link {
    /// Hands a leg to the worker, or to the queue in front of its socket, where it may wait for `--submit-timeout-ms`; what it
    /// gives comes in `mailbox`. Dropping the lease cancels it.
    ///
    /// # Errors
    /// The link broke, or had no room within `--submit-timeout-ms`.
    ///
    /// # Cancel safety
    /// A dropped call submits nothing.
    pub(in crate::fleet) async fn submit(
        self: &Arc<Self>,
        mut submit: Box<Submit>,
        part: LegWork,
        mailbox: &Arc<Mailbox>,
        hangup: &Arc<Hangup>,
        parent: Option<&LegParent>,
    ) -> Result<Lease, RouteError> {
        let request = submit.request;
        let resumed = submit.resume.as_ref().map_or(0, |resume| resume.generated.len() / 4);
        let first = u32::from(matches!(part, LegWork::Decode { .. }));
        let span = LegSpan::begin(parent, &part, &self.worker, &mut submit);
        let leg = LegHandle {
            state: LegState::Queued(Arc::clone(mailbox)),
            part,
            generated: 0,
            before: u32::try_from(resumed).unwrap_or(u32::MAX).saturating_add(first),
            hangup: Arc::clone(hangup),
            span,
        };
        {
            let mut legs = self.legs();
            if legs.closed {
                drop(legs);
                self.registry.ended(self.id, &[(request, LegOutput::default())]);
                return Err(self.lost(Arc::new(NotTaken::Closed)));
            }
            legs.by_request.insert(request, leg);
            legs.look_at(request, self.registry.at_ms(Instant::now() + self.submit_timeout));
        }
        let lease = Lease::new(Arc::clone(self), request);
        let sent = self.submits.put(submit, self.submit_timeout).await;
        sent.map(|()| lease).map_err(|error| self.lost(Arc::new(error)))
    }

    /// Legs that have not ended.
    pub(in crate::fleet) fn in_flight(&self) -> usize {
        self.legs().by_request.len()
    }

    pub(super) fn legs(&self) -> Held<'_, Legs> {
        self.legs.lock()
    }

    pub(super) fn lost(&self, source: Cause) -> RouteError {
        RouteError::WorkerLost { worker: self.worker.clone(), source }
    }

    // ---- what happens to a leg ----

    /// Ends a leg, whatever its state. After its end a no-op.
    pub(crate) fn cancel(&self, request: RequestId, fault: Option<&'static str>) {
        let mut legs = self.legs();
        let Legs { by_request, urgent, .. } = &mut *legs;
        let Some(leg) = by_request.get_mut(&request) else { return };
        let stage = match &leg.state {
            LegState::Cancelled(_) => return,
            LegState::Queued(_) => "submit",
            LegState::Sent(_) if leg.waiting_partner().is_some() => "prefill",
            LegState::Sent(_) if matches!(leg.part, LegWork::Prefill(_)) => "handed_off",
            LegState::Sent(_) if matches!(leg.part, LegWork::Decode { goes_on: false, .. }) => {
                "decode_waits"
            }
            LegState::Sent(mailbox) if mailbox.has_begun() => "streaming",
            LegState::Sent(_) => "first_token",
        };
        self.registry.metrics.legs.cancelled.inc(fault.unwrap_or(stage));
        leg.span.cancelled(fault.unwrap_or(stage));
        if stage == "submit" {
            leg.ends("cancelled");
            // the writer sends no submit whose leg is gone
            by_request.remove(&request);
            drop(legs);
            self.registry.ended(self.id, &[(request, LegOutput::default())]);
        } else {
            let now = Instant::now();
            leg.state = LegState::Cancelled(now);
            urgent.push(Frame::Cancel(Cancel { request }));
            legs.look_at(request, self.registry.at_ms(now + FREED_TIMEOUT));
            self.urgent.notify_one();
        }
    }

    /// The KV of a prompt may be pulled: this passes the word on.
    pub(super) fn kv_ready(&self, ready: KvReady) {
        let partner = match self.legs().by_request.get_mut(&ready.request).map(|leg| &mut leg.part)
        {
            Some(LegWork::Prefill(partner)) if !partner.ticketed => {
                partner.ticketed = true;
                Some((Arc::clone(&partner.link), partner.request))
            }
            Some(LegWork::Prefill(_) | LegWork::Whole | LegWork::Decode { .. }) | None => None,
        };
        let Some((link, request)) = partner else { return }; // it crossed a cancel
        link.tell(request, Frame::Ticket(Ticket { request, ticket: ready.ticket }));
    }

    fn tell(&self, request: RequestId, frame: Frame) -> bool {
        let told = self.legs().tell(request, frame);
        self.urgent.notify_one();
        told
    }

    /// A decode leg goes on after the tokens that its prefill worker generated.
    fn goes_on(&self, request: RequestId, ids: &[u32]) {
        if let Some(LegWork::Decode { goes_on, .. }) =
            self.legs().by_request.get_mut(&request).map(|leg| &mut leg.part)
        {
            *goes_on = true;
        }
        let generated = tokens_le(ids);
        self.tell(request, Frame::Continue(Continue { request, generated }));
    }

    /// A decode leg has lost its prefill worker before the first token: it does all by itself.
    pub(in crate::fleet) fn goes_alone(&self, request: RequestId, why: &RouteError) {
        {
            let mut legs = self.legs();
            let Some(leg) = legs.by_request.get_mut(&request) else { return };
            let (LegState::Queued(mailbox) | LegState::Sent(mailbox)) = &leg.state else { return };
            let LegWork::Decode { goes_on, .. } = &mut leg.part else { return };
            if std::mem::replace(goes_on, true) {
                return; // it has been told already
            }
            leg.before = leg.before.saturating_sub(1);
            mailbox.expects(self.id);
        }
        tracing::info!(worker = self.worker, leg = request.0, %why, "it computes the prompt itself");
        self.registry.metrics.legs.prefills_lost.inc();
        self.registry.goes_alone(self.id, request);
        self.tell(request, Frame::Continue(Continue { request, generated: Vec::new() }));
    }

    /// The worker is silent, or cannot step: its requests go on elsewhere, and it is told so in case that it hears again.
    pub(in crate::fleet) fn give_up_legs(&self, why: LinkError) {
        let lost_rank = matches!(why, LinkError::RankLost { .. });
        let outcome = if lost_rank { "group_lost" } else { "worker_silent" };
        let (mut given_up, mut never_sent) = (Vec::new(), Vec::new());
        let (now, mut cancelled) = (Instant::now(), Vec::new());
        {
            let mut legs = self.legs();
            let Legs { by_request, urgent, .. } = &mut *legs;
            by_request.retain(|request, leg| {
                let (mailbox, sent) = match &leg.state {
                    LegState::Queued(mailbox) => (Arc::clone(mailbox), false),
                    LegState::Sent(mailbox) => (Arc::clone(mailbox), true),
                    LegState::Cancelled(_) => return true,
                };
                leg.ends(outcome);
                let part = std::mem::replace(&mut leg.part, LegWork::Whole);
                let (state, hangup) = (LegState::Sent(mailbox), Arc::clone(&leg.hangup));
                let span = std::mem::take(&mut leg.span);
                given_up.push(LegHandle { state, part, generated: 0, before: 0, hangup, span });
                if sent {
                    leg.state = LegState::Cancelled(now);
                    cancelled.push(*request);
                    urgent.push(Frame::Cancel(Cancel { request: *request }));
                } else {
                    never_sent.push((*request, LegOutput::default()));
                }
                sent
            });
            for request in cancelled {
                legs.look_at(request, self.registry.at_ms(now + FREED_TIMEOUT));
            }
            self.urgent.notify_one();
        }
        if !given_up.is_empty() {
            let legs = given_up.len();
            tracing::warn!(worker = self.worker, legs, %why, "they go on elsewhere");
        }
        self.registry.ended(self.id, &never_sent);
        let error: Cause = Arc::new(why);
        for leg in given_up {
            self.registry.metrics.legs.ended.inc(outcome);
            leg.fail(self.lost(Arc::clone(&error)), self.id, true);
        }
    }

    /// The router ends: whoever reads an answer is told so, and ends it.
    pub(in crate::fleet) fn cut_legs(&self) {
        let mailbox = |leg: &LegHandle| match &leg.state {
            LegState::Queued(mailbox) | LegState::Sent(mailbox) => Some(Arc::clone(mailbox)),
            LegState::Cancelled(_) => None,
        };
        let mailboxes: Vec<_> = self.legs().by_request.values().filter_map(mailbox).collect();
        for mailbox in mailboxes {
            mailbox.fail(RouteError::ShuttingDown, self.id);
        }
    }

    /// The link ended, and all legs with it.
    pub(super) fn fail_all(&self, error: &Arc<LinkError>) {
        let legs = {
            let mut legs = self.legs();
            legs.closed = true;
            legs.urgent.clear();
            std::mem::take(&mut legs.by_request)
        };
        let error: Cause = error.clone();
        for leg in legs.into_values() {
            leg.hangup.void();
            let cancelled = matches!(leg.state, LegState::Cancelled(_));
            let outcome = if cancelled { "cancelled" } else { "worker_lost" };
            self.registry.metrics.legs.ended.inc(outcome);
            leg.ends(outcome);
            leg.fail(self.lost(Arc::clone(&error)), self.id, true);
        }
    }

    // ---- what the worker says of legs ----

    /// The hot path: one look-up and one lock for each output, whose reader is called after the burst or woken; one lock of
    /// the registry and of what is counted for all.
    pub(super) fn step(&self, mut step: Step, burst: &mut Burst) -> Option<Withdrawal> {
        let now = Instant::now();
        let mut follows = Follows::default();
        let outputs = std::mem::take(&mut step.outputs);
        if !outputs.is_empty() {
            let mut legs = self.legs();
            for output in outputs {
                legs.take_in(output, now, &mut follows, burst);
            }
        }
        follows.count(&self.metrics, &self.registry.metrics);
        burst.wake();
        for (link, request, ids) in follows.go_on {
            link.goes_on(request, &ids);
        }
        for (link, request) in follows.needless {
            link.cancel(request, Some("prefill_finished"));
        }
        for (request, mailbox, what) in follows.wrong {
            tracing::error!(worker = self.worker, request = request.0, what, "wrong output");
            self.cancel(request, Some("wrong_output"));
            let worker = self.worker.clone();
            mailbox.fail(RouteError::WrongOutput { worker, what }, self.id);
        }
        for (request, mailbox, refused) in follows.refused {
            self.cancel(request, Some("memory"));
            mailbox.fail(refused.answer(), self.id);
        }
        self.registry.step(self.id, &step, &follows.said)
    }

    /// The blocks of a leg are free: of one that was cancelled, or of a prompt that was pulled.
    pub(super) fn freed(&self, request: RequestId) {
        let mut legs = self.legs();
        let Some(leg) = legs.by_request.get(&request) else { return }; // it finished before
        let metrics = &self.registry.metrics;
        match (&leg.state, &leg.part) {
            (LegState::Cancelled(since), _) => {
                metrics.legs.cancel_to_freed_seconds.observe(since.elapsed());
                metrics.legs.ended.inc("cancelled");
                leg.ends("cancelled");
            }
            (LegState::Sent(_), LegWork::Prefill(partner)) if partner.handed_off => {
                metrics.legs.ended.inc("let_go"); // pulled, or in vain
                leg.ends("let_go");
            }
            (LegState::Sent(_) | LegState::Queued(_), _) => return,
        }
        let output = leg.output(false);
        legs.by_request.remove(&request);
        drop(legs);
        self.registry.freed(self.id, request, output);
    }

    /// The worker cannot do it.
    pub(super) fn failed(&self, failed: Failed) {
        let Some(leg) = self.legs().by_request.remove(&failed.request) else { return };
        self.registry.ended(self.id, &[(failed.request, leg.output(false))]);
        let cancelled = matches!(leg.state, LegState::Cancelled(_));
        let outcome = if cancelled { "cancelled" } else { "worker_failed" };
        self.registry.metrics.legs.ended.inc(outcome);
        leg.ends(outcome);
        let Failed { kind, message, .. } = failed;
        let error = RouteError::WorkerFailed { worker: self.worker.clone(), kind, message };
        leg.fail(error, self.id, kind.is_retryable());
    }
}
