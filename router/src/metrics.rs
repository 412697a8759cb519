//! Counters, gauges and histograms, and their text for Prometheus. Updating one is an atomic addition, or a short lock
//! where labels are free.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::core::decision::Decision;
use crate::core::scheduler::Begun;

/// Upper bounds in seconds, for everything from a token to a long answer.
const SECONDS: [f64; 20] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 640.0,
];

/// All that the router counts; `App::render_metrics` adds what is read off at that moment.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Answered requests by route, status and error.
    http_requests: Labelled<3>,
    /// Links that were closed or never came about, by reason.
    link_errors: Labelled<1>,
    /// Legs that ended, by outcome.
    legs: Labelled<1>,
    /// Legs cancelled before their end, by stage.
    cancels: Labelled<1>,
    /// Block events that changed nothing, by reason.
    block_events_ignored: Labelled<1>,
    /// Times that a worker's blocks were not known any more, by reason.
    blocks_lost: Labelled<1>,
    /// Requests that the queue did not take, by reason.
    refused: Labelled<1>,
    /// Placements by policy.
    placements: Labelled<1>,
    /// Snapshots that workers were asked for again.
    pub resyncs: Counter,
    /// Blocks that workers removed without having said that they hold them.
    pub blocks_removed_unknown: Counter,
    /// Predictions taken back because the first token of their leg was overdue.
    pub leases_expired: Counter,
    /// Prompt tokens that workers had said they hold, at the placement.
    promised_tokens: Counter,
    /// Of these, tokens that they did not take from their caches.
    missing_tokens: Counter,
    /// First tokens, and how far off the prediction was: `|predicted - actual|`.
    ttft_error_seconds: Histogram,
    /// Placements where the shadow policy would have chosen another worker, and its predicted regret in microseconds.
    shadow_differs: Counter,
    /// See above.
    shadow_regret_us: Counter,
    /// Answers under way.
    pub streams: Gauge,
    /// Connections of clients.
    pub connections: Gauge,
    /// Connections turned away or cut, because of `--max-connections` or a stalled client.
    pub connections_refused: Counter,
    /// See above.
    pub connections_stalled: Counter,
    /// Bytes of the bodies of requests under way.
    pub body_bytes: Gauge,
    /// Workers that were told to leave, by whether they did in time.
    drains: Labelled<1>,
    /// Blocks that others pulled from workers that leave.
    handed_over_blocks: Counter,
    /// Times that a worker's circuit opened: it came and went too often.
    pub circuits_opened: Counter,
    /// 1 while this router's entry stands in etcd.
    pub registered: Gauge,
    /// What went wrong in being found by workers, by reason.
    discovery_errors: Labelled<1>,
    /// Links that completed the handshake.
    pub links: Counter,
    /// Times that a worker missed three heartbeats.
    pub suspects: Counter,
    /// Legs placed again after a worker was lost or failed, before and after their first token.
    pub retries: Counter,
    /// See above.
    pub resumes: Counter,
    /// Legs cancelled because their client took nothing.
    pub stalls: Counter,
    /// Decisions that the log had no room for, and that could not be written.
    pub decision_log_dropped: Counter,
    /// See above.
    pub decision_log_errors: Counter,
    /// Requests with a deadline for their first token, by what became of them.
    slo_requests: Labelled<1>,
    /// Tokens of prompts, answers, and of prompts found in a worker's cache.
    pub prompt_tokens: Counter,
    /// See above.
    pub completion_tokens: Counter,
    /// See above.
    pub cached_tokens: Counter,
    /// Tokens that workers drafted and checked, and those of them that became part of an answer.
    pub drafted_tokens: Counter,
    /// See above.
    pub accepted_tokens: Counter,
    /// Wait for a worker.
    pub queue_seconds: Histogram,
    /// Chat template and tokenisation.
    pub encode_seconds: Histogram,
    /// Arrival of the request to its first token.
    pub ttft_seconds: Histogram,
    /// From the tokens of one step to those of the next, per leg.
    pub itl_seconds: Histogram,
    /// Arrival to the end of the last choice.
    pub request_seconds: Histogram,
    /// A worker lost to the next token of another one.
    pub resume_seconds: Histogram,
    /// Cancel sent to blocks free, per leg.
    pub cancel_to_freed_seconds: Histogram,
    /// The first leg of a request told to stop to the last block free, on whichever worker.
    pub hangup_to_freed_seconds: Histogram,
    /// Prefill legs that gave no token: their decode workers computed the prompts.
    pub prefills_lost: Counter,
    /// Pulls of KV by back-end and outcome.
    transfers: Labelled<2>,
    /// Bytes that they moved.
    transfer_bytes: Counter,
    /// How long those took that moved something.
    transfer_seconds: Histogram,
}

