//! One worker's link: a task that reads frames, a task that writes them, and the legs in between.

mod blocks;
mod description;
mod error;
mod hangup;
mod leg;
mod leg_span;
mod legs;
mod overdue;
mod submits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use self::blocks::{Pace, cost, give_back};
pub(super) use self::description::Description;
pub(crate) use self::error::LinkError;
use self::error::NotTaken;
pub(crate) use self::hangup::Hangup;
pub(crate) use self::leg::{LegWork, Partner};
pub(crate) use self::leg_span::LegParent;
use self::legs::Legs;
pub(super) use self::submits::SubmitQueue;
use self::submits::{Submits, submits};
use super::codec::{CodecError, FrameArrival, FrameReader, FrameWriter};
use super::registry::Registry;
use super::stream::Burst;
use crate::core::candidate::WorkerId;
use crate::core::events::BlockEvents;
use crate::core::frame::{Describe, Frame, ModelPart, Ping, RequestId, Submit};
use crate::metrics::ModelMetrics;
use crate::process::lock::Lock;

/// The writer sends once this much was collected.
const WRITE_BYTES: usize = 256 << 10;
/// Or this many were looked at: those of clients that hung up are dropped, thousands perhaps, and leave nothing to send.
const SUBMITS_AT_ONCE: usize = 256;

/// The router's side of one worker.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) id: WorkerId,
    pub(super) worker: String,
    registry: Arc<Registry>,
    /// Of its model.
    metrics: Arc<ModelMetrics>,
    submit_timeout: Duration,
    legs: Lock<Legs>,
    submits: Submits,
    urgent: Notify,
    asked: Lock<Option<Description>>,
    heard_ms: AtomicU64,
    /// A frame of its is at work here and the next ones wait, so its silence means nothing.
    behind: AtomicBool,
    /// It said that it leaves, or was told to: its end is no fault.
    leaves: AtomicBool,
    close: CancellationToken,
    closing: Lock<Option<LinkError>>,
}

/// Cancels a leg when it drops.
#[derive(Debug)]
pub(crate) struct Lease {
    link: Arc<Link>,
    request: RequestId,
}

