//! The result of a run, the same from `replay`, `load` and `sim`. Its fields are what `compare` and `plot` read.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::mock::lockstep::RoundReport;

use crate::report::sample::{Answer, Sample, Slo};
use crate::report::stats::{Quantiles, sorted, thinned};

mod output;
pub(crate) mod sample;
pub(crate) mod stats;
mod table;

pub(crate) use output::Output;

/// Points of a distribution that are kept for its curve.
const CURVE_POINTS: usize = 200;
/// Parts of the run for which the hit rate is kept.
const TIME_BINS: usize = 40;
/// Error texts that are kept.
const ERROR_SAMPLES: usize = 3;
/// Above this share of a core the client may be what was measured.
const CLIENT_IS_LIMIT: f64 = 0.8;

/// What a run was, beside its samples.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setting {
    /// Name of the trace.
    pub(crate) trace: Option<String>,
    pub(crate) policy: Option<String>,
    /// `live` or `sim`.
    pub(crate) mode: &'static str,
    /// Workers there are, so that those without a request count too.
    pub(crate) workers: Option<usize>,
    pub(crate) bound_hit_rate: Option<f64>,
    pub(crate) slo: Option<Slo>,
    /// From the first request's time to the last answer.
    pub(crate) wall_s: f64,
    /// Requests per second that were to be sent; `None` in a closed loop.
    pub(crate) offered_per_s: Option<f64>,
    /// CPU time of the client, and its share of a core.
    pub(crate) client_cpu: Option<(f64, f64)>,
    /// CPU time of processes that were to be watched.
    pub(crate) watched_cpu_s: Vec<f64>,
    /// How many times as fast as recorded the trace ran.
    pub(crate) speed: Option<f64>,
    /// What a simulation took.
    pub(crate) run_s: Option<f64>,
    /// Of a simulation: how far predictions were off.
    pub(crate) ttft_errors: TtftErrors,
    /// Of simulated workers.
    pub(crate) preemptions: Option<u64>,
    /// Where workers came and went.
    pub(crate) autoscaled: Option<AutoscaleReport>,
    /// Where there are prefill workers.
    pub(crate) split: Option<Split>,
    /// Where workers are ranks of groups.
    pub(crate) groups: Option<RoundReport>,
    /// Of a simulated router.
    pub(crate) router_ms: Option<RouterMs>,
}

/// Times that the simulated router had, so that a live one can be given the same on a fleet whose clock runs faster.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RouterMs {
    /// The router's `--worker-queue-ms`.
    pub(crate) worker_queue: f64,
    /// The router's `--queue-timeout-ms`.
    pub(crate) queue_timeout: f64,
}

/// What an autoscaler did in a simulation.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct AutoscaleReport {
    /// Workers that were there or starting, times the hours.
    pub(crate) worker_hours: f64,
    /// The same over the time of the run.
    pub(crate) mean_workers: f64,
    /// The most at one time.
    pub(crate) peak_workers: usize,
    pub(crate) started: usize,
    pub(crate) stopped: usize,
}

/// Of each first token: how far its prediction was off, over what it took from the placement on.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct TtftErrors {
    /// As predicted at the placement.
    pub(crate) ttft_prediction_error: Option<Quantiles>,
    /// With those that were placed beside it in the same moment.
    pub(crate) ttft_prediction_error_settled: Option<Quantiles>,
    /// With all that were placed beside it until then.
    pub(crate) ttft_prediction_error_last: Option<Quantiles>,
    /// At the placement, of those after which no other prompt was sent to their worker.
    pub(crate) ttft_prediction_error_undisturbed: Option<Quantiles>,
}

/// What became of requests on two workers.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Split {
    /// Placed on a pair, each try counted.
    pub(crate) requests: u64,
    /// Of those, left to the decode worker because the prefill worker was lost.
    pub(crate) alone: u64,
    /// Transfers that came whole, their bytes, and those that failed.
    pub(crate) pulls: u64,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
}

