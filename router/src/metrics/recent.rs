//! Times of the last requests, each by itself: percentiles of the last minute, which buckets of a histogram only bound.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

/// Times that are kept of each kind, some 24 KB. A guess: at more than 17 requests a second they are fewer than a minute's.
const KEPT: usize = 1_024;

/// What the dashboard tells percentiles of.
#[derive(Debug, Default)]
pub struct Recent {
    /// As `headrace_ttft_seconds`.
    pub ttft: RecentTimes,
    /// As `headrace_tpot_seconds`.
    pub tpot: RecentTimes,
}

/// The last times of one kind. One is added once a request, and nothing is computed before somebody asks.
#[derive(Debug, Default)]
pub struct RecentTimes(Mutex<VecDeque<(Instant, Duration)>>);

/// How some times are spread, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) count: usize,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
}

impl RecentTimes {
    /// Keeps a time that was measured now.
    pub fn observe(&self, now: Instant, time: Duration) {
        let mut times = self.times();
        if times.len() == KEPT {
            times.pop_front();
        }
        times.push_back((now, time));
    }

    /// Of those that were measured since then; `None` without any.
    pub(crate) fn spread(&self, since: Instant) -> Option<Spread> {
        let times = self.times();
        let recent = times.iter().rev().take_while(|(at, _)| *at >= since);
        let mut sorted: Vec<Duration> = recent.map(|(_, time)| *time).collect();
        drop(times);
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        // the nearest rank: a time that somebody waited
        let percentile = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            (sorted[rank.clamp(1, last + 1) - 1].as_secs_f64() * 1e5).round() / 1e2
        };
        Some(Spread {
            count: sorted.len(),
            p50: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
        })
    }

    fn times(&self) -> MutexGuard<'_, VecDeque<(Instant, Duration)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a time more or less
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_those_since_then_and_nothing_is_not_zero() {
        let (times, begin) = (RecentTimes::default(), Instant::now());
        assert_eq!(times.spread(begin), None);
        for ms in 1..=100 {
            times.observe(begin + Duration::from_secs(ms), Duration::from_millis(ms));
        }
        let all = times.spread(begin).unwrap();
        assert_eq!(all, Spread { count: 100, p50: 50.0, p90: 90.0, p99: 99.0 });
        let last = times.spread(begin + Duration::from_secs(100)).unwrap();
        assert_eq!(last, Spread { count: 1, p50: 100.0, p90: 100.0, p99: 100.0 });
        assert_eq!(times.spread(begin + Duration::from_secs(101)), None);
    }

    #[test]
    fn the_oldest_makes_room() {
        let (times, now) = (RecentTimes::default(), Instant::now());
        for us in 0..5_000 {
            times.observe(now, Duration::from_micros(us));
        }
        let spread = times.spread(now).unwrap();
        assert_eq!(spread.count, KEPT);
        assert!(spread.p50 > 4.4 && spread.p99 <= 5.0, "{spread:?}");
    }
}