impl Metrics {
    /// A request was answered; `error` is the error's kind, empty without one.
    pub fn http_request(&self, route: &str, status: u16, error: &str) {
        self.http_requests.inc([route, status.to_string().as_str(), error]);
    }

    /// A leg was placed.
    pub(crate) fn placed(&self, decision: &Decision) {
        self.placements.inc([decision.chooser.policy.name().as_str()]);
        if let Some(shadow) = &decision.shadow
            && decision.shadow_differs()
        {
            self.shadow_differs.inc();
            self.shadow_regret_us.add((shadow.regret_ms.max(0.0) * 1e3) as u64);
        }
    }

    /// A leg got its first token.
    pub(crate) fn begun(&self, begun: &Begun) {
        self.promised_tokens.add(begun.held_tokens.into());
        self.missing_tokens.add(begun.held_tokens.saturating_sub(begun.cached_tokens).into());
        let error_ms = (begun.predicted_ttft_ms - begun.ttft_ms).abs();
        self.ttft_error_seconds.observe(Duration::from_secs_f64((error_ms / 1e3).min(1e6)));
    }

    /// A block event changed nothing.
    pub fn block_event_ignored(&self, reason: &str) {
        self.block_events_ignored.inc([reason]);
    }

    /// What a worker said of its blocks is worth nothing until it has sent a new snapshot.
    pub fn blocks_lost(&self, reason: &str) {
        self.blocks_lost.inc([reason]);
    }

    /// The queue did not take a request.
    pub(crate) fn refused(&self, reason: &str) {
        self.refused.inc([reason]);
    }

    /// A link was closed, or refused, for this reason.
    pub fn link_error(&self, reason: &str) {
        self.link_errors.inc([reason]);
    }

    /// A drain is over.
    pub(crate) fn drained(&self, outcome: &str) {
        self.drains.inc([outcome]);
    }

    /// Blocks of a leaving worker went to others.
    pub(crate) fn handed_over(&self, blocks: usize) {
        self.handed_over_blocks.add(blocks as u64);
    }

    /// Etcd did not do what it was asked for, or forgot this router.
    pub(crate) fn discovery_error(&self, reason: &str) {
        self.discovery_errors.inc([reason]);
    }

    /// A request with a deadline for its first token is over.
    pub fn slo_request(&self, result: &str) {
        self.slo_requests.inc([result]);
    }

    /// A pull of KV ended, with this error or well.
    pub(crate) fn transferred(&self, backend: &str, bytes: u64, ms: f64, error: Option<&str>) {
        self.transfers
            .inc([known_word(&BACKENDS, backend), known_word(&OUTCOMES, error.unwrap_or("ok"))]);
        if error.is_none() {
            self.transfer_bytes.add(bytes);
            let seconds = (ms / 1e3).clamp(0.0, 1e6); // NaN is no number of seconds, and becomes one
            self.transfer_seconds.observe(Duration::from_secs_f64(if seconds.is_nan() {
                0.0
            } else {
                seconds
            }));
        }
    }

    /// A leg ended.
    pub fn leg_ended(&self, outcome: &str) {
        self.legs.inc([outcome]);
    }

    /// A leg was cancelled in this stage.
    pub fn cancelled(&self, stage: &str) {
        self.cancels.inc([stage]);
    }

