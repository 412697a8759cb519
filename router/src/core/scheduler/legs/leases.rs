//! Blocks that are booked count as there for a while: until the first token, or until the lease of the leg ends.

use super::BookedLeg;
use crate::core::frame::RequestId;
use crate::core::scheduler::Scheduler;

impl<W> Scheduler<W> {
    /// Takes back the predictions of legs whose first token is overdue. How many legs these were.
    pub fn expire_leases(&mut self, now_ms: f64) -> usize {
        let mut expired = 0;
        while let Some(request) = self.leases.next_due(now_ms) {
            let Some(leg) = self.legs.get_mut(&request) else { continue };
            if !std::mem::take(&mut leg.booked) {
                continue; // its first token came
            }
            if let Ok(i) = self.workers.binary_search_by_key(&leg.worker, |worker| worker.id) {
                self.holdings.unbook(&self.workers[i].places, leg.part, &leg.keys);
            }
            expired += 1;
        }
        expired
    }

    /// The blocks of a leg are booked: until its lease ends.
    pub(in crate::core::scheduler) fn lease(&mut self, request: RequestId, lease_ms: f64) {
        self.leases.set(request, lease_ms);
        let legs = &self.legs;
        let is_booked = |request| legs.get(&request).is_some_and(|leg: &BookedLeg| leg.booked);
        self.leases.tidy(legs.len(), is_booked);
    }
}
