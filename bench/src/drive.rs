//! When requests go out: at times fixed beforehand, whatever the server does, or each when the one before it is answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::client::{Client, Request};
use crate::mock::clock::Clock;
use crate::progress::Progress;
use crate::random::Random;
use crate::report::sample::Sample;
use crate::report::stats::cpu_seconds;

/// Between the start and the first request, so that the first one is not late.
const LEAD: Duration = Duration::from_millis(20);

/// Samples of a run in the order in which their requests were due, with its length in seconds of this machine's clock.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) samples: Vec<Sample>,
    pub(crate) elapsed_s: f64,
    /// This process's; `None` on systems that do not tell.
    pub(crate) cpu_s: Option<f64>,
}

impl Run {
    /// CPU seconds and share of a core.
    pub(crate) fn client_cpu(&self) -> Option<(f64, f64)> {
        self.cpu_s.map(|cpu_s| (cpu_s, cpu_s / self.elapsed_s))
    }
}

/// How a stream of requests is spaced.
#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum Arrivals {
    /// Independent of each other, as those of many users are.
    Poisson,
    /// All at one distance.
    Constant,
}

/// Times of requests with this mean rate, in order: at most `count` of them, all before `until`.
pub(crate) fn arrival_times(
    arrivals: Arrivals,
    rate_per_s: f64,
    count: usize,
    until: Duration,
    random: &mut Random,
) -> Vec<Duration> {
    let mut at_s = 0.0;
    let times = (0..count).map(|i| {
        match arrivals {
            Arrivals::Poisson => at_s += random.exponential(1.0 / rate_per_s),
            Arrivals::Constant => at_s = i as f64 / rate_per_s,
        }
        Duration::from_secs_f64(at_s)
    });
    times.take_while(|time| *time < until).collect()
}

/// Sends request `i` at `times[i]`, which are in order. No answer is waited for.
///
/// # Errors
/// There can be no thread for the clock.
pub(crate) async fn open_loop(
    client: &Arc<Client>,
    times: &[Duration],
    request: impl Fn(usize) -> Request,
    progress: &Arc<Progress>,
) -> std::io::Result<Run> {
    // The runtime's timer has ticks of a millisecond; with --mock-speed 30 that is 30.
    let clock = Clock::start()?;
    let run = timed(async |begin| {
        let mut in_flight = JoinSet::new();
        let mut samples = Vec::with_capacity(times.len());
        for (i, time) in times.iter().enumerate() {
            let request = request(i); // made before its time comes
            let due = begin + *time;
            let _ = clock.at(due).await; // it outlives the loop, so it rings
            let (client, progress) = (Arc::clone(client), Arc::clone(progress));
            progress.sent();
            in_flight.spawn(async move {
                let sample = client.sample(&request, begin, due).await;
                progress.done(&sample);
                sample
            });
            while let Some(done) = in_flight.try_join_next() {
                samples.push(done.expect("a request does not panic"));
            }
        }
        samples.extend(in_flight.join_all().await);
        samples
    });
    Ok(run.await)
}

/// `clients` senders, each with one request at a time; `number` gives the request for each number from 0 on, until it
/// gives `None`.
pub(crate) async fn closed_loop(
    client: &Arc<Client>,
    clients: usize,
    number: impl Fn(u64) -> Option<Request> + Send + Sync + 'static,
    progress: &Arc<Progress>,
) -> Run {
    timed(async |begin| {
        let next = Arc::new(AtomicU64::new(0));
        let number = Arc::new(number);
        let mut senders = JoinSet::new();
        for _ in 0..clients {
            let (client, progress) = (Arc::clone(client), Arc::clone(progress));
            let (next, number) = (Arc::clone(&next), Arc::clone(&number));
            senders.spawn(async move {
                tokio::time::sleep_until(begin.into()).await;
                let mut samples = Vec::new();
                while let Some(request) = number(next.fetch_add(1, Ordering::Relaxed)) {
                    progress.sent();
                    let sample = client.sample(&request, begin, Instant::now()).await;
                    progress.done(&sample);
                    samples.push(sample);
                }
                samples
            });
        }
        senders.join_all().await.into_iter().flatten().collect()
    })
    .await
}

/// One request of a conversation, and the pause before it.
pub(crate) type Turn = (Request, Duration);

/// Conversations that begin at given times. Each has one request in flight at a time; the next is due a pause after the
/// answer before it. One that failed ends its conversation.
pub(crate) async fn conversations(
    client: &Arc<Client>,
    all: Vec<(Duration, Vec<Turn>)>,
    progress: &Arc<Progress>,
) -> Run {
    timed(async |begin| {
        let mut in_flight = JoinSet::new();
        for (start, turns) in all {
            let (client, progress) = (Arc::clone(client), Arc::clone(progress));
            in_flight.spawn(async move {
                let mut samples = Vec::with_capacity(turns.len());
                let mut due = begin + start;
                for (request, pause) in turns {
                    due += pause;
                    tokio::time::sleep_until(due.into()).await;
                    progress.sent();
                    let sample = client.sample(&request, begin, due).await;
                    progress.done(&sample);
                    let failed = sample.result.is_err();
                    samples.push(sample);
                    if failed {
                        break;
                    }
                    due = Instant::now();
                }
                samples
            });
        }
        in_flight.join_all().await.into_iter().flatten().collect()
    })
    .await
}

async fn timed(run: impl AsyncFnOnce(Instant) -> Vec<Sample>) -> Run {
    let cpu_before = cpu_seconds(std::process::id()).ok();
    let begin = Instant::now() + LEAD;
    let mut samples = run(begin).await;
    samples.sort_by(|a, b| a.due_ms.total_cmp(&b.due_ms));
    let cpu_after = cpu_seconds(std::process::id()).ok();
    let cpu_s = cpu_before.zip(cpu_after).map(|(before, after)| after - before);
    let elapsed_s = begin.elapsed().as_secs_f64().max(1e-6);
    Run { samples, elapsed_s, cpu_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_times_and_the_rate_holds() {
        let times = |seed| {
            let mut random = Random::new(seed);
            arrival_times(Arrivals::Poisson, 50.0, 5000, Duration::MAX, &mut random)
        };
        assert_eq!(times(3), times(3));
        assert_ne!(times(3), times(4));
        let all = times(3);
        assert!(all.is_sorted());
        let span_s = all.last().unwrap().as_secs_f64();
        assert!((span_s - 100.0).abs() < 8.0, "{span_s}"); // 5.7 standard deviations of 1.4 s
        // of a Poisson process, gaps vary as much as they last
        let gaps: Vec<f64> = all.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.1);
    }

    #[test]
    fn constant_arrivals_have_one_distance() {
        let times = |count, until| {
            arrival_times(Arrivals::Constant, 4.0, count, until, &mut Random::new(0))
        };
        let three = [0, 250, 500].map(Duration::from_millis);
        assert_eq!(times(3, Duration::MAX), three);
        assert_eq!(times(usize::MAX, Duration::from_millis(501)), three);
    }
}