/// Result of a run. Times are in ms of the trace's clock.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    trace: Option<String>,
    policy: Option<String>,
    mode: &'static str,
    /// Sent, whatever became of them.
    requests: usize,
    errors: usize,
    errors_by_kind: BTreeMap<String, usize>,
    error_samples: Vec<String>,
    wall_s: f64,
    run_s: Option<f64>,
    speed: Option<f64>,
    offered_per_s: Option<f64>,
    requests_per_s: f64,
    tokens_per_s: f64,
    prompt_tokens: u64,
    completion_tokens: u64,
    cached_tokens: Option<u64>,
    token_hit_rate: Option<f64>,
    bound_hit_rate: Option<f64>,
    ttft_ms: Option<Quantiles>,
    #[serde(flatten)]
    ttft_errors: TtftErrors,
    #[serde(skip_serializing_if = "Option::is_none")]
    preemptions: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    autoscaled: Option<AutoscaleReport>,
    /// Mean over the requests.
    tpot_ms: Option<f64>,
    tpot_quantiles_ms: Option<Quantiles>,
    itl_ms: Option<Quantiles>,
    /// Of each token, where tokens were held against a pace.
    #[serde(skip_serializing_if = "Option::is_none")]
    late_ms: Option<Quantiles>,
    e2e_ms: Option<Quantiles>,
    goodput: Option<Goodput>,
    /// Greatest over mean, over workers, of the prompt tokens that were computed.
    imbalance: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<RoundReport>,
    router_ms: Option<RouterMs>,
    uncached_tokens_by_worker: BTreeMap<String, u64>,
    chunks: u64,
    client_lag_ms: Option<Quantiles>,
    client_cpu_s: Option<f64>,
    client_cpu_share: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cpu_s: Vec<f64>,
    notes: Vec<String>,
    hit_rate_over_time: Vec<Bin>,
    /// Sorted, thinned out evenly: the curve of the distribution.
    ttft_curve_ms: Vec<f64>,
    tpot_curve_ms: Vec<f64>,
}

/// Requests that met every limit; errors and rejections are misses.
#[derive(Debug, Clone, Serialize)]
struct Goodput {
    slo: Slo,
    met: usize,
    share: f64,
    per_s: f64,
}

/// Part of a run, by when its requests were due.
#[derive(Debug, Clone, Serialize)]
struct Bin {
    from_s: f64,
    requests: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttft_mean_ms: f64,
}

