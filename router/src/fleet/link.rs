//! One worker's link: a task that reads frames, a task that writes them, and the legs in between.

mod description;
mod error;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use self::description::Description;
pub(crate) use self::error::LinkError;
use super::codec::{CodecError, FrameReader, FrameWriter};
use super::registry::Registry;
use crate::core::candidate::WorkerId;
use crate::core::events::{BlockEvents, Gap, Verdict};
use crate::core::frame::{
    Cancel, Describe, Drain, Failed, Finish, Frame, ModelPart, Ping, RequestId, Step, Submit,
};
use crate::core::scheduler::{Output, Withdrawal};
use crate::error::RouteError;
use crate::stream::{Appended, Mailbox, TokenStream};

/// Submits that may wait for the socket. Few: a worker's queue is the place to wait.
const SUBMITS_WAITING: usize = 64;
/// The writer sends once this much was collected.
const WRITE_BYTES: usize = 256 << 10;
/// A worker frees the blocks of a cancelled request in this time. A guess: a long prefill step on a CPU fits in.
const FREED_TIMEOUT: Duration = Duration::from_secs(60);

/// The router's side of one worker.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) id: WorkerId,
    pub(super) worker: String,
    registry: Arc<Registry>,
    submit_timeout: Duration,
    legs: Mutex<Legs>,
    submits: mpsc::Sender<Submit>,
    urgent: Notify,
    asked: Mutex<Option<Description>>,
    heard_ms: AtomicU64,
    close: CancellationToken,
    closing: Mutex<Option<LinkError>>,
}

#[derive(Debug, Default)]
struct Legs {
    closed: bool,
    by_request: HashMap<RequestId, Leg>,
    /// Frames that overtake submits. At most one cancel for each leg, and a few more.
    urgent: Vec<Frame>,
    pinged: bool,
}

#[derive(Debug)]
struct Leg {
    state: LegState,
    /// Tokens that came.
    generated: u32,
}

impl Leg {
    fn output(&self, complete: bool) -> Output {
        Output { tokens: self.generated, complete }
    }
}

#[derive(Debug)]
enum LegState {
    /// Its submit waits for the socket.
    Queued(Arc<Mailbox>),
    /// The worker has it.
    Sent(Arc<Mailbox>),
    /// The worker was told to stop, and has not said yet that the blocks are free.
    Cancelled(Instant),
}

/// Cancels a leg when it drops.
#[derive(Debug)]
pub(crate) struct Lease {
    link: Arc<Link>,
    request: RequestId,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.link.cancel(self.request, None);
    }
}

impl Link {
    pub(super) fn new(
        id: WorkerId,
        worker: String,
        registry: Arc<Registry>,
        submit_timeout: Duration,
    ) -> (Arc<Self>, mpsc::Receiver<Submit>) {
        let (submits, inbox) = mpsc::channel(SUBMITS_WAITING);
        let link = Self {
            id,
            worker,
            heard_ms: AtomicU64::new(registry.now_ms()),
            registry,
            submit_timeout,
            legs: Mutex::default(),
            submits,
            urgent: Notify::new(),
            asked: Mutex::new(None),
            close: CancellationToken::new(),
            closing: Mutex::new(None),
        };
        (Arc::new(link), inbox)
    }

