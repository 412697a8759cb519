//! Which worker gets a request. Choice and booking are one step, so that a burst does not pile up on one worker before
//! its first report. The state is passed in: no clock, no randomness of its own.

use crate::core::frame::{Capacity, Load};
use crate::core::policy::Policy;

/// One link of a worker to this router; a worker that dials again gets a new one. They grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

/// What was placed on a worker and has not ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Booked {
    /// Legs.
    pub requests: u32,
    /// Their tokens, prompt and longest answer.
    pub tokens: u64,
}

/// A worker, as far as the choice is concerned.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Which.
    pub id: WorkerId,
    /// [`hash`] of its name, for `session-hash`.
    pub name_hash: u64,
    /// It takes new work: ready, not suspect, not draining.
    pub open: bool,
    /// Its bounds.
    pub capacity: Capacity,
    /// Its own last report.
    pub load: Load,
    /// By this router.
    pub booked: Booked,
    /// Legs booked since the last report, which it may not have counted yet.
    pub unreported: u32,
}

impl WorkerView {
    /// Requests that it has, as far as is known: its own report (which counts the work of other routers too) and what
    /// was sent since, but at least what this router has on it.
    #[must_use]
    pub fn occupied(&self) -> u32 {
        let reported = self.load.running.saturating_add(self.load.waiting);
        reported.saturating_add(self.unreported).max(self.booked.requests)
    }

    /// Requests that it can hold, in the batch and in its queue.
    #[must_use]
    pub fn places(&self) -> u32 {
        self.capacity.sequences.saturating_add(self.capacity.waiting)
    }

    /// It takes one more.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.open && self.occupied() < self.places()
    }

    /// A new report came.
    pub fn report(&mut self, load: Load) {
        self.load = load;
        self.unreported = 0;
    }

    /// A leg that was booked ended, or never started.
    pub fn release(&mut self, tokens: u64) {
        self.booked.requests = self.booked.requests.saturating_sub(1);
        self.booked.tokens = self.booked.tokens.saturating_sub(tokens);
    }

    fn book(&mut self, tokens: u64) {
        self.booked.requests = self.booked.requests.saturating_add(1);
        self.booked.tokens = self.booked.tokens.saturating_add(tokens);
        self.unreported = self.unreported.saturating_add(1);
    }
}

/// What is to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Prompt and longest answer.
    pub tokens: u64,
    /// Key for `session-hash`.
    pub session: Option<&'a str>,
    /// Workers that failed it before.
    pub excluded: &'a [WorkerId],
}

/// Where it goes; booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Which worker.
    pub worker: WorkerId,
    /// To be given back to [`WorkerView::release`].
    pub tokens: u64,
}

/// Why nothing was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// No worker takes new work.
    NoneOpen,
    /// Those that take new work are full.
    AllFull,
    /// Those that take new work failed this request before.
    AllExcluded,
}

/// Chooses a worker and books the request on it. `workers` is in the order of their ids.
///
/// # Errors
/// Nothing is booked, and why.
pub fn schedule(
    workers: &mut [WorkerView],
    ask: &Ask<'_>,
    policy: &mut Policy,
    random: &mut Random,
) -> Result<Placement, NoPlace> {
    let allowed = |worker: &WorkerView| worker.open && !ask.excluded.contains(&worker.id);
    let candidates: Vec<&WorkerView> =
        workers.iter().filter(|worker| allowed(worker) && worker.has_room()).collect();
    if candidates.is_empty() {
        return Err(if workers.iter().any(allowed) {
            NoPlace::AllFull
        } else if workers.iter().any(|worker| worker.open) {
            NoPlace::AllExcluded
        } else {
            NoPlace::NoneOpen
        });
    }
    let id = candidates[policy.pick(&candidates, ask, random)].id;
    let chosen = workers.iter_mut().find(|worker| worker.id == id).expect("it was a candidate");
    chosen.book(ask.tokens);
    Ok(Placement { worker: id, tokens: ask.tokens })
}

/// A small generator of random numbers (SplitMix64). Good for choosing, not for secrets.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number from 0 to `n - 1`; `n` is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let wide = u128::from(mix(self.0)) * n as u128;
        usize::try_from(wide >> 64).expect("less than n")
    }
}

/// Hash of a name or a session, the same in every router and every run: two routers agree on a session's worker.
#[must_use]
pub fn hash(text: &str) -> u64 {
    let hash = blake3::hash(text.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
}

/// Mixes all bits into all others (the finaliser of SplitMix64).
pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
