//! What SIGTERM, SIGINT and SIGHUP do: the first drains, the second stops, and after that the process ends, whatever is busy.
//! Where there are files to be read again, SIGHUP has them read and ends nothing, unless it says that the terminal is gone.
//!
//! A thread of its own, with a runtime of its own, waits for them: the one that serves may have no thread left that runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use crate::log::{LAST_LINES, flush};
use crate::process::stopper::Stopper;

/// After the second signal: for streams to end with an error, and links with a word. A guess; people who press Ctrl-C
/// twice wait no longer.
pub const STOP: Duration = Duration::from_secs(2);

/// When the drain should have ended by itself and has not. Longer than all that ends in order after the drain's deadline:
/// last events, links, what is written down (1 + 2 + 2 s).
pub const OVERDUE: Duration = Duration::from_secs(8);

/// Exit status of a drain that did not end by itself.
const DRAIN_OVERDUE: i32 = 1;

/// How long the ends may take.
#[derive(Debug, Clone, Copy)]
pub struct StopDeadlines {
    /// From the first signal to the end of the process; `None` is for ever.
    pub drain: Option<Duration>,
    /// From the second.
    pub stop: Duration,
}

/// The signals, caught from the time when this was made.
#[derive(Debug)]
pub struct Signals {
    runtime: Runtime,
    caught: Vec<(i32, Signal)>,
}

impl Signals {
    /// SIGTERM, SIGINT, and SIGHUP unless `nohup` has it ignored.
    ///
    /// # Errors
    /// They cannot be caught.
    pub fn catch() -> io::Result<Self> {
        let mut kinds = vec![SignalKind::terminate(), SignalKind::interrupt()];
        if !hangup_is_ignored() {
            kinds.push(SignalKind::hangup());
        }
        Self::catch_these(kinds.into_iter().map(|kind| kind.as_raw_value()))
    }

    /// Those with these numbers, for whoever handles them besides; earlier handlers stay.
    ///
    /// # Errors
    /// One cannot be caught.
    pub fn catch_these(numbers: impl IntoIterator<Item = i32>) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let entered = runtime.enter();
        let one = |number| Ok((number, signal(SignalKind::from_raw(number))?));
        let caught = numbers.into_iter().map(one).collect::<io::Result<Vec<_>>>()?;
        drop(entered);
        Ok(Self { runtime, caught })
    }

    /// Acts on the signals from now on: the first drains, the second stops, and the process ends within `bounds`, or at
    /// once with a third. `reload` is what SIGHUP does in the place of this.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn obey(
        self,
        stopper: Stopper,
        bounds: StopDeadlines,
        reload: Option<Reload>,
    ) -> io::Result<Obeyed> {
        let Self { runtime, mut caught } = self;
        let hangup = Hangup { had_terminal: has_terminal(), reload };
        let obeyed = Obeyed::default();
        let noted = obeyed.clone();
        let obey = move || {
            let next = async || loop {
                let number = next(&mut caught).await;
                if !hangup.is_no_end(number, has_terminal) {
                    break number;
                }
            };
            let status = runtime.block_on(follow(next, stopper, bounds, &noted));
            flush(LAST_LINES);
            std::process::exit(status);
        };
        std::thread::Builder::new().name("signals".into()).spawn(obey)?;
        Ok(obeyed)
    }
}

/// What reads files again.
pub type Reload = Box<dyn Fn() + Send>;

/// What SIGHUP means.
struct Hangup {
    /// At the start.
    had_terminal: bool,
    reload: Option<Reload>,
}

impl Hangup {
    /// Has the files read again where the signal with this number asks for it.
    fn is_no_end(&self, number: i32, has_terminal: impl Fn() -> bool) -> bool {
        let Some(reload) =
            self.reload.as_ref().filter(|_| number == SignalKind::hangup().as_raw_value())
        else {
            return false;
        };
        if self.had_terminal && !has_terminal() {
            return false; // the kernel sends the same signal when a terminal is closed
        }
        reload();
        true
    }
}

/// True if a terminal controls this process.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// True if this process was started so that the end of its terminal means nothing to it. Elsewhere than on Linux nobody
/// says so, and false is the answer.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (SignalKind::hangup().as_raw_value() - 1)) != 0
}

/// What the signals have asked for so far.
#[derive(Debug, Clone, Default)]
pub struct Obeyed(Arc<AtomicI32>);

