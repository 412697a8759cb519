//! One link of a mock worker: shake hands, then requests in and steps out, until one side ends it.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use headrace_router::core::blocks::{BlockHash, hash_blocks_le};
use headrace_router::core::frame::{
    Bye, Failed, Finish, Frame, Freed, Hello, MAX_FRAME_BYTES, ModelPart, Output, Prove, RequestId,
    Snapshot, Step, Submit,
};
use headrace_router::core::secret::{AuthKey, HashKey, Side};
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

use super::engine::Leg;
use super::fault::Health;
use super::worker::Worker;

/// Bytes of one `Model` part.
const PART_BYTES: usize = 1 << 20;
/// Keys of one `Snapshot` part, as in `headrace.engine.block_log`.
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

/// The router does not want this worker: dialling again cannot help.
#[derive(Debug, thiserror::Error)]
#[error("{worker} was refused: {text}")]
pub(super) struct Refused {
    worker: String,
    text: String,
}

/// What only this link knows.
struct Session<'a, W> {
    worker: &'a mut Worker,
    writer: FrameWriter<W>,
    hash_key: HashKey,
    /// When requests are given up.
    deadlines: BTreeMap<(Instant, RequestId), ()>,
    /// Requests whose answer this worker ends before the client's limit.
    shortened: HashSet<RequestId>,
    drain_until: Option<Instant>,
    /// The step that runs: its time in ms, and when it ends.
    step: Option<(f64, Instant, Alarm)>,
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
        writer,
        hash_key,
        deadlines: BTreeMap::new(),
        shortened: HashSet::new(),
        drain_until: None,
        step: None,
    };
    session.push_snapshot()?;
    session.push_heartbeat()?;
    session.writer.flush().await?;
    session.run(&mut reader, heartbeat).await
}

async fn greet(
    worker: &Worker,
    hello: &Hello,
    reader: &mut FrameReader<impl AsyncRead + Unpin>,
    writer: &mut FrameWriter<impl AsyncWrite + Unpin>,
) -> anyhow::Result<(Duration, HashKey)> {
    writer.push(&Frame::Hello(hello.clone()))?;
    writer.flush().await?;
    let refused = |text: String| Refused { worker: hello.worker.clone(), text };
    let welcome = match reader.next().await? {
        Some(Frame::Welcome(welcome)) => welcome,
        Some(Frame::Refuse(refuse)) => {
            let text = format!(
                "{} is {}, expected {}: {}",
                refuse.field, refuse.got, refuse.expected, refuse.message
            );
            bail!(refused(text))
        }
        Some(other) => bail!("expected Welcome, got {}", other.name()),
        None => bail!("the router hung up"),
    };
    let hash_key = match (worker.secret(), welcome.challenge.is_empty()) {
        (None, true) => {
            let key = welcome.hash_key.try_into().ok().context("the hash key is not 32 bytes")?;
            HashKey(key)
        }
        (None, false) => bail!(refused("the router wants a secret: give --secret-file".into())),
        (Some(_), true) => bail!(refused("the router has no secret: leave it out".into())),
        (Some(secret), false) => {
            let key = AuthKey::derive(secret);
            if !key.verify(Side::Router, &hello.nonce, &welcome.proof) {
                bail!(refused("the router does not know the secret".into()));
            }
            let proof = key.proof(Side::Worker, &welcome.challenge).to_vec();
            writer.push(&Frame::Prove(Prove { proof }))?;
            HashKey::derive(secret)
        }
    };
    Ok((Duration::from_millis(u64::from(welcome.heartbeat_ms.max(1))), hash_key))
}

