//! What the dashboard shows at one moment, as an event of its stream: rates since the document before, percentiles and hits of
//! the last minute, the fleet, and the last decisions beside what happened.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::app::App;
use crate::core::admission::Class;
use crate::decisions::Remembered;
use crate::http::reply::events::json as json_of;
use crate::metrics::AllTokens;

/// Workers that have a tile; of more the page says how many it leaves out. More than a fleet of 288 GPUs has.
const MOST_WORKERS: usize = 512;
/// Decisions that are shown.
const DECISIONS: usize = 24;
/// What percentiles and the hit rate look back at.
const WINDOW: Duration = Duration::from_secs(60);

/// Makes one document after the other. It ends with the router.
pub(super) struct Documents {
    app: Weak<App>,
    /// What was counted in the last [`WINDOW`], the oldest first.
    counted: VecDeque<Counted>,
}

/// What was counted up to a moment.
#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    finished: u64,
    failed: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
}

impl Counted {
    fn of(app: &App) -> Self {
        let ended = app.request_log.counts();
        let AllTokens { prompt, cached, output } = app.metrics.models.tokens();
        Self {
            at: Instant::now(),
            finished: ended.finished,
            failed: ended.failed,
            prompt_tokens: prompt,
            cached_tokens: cached,
            output_tokens: output,
        }
    }

    /// How much of it came in each second since then; `None` where no time has passed.
    fn per_s(&self, before: &Self, of: fn(&Self) -> u64) -> Option<f64> {
        let seconds = (self.at - before.at).as_secs_f64();
        (seconds > 0.0).then(|| rounded((of(self) - of(before)) as f64 / seconds))
    }
}

impl Documents {
    pub(super) fn of(app: &Arc<App>) -> Self {
        Self { app: Arc::downgrade(app), counted: VecDeque::new() }
    }

    /// The next event.
    pub(super) fn next(&mut self) -> Option<Bytes> {
        let app = self.app.upgrade()?;
        let document = self.document(&app);
        let mut event = BytesMut::from(&b"data: "[..]);
        json_of(&mut event, &document);
        event.extend_from_slice(b"\n\n");
        Some(event.freeze())
    }

    fn document(&mut self, app: &App) -> Value {
        let now = Counted::of(app);
        let last = self.counted.back().copied();
        while self.counted.front().is_some_and(|first| now.at - first.at > WINDOW) {
            self.counted.pop_front();
        }
        let first = *self.counted.front().unwrap_or(&now);
        self.counted.push_back(now);
        let per_s = |of: fn(&Counted) -> u64| last.and_then(|last| now.per_s(&last, of));
        let prompt = now.prompt_tokens - first.prompt_tokens;
        let cached = now.cached_tokens - first.cached_tokens;
        let since = now.at.checked_sub(WINDOW).unwrap_or(now.at);
        let tiles = app.fleet.tiles(MOST_WORKERS);
        let glance = tiles.glance;
        let classes = Class::ALL.iter().zip(glance.waiting_by_class);
        let classes: Map<String, Value> =
            classes.map(|(class, waiting)| (class.as_str().to_owned(), waiting.into())).collect();
        let clock_ms = app.fleet.at_ms(now.at);
        let decisions = app.decisions.latest(DECISIONS);
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": rounded(clock_ms / 1e3),
            "draining": app.fleet.takes_requests().is_err(),
            "models": tiles.models,
            "output_tokens_per_s": per_s(|counted| counted.output_tokens),
            "prompt_tokens_per_s": per_s(|counted| counted.prompt_tokens),
            "requests_per_s": per_s(|counted| counted.finished),
            "failed_per_s": per_s(|counted| counted.failed),
            "finished": now.finished,
            "failed": now.failed,
            "running": app.metrics.requests.streams.get(),
            "hit_rate": (prompt > 0).then(|| rounded((cached as f64 / prompt as f64).min(1.0))),
            "ttft_ms": app.metrics.recent.ttft.spread(since),
            "tpot_ms": app.metrics.recent.tpot.spread(since),
            "queue": {"waiting": glance.waiting, "classes": classes, "oldest_s": rounded(glance.oldest_s)},
            "kv": {"blocks": glance.blocks, "used": glance.blocks_used, "cached": glance.blocks_cached},
            "workers_ready": glance.ready,
            "workers_total": glance.workers,
            "workers_left_out": tiles.left_out,
            "workers": tiles.workers,
            "groups": tiles.groups,
            "decisions": decisions.iter().map(|one| shown(one, clock_ms)).collect::<Vec<_>>(),
        })
    }
}

/// A decision in a line: what was predicted of the worker that was taken, and what happened.
fn shown(remembered: &Remembered, clock_ms: f64) -> Value {
    let (decision, ask) = (&remembered.decision, &remembered.decision.ask);
    let chosen = decision.chosen();
    let prefill = decision.chosen_prefill();
    json!({
        "request": decision.request,
        "at_ms": rounded(decision.at_ms),
        "age_s": rounded((clock_ms - decision.at_ms).max(0.0) / 1e3),
        "policy": decision.chooser.policy.name(),
        "worker": chosen.map(|(worker, _)| &*worker.name),
        "prefill": prefill.map(|worker| &*worker.name),
        "prompt_tokens": ask.prompt_tokens,
        "predicted": chosen.map(|(worker, estimate)| json!({
            "cached_tokens": prefill.unwrap_or(worker).cached_tokens,
            "first_token_ms": rounded(estimate.ttft_ms()),
            "decode_ms": rounded(estimate.transfer_ms + estimate.decode_ms),
            "output_tokens": rounded(ask.output_tokens),
        })),
        "actual": remembered.actual.report(),
    })
}

/// To three digits behind the point.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_that_passed() {
        let at = Instant::now();
        let before = Counted {
            at,
            finished: 1,
            failed: 0,
            prompt_tokens: 10,
            cached_tokens: 0,
            output_tokens: 100,
        };
        let later = Counted { at: at + Duration::from_secs(2), output_tokens: 150, ..before };
        assert_eq!(later.per_s(&before, |counted| counted.output_tokens), Some(25.0));
        assert_eq!(before.per_s(&before, |counted| counted.output_tokens), None);
    }
}
