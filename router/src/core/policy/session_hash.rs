//! A session stays with its worker as long as that one is not overloaded.

use super::least_loaded::LeastLoaded;
use crate::core::schedule::{Ask, WorkerView, hash, mix};

/// No worker takes more than this share of the mean load, in percent. 125 is the usual choice (Mirrokni et al. 2018).
const LOAD_BOUND_PERCENT: u64 = 125;
/// Below this many requests a worker counts as idle, whatever the mean: leaving a warm cache would gain nothing. A
/// guess.
const ALWAYS_ALLOWED: u64 = 4;

/// Rendezvous hashing with bounded load: every session has its own order of all workers, and gets the first one under
/// the bound. A worker that leaves moves only its own sessions, each to the next of its order.
#[derive(Debug, Default)]
pub struct SessionHash {
    without_session: LeastLoaded,
}

impl SessionHash {
    pub(super) fn pick(&mut self, candidates: &[&WorkerView], ask: &Ask<'_>) -> usize {
        let Some(session) = ask.session else {
            return self.without_session.pick(candidates);
        };
        let session = hash(session);
        let rank = |worker: &WorkerView| mix(session ^ worker.name_hash);
        let bound = load_bound(candidates);
        (0..candidates.len())
            .filter(|&i| u64::from(candidates[i].occupied()) < bound)
            .max_by_key(|&i| rank(candidates[i]))
            .expect("one of the workers is at or under the mean, so under the bound")
    }
}

/// With one request more, no worker may hold more than this many.
pub(super) fn load_bound(workers: &[&WorkerView]) -> u64 {
    let total: u64 = workers.iter().map(|worker| u64::from(worker.occupied())).sum();
    let n = workers.len() as u64;
    ((total + 1) * LOAD_BOUND_PERCENT).div_ceil(n * 100).max(ALWAYS_ALLOWED)
}
