//! The bare worker link: this program in the router's place, with nothing between it and the worker.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use headrace_router::core::frame::{
    Frame, MAX_FRAME_BYTES, PROTOCOL, RequestId, Sampling, Submit, Welcome,
};
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use serde::Serialize;
use tokio::net::UnixListener;

use crate::report::stats::Quantiles;

/// Requests over a link, one after the other.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LinkArgs {
    /// Unix socket to wait on for one worker.
    #[arg(long)]
    socket: String,
    /// Requests, one after the other.
    #[arg(short = 'n', long, default_value_t = 200)]
    requests: u64,
    /// Tokens in each prompt.
    #[arg(long, default_value_t = 48)]
    prompt_tokens: u32,
    /// Tokens to generate.
    #[arg(long, default_value_t = 8)]
    max_tokens: u32,
}

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    requests: u64,
    /// Submit written to first token read, in ms.
    ttft_ms: Option<Quantiles>,
}

/// Waits for a worker and runs the requests.
///
/// # Errors
/// The socket cannot be bound, or the worker breaks the protocol or fails a request.
pub(crate) async fn run(args: &LinkArgs) -> anyhow::Result<Report> {
    let (stream, _) = UnixListener::bind(&args.socket)?.accept().await?;
    let (read, write) = stream.into_split();
    let mut reader = FrameReader::new(read, MAX_FRAME_BYTES);
    let mut writer = FrameWriter::new(write);
    let Some(Frame::Hello(_)) = reader.next().await? else { bail!("the worker did not say Hello") };
    writer.push(&Frame::Welcome(Welcome {
        protocol: PROTOCOL,
        router: "bench".into(),
        heartbeat_ms: 1000,
        challenge: Vec::new(),
        proof: Vec::new(),
        hash_key: vec![0; 32],
    }))?;
    writer.flush().await?;
    let mut samples: Vec<Duration> = Vec::new();
    for number in 0..args.requests {
        let id = |i: u32| (number as u32).wrapping_mul(31).wrapping_add(i) % 1000 + 1000;
        let tokens = (0..args.prompt_tokens).flat_map(|i| id(i).to_le_bytes()).collect();
        let submit = Submit {
            request: RequestId(number),
            tokens,
            sampling: Sampling { ignore_eos: true, ..Sampling::default() },
            stop_ids: Vec::new(),
            max_tokens: args.max_tokens,
            deadline_ms: None,
            priority: 0,
            salt: Vec::new(),
            kv_from: None,
            resume: None,
            kv_transfer: None,
            pooling: None,
            request_id: "".into(),
            trace: None,
        };
        let started = Instant::now();
        writer.push(&Frame::Submit(submit))?;
        writer.flush().await?;
        let mut first = None;
        'answer: loop {
            let frame = reader.next().await?.context("the worker hung up")?;
            if let Frame::Failed(failed) = &frame {
                bail!("{failed:?}");
            }
            let Frame::Step(step) = frame else { continue };
            for output in &step.outputs {
                first.get_or_insert_with(|| started.elapsed());
                if output.finish.is_some() {
                    break 'answer;
                }
            }
        }
        samples.extend(first);
    }
    Ok(Report { requests: args.requests, ttft_ms: Quantiles::of(&samples) })
}
