//! How a rank waits until another one has done something: it looks for a while, then it sleeps on its bell.
//!
//! Whoever changes a word that others wait for changes it first and looks for sleepers then; whoever falls asleep says so
//! first and looks at the words then. A fence stands between the two on both sides, so one of them sees the other.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::layout::Shared;

/// The longest that a thread looks without sleep. A guess, at more than it takes to be woken: so a rank that was late
/// because it slept still finds the others awake.
const LONGEST_LOOK: Duration = Duration::from_micros(100);
/// One wait of so many looks for the longest time, also when the last ones were in vain.
const TRY_AGAIN: u32 = 8;

/// Wakes `rank`, where it sleeps.
pub(crate) fn ring(shared: &Shared, rank: usize) {
    fence(Ordering::SeqCst);
    if shared.sleeps(rank).load(Ordering::Relaxed) != 0 {
        shared.bell(rank).fetch_add(1, Ordering::Release);
        system::wake(shared.bell(rank));
    }
}

pub(crate) fn ring_all(shared: &Shared) {
    for rank in 0..shared.layout().ranks() {
        ring(shared, rank);
    }
}

/// Of one rank: how long it pays to look before it sleeps.
#[derive(Debug)]
pub(crate) struct Patience {
    rank: usize,
    look: Duration,
    longest: Duration,
    waits: u32,
}

impl Patience {
    pub(crate) fn new(rank: usize, ranks: usize) -> Self {
        // With more ranks than cores, who looks keeps the one off its core that is waited for.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let longest = if ranks <= cores { LONGEST_LOOK } else { Duration::ZERO };
        Self { rank, look: longest, longest, waits: 0 }
    }

    /// Returns when `done`, when somebody rang, or at `until`, and sometimes for no reason.
    pub(crate) fn wait(&mut self, shared: &Shared, until: Instant, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        self.waits = self.waits.wrapping_add(1);
        let look = if self.waits.is_multiple_of(TRY_AGAIN) { self.longest } else { self.look };
        while began.elapsed() < look {
            for _ in 0..16 {
                if done() {
                    self.look = self.longest;
                    return;
                }
                std::hint::spin_loop();
            }
        }
        self.look /= 2;
        let bell = shared.bell(self.rank);
        let rung = bell.load(Ordering::Acquire);
        shared.sleeps(self.rank).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !done() {
            system::sleep(bell, rung, until.saturating_duration_since(Instant::now()));
        }
        shared.sleeps(self.rank).store(0, Ordering::Relaxed);
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::thread::futex::{Flags, Timespec, wait, wake as wake_some};

    pub(super) fn wake(bell: &AtomicU32) {
        // The one that sleeps. The call fails only for words that are not mapped.
        let _ = wake_some(bell, Flags::empty(), 1);
    }

    pub(super) fn sleep(bell: &AtomicU32, rung: u32, at_most: Duration) {
        let at_most = Timespec {
            tv_sec: at_most.as_secs().cast_signed(),
            tv_nsec: i64::from(at_most.subsec_nanos()),
        };
        // Whatever ends the sleep, the caller looks again.
        let _ = wait(bell, Flags::empty(), rung, Some(&at_most));
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    /// Between two looks where a word cannot be slept on.
    const NAP: Duration = Duration::from_micros(50);

    pub(super) fn wake(_: &AtomicU32) {}

    pub(super) fn sleep(bell: &AtomicU32, rung: u32, at_most: Duration) {
        if bell.load(Ordering::Acquire) == rung {
            std::thread::sleep(at_most.min(NAP));
        }
    }
}
