//! One worker after the other.

use serde::{Deserialize, Serialize};

use super::Choosable;
use crate::core::candidate::WorkerId;

/// Takes the candidate after the one taken last, by worker id, so that workers that come and go upset nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundRobin {
    last: Option<WorkerId>,
}

impl RoundRobin {
    pub(super) fn pick(&mut self, open: &[Choosable<'_>]) -> usize {
        let after_last =
            |choice: &Choosable<'_>| self.last.is_none_or(|last| choice.candidate.id > last);
        let index = open.iter().position(after_last).unwrap_or(0);
        self.last = Some(open[index].candidate.id);
        index
    }
}