impl Lease {
    pub(super) fn new(link: Arc<Link>, request: RequestId) -> Self {
        Self { link, request }
    }
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
        metrics: Arc<ModelMetrics>,
        submit_timeout: Duration,
    ) -> (Arc<Self>, SubmitQueue) {
        let (submits, queue) = submits();
        let link = Self {
            id,
            worker,
            heard_ms: AtomicU64::new(registry.now_ms()),
            behind: AtomicBool::new(false),
            registry,
            metrics,
            submit_timeout,
            legs: Lock::new("the legs of a worker", Legs::default()),
            submits,
            urgent: Notify::new(),
            asked: Lock::new("the description of a model", None),
            leaves: AtomicBool::new(false),
            close: CancellationToken::new(),
            closing: Lock::new("the end of a link", None),
        };
        (Arc::new(link), queue)
    }

    /// Reads and writes until one of both ends or [`Self::close`] is called; then all legs fail.
    pub(super) async fn run<R, W>(
        self: &Arc<Self>,
        mut reader: FrameReader<R>,
        mut writer: FrameWriter<W>,
        submits: SubmitQueue,
        events: BlockEvents,
    ) -> Arc<LinkError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let error = tokio::select! {
            error = self.read(&mut reader, events) => error,
            error = self.write(&mut writer, submits) => error,
            () = self.close.cancelled() => {
                self.closing.lock().take().unwrap_or(LinkError::Closed)
            }
        };
        // first out of the registry, so that no leg that is tried again comes back here, and no drain begins any more
        self.registry.leave(self.id);
        self.registry.drains.left(self.id, self.in_flight());
        let error = Arc::new(error);
        self.fail_all(&error);
        error
    }

    /// Ends the link for this reason.
    pub(super) fn close(&self, error: LinkError) {
        self.closing.lock().get_or_insert(error);
        self.close.cancel();
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
            legs.urgent.push(Frame::Ping(Ping { nonce: self.heard_ms() }));
            self.urgent.notify_one();
        }
    }

    /// Asks for the description of the model.
    pub(super) fn describe(&self, fingerprint: String) {
        let charge = self.registry.descriptions.charge();
        let asked = Description::new(fingerprint.clone(), Instant::now(), charge);
        *self.asked.lock() = Some(asked);
        self.send(Frame::Describe(Describe { fingerprint }));
    }

    /// Takes note that the worker leaves.
    pub(super) fn will_leave(&self) {
        self.leaves.store(true, Relaxed);
    }

    /// It said that it leaves, or was told to.
    pub(super) fn leaves(&self) -> bool {
        self.leaves.load(Relaxed)
    }

    /// When a frame came last, or a part of a long one, on the registry's clock.
    pub(super) fn heard_ms(&self) -> u64 {
        if self.behind.load(Relaxed) { self.registry.now_ms() } else { self.heard_ms.load(Relaxed) }
    }

    fn heard(&self) {
        self.heard_ms.store(self.registry.now_ms(), Relaxed);
    }

    fn arrives(&self, arrival: FrameArrival) {
        match arrival {
            FrameArrival::Part => self.heard(),
            FrameArrival::Whole => self.behind.store(true, Relaxed),
        }
    }

    /// Ends what takes too long: legs whose reader takes nothing, cancels without an answer, a late description.
    pub(super) fn sweep(&self, now: Instant, stall: Duration, describe_timeout: Duration) {
        self.sweep_legs(now, stall);
        let asked = self.asked.lock().as_ref().map(|asked| asked.since);
        if asked.is_some_and(|since| now - since > describe_timeout) {
            self.close(LinkError::Model(format!("did not come within {describe_timeout:?}")));
        }
    }

    async fn write<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut FrameWriter<W>,
        mut submits: SubmitQueue,
    ) -> LinkError {
        loop {
            let mut next = tokio::select! {
                biased;
                () = self.urgent.notified() => None,
                submit = submits.next() => submit,
            };
            let mut looked_at = 0;
            loop {
                if let Err(error) = self.push(writer, next.take()) {
                    return error.into();
                }
                looked_at += 1;
                if writer.pending() >= WRITE_BYTES || looked_at == SUBMITS_AT_ONCE {
                    break;
                }
                next = submits.next_now();
                if next.is_none() {
                    break;
                }
            }
            if let Err(error) = self.flush(writer).await {
                return error;
            }
            if looked_at == SUBMITS_AT_ONCE {
                yield_now().await;
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

    /// Collects what is urgent, then `submit` if its leg still wants it, then what had to wait for that.
    fn push<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut FrameWriter<W>,
        submit: Option<Box<Submit>>,
    ) -> Result<(), CodecError> {
        let look_ms =
            self.registry.at_ms(Instant::now() + self.registry.setup.config.deadlines.stall);
        let (urgent, submit) = {
            let mut legs = self.legs();
            legs.pinged = false;
            let urgent = std::mem::take(&mut legs.urgent);
            let submit =
                submit.and_then(|submit| legs.sent(&submit, look_ms).map(|later| (submit, later)));
            (urgent, submit)
        };
        for frame in &urgent {
            writer.push(frame)?;
        }
        let Some((submit, later)) = submit else { return Ok(()) };
        writer.push(&Frame::Submit(*submit))?;
        later.iter().try_for_each(|frame| writer.push(frame))
    }

    async fn read<R: AsyncRead + Unpin>(
        self: &Arc<Self>,
        reader: &mut FrameReader<R>,
        mut events: BlockEvents,
    ) -> LinkError {
        let mut pace = Pace::new(self.registry.clock_ms());
        let (mut burst, calls) = (Burst::default(), &self.registry.metrics.requests.direct_reads);
        loop {
            let next = reader.next_telling(|arrival| self.arrives(arrival));
            let next = if burst.is_empty() { Some(next.await) } else { next.now_or_never() };
            let Some(next) = next else {
                // nothing more is there: whoever got something in these frames reads it
                self.heard();
                self.behind.store(true, Relaxed);
                burst.flush(calls).await;
                self.behind.store(false, Relaxed);
                continue;
            };
            let frame = match next {
                Ok(Some(frame)) => frame,
                Ok(None) => return LinkError::Closed,
                Err(error) => return error.into(),
            };
            self.heard();
            self.behind.store(true, Relaxed);
            let cost = cost(&frame);
            if !matches!(frame, Frame::Step(_)) {
                burst.flush(calls).await; // what comes now may take long
            }
            if let Err(error) = self.take_in(frame, &mut events, &mut burst).await {
                return error;
            }
            if let Some(resync) = events.ask(self.registry.clock_ms()) {
                self.registry.metrics.scheduling.resyncs.inc();
                self.send(Frame::Resync(resync));
            }
            if burst.ends_after_frame() || pace.would_sleep(cost) {
                burst.flush(calls).await;
            }
            pace.keep(cost, &self.registry).await;
            self.heard();
            self.behind.store(false, Relaxed);
        }
    }

    async fn take_in(
        self: &Arc<Self>,
        frame: Frame,
        events: &mut BlockEvents,
        burst: &mut Burst,
    ) -> Result<(), LinkError> {
        match frame {
            Frame::Step(step) => {
                let withdrawn = self.step(step, burst);
                self.disbelieve(withdrawn, events);
            }
            Frame::Snapshot(part) => {
                let verdict = events.snapshot(&part, self.registry.clock_ms())?;
                self.block_event(&verdict, events).await;
            }
            Frame::Blocks(delta) => {
                let verdict = events.delta(&delta, self.registry.clock_ms())?;
                self.block_event(&verdict, events).await;
                give_back(delta);
            }
            Frame::Model(part) => self.model_part(&part)?,
            Frame::KvReady(ready) => self.kv_ready(ready),
            Frame::Transferred(pull) => self.registry.transferred(self.id, &pull),
            Frame::GroupTotals(totals) => self.registry.group_totals(self.id, &totals),
            Frame::GrammarTotals(totals) => self.registry.grammar_totals(self.id, &totals),
            Frame::OtherPrompts(told) => self.registry.other_prompts(self.id, &told),
            Frame::Freed(freed) => self.freed(freed.request),
            Frame::Offer(offer) => {
                if !self.registry.drains.offered(self.id, offer) {
                    return Err(LinkError::Unexpected("offer"));
                }
            }
            Frame::Failed(failed) => {
                self.registry.drains.moved(self.id, failed.kind);
                self.failed(failed);
            }
            Frame::Bye(bye) => {
                tracing::info!(worker = self.worker, reason = bye.reason, "worker leaves");
                self.will_leave();
                self.registry.draining(self.id);
            }
            Frame::Hello(_)
            | Frame::Prove(_)
            | Frame::Welcome(_)
            | Frame::OtherVersion(_)
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

    fn model_part(self: &Arc<Self>, part: &ModelPart) -> Result<(), LinkError> {
        let mut asked = self.asked.lock();
        let Some(description) = asked.as_mut() else {
            return Err(LinkError::Model("was not asked for".into()));
        };
        description.take_in(part, &self.registry.descriptions)?;
        if part.last {
            let description = asked.take().expect("it was there above");
            drop(asked);
            self.registry.described(Arc::clone(self), description);
        }
        Ok(())
    }
}
