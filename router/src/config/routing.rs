//! How requests are let in, placed and explained: the part of the configuration that is about choosing workers.

use std::path::PathBuf;
use std::time::Duration;

use super::{ConfigError, RouterArgs, flag, millis, policy};
use crate::core::admission::QueueRules;
use crate::core::policy::PolicyName;

/// Of two files together; less would hold no decision about a large fleet.
const LEAST_LOG_BYTES: u64 = 64 << 10;

/// How requests are placed and explained, as checked.
#[derive(Debug, Clone)]
pub struct RoutingConfig {
    /// The policy whose opinion is noted beside the real one.
    pub shadow: Option<PolicyName>,
    /// Requests wait in the router while every worker has more ms of prompts ahead than this.
    pub worker_queue_ms: f64,
    /// A request that would wait anyway waits so long for those that come with it.
    pub gather_ms: f64,
    /// The queue of each model.
    pub queue: QueueRules,
    /// From a request's arrival to its first token, where it has no wish of its own.
    pub ttft_deadline: Option<Duration>,
    /// Ms per further token that a request with a deadline may take.
    pub slo_tpot_ms: Option<f64>,
    /// Where decisions are written.
    pub decision_log: Option<DecisionLogConfig>,
}

/// Where decisions are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecisionLogConfig {
    /// The file; the one before it is beside it, with `.1`.
    pub path: PathBuf,
    /// Bytes of the file and of the one before it together.
    pub max_bytes: u64,
}

impl RoutingConfig {
    pub(super) fn check(args: &RouterArgs) -> Result<Self, ConfigError> {
        Ok(Self {
            shadow: shadow(args)?,
            gather_ms: gather_ms(args.gather_ms)?,
            worker_queue_ms: as_ms(millis("worker-queue-ms", args.worker_queue_ms)?),
            queue: QueueRules {
                requests: args.queue_requests,
                tokens: args.queue_tokens as u64,
                bytes: args.queue_bytes,
                ageing_ms: as_ms(millis("queue-ageing-ms", args.queue_ageing_ms)?),
                floors: floors(&args.queue_floors)?,
            },
            ttft_deadline: (args.ttft_deadline_ms > 0)
                .then(|| Duration::from_millis(args.ttft_deadline_ms)),
            slo_tpot_ms: slo_tpot_ms(args.slo_tpot_ms)?,
            decision_log: decision_log(args)?,
        })
    }
}

fn as_ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn shadow(args: &RouterArgs) -> Result<Option<PolicyName>, ConfigError> {
    let Some(name) = &args.shadow else { return Ok(None) };
    let shadow = policy("shadow", name)?;
    if shadow.as_str() == args.policy {
        let problem = format!("{name} is the policy itself");
        return Err(flag("shadow", problem, "name another one, or leave it out"));
    }
    Ok(Some(shadow))
}

/// Lowest class first; users write the highest first.
fn floors(typed: &[f64]) -> Result<[f64; 3], ConfigError> {
    let shares = |problem: String| {
        flag(
            "queue-floors",
            problem,
            "write three shares such as 0.5,0.2,0.05, for high, normal, low",
        )
    };
    let &[high, normal, low] = typed else {
        return Err(shares(format!("has {} shares", typed.len())));
    };
    if let Some(wrong) = typed.iter().find(|share| !(0.0..=1.0).contains(*share)) {
        return Err(shares(format!("{wrong} is not a share between 0 and 1")));
    }
    let sum: f64 = typed.iter().sum();
    if sum > 1.0 + 1e-9 {
        let problem = format!("the shares come to {sum}");
        return Err(flag("queue-floors", problem, "together they may be 1 at most"));
    }
    Ok([low, normal, high])
}

fn slo_tpot_ms(ms: f64) -> Result<Option<f64>, ConfigError> {
    if !(0.0..=3_600_000.0).contains(&ms) {
        return Err(flag("slo-tpot-ms", format!("is {ms}"), "0 for no limit, or up to an hour"));
    }
    Ok((ms > 0.0).then_some(ms))
}

fn gather_ms(ms: f64) -> Result<f64, ConfigError> {
    if !(0.0..=1_000.0).contains(&ms) {
        let hint = "0 places each request by itself, up to a second";
        return Err(flag("gather-ms", format!("is {ms}"), hint));
    }
    Ok(ms)
}

fn decision_log(args: &RouterArgs) -> Result<Option<DecisionLogConfig>, ConfigError> {
    let max_bytes = args.decision_log_bytes;
    if max_bytes < LEAST_LOG_BYTES {
        return Err(flag(
            "decision-log-bytes",
            format!("is {max_bytes}"),
            &format!("it must be at least {LEAST_LOG_BYTES}"),
        ));
    }
    let Some(path) = &args.decision_log else { return Ok(None) };
    if path.file_name().is_none() || path.is_dir() {
        let problem = format!("{} is not a file", path.display());
        return Err(flag("decision-log", problem, "name a file in a directory that exists"));
    }
    Ok(Some(DecisionLogConfig { path: path.clone(), max_bytes }))
}
