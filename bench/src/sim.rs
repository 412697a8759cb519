//! `headrace sim`: the router's own scheduler and queue over a trace, with mock engines for workers and a clock that jumps
//! from event to event. What it says is what `bench replay` would have measured, in seconds instead of an hour.

use std::path::PathBuf;
use std::time::Instant;

use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::StepCost;

use self::autoscale::AutoscaleArgs;
use self::world::{Fleet, World, targets};
use crate::BadInput;
use crate::bound::bound_hit_rate;
use crate::load::positive;
use crate::mock::RoleArgs;
use crate::mock::engine::{Engine, EngineConfig};
use crate::mock::fault::Fault;
use crate::mock::preset::ModelArgs;
use crate::report::sample::Slo;
use crate::report::{Output, Report, RouterMs, Setting};
use crate::trace::{Requests, Scale, Slice, read_requests};

mod again;
mod arrival;
mod autoscale;
mod events;
mod predictions;
#[cfg(test)]
mod tests;
mod worker;
mod world;

/// A trace in virtual time.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SimArgs {
    /// Block-id JSON lines (Mooncake) or CSV with lengths (Azure); plain or gzip.
    #[arg(required_unless_present = "replay")]
    trace: Option<PathBuf>,
    /// Instead: make the decisions of a router's log again, and compare them byte for byte.
    #[arg(long, value_name = "DECISIONS", conflicts_with = "trace")]
    replay: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Fleet")]
    model: ModelArgs,
    #[command(flatten, next_help_heading = "Fleet")]
    roles: RoleArgs,
    #[command(flatten, next_help_heading = "Fleet")]
    scale_rules: AutoscaleArgs,
    /// What goes wrong, as for `headrace mock`; times are the simulation's. w8:die@0-60s joins after a minute.
    #[arg(long, value_name = "FAULT", help_heading = "Fleet")]
    fault: Vec<Fault>,

    /// How a worker is chosen: kv, round-robin, least-loaded, power-of-two or session-hash.
    #[arg(long, default_value = "kv", help_heading = "Router")]
    policy: String,
    /// A second policy that chooses nothing: decisions note what it would have chosen.
    #[arg(long, value_name = "POLICY", help_heading = "Router")]
    shadow: Option<String>,
    /// A worker with more ms of prompts ahead of it gets no further one; as for `headrace router`.
    #[arg(long, value_name = "MS", help_heading = "Router")]
    worker_queue_ms: Option<u64>,
    /// Requests that come within so many ms are placed together; as for `headrace router`.
    #[arg(long, value_name = "MS", help_heading = "Router")]
    gather_ms: Option<f64>,
    /// Longest wait for a worker with room, in ms; as for `headrace router`.
    #[arg(long, value_name = "MS", help_heading = "Router")]
    queue_timeout_ms: Option<u64>,
    /// Routers that share the workers, each with its own view of them; each request comes to one of them by lot.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = routers, help_heading = "Router")]
    routers: usize,
    /// Write every decision to this file, one JSON object a line.
    #[arg(long, value_name = "FILE", help_heading = "Router")]
    decisions: Option<PathBuf>,

    #[command(flatten, next_help_heading = "When")]
    slice: Slice,
    /// Send everything so many times as fast as it was recorded.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive, help_heading = "When")]
    speed: f64,
    /// Send at the speed at which computing every prompt whole would take this share of the fleet's time.
    #[arg(long, value_name = "SHARE", conflicts_with = "speed", value_parser = positive, help_heading = "When")]
    util: Option<f64>,
    /// Requests that the trace has at one moment come evenly until the next such moment.
    #[arg(long, help_heading = "When")]
    spread: bool,

    /// Make prompts N times shorter, block by block; a token then costs what N would. In place of --token-scale.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "What")]
    scale: u32,
    /// Make answers N times shorter.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "What")]
    output_scale: u32,

    /// Longest answer that requests ask for, those of longer answers excepted. Without it each asks for exactly its answer's
    /// length, which the router then knows.
    #[arg(long, value_name = "N", help_heading = "What")]
    max_tokens: Option<u32>,

    /// Limits of a good answer, such as ttft=1s,tpot=50ms; errors and rejections are misses.
    #[arg(long, help_heading = "Report")]
    slo: Option<Slo>,
    #[command(flatten)]
    output: Output,
}

/// Simulates, and prints the report.
///
/// # Errors
/// [`BadInput`] for a bad trace or arguments; with `--replay`, a decision that came out otherwise.
pub(crate) fn run(args: &SimArgs) -> anyhow::Result<()> {
    if let Some(log) = &args.replay {
        return again::run(log);
    }
    let trace = args.trace.as_ref().ok_or_else(|| BadInput("a trace is missing".into()))?;
    // --block-tokens is about the trace's blocks here: those of the workers follow from it
    let requests = read_requests(trace, args.model.block_tokens)?.slice(&args.slice)?;
    let report = simulate(args, &requests)?;
    args.output.write(&report)
}

