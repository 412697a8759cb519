//! The worker with the least to do.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use super::Choosable;
use crate::core::candidate::{Candidate, WorkerId};

/// Takes the candidate with the smallest share of its places taken, then the fewest booked tokens. Ties rotate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeastLoaded {
    last: Option<WorkerId>,
}

impl LeastLoaded {
    pub(super) fn pick(&mut self, open: &[Choosable<'_>]) -> usize {
        let had_its_turn = |worker: &Candidate| self.last.is_some_and(|last| worker.id <= last);
        let index = (0..open.len())
            .min_by(|&a, &b| {
                let (a, b) = (open[a].candidate, open[b].candidate);
                compare(a, b).then_with(|| had_its_turn(a).cmp(&had_its_turn(b)))
            })
            .expect("there is a candidate");
        self.last = Some(open[index].candidate.id);
        index
    }
}

/// Less means less loaded.
pub(super) fn compare(a: &Candidate, b: &Candidate) -> Ordering {
    // occupied / sequences, without the division
    let share = |worker: &Candidate, other: &Candidate| {
        u64::from(worker.occupied) * u64::from(other.sequences)
    };
    share(a, b).cmp(&share(b, a)).then_with(|| a.booked_tokens.cmp(&b.booked_tokens))
}