    /// Reads and writes until one of both ends or [`Self::close`] is called; then all legs fail.
    pub(super) async fn run<R, W>(
        self: &Arc<Self>,
        mut reader: FrameReader<R>,
        mut writer: FrameWriter<W>,
        submits: mpsc::Receiver<Submit>,
        events: BlockEvents,
    ) -> LinkError
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let error = tokio::select! {
            error = self.read(&mut reader, events) => error,
            error = self.write(&mut writer, submits) => error,
            () = self.close.cancelled() => {
                self.closing.lock().expect("no holder panics").take().unwrap_or(LinkError::Closed)
            }
        };
        // first out of the registry, so that no leg that is tried again comes back here
        self.registry.leave(self.id);
        self.fail_all(&error);
        error
    }

    /// Ends the link for this reason.
    pub(super) fn close(&self, error: LinkError) {
        self.closing.lock().expect("no holder panics").get_or_insert(error);
        self.close.cancel();
    }

    /// Hands a request to the worker. What comes back is in the stream; dropping that cancels the request.
    ///
    /// # Errors
    /// The link broke, or took nothing within `--submit-timeout-ms`.
    ///
    /// # Cancel safety
    /// A dropped call submits nothing.
    pub(super) async fn submit(
        self: &Arc<Self>,
        submit: Submit,
    ) -> Result<TokenStream, RouteError> {
        let mailbox = Arc::new(Mailbox::new(submit.max_tokens));
        let request = submit.request;
        {
            let mut legs = self.legs();
            if legs.closed {
                drop(legs);
                self.registry.ended(self.id, &[(request, Output::default())]);
                return Err(self.lost("its link closed"));
            }
            let state = LegState::Queued(Arc::clone(&mailbox));
            legs.by_request.insert(request, Leg { state, generated: 0 });
        }
        let stream = TokenStream::new(mailbox, Lease { link: Arc::clone(self), request });
        let sent = match self.submits.try_send(submit) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err("its link closed"),
            Err(mpsc::error::TrySendError::Full(submit)) => {
                match timeout(self.submit_timeout, self.submits.send(submit)).await {
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(_)) => Err("its link closed"),
                    Err(_) => Err("its link is full"),
                }
            }
        };
        sent.map(|()| stream).map_err(|reason| self.lost(reason))
    }

    /// Sends a frame before all submits.
    pub(super) fn send(&self, frame: Frame) {
        let mut legs = self.legs();
        if !legs.closed {
            legs.urgent.push(frame);
            self.urgent.notify_one();
        }
    }

    /// Asks for a sign of life, unless that question still waits.
    pub(super) fn ping(&self) {
        let mut legs = self.legs();
        if !legs.closed && !legs.pinged {
            legs.pinged = true;
            legs.urgent.push(Frame::Ping(Ping { nonce: self.heard_ms.load(Relaxed) }));
            self.urgent.notify_one();
        }
    }

    /// Asks for the description of the model.
    pub(super) fn describe(&self, fingerprint: String) {
        let asked = Description::new(fingerprint.clone(), Instant::now());
        *self.asked.lock().expect("no holder panics") = Some(asked);
        self.send(Frame::Describe(Describe { fingerprint }));
    }

    /// Tells the worker to leave.
    pub(super) fn drain(&self, budget: Duration) {
        let budget_ms = u64::try_from(budget.as_millis()).unwrap_or(u64::MAX);
        self.send(Frame::Drain(Drain { budget_ms, hand_over: 0 }));
    }

    /// When the last frame came, on the registry's clock.
    pub(super) fn heard_ms(&self) -> u64 {
        self.heard_ms.load(Relaxed)
    }

    /// Legs that have not ended.
    pub(super) fn in_flight(&self) -> usize {
        self.legs().by_request.len()
    }

    /// Ends what takes too long: legs whose reader takes nothing, cancels without an answer, a late description.
    pub(super) fn sweep(&self, now: Instant, stall: Duration, describe_timeout: Duration) {
        let mut stalled = Vec::new();
        let mut released = Vec::new();
        {
            let mut legs = self.legs();
            legs.by_request.retain(|request, leg| match &leg.state {
                LegState::Cancelled(since) if now - *since > FREED_TIMEOUT => {
                    tracing::warn!(
                        worker = self.worker,
                        request = request.0,
                        "cancelled, never freed"
                    );
                    self.registry.metrics.leg_ended("never_freed");
                    released.push((*request, leg.output(false)));
                    false
                }
                LegState::Sent(mailbox) => {
                    if mailbox.unread_since().is_some_and(|since| now - since > stall) {
                        stalled.push((*request, Arc::clone(mailbox)));
                    }
                    true
                }
                LegState::Queued(_) | LegState::Cancelled(_) => true,
            });
        }
        for (request, mailbox) in stalled {
            tracing::info!(worker = self.worker, request = request.0, "the client takes nothing");
            self.registry.metrics.stalls.inc();
            self.cancel(request, Some("stalled"));
            mailbox.fail(RouteError::ClientGone);
        }
        self.registry.ended(self.id, &released);
        let asked = self.asked.lock().expect("no holder panics").as_ref().map(|asked| asked.since);
        if asked.is_some_and(|since| now - since > describe_timeout) {
            self.close(LinkError::Model(format!("did not come within {describe_timeout:?}")));
        }
    }

    fn legs(&self) -> MutexGuard<'_, Legs> {
        self.legs.lock().expect("no holder panics")
    }

    fn lost(&self, reason: &str) -> RouteError {
        RouteError::WorkerLost { worker: self.worker.clone(), reason: reason.to_owned() }
    }

    /// Ends a leg, whatever its state. After its end a no-op.
    fn cancel(&self, request: RequestId, fault: Option<&str>) {
        let mut legs = self.legs();
        let Some(leg) = legs.by_request.get_mut(&request) else { return };
        let stage = match &leg.state {
            LegState::Cancelled(_) => return,
            LegState::Queued(_) => "submit",
            LegState::Sent(mailbox) if mailbox.has_begun() => "streaming",
            LegState::Sent(_) => "first_token",
        };
        self.registry.metrics.cancelled(fault.unwrap_or(stage));
        if stage == "submit" {
            // the writer sends no submit whose leg is gone
            legs.by_request.remove(&request);
            drop(legs);
            self.registry.ended(self.id, &[(request, Output::default())]);
        } else {
            leg.state = LegState::Cancelled(Instant::now());
            legs.urgent.push(Frame::Cancel(Cancel { request }));
            self.urgent.notify_one();
        }
    }

    /// The worker is silent: its requests go on elsewhere, and it is told so in case that it hears again.
    pub(super) fn give_up_legs(&self, silent: Duration) {
        let (mut given_up, mut never_sent) = (Vec::new(), Vec::new());
        {
            let mut legs = self.legs();
            let Legs { by_request, urgent, .. } = &mut *legs;
            by_request.retain(|request, leg| match &leg.state {
                LegState::Queued(mailbox) => {
                    given_up.push(Arc::clone(mailbox));
                    never_sent.push((*request, Output::default()));
                    false
                }
                LegState::Sent(mailbox) => {
                    given_up.push(Arc::clone(mailbox));
                    leg.state = LegState::Cancelled(Instant::now());
                    urgent.push(Frame::Cancel(Cancel { request: *request }));
                    true
                }
                LegState::Cancelled(_) => true,
            });
            self.urgent.notify_one();
        }
        if !given_up.is_empty() {
            tracing::warn!(
                worker = self.worker,
                legs = given_up.len(),
                "silent: they go on elsewhere"
            );
        }
        self.registry.ended(self.id, &never_sent);
        for mailbox in given_up {
            self.registry.metrics.leg_ended("worker_silent");
            mailbox.fail(self.lost(&format!("nothing was heard of it for {silent:?}")));
        }
    }

    fn fail_all(&self, error: &LinkError) {
        let legs = {
            let mut legs = self.legs();
            legs.closed = true;
            legs.urgent.clear();
            std::mem::take(&mut legs.by_request)
        };
        for leg in legs.into_values() {
            match leg.state {
                LegState::Queued(mailbox) | LegState::Sent(mailbox) => {
                    self.registry.metrics.leg_ended("worker_lost");
                    mailbox.fail(self.lost(&error.to_string()));
                }
                LegState::Cancelled(_) => self.registry.metrics.leg_ended("cancelled"),
            }
        }
    }

    async fn write<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut FrameWriter<W>,
        mut submits: mpsc::Receiver<Submit>,
    ) -> LinkError {
        loop {
            let mut next = tokio::select! {
                biased;
                () = self.urgent.notified() => None,
                submit = submits.recv() => submit,
            };
            loop {
                if let Err(error) = self.push(writer, next.take()) {
                    return error.into();
                }
                if writer.pending() >= WRITE_BYTES {
                    break;
                }
                next = submits.try_recv().ok();
                if next.is_none() {
                    break;
                }
            }
            if let Err(error) = self.flush(writer).await {
                return error;
            }
        }
    }

    /// Sends what was collected; slowly is fine, not at all is not.
    async fn flush<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut FrameWriter<W>,
    ) -> Result<(), LinkError> {
        loop {
            let before = writer.pending();
            match timeout(self.submit_timeout, writer.flush()).await {
                Ok(result) => return result.map_err(LinkError::Write),
                Err(_) if writer.pending() < before => {}
                Err(_) => return Err(LinkError::WriteStalled(self.submit_timeout)),
            }
        }
    }

    /// Collects what is urgent, then `submit` if its leg still wants it.
    fn push<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut FrameWriter<W>,
        submit: Option<Submit>,
    ) -> Result<(), CodecError> {
        let (urgent, submit) = {
            let mut legs = self.legs();
            legs.pinged = false;
            let urgent = std::mem::take(&mut legs.urgent);
            let submit = submit.filter(|submit| {
                let Some(leg) = legs.by_request.get_mut(&submit.request) else { return false };
                let LegState::Queued(mailbox) = &leg.state else { return false };
                leg.state = LegState::Sent(Arc::clone(mailbox));
                true
            });
            (urgent, submit)
        };
        for frame in &urgent {
            writer.push(frame)?;
        }
        match submit {
            Some(submit) => writer.push(&Frame::Submit(submit)),
            None => Ok(()),
        }
    }

    async fn read<R: AsyncRead + Unpin>(
        self: &Arc<Self>,
        reader: &mut FrameReader<R>,
        mut events: BlockEvents,
    ) -> LinkError {
        loop {
            let frame = match reader.next().await {
                Ok(Some(frame)) => frame,
                Ok(None) => return LinkError::Closed,
                Err(error) => return error.into(),
            };
            self.heard_ms.store(self.registry.now_ms(), Relaxed);
            if let Err(error) = self.take_in(frame, &mut events) {
                return error;
            }
            if let Some(resync) = events.ask(self.registry.clock_ms()) {
                self.registry.metrics.resyncs.inc();
                self.send(Frame::Resync(resync));
            }
        }
    }

    fn take_in(self: &Arc<Self>, frame: Frame, events: &mut BlockEvents) -> Result<(), LinkError> {
        match frame {
            Frame::Step(step) => {
                let withdrawn = self.step(step);
                self.disbelieve(withdrawn, events);
            }
            Frame::Snapshot(part) => {
                let verdict = events.snapshot(&part, self.registry.clock_ms())?;
                self.block_event(&verdict, events);
            }
            Frame::Blocks(delta) => {
                let verdict = events.delta(&delta, self.registry.clock_ms())?;
                self.block_event(&verdict, events);
            }
            Frame::Model(part) => self.model_part(&part)?,
            Frame::Freed(freed) => self.freed(freed.request),
            Frame::Failed(failed) => self.failed(failed),
            Frame::Bye(bye) => {
                tracing::info!(worker = self.worker, reason = bye.reason, "worker leaves");
                self.registry.draining(self.id);
            }
            Frame::Hello(_)
            | Frame::Prove(_)
            | Frame::KvReady(_) // only asked for by split serving
            | Frame::Transferred(_)
            | Frame::Offer(_)
            | Frame::Welcome(_)
            | Frame::Refuse(_)
            | Frame::Submit(_)
            | Frame::Describe(_)
            | Frame::Cancel(_)
            | Frame::Drain(_)
            | Frame::Ping(_)
            | Frame::Resync(_)
            | Frame::Ticket(_)
            | Frame::Continue(_)
            | Frame::Fetch(_) => return Err(LinkError::Unexpected(frame.name())),
        }
        Ok(())
    }

    /// Applies a block event, or drops all that is known of the worker's blocks and asks for them anew.
    fn block_event(&self, verdict: &Verdict<'_>, events: &mut BlockEvents) {
        let metrics = &self.registry.metrics;
        match verdict {
            Verdict::Apply(_) => {}
            Verdict::Ignore(ignored) => metrics.block_event_ignored(ignored.as_str()),
            Verdict::Lost(gap) => {
                tracing::warn!(worker = self.worker, %gap, "its cached blocks are not known now");
                metrics.blocks_lost(gap.as_str());
            }
        }
        let withdrawn = self.registry.blocks(self.id, verdict, events);
        self.disbelieve(withdrawn, events);
    }

    fn disbelieve(&self, withdrawn: Option<Withdrawal>, events: &mut BlockEvents) {
        let Some(why) = withdrawn else { return };
        let reason = why.as_str();
        tracing::warn!(worker = self.worker, reason, "no credit for its cache");
        self.registry.metrics.blocks_lost(reason);
        let gap = match why {
            Withdrawal::OverCapacity => Gap::Capacity,
            Withdrawal::Silent => Gap::Silent,
            Withdrawal::Unknown | Withdrawal::Lost | Withdrawal::Overclaimed => Gap::Audit,
        };
        events.lose(gap, self.registry.clock_ms());
    }

    /// The hot path: one look-up, one lock and one wake for each output, one lock of the registry for all.
    fn step(&self, mut step: Step) -> Option<Withdrawal> {
        let now = Instant::now();
        let (mut begun, mut ended) = (Vec::new(), Vec::new());
        let mut wrong = Vec::new();
        let outputs = std::mem::take(&mut step.outputs);
        if !outputs.is_empty() {
            let metrics = &self.registry.metrics;
            let mut legs = self.legs();
            for output in outputs {
                let (request, finished) = (output.request, output.finish.is_some());
                let complete = matches!(output.finish, Some(Finish::Stop | Finish::Length));
                let Some(leg) = legs.by_request.get_mut(&request) else { continue };
                // an output that crosses a cancel is of no use any more
                let LegState::Sent(mailbox) = &leg.state else { continue };
                metrics.completion_tokens.add(output.ids.len() as u64);
                // a worker that does not say what its cache gave is held to have got nothing from it
                let first = leg.generated == 0 && !output.ids.is_empty();
                if let Some(cached_tokens) = output.cached_tokens.or(first.then_some(0)) {
                    begun.push((request, cached_tokens));
                }
                leg.generated += u32::try_from(output.ids.len()).unwrap_or(u32::MAX);
                match mailbox.append(output, now) {
                    Appended::Fine(Some(gap)) => metrics.itl_seconds.observe(gap),
                    Appended::Fine(None) => {}
                    Appended::Wrong(what) => {
                        wrong.push((request, Arc::clone(mailbox), what));
                        continue;
                    }
                }
                if finished {
                    metrics.leg_ended("finished");
                    ended.push((request, leg.output(complete)));
                    legs.by_request.remove(&request);
                }
            }
        }
        for (request, mailbox, what) in wrong {
            tracing::error!(worker = self.worker, request = request.0, what, "wrong output");
            self.cancel(request, Some("wrong_output"));
            mailbox.fail(RouteError::WorkerFailed {
                worker: self.worker.clone(),
                kind: "wrong_output".into(),
                message: format!("it sent {what}"),
                retryable: true,
            });
        }
        self.registry.step(self.id, &step, &begun, &ended)
    }

    fn freed(&self, request: RequestId) {
        let mut legs = self.legs();
        let Some(leg) = legs.by_request.get(&request) else { return }; // it finished before
        let LegState::Cancelled(since) = leg.state else { return };
        self.registry.metrics.cancel_to_freed_seconds.observe(since.elapsed());
        self.registry.metrics.leg_ended("cancelled");
        let output = leg.output(false);
        legs.by_request.remove(&request);
        drop(legs);
        self.registry.freed(self.id, request, output);
    }

    fn failed(&self, failed: Failed) {
        let Some(leg) = self.legs().by_request.remove(&failed.request) else { return };
        self.registry.ended(self.id, &[(failed.request, leg.output(false))]);
        match leg.state {
            LegState::Queued(mailbox) | LegState::Sent(mailbox) => {
                self.registry.metrics.leg_ended("worker_failed");
                mailbox.fail(RouteError::WorkerFailed {
                    worker: self.worker.clone(),
                    kind: failed.kind,
                    message: failed.message,
                    retryable: failed.retryable,
                });
            }
            LegState::Cancelled(_) => self.registry.metrics.leg_ended("cancelled"),
        }
    }

    fn model_part(self: &Arc<Self>, part: &ModelPart) -> Result<(), LinkError> {
        let mut asked = self.asked.lock().expect("no holder panics");
        let Some(description) = asked.as_mut() else {
            return Err(LinkError::Model("was not asked for".into()));
        };
        description.take_in(part)?;
        if part.last {
            let Description { fingerprint, document, .. } =
                asked.take().expect("it was there above");
            self.registry.described(Arc::clone(self), fingerprint, document);
        }
        Ok(())
    }
}
