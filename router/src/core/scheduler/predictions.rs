//! What a prediction of a first token becomes when others are placed on the same worker after it.

use super::Scheduler;
use crate::core::candidate::{Ask, Candidate};
use crate::core::estimate::delays_ms;

/// Requests that come within so many ms are taken for simultaneous: a prediction is settled once they are placed. A guess:
/// longer than it takes to read a burst, much shorter than a step.
const MOMENT_MS: f64 = 10.0;

impl<W> Scheduler<W> {
    /// The prompt of `ask` goes to this worker: the first tokens of those that wait there come later.
    pub(super) fn delays(&mut self, i: usize, on: &Candidate, ask: &Ask, now_ms: f64) {
        let later_ms = delays_ms(&on.worker_load, &on.queue, &ask.demand(on.cached_tokens));
        for (request, later_ms) in self.workers[i].queued().zip(later_ms) {
            let Some(leg) = request.and_then(|request| self.legs.get_mut(&request)) else {
                continue;
            };
            leg.delayed_ms += later_ms;
            if now_ms - leg.placed_ms <= MOMENT_MS {
                leg.settled_ms += later_ms;
            }
        }
    }
}
