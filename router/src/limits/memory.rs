//! Memory that requests are charged for: what all of them may hold together, and what one of them holds.
//!
//! A charge is made before the memory is taken, for what is allocated rather than for what was sent, and goes back when
//! the [`MemoryShare`] drops. Whoever keeps what was charged for keeps the share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::config::MemoryConfig;
use crate::error::RouteError;
use crate::metrics::{Gauge, Metrics};

/// What the allocator adds to an allocation: its header, and rounding up.
pub const ALLOCATION_BYTES: usize = 16;

/// A share takes from its pool, and gives back to it, in steps of this. So a small request touches the pool twice.
const STEP_BYTES: usize = 16 << 10;

/// The pools of a router.
#[derive(Debug)]
pub struct Memory {
    /// Of request bodies: their bytes, and all that is made of them until the prompt is tokenised.
    pub(crate) bodies: MemoryPool,
    /// Of answers: what is kept of them until the client takes it.
    pub(crate) answers: MemoryPool,
    /// Of stored responses.
    pub(crate) responses: MemoryPool,
    /// Turns to parse a large body; who waits for one holds no more than the body's bytes.
    pub(crate) parsers: Arc<Semaphore>,
}

/// Large bodies that are parsed at once: half of the cores, so that sockets and tokenisers get the others.
fn parsers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2))
}

impl Memory {
    pub(crate) fn new(config: &MemoryConfig, stored: usize, metrics: &Arc<Metrics>) -> Self {
        Self {
            bodies: MemoryPool::new(
                "memory for request bodies",
                config.bodies,
                config.body,
                Some((Arc::clone(metrics), |metrics| &metrics.http.body_bytes)),
            ),
            answers: MemoryPool::new(
                "memory for answers",
                config.answers,
                config.answer,
                Some((Arc::clone(metrics), |metrics| &metrics.http.answer_bytes)),
            ),
            responses: MemoryPool::new(
                "stored responses",
                stored,
                stored,
                Some((Arc::clone(metrics), |metrics| &metrics.responses.stored_bytes)),
            ),
            parsers: Arc::new(Semaphore::new(parsers())),
        }
    }
}

/// Where the use of a pool is shown.
type Shown = (Arc<Metrics>, fn(&Metrics) -> &Gauge);

/// Memory that requests share. A cheap handle.
#[derive(Debug, Clone)]
pub struct MemoryPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Its name in errors.
    what: &'static str,
    left: AtomicUsize,
    /// The most that one request may hold.
    limit: usize,
    shown: Option<Shown>,
}

impl MemoryPool {
    fn new(what: &'static str, bytes: usize, limit: usize, shown: Option<Shown>) -> Self {
        Self(Arc::new(Shared { what, left: AtomicUsize::new(bytes), limit, shown }))
    }

    /// A pool of its own, of which one share may hold all. For tests and tools.
    #[must_use]
    pub fn private(bytes: usize) -> Self {
        Self::new("memory", bytes, bytes, None)
    }

    /// The share of one request, empty at first.
    #[must_use]
    pub fn share(&self) -> MemoryShare {
        MemoryShare { pool: self.clone(), used: 0, taken: 0, peak: 0 }
    }

    /// The most that one request may hold.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    fn take(&self, bytes: usize) -> bool {
        let took =
            self.0.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok();
        if took {
            self.show(signed(bytes));
        }
        took
    }

    fn give_back(&self, bytes: usize) {
        self.0.left.fetch_add(bytes, Relaxed);
        self.show(-signed(bytes));
    }

    fn show(&self, change: i64) {
        if let Some((metrics, gauge)) = &self.0.shown {
            gauge(metrics).inc_by(change);
        }
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Why a charge was refused. Nothing was charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// One request may not hold so much.
    TooMuch {
        /// What it may hold, in bytes.
        limit: usize,
    },
    /// All requests together hold too much for it.
    Full {
        /// The pool's name.
        what: &'static str,
    },
}

impl Refused {
    /// As an error about the body; `param` is where in it the limit was passed.
    pub(crate) fn body(self, param: Option<String>) -> RouteError {
        match self {
            Self::TooMuch { limit } => RouteError::BodyTooComplex { limit, param },
            Self::Full { what } => full(what),
        }
    }

    /// As an error about the answer.
    pub(crate) fn answer(self) -> RouteError {
        match self {
            Self::TooMuch { limit } => RouteError::AnswerTooLarge { limit },
            Self::Full { what } => full(what),
        }
    }
}

/// When a caller that met a full pool should try again; a guess.
const RETRY_AFTER: Duration = Duration::from_secs(1);

fn full(what: &'static str) -> RouteError {
    RouteError::Overloaded { what, retry_after: RETRY_AFTER }
}

/// What one request holds of a pool.
#[derive(Debug)]
pub struct MemoryShare {
    pool: MemoryPool,
    /// `used <= taken` always holds.
    used: usize,
    taken: usize,
    peak: usize,
}