impl Obeyed {
    /// The exit status of a process that ends by itself now: 0, or after a second signal as if that had ended it.
    #[must_use]
    pub fn status(&self) -> u8 {
        u8::try_from(self.0.load(Relaxed)).unwrap_or(u8::MAX)
    }
}

/// The number of the next signal.
async fn next(caught: &mut [(i32, Signal)]) -> i32 {
    std::future::poll_fn(|context| {
        for (number, signal) in &mut *caught {
            if signal.poll_recv(context).is_ready() {
                return std::task::Poll::Ready(*number);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

/// Does what the signals ask for. Returns when the process has to end now, with its exit status.
async fn follow(
    mut next: impl AsyncFnMut() -> i32,
    stopper: Stopper,
    bounds: StopDeadlines,
    obeyed: &Obeyed,
) -> i32 {
    next().await;
    stopper.leave();
    let second = match bounds.drain {
        Some(drain) => timeout(drain, next()).await,
        None => Ok(next().await),
    };
    let Ok(second) = second else {
        tracing::error!("the drain did not end in time: what is still busy is left behind");
        return DRAIN_OVERDUE;
    };
    let status = 128 + second; // as shells have it
    obeyed.0.store(status, Relaxed);
    stopper.stop();
    if timeout(bounds.stop, next()).await.is_err() {
        tracing::warn!("not everything stopped in time: what is still busy is left behind");
    }
    status
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::time::{Instant, sleep};

    use super::*;

    const BOUNDS: StopDeadlines =
        StopDeadlines { drain: Some(Duration::from_secs(30)), stop: STOP };

    /// Signals with the ms of silence before each; then none.
    async fn followed(signals: &[(u64, i32)], bounds: StopDeadlines) -> (i32, Duration, Stopper) {
        let (stopper, begin) = (Stopper::default(), Instant::now());
        let mut left: VecDeque<(u64, i32)> = signals.iter().copied().collect();
        let next = async || match left.pop_front() {
            Some((ms, number)) => {
                sleep(Duration::from_millis(ms)).await;
                number
            }
            None => std::future::pending().await,
        };
        let obeyed = Obeyed::default();
        let status = follow(next, stopper.clone(), bounds, &obeyed).await;
        let stopped = signals.len() > 1;
        assert_eq!(i32::from(obeyed.status()), if stopped { status } else { 0 });
        (status, begin.elapsed(), stopper)
    }

    #[test]
    fn a_hangup_has_files_read_unless_there_are_none_or_the_terminal_is_gone() {
        let (hangup, term) = (SignalKind::hangup().as_raw_value(), 15);
        let count = Arc::new(AtomicI32::new(0));
        for (had_terminal, has_terminal, number, reloads) in [
            (true, true, hangup, true),
            (true, false, hangup, false),
            (false, false, hangup, true),
            (false, false, term, false),
            (true, true, term, false),
        ] {
            let counted = Arc::clone(&count);
            let reload: Reload = Box::new(move || {
                counted.fetch_add(1, Relaxed);
            });
            let with = Hangup { had_terminal, reload: Some(reload) };
            assert_eq!(with.is_no_end(number, || has_terminal), reloads);
            assert_eq!(count.swap(0, Relaxed), i32::from(reloads));
            let without = Hangup { had_terminal, reload: None };
            assert!(!without.is_no_end(number, || has_terminal));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_that_does_not_end_is_ended() {
        let (status, took, stopper) = followed(&[(5, 15)], BOUNDS).await;
        assert_eq!((status, took), (DRAIN_OVERDUE, Duration::from_millis(30_005)));
        stopper.leaving().await;
        assert!(!stopper.is_draining(), "the server drains when it has stopped to accept");
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_signal_ends_the_process_in_a_bounded_time() {
        let (status, took, stopper) = followed(&[(5, 15), (10, 2)], BOUNDS).await;
        assert_eq!((status, took), (130, Duration::from_millis(15) + STOP));
        stopper.stopping().await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_third_signal_ends_it_at_once() {
        let (status, took, _) = followed(&[(5, 15), (10, 15), (10, 2)], BOUNDS).await;
        assert_eq!((status, took), (143, Duration::from_millis(25)));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_bound_a_drain_takes_as_long_as_it_likes() {
        let bounds = StopDeadlines { drain: None, ..BOUNDS };
        let (status, took, _) = followed(&[(5, 15), (86_400_000, 15)], bounds).await;
        assert_eq!((status, took), (143, Duration::from_millis(86_400_005) + STOP));
    }
}
