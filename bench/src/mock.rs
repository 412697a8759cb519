//! Workers without a model: a whole engine but for the arithmetic, whose place a step-time model takes.
//!
//! Read in this order: [`engine`] is pure and serves the simulation too, `preset` says what its steps cost, `worker` and
//! `session` put it behind the real wire protocol, [`fault`] makes it misbehave.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use headrace_router::config::argv::NoSecret;
use headrace_router::config::environment;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use self::clock::Clock;
use self::engine::EngineConfig;
use self::exchange::{Exchange, Terms};
use self::fault::Fault;
use self::lockstep::{Lockstep, RoundSums};
use self::model::Model;
use self::model::script::Script;
use self::pace::{Pace, PaceReport};
use self::preset::ModelArgs;
use self::worker::{Fleet, Roles, Worker};
use crate::BadInput;

pub(crate) mod clock;
pub(crate) mod engine;
pub(crate) mod exchange;
pub(crate) mod fault;
mod greeting;
pub(crate) mod kv_legs;
pub(crate) mod lockstep;
mod model;
mod pace;
mod pool;
pub(crate) mod preset;
mod rank;
mod session;
#[cfg(test)]
mod tests;
pub(crate) mod worker;

/// Faults that a worker may not have read yet.
const FAULTS_WAITING: usize = 256;

/// Arguments of `headrace mock`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
FAULT is [WORKERS:]KIND[=VALUE][@FROM[-UNTIL]], such as w3:die@10s or w0-w3:slow=3x@5s-20s. Kinds:
  die, freeze          it is gone, or stands still; with UNTIL it comes back
  stall=PHASE          of a rank: it stands still in a phase of a step, agree, dispatch, combine or draft; its link lives
  wrong-size, wrong-weights  of a rank: its Hello says so
  slow=3x              steps take three times longer
  drop-events=0.1      each block event is lost with this probability; stop-events loses all
  lie=+50%             says that half of each prompt more was cached than there was
  forget=0.5           loses half of what it stored, at once and without a word
  overclaim            stores more and more blocks that do not exist
  gap, wrong-epoch     numbers its events with a hole, or puts another epoch on one
  duplicate-stores     says again what it stored
  unknown-removes      removes what it never had
  slow-transfer=10x    KV that is pulled from it takes ten times longer
  fail-transfer=0.5    KV that is pulled from it is lost on the way with this probability
Workers are numbered from 0: those of --prefill, then those of --decode, then those of --workers.")]
pub(crate) struct MockArgs {
    /// The router's address for workers: HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDRESS")]
    router: String,
    #[command(flatten)]
    roles: RoleArgs,
    #[command(flatten)]
    model_args: ModelArgs,
    /// Everything runs so many times faster.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    speed: f64,
    /// What goes wrong; may be given again.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<Fault>,
    /// Read more faults from standard input, one a line; their times count from then.
    #[arg(long)]
    control: bool,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Description of the model, in place of a small built-in one: the JSON document that workers send to routers.
    #[arg(long, value_name = "FILE")]
    doc: Option<PathBuf>,
    /// Answers, in the place of random tokens: one JSON object a line with `text`, and with `when`, `finish`,
    /// `tokens_per_step`, `pieces` and `delay_steps` if needed (docs/operations.md).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prefill", "decode"])]
    script: Option<PathBuf>,
    /// Names of the workers begin with this; a number follows.
    #[arg(long, value_name = "PREFIX", default_value = "w")]
    name: String,
    /// An answer ends after so many tokens, unless the client says `ignore_eos`.
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    longest_answer: u32,
    /// Ranks of a group wait for one another so long, in ms; then the group starts anew as a whole.
    #[arg(long, value_name = "MS", default_value_t = 1000, requires = "ep")]
    group_deadline: u64,
    /// End with the link, instead of dialling again.
    #[arg(long)]
    once: bool,
    /// File with the secret that lets workers join; or set HEADRACE_SECRET.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// The secret itself, from the variable.
    #[arg(skip = environment::one("HEADRACE_SECRET"))]
    secret: Option<String>,
    #[command(flatten)]
    _no_secret: NoSecret,
}

fn workers(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (1..=10_000).contains(number));
    number.ok_or_else(|| format!("{text} is not from 1 to 10000"))
}

fn ranks(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (2..=1024).contains(number));
    number.ok_or_else(|| format!("{text} is not from 2 to 1024"))
}

/// How many workers there are. Numbers begin with those of `--prefill`, then come those of `--decode`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RoleArgs {
    /// Workers that compute prompts and generate [default: 8, or 0 beside --prefill and --decode].
    #[arg(long, value_name = "N", value_parser = workers)]
    workers: Option<usize>,
    /// Workers that only compute prompts.
    #[arg(long, value_name = "N", value_parser = workers)]
    prefill: Option<usize>,
    /// Workers that generate; their prompts come from the others.
    #[arg(long, value_name = "N", value_parser = workers)]
    decode: Option<usize>,
    /// Workers are ranks of groups of N that step together: a step lasts as long as that of the slowest.
    #[arg(long, value_name = "N", value_parser = ranks)]
    ep: Option<usize>,
}

