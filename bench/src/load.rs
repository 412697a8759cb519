//! `bench load`: closed or open loop against an OpenAI-compatible endpoint.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::BadInput;
use crate::client::body::Asker;
use crate::client::pace::TokenPace;
use crate::client::{Client, ClientArgs};
use crate::drive::{Arrivals, Run, arrival_times, closed_loop, open_loop};
use crate::progress::Progress;
use crate::random::Random;
use crate::report::sample::{Slo, time_ms};
use crate::report::stats::cpu_seconds;
use crate::report::{Output, Report, Setting};
use crate::trace::FIRST_TOKEN;

mod prompts;

use prompts::{MadeUp, Prompts};

/// Requests where neither their number nor a time is given.
const DEFAULT_REQUESTS: u64 = 100;

/// Load on an endpoint.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Requests in all [default: 100, or as many as fit into --duration].
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u64).range(1..), help_heading = "When")]
    requests: Option<u64>,
    /// No request begins after this time: 30s, 2m.
    #[arg(long, value_name = "TIME", value_parser = time_ms, help_heading = "When")]
    duration: Option<f64>,
    /// Closed loop: clients, each with one request in flight.
    #[arg(short, long, default_value_t = 1, conflicts_with = "rate", help_heading = "When")]
    concurrency: usize,
    /// Open loop: requests per second, at times fixed beforehand; latency counts from these times.
    #[arg(long, value_name = "R", value_parser = positive, help_heading = "When")]
    rate: Option<f64>,
    /// How the requests of an open loop are spaced.
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson, help_heading = "When")]
    arrivals: Arrivals,

    /// Words in each prompt; no two prompts are equal.
    #[arg(long, default_value_t = 32, help_heading = "What")]
    prompt_words: usize,
    /// Send this many token ids instead of words.
    #[arg(long, value_name = "N", conflicts_with = "chat", help_heading = "What")]
    prompt_tokens: Option<usize>,
    /// Token ids are below this.
    #[arg(long, default_value_t = 32_000, value_parser = vocab, help_heading = "What")]
    vocab: u32,
    /// Words (or tokens) at the beginning that prompts have in common.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "What")]
    shared_prefix: usize,
    /// How many such beginnings there are; each request draws one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, help_heading = "What")]
    prefixes: usize,
    /// Prompts from a file instead: JSON lines with `prompt` or `messages`, in a circle.
    #[arg(long, value_name = "FILE", help_heading = "What")]
    prompts: Option<PathBuf>,
    /// Number of the first request; a request's number is in its prompt, so other numbers are other prompts.
    #[arg(long, default_value_t = 0, help_heading = "What")]
    first: u64,
    /// Equal seeds are equal times and prompts [default: from the clock, and printed].
    #[arg(long, help_heading = "What")]
    seed: Option<u64>,
    /// Tokens to generate (`max_tokens` with `ignore_eos`).
    #[arg(long, default_value_t = 64, help_heading = "What")]
    max_tokens: u32,
    /// Ask for the whole answer at once.
    #[arg(long, help_heading = "What")]
    unary: bool,
    /// Send chat messages instead of a plain prompt.
    #[arg(long, help_heading = "What")]
    chat: bool,

    /// Limits of a good answer, such as ttft=1s,tpot=50ms; errors and rejections are misses.
    #[arg(long, help_heading = "Report")]
    slo: Option<Slo>,
    /// Report the CPU time of these processes over the run, comma separated.
    #[arg(long, value_delimiter = ',', help_heading = "Report")]
    pids: Vec<u32>,
    /// Report how late tokens are where workers give each answer a token in this time: 20ms. Needs --token-text.
    #[arg(long, value_name = "TIME", value_parser = time_ms, requires = "token_text", help_heading = "Report")]
    pace: Option<f64>,
    /// The text that all tokens have, as it stands in JSON.
    #[arg(long, value_name = "TEXT", value_parser = token_text, requires = "pace", help_heading = "Report")]
    token_text: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Runs the load, waits for the last answer, and prints the report.