    /// Everything counted here, in the text format of Prometheus; more families may follow.
    #[must_use]
    pub fn render(&self) -> Text {
        let mut text = Text::default();
        text.family("headrace_build_info", "gauge", "Version of the router; always 1.");
        text.sample("", &[("version", &env!("CARGO_PKG_VERSION"))], 1);
        let http = ["route", "status", "error"];
        text.labelled(
            "headrace_http_requests_total",
            "HTTP requests answered.",
            http,
            &self.http_requests,
        );
        text.gauge("headrace_http_connections", "Open connections of clients.", &self.connections);
        text.counter(
            "headrace_http_connections_refused_total",
            "Connections turned away because --max-connections were open.",
            &self.connections_refused,
        );
        text.counter(
            "headrace_http_connections_stalled_total",
            "Connections cut because the client read nothing for --stall-timeout-ms.",
            &self.connections_stalled,
        );
        text.gauge(
            "headrace_http_body_bytes",
            "Bodies of requests that have not begun to be answered.",
            &self.body_bytes,
        );
        text.gauge("headrace_streams", "Answers under way, each choice counted.", &self.streams);
        text.labelled(
            "headrace_legs_total",
            "Legs of requests that ended, by outcome.",
            ["outcome"],
            &self.legs,
        );
        text.labelled(
            "headrace_cancels_total",
            "Legs cancelled before their end (hang-up, stop string, deadline), by stage.",
            ["stage"],
            &self.cancels,
        );
        text.counter(
            "headrace_retries_total",
            "Legs placed again after their worker was lost or failed before their first token.",
            &self.retries,
        );
        text.counter(
            "headrace_resumes_total",
            "Answers under way that went on with another worker.",
            &self.resumes,
        );
        text.counter(
            "headrace_prefills_lost_total",
            "Prefill legs that gave no token: the decode worker computed the prompt.",
            &self.prefills_lost,
        );
        text.labelled(
            "headrace_transfers_total",
            "Pulls of KV between workers. Where one failed, the decode worker computed the prompt.",
            ["backend", "outcome"],
            &self.transfers,
        );
        text.counter("headrace_transfer_bytes_total", "KV that was pulled.", &self.transfer_bytes);
        text.counter(
            "headrace_stalls_total",
            "Legs cancelled because their client took nothing.",
            &self.stalls,
        );
        text.labelled(
            "headrace_slo_requests_total",
            "Requests with a deadline for their first token: those that met it and --slo-tpot-ms, and those that did not.",
            ["result"],
            &self.slo_requests,
        );
        text.counter(
            "headrace_decision_log_dropped_total",
            "Decisions that were not written because the disk was too slow, or they were too long.",
            &self.decision_log_dropped,
        );
        text.counter(
            "headrace_decision_log_errors_total",
            "Decisions that could not be written to --decision-log.",
            &self.decision_log_errors,
        );
        text.counter("headrace_links_total", "Workers that joined.", &self.links);
        text.counter(
            "headrace_suspects_total",
            "Workers that missed three heartbeats: their requests went on elsewhere.",
            &self.suspects,
        );
        text.labelled(
            "headrace_link_errors_total",
            "Links that were refused or broke, by reason.",
            ["reason"],
            &self.link_errors,
        );
        text.labelled(
            "headrace_drains_total",
            "Workers that were drained, by whether they left in time.",
            ["outcome"],
            &self.drains,
        );
        text.counter(
            "headrace_drain_blocks_handed_over_total",
            "Cached blocks that others pulled from workers that leave.",
            &self.handed_over_blocks,
        );
        text.counter(
            "headrace_circuits_opened_total",
            "Times that a worker's dials began to be refused because it came and went too often.",
            &self.circuits_opened,
        );
        text.gauge(
            "headrace_discovery_registered",
            "1 while etcd is known to hold this router's entry (--register).",
            &self.registered,
        );
        text.labelled(
            "headrace_discovery_errors_total",
            "Failures to be registered in etcd, by reason.",
            ["reason"],
            &self.discovery_errors,
        );
        self.render_scheduling(&mut text);
        text.counter("headrace_prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens);
        text.counter(
            "headrace_completion_tokens_total",
            "Tokens generated.",
            &self.completion_tokens,
        );
        text.counter(
            "headrace_cached_tokens_total",
            "Tokens of prompts that workers took from their prefix caches.",
            &self.cached_tokens,
        );
        text.counter(
            "headrace_drafted_tokens_total",
            "Tokens that workers drafted (--mtp) and checked.",
            &self.drafted_tokens,
        );
        text.counter(
            "headrace_accepted_tokens_total",
            "Drafted tokens that became part of an answer.",
            &self.accepted_tokens,
        );
        for (name, help, histogram) in [
            ("headrace_queue_seconds", "Wait for a worker with room.", &self.queue_seconds),
            (
                "headrace_encode_seconds",
                "Chat template and tokenisation, waiting for a thread included.",
                &self.encode_seconds,
            ),
            (
                "headrace_ttft_seconds",
                "Arrival of a request to its first token.",
                &self.ttft_seconds,
            ),
            ("headrace_itl_seconds", "From step to step of one leg.", &self.itl_seconds),
            (
                "headrace_request_seconds",
                "Arrival of a request to the end of its last choice.",
                &self.request_seconds,
            ),
            (
                "headrace_resume_seconds",
                "From the loss of a worker to the next token of an answer that went on with another one.",
                &self.resume_seconds,
            ),
            (
                "headrace_cancel_to_freed_seconds",
                "From the cancel of a leg to its worker's word that the blocks are free.",
                &self.cancel_to_freed_seconds,
            ),
            (
                "headrace_hangup_to_freed_seconds",
                "From the first cancel of a request to the last of its blocks free, on all workers.",
                &self.hangup_to_freed_seconds,
            ),
            (
                "headrace_transfer_seconds",
                "Pulls of KV between workers that went well.",
                &self.transfer_seconds,
            ),
        ] {
            text.histogram(name, help, histogram);
        }
        text
    }
}

impl Metrics {
    fn render_scheduling(&self, text: &mut Text) {
        text.labelled(
            "headrace_placements_total",
            "Legs placed on a worker, by policy.",
            ["policy"],
            &self.placements,
        );
        text.labelled(
            "headrace_refused_total",
            "Requests turned away on arrival or out of the queue, by the bound or deadline that stood against them.",
            ["reason"],
            &self.refused,
        );
        text.labelled(
            "headrace_block_events_ignored_total",
            "Block events of workers that changed nothing, by reason.",
            ["reason"],
            &self.block_events_ignored,
        );
        text.labelled(
            "headrace_blocks_lost_total",
            "Times that it was not known any more which blocks a worker holds, by reason.",
            ["reason"],
            &self.blocks_lost,
        );
        for (name, help, counter) in [
            ("headrace_resyncs_total", "Snapshots asked for again.", &self.resyncs),
            (
                "headrace_blocks_removed_unknown_total",
                "Blocks that workers removed without having said that they hold them.",
                &self.blocks_removed_unknown,
            ),
            (
                "headrace_leases_expired_total",
                "Booked blocks of legs whose first token was overdue, taken back.",
                &self.leases_expired,
            ),
            (
                "headrace_promised_tokens_total",
                "Prompt tokens that the chosen workers had said they hold.",
                &self.promised_tokens,
            ),
            (
                "headrace_missing_tokens_total",
                "Of the promised tokens, those that came from no cache.",
                &self.missing_tokens,
            ),
            (
                "headrace_shadow_differs_total",
                "Placements where the shadow policy would have chosen another worker.",
                &self.shadow_differs,
            ),
            (
                "headrace_shadow_regret_microseconds_total",
                "Predicted cost of following the shadow policy there, where it was worse.",
                &self.shadow_regret_us,
            ),
        ] {
            text.counter(name, help, counter);
        }
        text.histogram(
            "headrace_ttft_prediction_error_seconds",
            "Distance between predicted and actual time from placement to first token.",
            &self.ttft_error_seconds,
        );
    }
}

/// Words of workers that become labels; any other word becomes `other`, so that nobody can make labels without end.
pub(crate) const BACKENDS: [&str; 5] = ["shm", "tcp", "nixl", "cuda-ipc", "none"];
pub(crate) const OUTCOMES: [&str; 10] = [
    "ok",
    "lost",
    "revoked",
    "expired",
    "checksum",
    "timeout",
    "refused",
    "layout",
    "no_room",
    "cancelled",
];

/// `word`, if it is one of `words`.
pub(crate) fn known_word<'a>(words: &[&'a str], word: &str) -> &'a str {
    words.iter().find(|known| **known == word).copied().unwrap_or("other")
}