impl Report {
    pub(crate) fn new(setting: Setting, samples: &[Sample]) -> Self {
        let answers: Vec<&Answer> = samples.iter().filter_map(|s| s.result.as_ref().ok()).collect();
        let failures = samples.iter().filter_map(|s| s.result.as_ref().err());
        let mut errors_by_kind = BTreeMap::new();
        for failure in failures.clone() {
            *errors_by_kind.entry(failure.kind.clone()).or_default() += 1;
        }
        let error_samples =
            failures.map(|f| format!("{}: {}", f.kind, f.text)).take(ERROR_SAMPLES).collect();
        let sum = |count: fn(&Answer) -> u32| answers.iter().map(|a| u64::from(count(a))).sum();
        let (prompt_tokens, completion_tokens): (u64, u64) =
            (sum(|a| a.prompt_tokens), sum(|a| a.completion_tokens));
        let cached_tokens = answers
            .iter()
            .any(|answer| answer.cached_tokens.is_some())
            .then(|| sum(|a| a.cached_tokens.unwrap_or(0)));
        let tpot_quantiles_ms = Quantiles::of_ms(answers.iter().filter_map(|a| a.tpot_ms()));
        let ttft = sorted(answers.iter().map(|a| a.ttft_ms));
        let tpot = sorted(answers.iter().filter_map(|a| a.tpot_ms()));
        let gaps = answers.iter().flat_map(|a| a.gaps_ms.iter().map(|gap| f64::from(*gap)));
        let late = answers.iter().flat_map(|a| a.late_ms.iter().map(|late| f64::from(*late)));
        let by_worker = uncached_by_worker(&answers);
        let wall_s = setting.wall_s;
        Self {
            requests: samples.len(),
            errors: samples.len() - answers.len(),
            errors_by_kind,
            error_samples,
            wall_s,
            run_s: setting.run_s,
            speed: setting.speed,
            ttft_errors: setting.ttft_errors.clone(),
            preemptions: setting.preemptions,
            autoscaled: setting.autoscaled,
            offered_per_s: setting.offered_per_s,
            requests_per_s: answers.len() as f64 / wall_s,
            tokens_per_s: completion_tokens as f64 / wall_s,
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            token_hit_rate: cached_tokens.map(|n| n as f64 / prompt_tokens.max(1) as f64),
            bound_hit_rate: setting.bound_hit_rate,
            ttft_ms: Quantiles::of_ms(ttft.iter().copied()),
            tpot_ms: tpot_quantiles_ms.map(|quantiles| quantiles.mean),
            tpot_quantiles_ms,
            chunks: answers.iter().map(|a| a.gaps_ms.len() as u64 + 1).sum(),
            itl_ms: Quantiles::of_ms(gaps),
            late_ms: Quantiles::of_ms(late),
            e2e_ms: Quantiles::of_ms(answers.iter().map(|a| a.e2e_ms)),
            goodput: setting.slo.map(|slo| Goodput::of(slo, &answers, samples.len(), wall_s)),
            imbalance: imbalance(&by_worker, setting.workers),
            split: setting.split,
            groups: setting.groups,
            router_ms: setting.router_ms,
            uncached_tokens_by_worker: by_worker,
            client_lag_ms: Quantiles::of_ms(samples.iter().map(|s| s.lag_ms)),
            client_cpu_s: setting.client_cpu.map(|(cpu_s, _)| cpu_s),
            client_cpu_share: setting.client_cpu.map(|(_, share)| share),
            notes: notes(&setting),
            cpu_s: setting.watched_cpu_s,
            hit_rate_over_time: bins(samples),
            ttft_curve_ms: thinned(&ttft, CURVE_POINTS),
            tpot_curve_ms: thinned(&tpot, CURVE_POINTS),
            trace: setting.trace,
            policy: setting.policy,
            mode: setting.mode,
        }
    }
}

impl Goodput {
    fn of(slo: Slo, answers: &[&Answer], requests: usize, wall_s: f64) -> Self {
        let met = answers.iter().filter(|answer| slo.met(answer)).count();
        let share = met as f64 / requests.max(1) as f64;
        Self { slo, met, share, per_s: met as f64 / wall_s }
    }
}

fn uncached_by_worker(answers: &[&Answer]) -> BTreeMap<String, u64> {
    let mut by_worker = BTreeMap::new();
    for answer in answers {
        if let Some(worker) = &answer.worker {
            let cached = answer.cached_tokens.unwrap_or(0);
            *by_worker.entry(worker.to_string()).or_default() +=
                u64::from(answer.prompt_tokens.saturating_sub(cached));
        }
    }
    by_worker
}

fn imbalance(uncached: &BTreeMap<String, u64>, workers: Option<usize>) -> Option<f64> {
    let workers = workers.unwrap_or(0).max(uncached.len());
    let (most, all) = (*uncached.values().max()?, uncached.values().sum::<u64>());
    (all > 0).then(|| most as f64 * workers as f64 / all as f64)
}

fn notes(setting: &Setting) -> Vec<String> {
    let limit = setting.client_cpu.filter(|(_, share)| *share > CLIENT_IS_LIMIT);
    let note = limit.map(|(_, share)| {
        format!("the client used {:.0} % of a core: it may be what was measured", share * 100.0)
    });
    note.into_iter().collect()
}