///
/// # Errors
/// The endpoint cannot be reached or names no model, or no request was answered. Failures of single requests are counted.
pub(crate) async fn run(args: LoadArgs) -> anyhow::Result<()> {
    let seed = seed(args.seed);
    let prompts = match &args.prompts {
        Some(file) => prompts::read(file, args.chat)?,
        None => Prompts::MadeUp(MadeUp {
            words: args.prompt_words,
            tokens: args.prompt_tokens,
            shared: args.shared_prefix,
            beginnings: args.prefixes,
            chat: args.chat,
            seed,
            vocab: args.vocab,
        }),
    };
    if args.max_tokens == 0 {
        return Err(BadInput("--max-tokens must be at least 1".into()).into());
    }
    let pace = args.pace.zip(args.token_text.as_deref());
    let pace = pace.map(|(ms, text)| TokenPace::new(Duration::from_secs_f64(ms / 1e3), text));
    let client = Arc::new(Client::new(&args.client, 1.0)?.with_pace(pace));
    let model = client.model_for("load", &args.client).await?;
    let asker = Asker { model, priority: args.client.priority, unary: args.unary };
    let (first, max_tokens) = (args.first, args.max_tokens);
    let request =
        move |number: u64| asker.request(&prompts.prompt(first + number), None, max_tokens, None);

    let cpu = || args.pids.iter().map(|&pid| cpu_seconds(pid)).collect::<Result<Vec<_>, _>>();
    let before = cpu()?;
    let run = match args.rate {
        Some(rate) => open(&args, rate, seed, &client, request).await?,
        None => closed(&args, &client, request).await,
    };
    let after = cpu()?;
    let setting = Setting {
        mode: "live",
        slo: args.slo,
        wall_s: run.elapsed_s,
        offered_per_s: args.rate,
        client_cpu: run.client_cpu(),
        watched_cpu_s: after.iter().zip(&before).map(|(after, before)| after - before).collect(),
        ..Setting::default()
    };
    args.output.write(&Report::new(setting, &run.samples))
}

/// The seed that was given, or one from the clock: a second run with the prompts of the first one would meet a warm cache.
#[expect(clippy::print_stderr, reason = "a run is repeated with it, and the report may be JSON")]
fn seed(given: Option<u64>) -> u64 {
    given.unwrap_or_else(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let seed = since.as_millis() as u64;
        eprintln!("headrace bench load: seed {seed}; `--seed {seed}` repeats this run");
        seed
    })
}

async fn open(
    args: &LoadArgs,
    rate: f64,
    seed: u64,
    client: &Arc<Client>,
    request: impl Fn(u64) -> crate::client::Request,
) -> std::io::Result<Run> {
    let until = args.duration.map_or(Duration::MAX, |ms| Duration::from_secs_f64(ms / 1e3));
    let default = args.duration.map_or(DEFAULT_REQUESTS, |_| u64::MAX);
    let count = usize::try_from(args.requests.unwrap_or(default)).unwrap_or(usize::MAX);
    let mut random = Random::new(seed);
    let times = arrival_times(args.arrivals, rate, count, until, &mut random);
    let progress = Arc::new(Progress::new("load", times.len()));
    open_loop(client, &times, |i| request(i as u64), &progress).await
}

async fn closed(
    args: &LoadArgs,
    client: &Arc<Client>,
    request: impl Fn(u64) -> crate::client::Request + Send + Sync + 'static,
) -> Run {
    let default = args.duration.map_or(DEFAULT_REQUESTS, |_| u64::MAX);
    let most = args.requests.unwrap_or(default);
    let end = args.duration.map(|ms| Instant::now() + Duration::from_secs_f64(ms / 1e3));
    let known = if most == u64::MAX { 0 } else { most as usize };
    let progress = Arc::new(Progress::new("load", known));
    let number = move |number: u64| {
        let in_time = end.is_none_or(|end| Instant::now() < end);
        (number < most && in_time).then(|| request(number))
    };
    closed_loop(client, args.concurrency.max(1), number, &progress).await
}

/// A number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
    value.ok_or_else(|| "must be a number above 0".into())
}

fn token_text(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(text.to_owned()) }
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    let value = text.parse::<usize>().ok().filter(|value| *value > 0);
    value.ok_or_else(|| "must be a whole number from 1 on".into())
}

/// A vocabulary with ordinary tokens in it.
pub(crate) fn vocab(text: &str) -> Result<u32, String> {
    let value = text.parse::<u32>().ok().filter(|value| *value > FIRST_TOKEN);
    value.ok_or_else(|| format!("must be a whole number above {FIRST_TOKEN}"))
}
