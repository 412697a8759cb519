//! The requests of one moment, which are placed together.
//!
//! Requests often come in bursts: of an agent that sets out in several directions, of a batch, after a pause. Placed one by one,
//! short prompts are spread over the workers first, and a long one then shares its steps with them wherever it goes. Placed
//! the longest first, the long ones go apart from each other and the short ones around them, and what is predicted for a
//! long one holds. So one that would wait in its worker anyway, for the step that runs there, waits a part of that time in the
//! router. One that a worker could begin with at once is placed at once.

use super::Dispatch;
use crate::core::policy::PolicyName;
use crate::core::scheduler::PlacementRequest;

/// One gathers with others where it would wait in its worker for so many times as long as they gather: a late timer and the way
/// to the worker then cost it nothing.
const WAITS_TIMES: f64 = 2.0;

impl<T, W> Dispatch<T, W> {
    /// Until when those who came in this moment wait for others, if some do. Whoever drives this calls
    /// [`Self::dispatch_waiting`] then.
    #[must_use]
    pub fn gathers_until_ms(&self) -> Option<f64> {
        self.gathers_until_ms.filter(|_| !self.queue.is_empty())
    }

    /// Nobody waits who came before this moment.
    pub(super) fn nobody_is_before(&self) -> bool {
        self.returning.is_empty() && (self.queue.is_empty() || self.gathers_until_ms.is_some())
    }

    /// From such a wait in a worker on this request gathers with others; infinity if it does not.
    pub(super) fn gathers_from_ms(&self, wanted: &PlacementRequest) -> f64 {
        let rules = self.scheduler.rules();
        let bound = self.queue.bound(wanted.prompt_tokens.into(), wanted.bytes());
        if rules.gather_ms > 0.0 && rules.policy == PolicyName::Kv && bound.is_none() {
            WAITS_TIMES * rules.gather_ms
        } else {
            f64::INFINITY
        }
    }

    /// One more gathers.
    pub(super) fn gather(&mut self, now_ms: f64) {
        if self.queue.is_empty() {
            self.gathers_until_ms = None; // all who gathered before have left
        }
        let until_ms = now_ms + self.scheduler.rules().gather_ms;
        self.gathers_until_ms.get_or_insert(until_ms);
    }

    /// Those who gathered, in the order in which they are to be tried, if their time has come: the highest class first, in it
    /// the longest prompt.
    pub(super) fn gathered(&mut self, now_ms: f64) -> Option<Vec<u64>> {
        self.gathers_until_ms.take_if(|until_ms| *until_ms <= now_ms)?;
        Some(self.queue.longest_first())
    }
}
