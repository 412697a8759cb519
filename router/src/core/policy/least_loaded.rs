//! The worker with the least to do.

use std::cmp::Ordering;

use crate::core::schedule::{WorkerId, WorkerView};

/// Takes the candidate with the smallest share of its places taken, then the fewest booked tokens. Ties rotate.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    last: Option<WorkerId>,
}

impl LeastLoaded {
    pub(super) fn pick(&mut self, candidates: &[&WorkerView]) -> usize {
        let had_its_turn = |worker: &WorkerView| self.last.is_some_and(|last| worker.id <= last);
        let index = (0..candidates.len())
            .min_by(|&a, &b| {
                let (a, b) = (candidates[a], candidates[b]);
                compare(a, b).then_with(|| had_its_turn(a).cmp(&had_its_turn(b)))
            })
            .expect("there is a candidate");
        self.last = Some(candidates[index].id);
        index
    }
}

/// Less means less loaded.
pub(super) fn compare(a: &WorkerView, b: &WorkerView) -> Ordering {
    // occupied / sequences, without the division
    let share = |worker: &WorkerView, other: &WorkerView| {
        u64::from(worker.occupied()) * u64::from(other.capacity.sequences)
    };
    share(a, b).cmp(&share(b, a)).then_with(|| a.booked.tokens.cmp(&b.booked.tokens))
}