impl MemoryShare {
    /// Charges this much more.
    ///
    /// # Errors
    /// Nothing was charged then.
    pub fn charge(&mut self, bytes: usize) -> Result<(), Refused> {
        let used = self.used.saturating_add(bytes);
        if used > self.taken {
            self.take(used)?;
        }
        self.used = used;
        self.peak = self.peak.max(used);
        Ok(())
    }

    #[cold]
    fn take(&mut self, used: usize) -> Result<(), Refused> {
        let limit = self.pool.0.limit;
        if used > limit {
            return Err(Refused::TooMuch { limit });
        }
        let taken = used.next_multiple_of(STEP_BYTES).min(limit);
        if !self.pool.take(taken - self.taken) {
            return Err(Refused::Full { what: self.pool.0.what });
        }
        self.taken = taken;
        Ok(())
    }

    /// So much is not held any more.
    pub fn give_back(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        // not to and fro at a border; but what rests holds nothing
        let kept =
            if self.used == 0 { 0 } else { self.used.next_multiple_of(STEP_BYTES) + STEP_BYTES };
        if kept < self.taken {
            self.pool.give_back(self.taken - kept);
            self.taken = kept;
        }
    }

    /// Charges what a vector with this one more item takes, if it has to grow for it, and lets it grow.
    ///
    /// # Errors
    /// The vector is as it was then.
    pub fn room_for_one<T>(&mut self, items: &mut Vec<T>) -> Result<(), Refused> {
        let old = items.capacity();
        if items.len() < old {
            return Ok(());
        }
        let new = (2 * old).max(SMALLEST_VEC);
        // while the items move there may be both
        self.charge(new * size_of::<T>() + ALLOCATION_BYTES)?;
        items.reserve_exact(new - items.len());
        if old > 0 {
            self.give_back(old * size_of::<T>() + ALLOCATION_BYTES);
        }
        Ok(())
    }

    /// Nothing is held any more.
    pub fn give_all_back(&mut self) {
        self.give_back(self.used);
    }

    /// Bytes charged now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// The most bytes that were charged at once.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.peak
    }
}

/// Items for which a vector has room at first.
const SMALLEST_VEC: usize = 2;

impl Drop for MemoryShare {
    fn drop(&mut self) {
        if self.taken > 0 {
            self.pool.give_back(self.taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(bytes: usize, limit: usize) -> MemoryPool {
        MemoryPool::new("memory", bytes, limit, None)
    }

    #[test]
    fn shares_are_bounded_alone_and_together_and_give_back_what_they_took() {
        let pool = pool(100_000, 60_000);
        let mut one = pool.share();
        assert_eq!(one.charge(60_001), Err(Refused::TooMuch { limit: 60_000 }));
        one.charge(60_000).unwrap();
        assert_eq!(one.charge(1), Err(Refused::TooMuch { limit: 60_000 }));
        let mut two = pool.share();
        assert_eq!(two.charge(50_000), Err(Refused::Full { what: "memory" }));
        assert_eq!(two.used(), 0);
        one.give_back(50_000);
        two.charge(50_000).unwrap();
        assert_eq!((one.used(), one.peak()), (10_000, 60_000));
        drop((one, two));
        assert_eq!(pool.0.left.load(Relaxed), 100_000);
    }

    #[test]
    fn what_rests_holds_nothing_of_the_pool() {
        let pool = pool(100_000, 60_000);
        let mut share = pool.share();
        share.charge(40_000).unwrap();
        share.give_all_back();
        assert_eq!((share.used(), pool.0.left.load(Relaxed)), (0, 100_000));
        pool.share().charge(60_000).unwrap();
    }

    #[test]
    fn large_bodies_that_are_parsed_leave_cores_to_others() {
        let cores = std::thread::available_parallelism().unwrap().get();
        assert!((1..=cores.div_ceil(2)).contains(&parsers()));
        let config = MemoryConfig { bodies: 9, body: 8, answers: 7, answer: 6 };
        let memory = Memory::new(&config, 1 << 20, &Arc::default());
        assert_eq!(memory.parsers.available_permits(), parsers());
        assert_eq!((memory.bodies.limit(), memory.answers.limit()), (8, 6));
    }

    #[test]
    fn a_charge_beyond_all_numbers_is_refused() {
        let mut share = pool(usize::MAX, usize::MAX).share();
        share.charge(1).unwrap();
        let mut small = pool(10, 10).share();
        assert!(small.charge(usize::MAX).is_err());
    }

    #[test]
    fn a_vector_grows_as_far_as_it_is_paid_for() {
        let mut share = pool(1 << 20, 1 << 20).share();
        let mut items: Vec<u64> = Vec::new();
        let refused = loop {
            match share.room_for_one(&mut items) {
                Ok(()) => items.push(0),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused, Refused::TooMuch { limit: 1 << 20 });
        assert!(items.capacity() * 8 <= share.used() && items.len() == items.capacity());
    }
}
