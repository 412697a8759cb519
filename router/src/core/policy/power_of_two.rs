//! The less loaded of two workers drawn by lot.

use super::least_loaded::compare;
use crate::core::schedule::{Random, WorkerView};

/// Nearly as even as looking at all workers, and several routers with the same stale figures do not all rush to the
/// same worker (Mitzenmacher 2001).
#[derive(Debug)]
pub struct PowerOfTwo;

impl PowerOfTwo {
    pub(super) fn pick(&self, candidates: &[&WorkerView], random: &mut Random) -> usize {
        let n = candidates.len();
        if n == 1 {
            return 0;
        }
        let first = random.below(n);
        let second = (first + 1 + random.below(n - 1)) % n; // any but the first
        if compare(candidates[second], candidates[first]).is_lt() { second } else { first }
    }
}