impl RoleArgs {
    /// # Errors
    /// Nobody would generate.
    pub(crate) fn roles(&self) -> Result<Roles, BadInput> {
        let (prefill, decode) = (self.prefill.unwrap_or(0), self.decode.unwrap_or(0));
        let usual = if prefill + decode > 0 { 0 } else { 8 };
        let ep = self.ep.unwrap_or(1);
        let roles = Roles { prefill, decode, both: self.workers.unwrap_or(usual), ep };
        for (flag, workers) in [("prefill", prefill), ("decode", decode), ("workers", roles.both)] {
            if workers % ep != 0 {
                let text = format!("--{flag} {workers}: a multiple of the {ep} ranks of --ep");
                return Err(BadInput(text));
            }
        }
        if roles.decode + roles.both == 0 {
            return Err(BadInput("--prefill alone: nobody would generate".into()));
        }
        Ok(roles)
    }
}

/// Workers that run.
struct Running {
    fleet: Arc<Fleet>,
    tasks: JoinSet<anyhow::Result<()>>,
    workers: usize,
}

/// Runs a fleet until its router drained all of it, or a signal comes.
///
/// # Errors
/// The arguments make no sense, or the router refuses a worker.
pub(crate) async fn run(args: &MockArgs) -> anyhow::Result<serde_json::Value> {
    let model = Model::of(args.doc.as_deref())?;
    let script = match &args.script {
        Some(path) => Some(Script::read(path, &model).await?),
        None => None,
    };
    if let Some(script) = &script {
        note(&format!("{} scripted answers", script.answers()));
    }
    let mut running = start(args, model, script)?;
    let EngineConfig { capacity, block_tokens, .. } = &running.fleet.engine;
    let workers = running.workers;
    note(&format!(
        "{workers} workers of {} blocks of {block_tokens} tokens dial {}; Ctrl-C ends them",
        capacity.blocks, args.router
    ));
    if args.control {
        read_faults(running.fleet.faults.clone())?;
    }
    let ended = tokio::select! {
        ended = running.ended() => ended,
        signal = stop_signal() => signal.context("signals cannot be caught"),
    };
    running.tasks.shutdown().await;
    ended?;
    Ok(serde_json::to_value(running.report())?)
}

fn start(args: &MockArgs, model: Model, script: Option<Script>) -> anyhow::Result<Running> {
    if !(args.speed > 0.0 && args.speed <= 1e6) {
        return Err(BadInput(format!("--speed {}: from above 0 to 1000000", args.speed)).into());
    }
    let secret = match &args.secret_file {
        Some(path) => Some(read_secret(path)?),
        None => args.secret.clone().map(String::into_bytes),
    };
    let vocab = model.answer_vocab;
    let engine = EngineConfig { vocab, ..args.model_args.engine()? };
    let terms = args.model_args.terms(&engine)?;
    let terms = Terms {
        bytes_per_ms: terms.bytes_per_ms * args.speed,
        latency_ms: terms.latency_ms / args.speed,
        ..terms
    };
    let roles = args.roles.roles()?;
    let epoch = worker::now_ms_since_1970();
    let nonce = crate::random::mix(u64::from(std::process::id())) ^ worker::now_ms_since_1970();
    let fleet = Arc::new(Fleet {
        router: args.router.clone(),
        secret: secret.filter(|secret| !secret.is_empty()),
        model_name: args.model.clone(),
        engine,
        model,
        names: args.name.clone(),
        speed: args.speed,
        longest_answer: args.longest_answer.max(1),
        once: args.once,
        clock: Clock::start()?,
        started: Instant::now(),
        faults: broadcast::channel(FAULTS_WAITING).0,
        pace: Mutex::new(Pace::default()),
        roles,
        kv_block_bytes: terms.block_bytes,
        priors: args.model_args.step_prior,
        exchange: Mutex::new(Exchange::new(terms, roles.all(), nonce)),
        bells: (0..roles.all()).map(|_| Arc::default()).collect(),
        groups: roles.groups().map(|_| Mutex::new(Lockstep::new(roles.ep, epoch))).collect(),
        group_deadline: Duration::from_millis(args.group_deadline.max(1)),
        script,
        noted_grammar: Once::new(),
    });
    let mut tasks = JoinSet::new();
    for number in 0..roles.all() {
        tasks.spawn(Worker::new(Arc::clone(&fleet), number, &args.fault).run());
    }
    Ok(Running { fleet, tasks, workers: roles.all() })
}

impl Running {
    /// Waits for the last worker, or for the first that was refused.
    async fn ended(&mut self) -> anyhow::Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(())
    }

    fn report(&self) -> PaceReport {
        let cpu_s = crate::report::stats::cpu_seconds(std::process::id()).ok();
        let mut rounds = RoundSums::default();
        for group in &self.fleet.groups {
            rounds.add(group.lock().expect("no holder panics").sums());
        }
        let pace = self.fleet.pace.lock().expect("no holder panics");
        pace.report(self.workers, cpu_s, rounds.report())
    }
}

fn read_secret(path: &std::path::Path) -> anyhow::Result<Vec<u8>> {
    let secret = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(secret.trim_end_matches(['\r', '\n']).as_bytes().to_vec())
}

/// Hands on the faults that standard input names, and says what is wrong with a line.
fn read_faults(faults: broadcast::Sender<Fault>) -> std::io::Result<()> {
    let read = move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.trim().parse::<Fault>() {
                Ok(fault) => {
                    let listeners = faults.send(fault).unwrap_or(0);
                    note(&format!("{} is told to {listeners} workers", line.trim()));
                }
                Err(error) if line.trim().is_empty() => drop(error),
                Err(error) => note(&error),
            }
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(read).map(drop)
}

pub(crate) async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "standard output is for the report")]
fn note(text: &str) {
    eprintln!("headrace mock: {text}");
}
