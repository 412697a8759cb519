//! One link of a mock worker: shake hands, then requests in and steps out, until one side ends it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::bail;
use headrace_router::core::frame::{
    Bye, Failed, FailureKind, Finish, Frame, Freed, MAX_FRAME_BYTES, Offer, RequestId, Snapshot,
    Step,
};
use headrace_router::core::secret::HashKey;
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

use super::fault::Health;
use super::greeting::{greet, parts};
use super::worker::Worker;

mod legs;
mod outbox;
mod rounds;

use self::outbox::Outbox;

/// Keys of one `Snapshot` part, as in `headrace.engine.cache.block_log`.
const SNAPSHOT_KEYS: usize = 1 << 17;

/// How a session ended, when it was not by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The router closed the link.
    Closed,
    /// The worker was drained, and has said so.
    Drained,
    /// The worker died, as was asked.
    Died,
}

/// What only this link knows.
struct Session<'a, W> {
    worker: &'a mut Worker,
    outbox: Outbox<W>,
    hash_key: HashKey,
    /// When requests are given up.
    deadlines: BTreeMap<(Instant, RequestId), ()>,
    /// Requests whose answer this worker ends before the client's limit.
    shortened: HashSet<RequestId>,
    /// From which workers the prompts of legs come.
    sources: HashMap<RequestId, String>,
    drain_until: Option<Instant>,
    /// The step that runs: its time in ms, and when it ends.
    step: Option<(f64, Instant, Alarm)>,
    /// Of a rank: the step that it brought to a round.
    round: Option<Brought>,
    /// When the exchange has something for this worker.
    news: Option<(Instant, Alarm)>,
}

/// What a rank brought to a round.
struct Brought {
    since: Instant,
    /// Without work of its own.
    empty: bool,
    /// How much of the round it waits for others, once that is known.
    waited_ms: f64,
}

/// When a step's end is noticed.
enum Alarm {
    /// It has passed already.
    Late,
    At(oneshot::Receiver<()>),
}

impl Alarm {
    async fn rings(&mut self) {
        match self {
            Self::Late => tokio::task::yield_now().await,
            Self::At(rings) => {
                let _ = rings.await; // the clock outlives the fleet
            }
        }
    }
}

/// Serves one connection.
///
/// # Errors
/// [`Refused`], or the link broke.
pub(super) async fn serve(
    worker: &mut Worker,
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
) -> anyhow::Result<Ended> {
    let mut reader = FrameReader::new(read, MAX_FRAME_BYTES);
    let mut writer = FrameWriter::new(write);
    let hello = worker.hello();
    let (heartbeat, hash_key) = greet(worker, &hello, &mut reader, &mut writer).await?;
    worker.use_key(hash_key);
    let mut session = Session {
        worker,
        outbox: Outbox::new(writer),
        hash_key,
        deadlines: BTreeMap::new(),
        shortened: HashSet::new(),
        sources: HashMap::new(),
        drain_until: None,
        step: None,
        round: None,
        news: None,
    };
    session.push_snapshot()?;
    session.push_heartbeat()?;
    session.outbox.flush().await?;
    session.run(&mut reader, heartbeat).await
}

