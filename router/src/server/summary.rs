//! One line every ten seconds while there is work: how much was done, and how full the fleet is. Workers write one with the
//! same names.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::app::App;
use crate::fleet::registry::FleetGlance;
use crate::log::requests::RequestCounts;
use crate::metrics::AllTokens;

const PERIOD: Duration = Duration::from_secs(10);

/// What was counted up to a moment.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    requests: RequestCounts,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
}

/// What happened between two moments, and how the fleet stands at the second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    requests: RequestCounts,
    output_tokens_per_s: f64,
    prompt_tokens_per_s: f64,
    /// `None` where no prompt came.
    hit_rate: Option<f64>,
    /// Answers in flight.
    running: u64,
    fleet: FleetGlance,
}

impl Counted {
    fn of(app: &App) -> Self {
        let AllTokens { prompt, cached, output } = app.metrics.models.tokens();
        Self {
            requests: app.request_log.counts(),
            prompt_tokens: prompt,
            cached_tokens: cached,
            output_tokens: output,
        }
    }
}

impl Summary {
    /// `None` if there is nothing to tell.
    fn of(
        before: Counted,
        now: Counted,
        seconds: f64,
        running: u64,
        fleet: FleetGlance,
    ) -> Option<Self> {
        let requests = RequestCounts {
            finished: now.requests.finished - before.requests.finished,
            failed: now.requests.failed - before.requests.failed,
            left_out: now.requests.left_out - before.requests.left_out,
        };
        let prompt = now.prompt_tokens - before.prompt_tokens;
        let cached = now.cached_tokens - before.cached_tokens;
        let output = now.output_tokens - before.output_tokens;
        let is_idle = requests == RequestCounts::default()
            && prompt + output + running == 0
            && fleet.waiting == 0;
        (!is_idle).then(|| Self {
            requests,
            output_tokens_per_s: tenths(output as f64 / seconds),
            prompt_tokens_per_s: tenths(prompt as f64 / seconds),
            hit_rate: (prompt > 0).then(|| thousandths((cached as f64 / prompt as f64).min(1.0))),
            running,
            fleet,
        })
    }

    fn write(&self) {
        let Self { requests, fleet, .. } = self;
        tracing::info!(
            requests = requests.finished,
            failed = requests.failed,
            running = self.running,
            waiting = fleet.waiting,
            output_tokens_per_s = self.output_tokens_per_s,
            prompt_tokens_per_s = self.prompt_tokens_per_s,
            kv_used = fleet.kv_used().map(thousandths),
            hit_rate = self.hit_rate,
            workers = fleet.ready,
            lines_left_out = (requests.left_out > 0).then_some(requests.left_out),
            "the last 10 s"
        );
    }
}

/// Writes the lines for ever.
pub(super) async fn keep_summing_up(app: Arc<App>) {
    let mut ticks = interval_at(Instant::now() + PERIOD, PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut before, mut since) = (Counted::of(&app), Instant::now());
    loop {
        let now = ticks.tick().await;
        let counted = Counted::of(&app);
        let running = u64::try_from(app.metrics.requests.streams.get()).unwrap_or(0);
        let seconds = now.saturating_duration_since(since).as_secs_f64().max(f64::MIN_POSITIVE);
        let summary = Summary::of(before, counted, seconds, running, app.fleet.glance());
        if let Some(summary) = summary {
            summary.write();
        }
        (before, since) = (counted, now);
    }
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn thousandths(share: f64) -> f64 {
    (share * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(finished: u64, prompt: u64, cached: u64, output: u64) -> Counted {
        Counted {
            requests: RequestCounts { finished, ..RequestCounts::default() },
            prompt_tokens: prompt,
            cached_tokens: cached,
            output_tokens: output,
        }
    }

    #[test]
    fn there_is_no_line_about_nothing() {
        let same = counted(5, 100, 50, 70);
        let summary = |running, fleet| Summary::of(same, same, 10.0, running, fleet);
        assert_eq!(summary(0, FleetGlance::default()), None);
        assert!(summary(1, FleetGlance::default()).is_some(), "an answer is in flight");
        let waits = FleetGlance { waiting: 1, ..FleetGlance::default() };
        assert!(summary(0, waits).is_some());
        let left_out = RequestCounts { left_out: 1, ..same.requests };
        let more = Counted { requests: left_out, ..same };
        assert!(Summary::of(same, more, 10.0, 0, FleetGlance::default()).is_some());
    }

    #[test]
    fn rates_are_of_the_time_between_and_hits_of_the_prompts_in_it() {
        let fleet = FleetGlance { blocks: 400, blocks_used: 100, ..FleetGlance::default() };
        let (before, now) = (counted(5, 1_000, 900, 70), counted(9, 1_300, 999, 135));
        let summary = Summary::of(before, now, 10.0, 2, fleet).unwrap();
        assert_eq!(summary.requests.finished, 4);
        let rates = (summary.prompt_tokens_per_s, summary.output_tokens_per_s);
        assert_eq!((rates, summary.hit_rate), ((30.0, 6.5), Some(0.33)));
        assert_eq!(summary.fleet.kv_used(), Some(0.25));
        let none = Summary::of(before, Counted { prompt_tokens: 1_000, ..now }, 10.0, 2, fleet);
        assert_eq!(none.unwrap().hit_rate, None, "no prompt, no rate");
    }
}