fn simulate(args: &SimArgs, requests: &Requests) -> anyhow::Result<Report> {
    let scale = Scale::new(requests, args.scale, args.output_scale)?;
    let (block_tokens, token_scale) = (scale.block_tokens, args.scale);
    let engine = EngineConfig { block_tokens, token_scale, ..args.model.engine()? };
    let (config, roles) = (router(args)?, args.roles.roles()?);
    let speed = match args.util {
        Some(util) => speed_for(util, roles.all(), &engine, requests, scale)?,
        None => args.speed,
    };
    let blocks = engine.capacity.blocks as usize;
    let began = Instant::now();
    let terms = args.model.terms(&engine)?;
    let (faults, priors) = (args.fault.clone(), args.model.step_prior);
    let autoscale = args.scale_rules.rules(roles, args.routers, !faults.is_empty())?;
    let targets = targets(args.slo);
    let fleet =
        Fleet { roles, engine, terms, faults, priors, routers: args.routers, autoscale, targets };
    let arrivals = arrival::arrivals(requests, scale, speed, args.spread, args.max_tokens);
    let mut world = World::new(&config, &fleet, arrivals, args.decisions.as_deref())?;
    let wall_s = world.run()? / 1e3;
    let span_s = requests.rows.last().map_or(0.0, |row| row.at_ms / speed / 1e3);
    let setting = Setting {
        trace: Some(requests.name.clone()),
        policy: Some(args.policy.clone()),
        mode: "sim",
        workers: Some(roles.all()),
        bound_hit_rate: Some(bound_hit_rate(requests, roles.all() * blocks)),
        slo: args.slo,
        wall_s,
        offered_per_s: Some(requests.rows.len() as f64 / span_s).filter(|rate| rate.is_finite()),
        speed: Some(speed),
        ttft_errors: world.predictions().report(),
        preemptions: Some(world.preemptions()),
        autoscaled: world.autoscaled(),
        run_s: Some(began.elapsed().as_secs_f64()),
        split: (roles.prefill > 0).then(|| world.split()),
        groups: world.rounds().report(),
        router_ms: Some(RouterMs {
            worker_queue: config.routing.worker_queue_ms,
            queue_timeout: config.deadlines.queue.as_secs_f64() * 1e3,
        }),
        ..Setting::default()
    };
    Ok(Report::new(setting, &world.samples()))
}

fn routers(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (1..=64).contains(number));
    number.ok_or_else(|| format!("{text} is not from 1 to 64"))
}

/// The router's own flags and defaults.
fn router(args: &SimArgs) -> anyhow::Result<Config> {
    let usual = RouterArgs::default();
    let flags = RouterArgs {
        policy: args.policy.clone(),
        shadow: args.shadow.clone(),
        worker_queue_ms: args.worker_queue_ms.unwrap_or(usual.worker_queue_ms),
        gather_ms: args.gather_ms.unwrap_or(usual.gather_ms),
        queue_timeout_ms: args.queue_timeout_ms.unwrap_or(usual.queue_timeout_ms),
        secret: None,
        api_key: Vec::new(),
        ..usual
    };
    Ok(Config::try_from(flags).map_err(|error| BadInput(error.to_string()))?)
}

/// How many times as fast as recorded a trace must run to ask for this share of the fleet's prefill.
fn speed_for(
    util: f64,
    workers: usize,
    engine: &EngineConfig,
    requests: &Requests,
    scale: Scale,
) -> Result<f64, BadInput> {
    let engine = Engine::new(EngineConfig { seed: 0, ..engine.clone() });
    let (cost, step_tokens) = (engine.cost(), f64::from(engine.capacity().batched_tokens));
    let work_ms: f64 = requests
        .rows
        .iter()
        .map(|row| prefill_ms(&cost, step_tokens, scale.input_tokens(row).into()))
        .sum();
    let span_ms = requests.rows.last().map_or(0.0, |row| row.at_ms);
    let speed = util * workers as f64 * span_ms / work_ms;
    if speed.is_finite() && speed > 0.0 {
        return Ok(speed);
    }
    Err(BadInput("--util: the requests of this trace all come at once, or cost nothing".into()))
}

/// Of a whole prompt, in steps that are full.
fn prefill_ms(cost: &StepCost, step_tokens: f64, tokens: f64) -> f64 {
    cost.prompt_ms(0.0, tokens) + cost.fixed_ms * tokens / step_tokens
}
