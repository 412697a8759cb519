//! What happened to a placement: recorded by the attempt that it was made for, shown beside what was predicted of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::error::RouteError;

/// Facts about one placement, as far as it has come. A few words each, so that every remembered decision can keep them.
#[derive(Debug)]
pub(crate) struct Actual {
    placed: Instant,
    /// For a worker with room, before the placement.
    waited: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    output_tokens: u32,
    cached_tokens: Option<u32>,
    /// `None` while it runs.
    end: Option<(Instant, End)>,
}

#[derive(Debug, Clone, Copy)]
enum End {
    /// With the word for the reason.
    Finished(&'static str),
    /// The word for the error. Where another worker went on, that has a decision of its own.
    Failed(&'static str),
    Cancelled,
}

/// [`Actual`] at one moment. Times are in ms, to the microsecond.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ActualReport {
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    waited_ms: f64,
    first_token_ms: Option<f64>,
    decode_ms: Option<f64>,
    total_ms: Option<f64>,
    cached_tokens: Option<u32>,
    output_tokens: u32,
}

impl Actual {
    /// The facts as they are now.
    pub(crate) fn report(&self) -> ActualReport {
        let seen = self.seen();
        let (outcome, finish_reason, error) = match seen.end {
            None => ("running", None, None),
            Some((_, End::Finished(reason))) => ("finished", Some(reason), None),
            Some((_, End::Failed(kind))) => ("failed", None, Some(kind)),
            Some((_, End::Cancelled)) => ("cancelled", None, None),
        };
        let since_placed = |at: Instant| millis(at.saturating_duration_since(self.placed));
        let decoding = seen.first_token.zip(seen.last_token);
        ActualReport {
            outcome,
            finish_reason,
            error,
            waited_ms: millis(self.waited),
            first_token_ms: seen.first_token.map(since_placed),
            decode_ms: decoding.map(|(first, last)| millis(last.saturating_duration_since(first))),
            total_ms: seen.end.map(|(at, _)| since_placed(at)),
            cached_tokens: seen.cached_tokens,
            output_tokens: seen.output_tokens,
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner) // each fact stands for itself
    }

    fn end(&self, now: Instant, end: End) {
        self.seen().end.get_or_insert((now, end));
    }
}

/// Writes down what happens to one placement. One that drops before the answer's end was cancelled.
#[derive(Debug)]
pub(crate) struct Recorder(Arc<Actual>);

impl Recorder {
    /// Of a placement that was made now, after so long a wait.
    pub(crate) fn begin(waited: Duration) -> Self {
        let (placed, seen) = (Instant::now(), Mutex::default());
        Self(Arc::new(Actual { placed, waited, seen }))
    }

    pub(crate) fn actual(&self) -> &Arc<Actual> {
        &self.0
    }

    /// So many tokens came. `cached`: tokens of the prompt that the worker found in its cache, if it said so now.
    pub(crate) fn tokens(&self, now: Instant, count: usize, cached: Option<u32>) {
        let mut seen = self.0.seen();
        seen.cached_tokens = seen.cached_tokens.or(cached);
        if count > 0 {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            seen.output_tokens = seen.output_tokens.saturating_add(count);
            seen.first_token.get_or_insert(now);
            seen.last_token = Some(now);
        }
    }

    /// The answer is complete.
    pub(crate) fn finished(&self, now: Instant, reason: &'static str) {
        self.0.end(now, End::Finished(reason));
    }

    /// This placement is over because of an error, whether or not another worker goes on.
    pub(crate) fn failed(&self, now: Instant, error: &RouteError) {
        self.0.end(now, End::Failed(error.kind()));
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.0.end(Instant::now(), End::Cancelled); // nothing, if its end is known
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> (Recorder, Arc<Actual>, Instant) {
        let recorder = Recorder::begin(Duration::from_micros(1_500));
        let actual = Arc::clone(recorder.actual());
        let placed = actual.placed;
        (recorder, actual, placed)
    }

    #[test]
    fn what_is_not_known_yet_is_not_said() {
        let (_recorder, actual, _) = recorder();
        let now = actual.report();
        assert_eq!((now.outcome, now.waited_ms), ("running", 1.5));
        let times = (now.first_token_ms, now.decode_ms, now.total_ms, now.cached_tokens);
        assert_eq!((times, now.output_tokens), ((None, None, None, None), 0));
    }

    #[test]
    fn times_count_from_the_placement_and_the_first_end_stays() {
        let (recorder, actual, placed) = recorder();
        let after = |ms| placed + Duration::from_millis(ms);
        recorder.tokens(after(10), 0, Some(64)); // nothing to read, yet the cache is known
        recorder.tokens(after(20), 1, Some(99));
        recorder.tokens(after(50), 3, None);
        recorder.finished(after(60), "length");
        recorder.failed(after(70), &RouteError::ShuttingDown);
        drop(recorder);
        let expected = ActualReport {
            outcome: "finished",
            finish_reason: Some("length"),
            error: None,
            waited_ms: 1.5,
            first_token_ms: Some(20.0),
            decode_ms: Some(30.0),
            total_ms: Some(60.0),
            cached_tokens: Some(64),
            output_tokens: 4,
        };
        assert_eq!(actual.report(), expected);
    }

    #[test]
    fn an_error_is_one_word_and_what_drops_was_cancelled() {
        let (recorder, actual, placed) = recorder();
        recorder.failed(placed, &RouteError::mistake("a long story"));
        let now = actual.report();
        assert_eq!((now.outcome, now.error), ("failed", Some("internal")));
        let (recorder, actual, _) = self::recorder();
        drop(recorder);
        let now = actual.report();
        assert_eq!((now.outcome, now.error, now.finish_reason), ("cancelled", None, None));
        assert!(now.total_ms.is_some());
    }
}
