//! One line for each request that ended, so many a second at most. What is left out is counted and told by the line of every
//! ten seconds.
//!
//! A line is made once a request, when all of it is over; nothing here is reached by a token. Texts of strangers are bounded
//! here; `tracing` escapes what could pass for another line or steer a terminal. The prompt is no part of a line, unless
//! `--log-prompts` asks for it.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::time::Instant;

use super::rate::LineRate;
use crate::config::LogConfig;

/// Longest text of a field, in characters: names, and why a request failed.
const FIELD: usize = 256;
/// Longest piece of a prompt.
const PROMPT: usize = 2_000;

/// Tells of requests, and counts them.
#[derive(Debug)]
pub(crate) struct RequestLog {
    began: Instant,
    prompts: bool,
    finished_lines: LineRate,
    /// Apart from those: a flood of requests that are refused hides no answer.
    failed_lines: LineRate,
    finished: AtomicU64,
    failed: AtomicU64,
    left_out: AtomicU64,
}

/// Requests so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RequestCounts {
    pub(crate) finished: u64,
    /// Refused, broken off, or left by their clients.
    pub(crate) failed: u64,
    /// Of both, those that no line told of.
    pub(crate) left_out: u64,
}

/// What is known of a request at its end. Times are in ms.
#[derive(Debug, Default)]
pub(crate) struct RequestEnd<'a> {
    /// `X-Request-ID` of its answer.
    pub(crate) id: &'a str,
    pub(crate) route: Option<&'a str>,
    pub(crate) model: Option<&'a str>,
    pub(crate) status: u16,
    /// One word; `None` if it was answered.
    pub(crate) error: Option<&'a str>,
    /// The same in a sentence.
    pub(crate) why: Option<&'a str>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) output_tokens: Option<u32>,
    pub(crate) queue_ms: Option<f64>,
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) tpot_ms: Option<f64>,
    pub(crate) total_ms: Option<f64>,
    pub(crate) worker: Option<&'a str>,
    /// Of a split request.
    pub(crate) prefill_worker: Option<&'a str>,
    /// Its number on the worker's link, by which the worker's own log names it.
    pub(crate) leg: Option<u64>,
    /// The end of the prompt, where it may be told.
    pub(crate) prompt: Option<&'a str>,
}

impl RequestLog {
    pub(crate) fn new(config: &LogConfig) -> Self {
        Self {
            began: Instant::now(),
            prompts: config.prompts,
            finished_lines: LineRate::new(config.requests_per_s),
            failed_lines: LineRate::new(config.requests_per_s),
            finished: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// So many lines a second from now on.
    pub(crate) fn change(&self, config: &LogConfig) {
        self.finished_lines.change(config.requests_per_s);
        self.failed_lines.change(config.requests_per_s);
    }

    /// Prompts may be told.
    pub(crate) fn tells_prompts(&self) -> bool {
        self.prompts
    }

    pub(crate) fn counts(&self) -> RequestCounts {
        RequestCounts {
            finished: self.finished.load(Relaxed),
            failed: self.failed.load(Relaxed),
            left_out: self.left_out.load(Relaxed),
        }
    }

    /// Counts a request that is over, and writes its line if this second has room for it.
    pub(crate) fn ended(&self, end: &RequestEnd<'_>) {
        let failed = end.error.is_some();
        let (count, lines) = if failed {
            (&self.failed, &self.failed_lines)
        } else {
            (&self.finished, &self.finished_lines)
        };
        count.fetch_add(1, Relaxed);
        if lines.admits(self.began.elapsed().as_secs()) {
            self.write(end, failed);
        } else {
            self.left_out.fetch_add(1, Relaxed);
        }
    }

    fn write(&self, end: &RequestEnd<'_>, failed: bool) {
        let model = end.model.map(|text| clipped(text, FIELD));
        let why = end.why.map(|text| clipped(text, FIELD));
        let prompt = end.prompt.filter(|_| self.prompts).map(|text| last_of(text, PROMPT));
        let message = if failed { "request failed" } else { "request finished" };
        tracing::info!(
            request = end.id,
            route = end.route,
            model = model.as_deref(),
            status = end.status,
            error = end.error,
            why = why.as_deref(),
            prompt_tokens = end.prompt_tokens,
            cached_tokens = end.cached_tokens,
            output_tokens = end.output_tokens,
            queue_ms = end.queue_ms.map(to_tenth),
            ttft_ms = end.ttft_ms.map(to_tenth),
            tpot_ms = end.tpot_ms.map(to_tenth),
            total_ms = end.total_ms.map(to_tenth),
            worker = end.worker,
            prefill_worker = end.prefill_worker,
            leg = end.leg,
            prompt = prompt.as_deref(),
            "{message}"
        );
    }
}

fn to_tenth(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

/// At most so many characters of the end of a text.
fn last_of(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().rev().nth(most.saturating_sub(1)) {
        Some((begin, _)) if begin > 0 => format!("...{}", &text[begin..]).into(),
        _ => text.into(),
    }
}

/// At most so many characters of a text.
fn clipped(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests;
