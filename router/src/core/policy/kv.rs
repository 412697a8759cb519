//! The worker where the request costs the least time, its own and that of others.

use serde::{Deserialize, Serialize};

use super::Choosable;
use super::session_hash::rank;
use crate::core::candidate::{Ask, WorkerId};

/// Costs that differ by less than this share are equal: no prediction is that good, and ties are to rotate.
const TIE: f64 = 1e-6;

/// Takes the least predicted total among the workers that meet the request's deadline; if none does, the one that is soonest.
/// Among equals a session's own worker, otherwise the next one in turn.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kv {
    last: Option<WorkerId>,
}

impl Kv {
    pub(super) fn pick(&mut self, open: &[Choosable<'_>], ask: &Ask) -> usize {
        let in_time = |choice: &Choosable<'_>| {
            ask.deadline_ms.is_none_or(|deadline| choice.estimate.ttft_ms() <= deadline)
        };
        let some_in_time = open.iter().any(in_time);
        let cost = |choice: &Choosable<'_>| {
            if some_in_time {
                if in_time(choice) { choice.estimate.total_ms() } else { f64::INFINITY }
            } else {
                choice.estimate.ttft_ms()
            }
        };
        let least = open.iter().map(cost).fold(f64::INFINITY, f64::min);
        let equal = |i: &usize| cost(&open[*i]) <= least * (1.0 + TIE);
        let mut equals = (0..open.len()).filter(equal);
        let index = match ask.session {
            Some(session) => equals.max_by_key(|&i| rank(session, open[i].candidate)),
            None => {
                let first = equals.clone().next();
                let after_last =
                    |i: &usize| self.last.is_none_or(|last| open[*i].candidate.id > last);
                equals.find(after_last).or(first)
            }
        };
        let index = index.unwrap_or(0); // all costs are NaN: a worker lies about its speed, and the audit is to find it
        self.last = Some(open[index].candidate.id);
        index
    }
}