fn bins(samples: &[Sample]) -> Vec<Bin> {
    let end_ms = samples.iter().map(|s| s.due_ms).fold(0.0, f64::max);
    let width_ms = (end_ms / TIME_BINS as f64).max(1.0);
    let mut bins: BTreeMap<usize, Bin> = BTreeMap::new();
    for sample in samples {
        let Ok(answer) = &sample.result else { continue };
        let at = ((sample.due_ms / width_ms) as usize).min(TIME_BINS - 1);
        let bin = bins.entry(at).or_insert_with(|| Bin {
            from_s: at as f64 * width_ms / 1e3,
            requests: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            ttft_mean_ms: 0.0,
        });
        bin.requests += 1;
        bin.prompt_tokens += u64::from(answer.prompt_tokens);
        bin.cached_tokens += u64::from(answer.cached_tokens.unwrap_or(0));
        bin.ttft_mean_ms += (answer.ttft_ms - bin.ttft_mean_ms) / bin.requests as f64;
    }
    bins.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample::Failure;

    fn answer(due_ms: f64, worker: &str, ttft_ms: f64, cached: u32) -> Sample {
        let answer = Answer {
            ttft_ms,
            last_ms: ttft_ms + 90.0,
            e2e_ms: ttft_ms + 91.0,
            gaps_ms: vec![10.0; 9],
            late_ms: Vec::new(),
            prompt_tokens: 100,
            completion_tokens: 10,
            cached_tokens: Some(cached),
            worker: Some(worker.into()),
        };
        Sample { due_ms, lag_ms: 0.5, result: Ok(answer) }
    }

    fn failed(kind: &str) -> Sample {
        let failure = Failure { kind: kind.into(), text: "no".into() };
        Sample { due_ms: 5.0, lag_ms: 0.5, result: Err(failure) }
    }

    fn setting() -> Setting {
        Setting {
            mode: "live",
            wall_s: 2.0,
            workers: Some(4),
            slo: Some("ttft=1s".parse().unwrap()),
            client_cpu: Some((1.9, 0.95)),
            ..Setting::default()
        }
    }

    #[test]
    fn rates_count_what_was_answered_and_misses_count_as_sent() {
        let samples = [
            answer(0.0, "a", 500.0, 80),
            answer(1000.0, "b", 2000.0, 0),
            answer(4000.0, "a", 900.0, 20),
            failed("429"),
            failed("429"),
        ];
        let report = serde_json::to_value(Report::new(setting(), &samples)).unwrap();
        assert_eq!(report["requests"], 5);
        assert_eq!(report["errors"], 2);
        assert_eq!(report["errors_by_kind"]["429"], 2);
        assert_eq!(report["token_hit_rate"], 100.0 / 300.0);
        assert_eq!(report["requests_per_s"], 1.5);
        assert_eq!(report["goodput"]["met"], 2);
        assert_eq!(report["goodput"]["share"], 0.4);
        assert_eq!(report["goodput"]["per_s"], 1.0);
        assert_eq!(report["tpot_ms"], 10.0);
        assert_eq!(report["ttft_ms"]["p50"], 900.0);
        // a computed 20 + 80, b 100, and two workers nothing
        assert_eq!(report["imbalance"], 2.0);
        assert_eq!(report["hit_rate_over_time"].as_array().unwrap().len(), 3);
        assert!(report["notes"][0].as_str().unwrap().starts_with("the client used 95 %"));
    }

    #[test]
    fn what_nobody_said_is_null() {
        let mut sample = answer(0.0, "a", 1.0, 0);
        if let Ok(answer) = &mut sample.result {
            (answer.cached_tokens, answer.worker) = (None, None);
        }
        let report = serde_json::to_value(Report::new(setting(), &[sample])).unwrap();
        assert!(report["token_hit_rate"].is_null() && report["imbalance"].is_null());
        let nothing = serde_json::to_value(Report::new(setting(), &[failed("connect")])).unwrap();
        assert!(nothing["ttft_ms"].is_null() && nothing["tpot_ms"].is_null());
    }
}
