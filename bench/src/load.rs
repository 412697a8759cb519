//! Load against an OpenAI-compatible endpoint: N clients, each with one request at a time, every chunk timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::TcpStream;

use crate::stats::{Quantiles, cpu_seconds};

/// Closed-loop load.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LoadArgs {
    /// `HOST:PORT` of the endpoint.
    #[arg(long, default_value = "127.0.0.1:8000")]
    target: String,
    /// Model name to ask for; the endpoint's first one where left out.
    #[arg(long)]
    model: Option<String>,
    /// Requests in all.
    #[arg(short = 'n', long, default_value_t = 100)]
    requests: u64,
    /// Number of the first request; a request's number is in its prompt, so other numbers are other prompts.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Clients, each with one request in flight.
    #[arg(short, long, default_value_t = 1)]
    concurrency: usize,
    /// Words in each prompt; no two prompts are equal.
    #[arg(long, default_value_t = 32)]
    prompt_words: usize,
    /// Tokens to generate (`max_tokens` with `ignore_eos`).
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// Ask for the whole answer at once.
    #[arg(long)]
    unary: bool,
    /// Send chat messages instead of a plain prompt.
    #[arg(long)]
    chat: bool,
    /// Report the CPU time of these processes over the run, comma separated.
    #[arg(long, value_delimiter = ',')]
    pids: Vec<u32>,
    /// Longest wait for one request.
    #[arg(long, default_value_t = 60)]
    timeout_s: u64,
}

/// Result of a run, times in ms.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    requests: u64,
    errors: u64,
    /// First few error texts.
    error_samples: Vec<String>,
    wall_s: f64,
    requests_per_s: f64,
    /// From usage.
    completion_tokens: u64,
    prompt_tokens: u64,
    tokens_per_s: f64,
    chunks: u64,
    ttft_ms: Option<Quantiles>,
    /// Gaps between chunks.
    gap_ms: Option<Quantiles>,
    total_ms: Option<Quantiles>,
    /// CPU seconds of `--pids`, one each.
    cpu_s: Vec<f64>,
    /// CPU seconds of this client: where it nears `wall_s`, the client is the limit.
    client_cpu_s: f64,
}

/// What one request gave.
#[derive(Debug, Default)]
struct Sample {
    ttft: Duration,
    gaps: Vec<Duration>,
    total: Duration,
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// Runs the load and waits for the last answer.
///
/// # Errors
/// The endpoint cannot be reached or names no model; failures of single requests are counted instead.
pub(crate) async fn run(args: LoadArgs) -> anyhow::Result<Report> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&args.target).await?,
    };
    let args = Arc::new(LoadArgs { model: Some(model), ..args });
    let cpu =
        |pids: &[u32]| pids.iter().map(|&pid| cpu_seconds(pid)).collect::<Result<Vec<_>, _>>();
    let before = cpu(&args.pids)?;
    let own_before = cpu_seconds(std::process::id())?;
    let started = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..args.concurrency.max(1))
        .map(|_| tokio::spawn(client(args.clone(), next.clone())))
        .collect();
    let mut samples = Vec::new();
    let mut failures = Vec::new();
    for client in clients {
        let (good, bad) = client.await?;
        samples.extend(good);
        failures.extend(bad);
    }
    let wall_s = started.elapsed().as_secs_f64();
    let after = cpu(&args.pids)?;
    let tokens: u64 = samples.iter().map(|s| s.completion_tokens).sum();
    let gaps: Vec<_> = samples.iter().flat_map(|s| s.gaps.iter().copied()).collect();
    Ok(Report {
        requests: samples.len() as u64,
        errors: failures.len() as u64,
        error_samples: failures.iter().take(3).map(|e| format!("{e:#}")).collect(),
        wall_s,
        requests_per_s: samples.len() as f64 / wall_s,
        completion_tokens: tokens,
        prompt_tokens: samples.iter().map(|s| s.prompt_tokens).sum(),
        tokens_per_s: tokens as f64 / wall_s,
        chunks: samples.iter().map(|s| s.gaps.len() as u64 + 1).sum(),
        ttft_ms: Quantiles::of(&samples.iter().map(|s| s.ttft).collect::<Vec<_>>()),
        gap_ms: Quantiles::of(&gaps),
        total_ms: Quantiles::of(&samples.iter().map(|s| s.total).collect::<Vec<_>>()),
        cpu_s: after.iter().zip(&before).map(|(a, b)| a - b).collect(),
        client_cpu_s: cpu_seconds(std::process::id())? - own_before,
    })
}

/// One client: takes request numbers until none is left. A failed connection is dialled again for the next request.
async fn client(args: Arc<LoadArgs>, next: Arc<AtomicU64>) -> (Vec<Sample>, Vec<anyhow::Error>) {
    let (mut samples, mut failures) = (Vec::new(), Vec::new());
    let mut connection = None;
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= args.requests {
            return (samples, failures);
        }
        let limit = Duration::from_secs(args.timeout_s);
        match tokio::time::timeout(limit, one(&args, args.first + number, &mut connection)).await {
            Ok(Ok(sample)) => samples.push(sample),
            Ok(Err(error)) => {
                failures.push(error);
                connection = None;
            }
            Err(_) => {
                failures.push(anyhow::anyhow!("no answer in {limit:?}"));
                connection = None;
            }
        }
    }
}

