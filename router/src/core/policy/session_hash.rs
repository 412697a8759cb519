//! A session stays with its worker as long as that one is not overloaded.

use serde::{Deserialize, Serialize};

use super::Choosable;
use super::least_loaded::LeastLoaded;
use crate::core::candidate::mix;

/// No worker takes more than this share of the mean load, in percent. 125 is the usual choice (Mirrokni et al. 2018).
const LOAD_BOUND_PERCENT: u64 = 125;
/// Below this many requests a worker counts as idle, whatever the mean: leaving a warm cache would gain nothing. A
/// guess.
const ALWAYS_ALLOWED: u64 = 4;

/// Rendezvous hashing with bounded load: every session has its own order of all workers, and gets the first one under
/// the bound. A worker that leaves moves only its own sessions, each to the next of its order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionHash {
    without_session: LeastLoaded,
}

impl SessionHash {
    pub(super) fn pick(&mut self, open: &[Choosable<'_>], session: Option<u64>) -> usize {
        let Some(session) = session else {
            return self.without_session.pick(open);
        };
        let bound = load_bound(open);
        (0..open.len())
            .filter(|&i| u64::from(open[i].candidate.occupied) < bound)
            .max_by_key(|&i| rank(session, open[i].candidate.name.digest()))
            .expect("one of the workers is at or under the mean, so under the bound")
    }
}

/// A worker's place in the order of a session, by the digest of its name; the highest is its own.
pub(super) fn rank(session: u64, worker: u64) -> u64 {
    mix(session ^ worker)
}

/// With one request more, no worker may hold more than this many.
pub(super) fn load_bound(open: &[Choosable<'_>]) -> u64 {
    let total: u64 = open.iter().map(|choice| u64::from(choice.candidate.occupied)).sum();
    let n = open.len() as u64;
    ((total + 1) * LOAD_BOUND_PERCENT).div_ceil(n * 100).max(ALWAYS_ALLOWED)
}