/// A number that grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// By one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// By `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that comes and goes.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// To `n`.
    pub fn set(&self, n: usize) {
        self.0.store(i64::try_from(n).unwrap_or(i64::MAX), Relaxed);
    }

    /// By `n`, up or down.
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// Durations, counted by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; SECONDS.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// One more.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.buckets[SECONDS.partition_point(|bound| *bound < seconds)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum()
    }
}

/// Counters that differ in labels. The values of labels come from the program, not from clients: their number is
/// bounded.
#[derive(Debug)]
struct Labelled<const N: usize>(Mutex<BTreeMap<[String; N], u64>>);

impl<const N: usize> Default for Labelled<N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<const N: usize> Labelled<N> {
    fn inc(&self, labels: [&str; N]) {
        let mut counts = self.0.lock().expect("no holder panics");
        *counts.entry(labels.map(str::to_owned)).or_default() += 1;
    }
}

/// Text in the format of Prometheus, one family after the other.
#[derive(Debug, Default)]
pub struct Text(String, &'static str);

impl Text {
    /// Begins a family: samples follow.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        self.1 = name;
    }

    /// One sample of the family begun last.
    pub fn sample(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.0.push_str(self.1);
        self.0.push_str(suffix);
        for (i, (label, value)) in labels.iter().enumerate() {
            let value = value.to_string();
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{value}\"", if i == 0 { '{' } else { ',' });
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// What was written.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }

    /// A family of one number.
    pub fn single(&mut self, name: &'static str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample("", &[], value);
    }

    fn counter(&mut self, name: &'static str, help: &str, counter: &Counter) {
        self.single(name, "counter", help, counter.get());
    }

    fn gauge(&mut self, name: &'static str, help: &str, gauge: &Gauge) {
        self.single(name, "gauge", help, gauge.get());
    }

    fn labelled<const N: usize>(
        &mut self,
        name: &'static str,
        help: &str,
        labels: [&str; N],
        counts: &Labelled<N>,
    ) {
        self.family(name, "counter", help);
        for (values, count) in counts.0.lock().expect("no holder panics").iter() {
            let pairs: Vec<(&str, &dyn Display)> =
                labels.into_iter().zip(values.iter().map(|value| value as &dyn Display)).collect();
            self.sample("", &pairs, count);
        }
    }

    fn histogram(&mut self, name: &'static str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let mut total = 0;
        for (bound, bucket) in SECONDS.iter().zip(&histogram.buckets) {
            total += bucket.load(Relaxed);
            self.sample("_bucket", &[("le", bound)], total);
        }
        total += histogram.buckets[SECONDS.len()].load(Relaxed);
        self.sample("_bucket", &[("le", &"+Inf")], total);
        let seconds = Duration::from_nanos(histogram.sum_ns.load(Relaxed)).as_secs_f64();
        self.sample("_sum", &[], seconds);
        self.sample("_count", &[], total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_well_formed() {
        let metrics = Metrics::default();
        metrics.http_request("/v1/chat/completions", 200, "");
        metrics.link_error("a \"quoted\"\nreason\\");
        metrics.ttft_seconds.observe(Duration::from_millis(3));
        metrics.ttft_seconds.observe(Duration::from_secs(10_000));
        let text = metrics.render().into_string();
        assert!(text.ends_with('\n'));
        assert!(text.contains(
            "headrace_http_requests_total{route=\"/v1/chat/completions\",status=\"200\",error=\"\"} 1\n"
        ));
        assert!(text.contains(r#"{reason="a \"quoted\"\nreason\\"} 1"#));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"0.0025\"} 0\n"));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"0.005\"} 1\n"));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"+Inf\"} 2\n"));
        assert!(text.contains("headrace_ttft_seconds_count 2\n"));
        let mut seen = std::collections::HashSet::new();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split(' ').next().unwrap().to_owned();
                assert!(seen.insert(family.clone()), "{family} twice");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                assert!(kind.starts_with(&family), "{line}");
            } else {
                assert!(line.starts_with(&family), "{line}");
                let value = line.rsplit(' ').next().unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
        }
    }
}