type Connection = Option<SendRequest<Full<Bytes>>>;

async fn one(args: &LoadArgs, number: u64, connection: &mut Connection) -> anyhow::Result<Sample> {
    let body = Bytes::from(serde_json::to_vec(&request_body(args, number))?);
    let path = if args.chat { "/v1/chat/completions" } else { "/v1/completions" };
    let request = || {
        hyper::Request::post(path)
            .header("host", &args.target)
            .header("content-type", "application/json")
            .body(Full::new(body.clone()))
    };
    let kept = connection.take().filter(|c| !c.is_closed());
    let reused = kept.is_some();
    let mut sender = match kept {
        Some(sender) => sender,
        None => dial(&args.target).await?,
    };
    let mut started = Instant::now();
    let mut response = match sender.send_request(request()?).await {
        // A server may close an idle connection just as it is used again: that is no failure of a request.
        Err(_) if reused => {
            sender = dial(&args.target).await?;
            started = Instant::now();
            sender.send_request(request()?).await?
        }
        other => other?,
    };
    let status = response.status();
    if !status.is_success() {
        let text = response.into_body().collect().await?.to_bytes();
        bail!("{status}: {}", String::from_utf8_lossy(&text));
    }
    let mut sample = Sample::default();
    if args.unary {
        let text = response.into_body().collect().await?.to_bytes();
        sample.ttft = started.elapsed();
        take_usage(&mut sample, &serde_json::from_slice(&text)?);
    } else {
        let mut last = None;
        let mut lines = Lines::default();
        let mut done = false;
        while let Some(frame) = response.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            let now = Instant::now();
            for line in lines.push(&data) {
                let Some(event) = line.strip_prefix(b"data: ") else { continue };
                if event == b"[DONE]" {
                    done = true;
                    continue;
                }
                if memmem(event, b"\"error\"") {
                    bail!("{}", String::from_utf8_lossy(event));
                }
                // Only the usage event is parsed: parsing each chunk would measure this client.
                if memmem(event, b"\"prompt_tokens\":") {
                    take_usage(&mut sample, &serde_json::from_slice(event)?);
                    continue;
                }
                match last.replace(now) {
                    None => sample.ttft = now - started,
                    Some(before) => sample.gaps.push(now - before),
                }
            }
        }
        if !done {
            bail!("the stream ended without [DONE]");
        }
    }
    sample.total = started.elapsed();
    *connection = Some(sender);
    Ok(sample)
}

async fn dial(target: &str) -> anyhow::Result<SendRequest<Full<Bytes>>> {
    let socket = TcpStream::connect(target).await.with_context(|| format!("dialling {target}"))?;
    socket.set_nodelay(true)?;
    let (sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    tokio::spawn(connection); // ends with the sender
    Ok(sender)
}

async fn first_model(target: &str) -> anyhow::Result<String> {
    let request = hyper::Request::get("/v1/models").header("host", target).body(Full::default())?;
    let response = dial(target).await?.send_request(request).await?;
    let body: serde_json::Value =
        serde_json::from_slice(&response.into_body().collect().await?.to_bytes())?;
    let model = body["data"][0]["id"].as_str();
    Ok(model.with_context(|| format!("{target} serves no model: {body}"))?.to_owned())
}

fn request_body(args: &LoadArgs, number: u64) -> serde_json::Value {
    const WORDS: [&str; 16] = [
        "river", "stone", "under", "light", "seven", "paper", "morning", "engine", "garden",
        "winter", "silver", "window", "market", "circle", "orange", "valley",
    ];
    let mut words = vec![format!("Request {number}:")];
    let word = |i: usize| WORDS[(number as usize * 7 + i * i + i) % WORDS.len()].to_owned();
    words.extend((0..args.prompt_words).map(word));
    let text = words.join(" ");
    let mut body = serde_json::json!({
        "model": args.model, "max_tokens": args.max_tokens, "ignore_eos": true, "temperature": 0,
        "stream": !args.unary,
    });
    if args.chat {
        body["messages"] = serde_json::json!([{"role": "user", "content": text}]);
    } else {
        body["prompt"] = text.into();
    }
    if !args.unary {
        body["stream_options"] = serde_json::json!({"include_usage": true});
    }
    body
}

fn take_usage(sample: &mut Sample, body: &serde_json::Value) {
    sample.prompt_tokens = body["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
    sample.completion_tokens = body["usage"]["completion_tokens"].as_u64().unwrap_or(0);
}

fn memmem(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

/// Splits a byte stream into lines, whatever the chunk borders.
#[derive(Debug, Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that `data` completes, without their line ends.
    fn push(&mut self, data: &[u8]) -> Vec<Vec<u8>> {
        self.rest.extend_from_slice(data);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
            let mut line: Vec<u8> = self.rest.drain(..=end).collect();
            line.pop();
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            lines.push(line);
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_whatever_the_borders() {
        let text = b"data: a\r\n\r\ndata: bc\n\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut got = lines.push(&text[..cut]);
            got.extend(lines.push(&text[cut..]));
            assert_eq!(got, [&b"data: a"[..], b"", b"data: bc", b""]);
        }
    }
}
