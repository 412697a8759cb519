//! Workers without a model: the real protocol and deterministic tokens, as fast as asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use headrace_router::core::blocks::HASH_SCHEME;
use headrace_router::core::frame::{
    Capacity, Failed, Fingerprints, Finish, Frame, Freed, Hello, Load, ModelPart, Output, PROTOCOL,
    RequestId, Role, Snapshot, Step, Submit,
};
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// One worker without a model.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WorkerArgs {
    /// The router's worker address: `HOST:PORT` or `unix:PATH`.
    #[arg(long)]
    router: String,
    /// Model description (the JSON document that workers send to routers).
    #[arg(long)]
    doc: PathBuf,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Name of the worker.
    #[arg(long, default_value = "mock-0")]
    name: String,
    /// Time of one step, in which each running sequence gets one token; 0 is as fast as the link takes it.
    #[arg(long, default_value_t = 0.0)]
    step_ms: f64,
    /// Sequences that run at once; more wait.
    #[arg(long, default_value_t = 8192)]
    sequences: u32,
}

/// Longest sequence that the mock takes, in tokens.
const CONTEXT_TOKENS: u32 = 131_072;
/// Bytes of one `Model` part.
const PART_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Sequence {
    seed: u64,
    generated: u32,
    max_tokens: u32,
    prompt_tokens: u32,
}

/// Serves one link until the router closes it.
///
/// # Errors
/// The router cannot be reached, refuses, or breaks the protocol.
pub(crate) async fn run(args: &WorkerArgs) -> anyhow::Result<()> {
    let doc = std::fs::read(&args.doc).with_context(|| args.doc.display().to_string())?;
    if let Some(path) = args.router.strip_prefix("unix:") {
        let (read, write) = UnixStream::connect(path).await?.into_split();
        serve(args, &doc, read, write).await
    } else {
        let stream = TcpStream::connect(&args.router).await?;
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        serve(args, &doc, read, write).await
    }
}

async fn serve(
    args: &WorkerArgs,
    doc: &[u8],
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
) -> anyhow::Result<()> {
    let mut reader = FrameReader::new(read, headrace_router::core::frame::MAX_FRAME_BYTES);
    let mut writer = FrameWriter::new(write);
    writer.push(&Frame::Hello(hello(args)))?;
    writer.flush().await?;
    let heartbeat = match reader.next().await? {
        Some(Frame::Welcome(welcome)) => Duration::from_millis(u64::from(welcome.heartbeat_ms)),
        Some(Frame::Refuse(refuse)) => bail!("refused: {refuse:?}"),
        other => bail!("expected Welcome, got {other:?}"),
    };
    writer.push(&Frame::Snapshot(empty_snapshot()))?;
    let vocab = serde_json::from_slice::<serde_json::Value>(doc)?["vocab_size"]
        .as_u64()
        .context("the model description has no vocab_size")?;
    let mut mock = Mock { vocab, ..Mock::default() };
    writer.push(&Frame::Step(mock.heartbeat()))?;
    writer.flush().await?;
    let step = Duration::from_secs_f64(args.step_ms / 1e3);
    let mut next_step = tokio::time::Instant::now();
    loop {
        let now = tokio::time::Instant::now();
        // With nothing to run only a frame or the heartbeat wakes us.
        let wake = if mock.running.is_empty() { now + heartbeat } else { next_step };
        tokio::select! {
            frame = reader.next() => {
                let Some(frame) = frame? else { return Ok(()) };
                if mock.running.is_empty() {
                    next_step = tokio::time::Instant::now() + step;
                }
                mock.receive(frame, doc, &mut writer)?;
                // More frames may have come in the same read: take them all before the next step.
                while let Some(frame) = reader.ready()? {
                    mock.receive(frame, doc, &mut writer)?;
                }
            }
            () = until(wake) => {
                let frame = if mock.running.is_empty() { mock.heartbeat() } else { mock.step(args.sequences) };
                writer.push(&Frame::Step(frame))?;
                for freed in mock.freed.drain(..) {
                    writer.push(&Frame::Freed(freed))?;
                }
                next_step = (next_step + step).max(tokio::time::Instant::now());
            }
        }
        writer.flush().await?; // back-pressure: a slow router slows the steps
    }
}

fn empty_snapshot() -> Snapshot {
    Snapshot { epoch: 1, sequence: 0, hashes: Vec::new(), last: true }
}

/// Sleeps until `wake`, but does not round a step that is due now up to the next tick of the timer.
async fn until(wake: tokio::time::Instant) {
    if wake > tokio::time::Instant::now() {
        tokio::time::sleep_until(wake).await;
    } else {
        tokio::task::yield_now().await;
    }
}

