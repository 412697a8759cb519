//! The less loaded of two workers drawn by lot.

use serde::{Deserialize, Serialize};

use super::Choosable;
use super::least_loaded::compare;
use crate::core::candidate::Random;

/// Nearly as even as looking at all workers, and several routers with the same stale figures do not all rush to the
/// same worker (Mitzenmacher 2001).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerOfTwo {}

impl PowerOfTwo {
    pub(super) fn pick(&self, open: &[Choosable<'_>], random: &mut Random) -> usize {
        let n = open.len();
        if n == 1 {
            return 0;
        }
        let first = random.below(n);
        let second = (first + 1 + random.below(n - 1)) % n; // any but the first
        let lighter = compare(open[second].candidate, open[first].candidate).is_lt();
        if lighter { second } else { first }
    }
}
