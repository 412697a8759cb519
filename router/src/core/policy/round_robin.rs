//! One worker after the other.

use crate::core::schedule::{WorkerId, WorkerView};

/// Takes the candidate after the one taken last, by worker id, so that workers that come and go upset nothing.
#[derive(Debug, Default)]
pub struct RoundRobin {
    last: Option<WorkerId>,
}

impl RoundRobin {
    pub(super) fn pick(&mut self, candidates: &[&WorkerView]) -> usize {
        let after_last = |worker: &&WorkerView| self.last.is_none_or(|last| worker.id > last);
        let index = candidates.iter().position(after_last).unwrap_or(0);
        self.last = Some(candidates[index].id);
        index
    }
}