fn hello(args: &WorkerArgs) -> Hello {
    Hello {
        protocol: PROTOCOL,
        worker: args.name.clone(),
        epoch: 1,
        role: Role::Both,
        model: args.model.clone(),
        fingerprints: Fingerprints {
            weights: "mock".into(),
            tokenizer: "mock".into(),
            chat_template: "mock".into(),
            kv_layout: "mock".into(),
            hash_scheme: HASH_SCHEME.into(),
            block_tokens: 16,
        },
        capacity: Capacity {
            blocks: 1 << 20,
            sequences: args.sequences,
            batched_tokens: 1 << 16,
            waiting: 1 << 16,
            host_blocks: 0,
            disk_blocks: 0,
        },
        context_tokens: CONTEXT_TOKENS,
        group: None,
        transfer: Vec::new(),
        nonce: vec![7; 16],
        step_prior: None,
    }
}

#[derive(Debug, Default)]
struct Mock {
    /// In order of arrival: request ids grow.
    running: BTreeMap<RequestId, Sequence>,
    freed: Vec<Freed>,
    steps: u64,
    vocab: u64,
}

impl Mock {
    fn receive(
        &mut self,
        frame: Frame,
        doc: &[u8],
        writer: &mut FrameWriter<impl AsyncWrite + Unpin>,
    ) -> anyhow::Result<()> {
        match frame {
            Frame::Submit(submit) => {
                let Submit { request, tokens, sampling, max_tokens, .. } = submit;
                if max_tokens == 0 {
                    let message = "a worker without a model generates at least one token".into();
                    let kind = "bad_sampling".into();
                    writer.push(&Frame::Failed(Failed {
                        request,
                        kind,
                        message,
                        retryable: false,
                    }))?;
                    return Ok(());
                }
                let prompt_tokens = u32::try_from(tokens.len() / 4)?;
                let sequence =
                    Sequence { seed: sampling.seed, generated: 0, max_tokens, prompt_tokens };
                self.running.insert(request, sequence);
            }
            Frame::Cancel(cancel) => {
                let held = self.running.remove(&cancel.request).is_some();
                let blocks = u32::from(held);
                writer.push(&Frame::Freed(Freed { request: cancel.request, blocks }))?;
            }
            Frame::Describe(describe) => {
                let parts = doc.chunks(PART_BYTES);
                let last = parts.len() - 1;
                for (part, data) in parts.enumerate() {
                    writer.push(&Frame::Model(ModelPart {
                        fingerprint: describe.fingerprint.clone(),
                        part: u32::try_from(part)?,
                        last: part == last,
                        data: data.to_vec(),
                    }))?;
                }
            }
            Frame::Ping(_) => writer.push(&Frame::Step(self.heartbeat()))?,
            // it caches nothing, so there is nothing that deltas could follow
            Frame::Resync(_) => writer.push(&Frame::Snapshot(empty_snapshot()))?,
            Frame::Drain(_) => {}
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
            | Frame::Welcome(_)
            | Frame::Refuse(_)) => bail!("a router does not send {} now", other.name()),
        }
        Ok(())
    }

    fn load(&self) -> Load {
        let running = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        Load { blocks_used: running, blocks_cached: 0, running, waiting: 0 }
    }

    fn heartbeat(&self) -> Step {
        Step {
            step: self.steps,
            ms: 0.0,
            prefill_tokens: 0,
            prefill_context: 0,
            decode_rows: 0,
            kv_tokens: 0,
            waiting_tokens: 0,
            drafted: 0,
            accepted: 0,
            load: self.load(),
            outputs: Vec::new(),
        }
    }

    /// One token for each of the first `sequences` requests.
    fn step(&mut self, sequences: u32) -> Step {
        let started = Instant::now();
        self.steps += 1;
        let mut outputs = Vec::with_capacity(self.running.len());
        let mut prefill_tokens = 0_u32;
        let mut prefill_context = 0_u64;
        for (request, sequence) in self.running.iter_mut().take(sequences as usize) {
            let first = sequence.generated == 0;
            if first {
                prefill_tokens = prefill_tokens.saturating_add(sequence.prompt_tokens);
                let tokens = u64::from(sequence.prompt_tokens);
                prefill_context += tokens * tokens.saturating_sub(1) / 2;
            }
            sequence.generated += 1;
            outputs.push(Output {
                request: *request,
                ids: vec![token(sequence.seed, sequence.generated, self.vocab)],
                logprobs: None,
                finish: (sequence.generated == sequence.max_tokens).then_some(Finish::Length),
                cached_tokens: first.then_some(0),
                prompt_logprobs: None,
            });
        }
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            self.running.remove(&output.request);
            self.freed.push(Freed { request: output.request, blocks: 1 });
        }
        Step {
            ms: started.elapsed().as_secs_f64() * 1e3,
            decode_rows: u32::try_from(outputs.len()).unwrap_or(u32::MAX),
            prefill_tokens,
            prefill_context,
            outputs,
            load: self.load(),
            ..self.heartbeat()
        }
    }
}

/// An ordinary token (special ones come first in the tokenizers in use), the same for the same seed and position.
fn token(seed: u64, position: u32, vocab: u64) -> u32 {
    let mixed = (seed ^ u64::from(position)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let low = vocab / 16;
    u32::try_from(low + mixed % (vocab / 2).max(1)).expect("less than a vocabulary")
}