impl<W: AsyncWrite + Unpin> Session<'_, W> {
    async fn run(
        &mut self,
        reader: &mut FrameReader<impl AsyncRead + Unpin>,
        heartbeat: Duration,
    ) -> anyhow::Result<Ended> {
        let mut beat = Instant::now() + heartbeat;
        let (mut idle, mut silence) = (Alarm::Late, Alarm::Late); // ring for nobody
        let bell = self.worker.bell();
        loop {
            if let Some(ended) = self.suffer().await? {
                return Ok(ended);
            }
            if self.worker.group_is_over() {
                return Ok(Ended::Died);
            }
            if self.step.is_none() {
                self.begin_step(Instant::now())?;
            }
            if self.drained()? {
                self.outbox.close().await?;
                return Ok(Ended::Drained);
            }
            if self.outbox.is_owing() {
                beat = Instant::now() + heartbeat;
                tokio::select! {
                    biased;
                    sent = self.outbox.flush() => sent?,
                    () = std::future::ready(()) => {}
                }
            }
            self.expect_news();
            let round = self.round_deadline();
            let (stepping, expecting) = (self.step.is_some(), self.news.is_some());
            let (owing, hearing) = (self.outbox.is_owing(), !self.outbox.is_crowded());
            let news = self.news.as_mut().map_or(&mut silence, |(_, alarm)| alarm);
            let alarm = self.step.as_mut().map_or(&mut idle, |(_, _, alarm)| alarm);
            let wake = self.drain_until.map_or(beat, |until| until.min(beat));
            let wake = round.map_or(wake, |until| until.min(wake));
            let wake = self.worker.next_wake(wake);
            tokio::select! {
                biased;
                sent = self.outbox.flush(), if owing => sent?,
                frame = reader.next(), if hearing => {
                    let Some(frame) = frame? else { return Ok(Ended::Closed) };
                    self.receive(frame)?;
                    // more may have come in the same read: take them all before the next step
                    while let Some(frame) = reader.ready()? {
                        self.receive(frame)?;
                    }
                }
                () = alarm.rings(), if stepping => self.end_step()?,
                () = news.rings(), if expecting => self.hear()?,
                () = bell.notified() => {}
                fault = self.worker.faults.recv() => self.worker.add_fault(fault),
                () = tokio::time::sleep_until(wake.into()) => {
                    if self.round_deadline().is_some_and(|until| Instant::now() >= until) {
                        self.worker.give_group_up("the group deadline is over; it waits for ranks");
                    }
                    if Instant::now() >= beat {
                        self.expire(Instant::now())?;
                        self.push_heartbeat()?;
                    }
                }
            }
        }
    }

    /// Sets the alarm for what comes next from other workers.
    fn expect_news(&mut self) {
        let at = self.worker.news_at();
        if at != self.news.as_ref().map(|(at, _)| *at) {
            let alarm = |at| (at, self.worker.alarm(at).map_or(Alarm::Late, Alarm::At));
            self.news = at.map(alarm);
        }
    }

    /// Takes in what came from other workers.
    fn hear(&mut self) -> anyhow::Result<()> {
        self.news = None;
        #[expect(
            clippy::redundant_closure_for_method_calls,
            reason = "the method fits one lifetime only"
        )]
        let said = self.worker.kv_legs(Instant::now(), |kv_legs| kv_legs.hear());
        self.say(said)
    }

    /// Waits while the worker is frozen; says so when it died.
    async fn suffer(&mut self) -> anyhow::Result<Option<Ended>> {
        loop {
            let health = self.worker.health();
            self.worker.freeze(health == Health::Frozen);
            match health {
                Health::Working => return Ok(None),
                Health::Frozen if self.worker.group_is_over() => return Ok(Some(Ended::Died)),
                Health::Dead => return Ok(Some(Ended::Died)),
                Health::Frozen => {
                    let frozen = Instant::now();
                    self.worker.until_change_or_loss().await;
                    if let Some((_, end, alarm)) = &mut self.step {
                        *end += frozen.elapsed(); // its time stood still
                        *alarm = self.worker.alarm(*end).map_or(Alarm::Late, Alarm::At);
                    }
                }
            }
        }
    }

    /// Starts the next step, at `start`.
    fn begin_step(&mut self, start: Instant) -> anyhow::Result<()> {
        if self.worker.is_rank() {
            return self.begin_round(start);
        }
        let (ms, said) = self.worker.begin_step(start);
        self.say(said)?;
        let Some(ms) = ms else { return Ok(()) };
        let end = start + Duration::from_secs_f64(ms / 1e3);
        let alarm = self.worker.alarm(end).map_or(Alarm::Late, Alarm::At);
        self.step = Some((ms, end, alarm));
        Ok(())
    }

    /// Ends the step that runs and starts the next one at the moment when this one should have ended, so that what is
    /// noticed late makes nothing later.
    fn end_step(&mut self) -> anyhow::Result<()> {
        let Some((ms, end, _)) = self.step.take() else { return Ok(()) };
        let brought = self.round.take();
        if let Some(Brought { empty: true, waited_ms, .. }) = brought {
            let step = self.worker.engine.empty_step(ms);
            self.push_step(Step { waited_us: whole_us(waited_ms), ..step })?;
            return self.step_ended(ms, end);
        }
        let mut result = self.worker.end_step(ms, end);
        result.step.waited_us = brought.map_or(0, |brought| whole_us(brought.waited_ms));
        for output in &mut result.step.outputs {
            if output.finish.is_some() && self.shortened.remove(&output.request) {
                output.finish = Some(Finish::Stop);
            }
        }
        if let Some(blocks) = result.blocks {
            self.outbox.push(Frame::Blocks(blocks))?;
        }
        self.push_step(result.step)?;
        for pinned in result.progress.iter().filter(|progress| progress.pinned_ms.is_some()) {
            // from here on it is the lease that ends it
            self.deadlines.retain(|(_, request), ()| *request != pinned.request);
        }
        for freed in result.freed {
            self.push_freed(freed)?;
        }
        self.step_ended(ms, end)
    }

    fn step_ended(&mut self, ms: f64, end: Instant) -> anyhow::Result<()> {
        let now = Instant::now();
        self.expire(now)?;
        self.begin_step(end)?;
        let (late, more) = (now.saturating_duration_since(end), self.step.is_some());
        self.worker.note(|pace| pace.step_ended(ms, late, more));
        Ok(())
    }

    fn receive(&mut self, frame: Frame) -> anyhow::Result<()> {
        match frame {
            Frame::Submit(submit) => self.submit(submit)?,
            Frame::Cancel(cancel) => {
                let nothing = Freed { request: cancel.request, blocks: 0 };
                let freed = self.cancel(cancel.request)?.unwrap_or(nothing);
                self.push_freed(freed)?;
            }
            Frame::Describe(describe) => {
                for part in parts(&describe.fingerprint, self.worker.document()) {
                    self.outbox.push(Frame::Model(part))?;
                }
            }
            Frame::Resync(_) => {
                self.worker.note(|pace| pace.resyncs += 1);
                self.push_snapshot()?;
            }
            Frame::Ping(_) => self.push_heartbeat()?,
            Frame::Drain(drain) => {
                let until = Instant::now() + Duration::from_millis(drain.budget_ms.min(1 << 32));
                if self.drain_until.is_none() {
                    if drain.migration.is_some() {
                        self.outbox.push(Frame::Offer(nothing_to_offer()))?;
                    }
                    self.outbox.push(Frame::Bye(Bye { reason: "draining".into() }))?;
                }
                self.drain_until = Some(self.drain_until.map_or(until, |before| before.min(until)));
            }
            Frame::Ticket(ticket) => self.worker.engine.ticket(ticket.request, ticket.ticket),
            Frame::Continue(go) => self.go_on(&go)?,
            Frame::Fetch(fetch) => self.refuse(fetch)?,
            other @ (Frame::Hello(_)
            | Frame::Prove(_)
            | Frame::Snapshot(_)
            | Frame::Blocks(_)
            | Frame::Step(_)
            | Frame::Model(_)
            | Frame::KvReady(_)
            | Frame::Freed(_)
            | Frame::Failed(_)
            | Frame::Bye(_)
            | Frame::Transferred(_)
            | Frame::Offer(_)
            | Frame::GroupTotals(_)
            | Frame::GrammarTotals(_)
            | Frame::OtherPrompts(_)
            | Frame::Welcome(_)
            | Frame::OtherVersion(_)
            | Frame::Refuse(_)) => bail!("a router does not send {} now", other.name()),
        }
        Ok(())
    }

    /// True when nothing is left to do for a router that asked for that. What a drain has no time for fails.
    fn drained(&mut self) -> anyhow::Result<bool> {
        let Some(until) = self.drain_until else {
            self.worker.may_leave(); // others hear of it
            return Ok(false);
        };
        if Instant::now() >= until {
            (self.step, self.round) = (None, None);
            self.worker.leave_rounds();
            for request in self.worker.cancel_all() {
                let message = "the worker had no time left to finish it".into();
                let kind = FailureKind::Draining;
                self.outbox.push(Frame::Failed(Failed { request, kind, message }))?;
            }
        }
        Ok(self.worker.may_leave())
    }

    fn push_snapshot(&mut self) -> anyhow::Result<()> {
        let (sequence, keys) = self.worker.snapshot();
        let epoch = self.worker.epoch();
        let count = keys.len().div_ceil(SNAPSHOT_KEYS).max(1);
        for part in 0..count {
            let keys = keys.iter().skip(part * SNAPSHOT_KEYS).take(SNAPSHOT_KEYS);
            let hashes = keys.flat_map(|key| key.to_le_bytes()).collect();
            let last = part + 1 == count;
            self.outbox.push(Frame::Snapshot(Snapshot { epoch, sequence, hashes, last }))?;
        }
        Ok(())
    }

    fn push_heartbeat(&mut self) -> anyhow::Result<()> {
        self.push_step(self.worker.engine.heartbeat())
    }

    fn push_step(&mut self, step: Step) -> anyhow::Result<()> {
        Ok(self.outbox.push(Frame::Step(step))?)
    }
}

/// Its cache holds names only.
fn nothing_to_offer() -> Offer {
    let (ticket, names, parents, hits) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    Offer { ticket, names, parents, hits, lease_ms: 0 }
}

fn whole_us(ms: f64) -> u32 {
    (ms * 1e3).round() as u32 // saturates
}