impl<W: AsyncWrite + Unpin> Session<'_, W> {
    async fn run(
        &mut self,
        reader: &mut FrameReader<impl AsyncRead + Unpin>,
        heartbeat: Duration,
    ) -> anyhow::Result<Ended> {
        let mut beat = Instant::now() + heartbeat;
        let mut idle = Alarm::Late; // rings for nobody
        loop {
            if let Some(ended) = self.suffer().await? {
                return Ok(ended);
            }
            if self.step.is_none() {
                self.begin_step(Instant::now());
            }
            if self.drained()? {
                self.writer.close().await?;
                return Ok(Ended::Drained);
            }
            let stepping = self.step.is_some();
            let alarm = self.step.as_mut().map_or(&mut idle, |(_, _, alarm)| alarm);
            let wake = self.drain_until.map_or(beat, |until| until.min(beat));
            let wake = self.worker.next_wake(wake);
            tokio::select! {
                biased;
                frame = reader.next() => {
                    let Some(frame) = frame? else { return Ok(Ended::Closed) };
                    self.receive(frame)?;
                    // more may have come in the same read: take them all before the next step
                    while let Some(frame) = reader.ready()? {
                        self.receive(frame)?;
                    }
                }
                () = alarm.rings(), if stepping => self.end_step()?,
                fault = self.worker.faults.recv() => self.worker.add_fault(fault),
                () = tokio::time::sleep_until(wake.into()) => {
                    if Instant::now() >= beat {
                        self.expire(Instant::now())?;
                        self.push_heartbeat()?;
                    }
                }
            }
            if self.writer.pending() > 0 {
                beat = Instant::now() + heartbeat;
                self.writer.flush().await?; // back-pressure: a slow router slows the steps
            }
        }
    }

    /// Waits while the worker is frozen; says so when it died.
    async fn suffer(&mut self) -> anyhow::Result<Option<Ended>> {
        loop {
            match self.worker.health() {
                Health::Working => return Ok(None),
                Health::Dead => return Ok(Some(Ended::Died)),
                Health::Frozen => {
                    let frozen = Instant::now();
                    self.worker.until_change().await;
                    if let Some((_, end, alarm)) = &mut self.step {
                        *end += frozen.elapsed(); // its time stood still
                        *alarm = self.worker.alarm(*end).map_or(Alarm::Late, Alarm::At);
                    }
                }
            }
        }
    }

    /// Starts the next step, at `start`.
    fn begin_step(&mut self, start: Instant) {
        let Some(ms) = self.worker.begin_step() else { return };
        let end = start + Duration::from_secs_f64(ms / 1e3);
        let alarm = self.worker.alarm(end).map_or(Alarm::Late, Alarm::At);
        self.step = Some((ms, end, alarm));
    }

    /// Ends the step that runs and starts the next one at the moment when this one should have ended, so that what is
    /// noticed late makes nothing later.
    fn end_step(&mut self) -> anyhow::Result<()> {
        let Some((ms, end, _)) = self.step.take() else { return Ok(()) };
        let mut result = self.worker.end_step(ms);
        for output in &mut result.step.outputs {
            if output.finish.is_some() && self.shortened.remove(&output.request) {
                output.finish = Some(Finish::Stop);
            }
        }
        if let Some(blocks) = result.blocks {
            self.writer.push(&Frame::Blocks(blocks))?;
        }
        self.push_step(result.step)?;
        for freed in result.freed {
            self.writer.push(&Frame::Freed(freed))?;
        }
        let now = Instant::now();
        self.expire(now)?;
        self.begin_step(end);
        let (late, more) = (now.saturating_duration_since(end), self.step.is_some());
        self.worker.note(|pace| pace.step_ended(ms, late, more));
        Ok(())
    }

    fn receive(&mut self, frame: Frame) -> anyhow::Result<()> {
        match frame {
            Frame::Submit(submit) => self.submit(submit)?,
            Frame::Cancel(cancel) => {
                let request = cancel.request;
                let nothing = Freed { request, blocks: 0 };
                let freed = self.worker.engine.cancel(request).unwrap_or(nothing);
                self.writer.push(&Frame::Freed(freed))?;
            }
            Frame::Describe(describe) => {
                for part in parts(&describe.fingerprint, self.worker.document()) {
                    self.writer.push(&Frame::Model(part))?;
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
                    self.writer.push(&Frame::Bye(Bye { reason: "draining".into() }))?;
                }
                self.drain_until = Some(self.drain_until.map_or(until, |before| before.min(until)));
            }
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
            | Frame::Welcome(_)
            | Frame::Refuse(_)
            | Frame::Ticket(_) // no mock pulls KV
            | Frame::Continue(_)
            | Frame::Fetch(_)) => bail!("a router does not send {} now", other.name()),
        }
        Ok(())
    }

    fn submit(&mut self, submit: Submit) -> anyhow::Result<()> {
        let request = submit.request;
        let (ignore_eos, deadline) = (submit.sampling.ignore_eos, submit.deadline_ms);
        match self.take(submit) {
            Ok(shortened) => {
                if shortened && !ignore_eos {
                    self.shortened.insert(request);
                }
                if let Some(deadline_ms) = deadline {
                    let at = Instant::now() + Duration::from_millis(deadline_ms.min(1 << 32));
                    self.deadlines.insert((at, request), ());
                }
            }
            Err(failed) => self.writer.push(&Frame::Failed(failed))?,
        }
        Ok(())
    }

    /// Gives a request to the engine; true if its answer will end before the client's limit.
    fn take(&mut self, submit: Submit) -> Result<bool, Failed> {
        let Submit { request, mut tokens, sampling, max_tokens, salt, kv_from, resume, .. } =
            submit;
        let fail = |kind: &str, message: &str, retryable| {
            Err(Failed { request, kind: kind.into(), message: message.into(), retryable })
        };
        if self.drain_until.is_some() {
            return fail("draining", "this worker leaves", true);
        }
        if kv_from.is_some() {
            return fail("unsupported", "this worker does not pull KV from another one", true);
        }
        let resumed = resume.map_or(0, |resume| {
            tokens.extend_from_slice(&resume.generated);
            u32::try_from(resume.generated.len() / 4).unwrap_or(u32::MAX)
        });
        let vocab = self.worker.vocab_size();
        let known = |id: &[u8]| u32::from_le_bytes(id.try_into().expect("4 bytes")) < vocab;
        if tokens.len() % 4 != 0 || !tokens.chunks_exact(4).all(known) {
            return fail("bad_token", "a token is not in the vocabulary", false);
        }
        let prompt_tokens = u32::try_from(tokens.len() / 4).unwrap_or(u32::MAX);
        let longest = self.worker.longest_answer();
        let shortened = max_tokens > longest && !sampling.ignore_eos;
        let max_tokens = if shortened { longest } else { max_tokens };
        let root = BlockHash::root(&self.hash_key, &salt);
        let hashes = hash_blocks_le(&self.hash_key, root, &tokens, self.worker.block_tokens());
        self.worker.engine.submit(Leg {
            request,
            keys: hashes.into_iter().map(|hash| hash.key().0).collect(),
            prompt_tokens,
            max_tokens: max_tokens.saturating_sub(resumed),
            seed: sampling.seed,
            resumed,
        })?;
        Ok(shortened)
    }

    /// Gives up what is too late.
    fn expire(&mut self, now: Instant) -> anyhow::Result<()> {
        let mut outputs = Vec::new();
        let mut freed = Vec::new();
        while let Some(entry) = self.deadlines.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((_, request), ()) = entry.remove_entry();
            if let Some(blocks) = self.worker.engine.cancel(request) {
                freed.push(blocks);
                outputs.push(Output {
                    request,
                    ids: Vec::new(),
                    logprobs: None,
                    finish: Some(Finish::Cancelled),
                    cached_tokens: None,
                    prompt_logprobs: None,
                });
            }
        }
        if outputs.is_empty() {
            return Ok(());
        }
        self.push_step(Step { outputs, ..self.worker.engine.heartbeat() })?;
        for freed in freed {
            self.writer.push(&Frame::Freed(freed))?;
        }
        Ok(())
    }

    /// True when nothing is left to do for a router that asked for that. What a drain has no time for fails.
    fn drained(&mut self) -> anyhow::Result<bool> {
        let Some(until) = self.drain_until else { return Ok(false) };
        if Instant::now() >= until {
            self.step = None;
            for request in self.worker.engine.cancel_all() {
                let (kind, message) =
                    ("draining".into(), "the worker had no time left to finish it".into());
                self.writer.push(&Frame::Failed(Failed {
                    request,
                    kind,
                    message,
                    retryable: true,
                }))?;
            }
        }
        Ok(self.worker.engine.is_idle())
    }

    fn push_snapshot(&mut self) -> anyhow::Result<()> {
        let (sequence, keys) = self.worker.snapshot();
        let epoch = self.worker.epoch();
        let count = keys.len().div_ceil(SNAPSHOT_KEYS).max(1);
        for part in 0..count {
            let keys = keys.iter().skip(part * SNAPSHOT_KEYS).take(SNAPSHOT_KEYS);
            let hashes = keys.flat_map(|key| key.to_le_bytes()).collect();
            let last = part + 1 == count;
            self.writer.push(&Frame::Snapshot(Snapshot { epoch, sequence, hashes, last }))?;
        }
        Ok(())
    }

    fn push_heartbeat(&mut self) -> anyhow::Result<()> {
        self.push_step(self.worker.engine.heartbeat())
    }

    fn push_step(&mut self, step: Step) -> anyhow::Result<()> {
        Ok(self.writer.push(&Frame::Step(step))?)
    }
}

/// A model description in parts.
fn parts(fingerprint: &str, document: &[u8]) -> Vec<ModelPart> {
    let chunks: Vec<_> = document.chunks(PART_BYTES).collect();
    let part = |(number, data): (usize, &&[u8])| ModelPart {
        fingerprint: fingerprint.to_owned(),
        part: u32::try_from(number).expect("few parts"),
        last: number + 1 == chunks.len(),
        data: data.to_vec(),
    };
    chunks.iter().enumerate().map(part).collect()
}
