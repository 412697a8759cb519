//! Those who wait, when room appeared: those that began before first, then the queue in its order.

use super::{Dispatch, Refusal};
use crate::core::admission::Entry;
use crate::core::candidate::WorkerId;
use crate::core::decision::NoPlace;
use crate::core::frame::RequestId;
use crate::core::scheduler::{LegOutput, Placement, Scheduler};

/// Requests of the queue that are tried in vain when room appears. More than one, because the first may not go where others
/// may. Of those that began before, only one is tried of all that were failed by the same workers.
const TRIED: usize = 64;

/// One who need not wait any longer, and why.
type Next<T> = (Entry, T, Result<Placement, Refusal>);

impl<T, W> Dispatch<T, W> {
    /// Gives those who wait what room there is. `deliver` is told of each placement and of each refusal, and sees the
    /// workers; what it does not take, because nobody waits for it any more, is given back.
    pub fn dispatch_waiting(
        &mut self,
        may_open: bool,
        now_ms: f64,
        mut deliver: impl FnMut(T, Result<Placement, Refusal>, &Scheduler<W>) -> bool,
    ) {
        for (entry, (wanted, item)) in self.queue.expired(now_ms) {
            let refusal = Refusal::TooLate {
                predicted_ms: now_ms - entry.since_ms + self.soonest_ms(&wanted, now_ms),
                deadline_ms: entry.deadline_ms - entry.since_ms,
                retry_after_ms: self.retry_after_ms(),
            };
            deliver(item, Err(refusal), &self.scheduler);
        }
        if !self.dispatch_returning(now_ms, &mut deliver) && may_open {
            return;
        }
        if let Some(gathered) = self.gathered(now_ms) {
            let mut gathered = gathered.into_iter();
            while let Some(next) = self.first_of(&mut gathered, may_open, now_ms) {
                self.hand_over(next, now_ms, &mut deliver);
            }
        } else if self.gathers_until_ms().is_some() {
            return;
        }
        while let Some(next) = self.next(may_open, now_ms) {
            self.hand_over(next, now_ms, &mut deliver);
        }
    }

    fn hand_over(
        &mut self,
        (entry, item, result): Next<T>,
        now_ms: f64,
        deliver: &mut impl FnMut(T, Result<Placement, Refusal>, &Scheduler<W>) -> bool,
    ) {
        match result {
            Ok(placement) => {
                let charge = placement.expected_block_seconds;
                self.queue.charge(entry.tenant, charge);
                let legs = legs(&placement);
                if !deliver(item, Ok(placement), &self.scheduler) {
                    self.queue.charge(entry.tenant, -charge);
                    self.give_back(legs, now_ms);
                }
            }
            Err(refusal) => {
                deliver(item, Err(refusal), &self.scheduler);
            }
        }
    }

    /// The next one of the queue for whom something can be done now.
    fn next(&mut self, may_open: bool, now_ms: f64) -> Option<Next<T>> {
        if self.queue.is_empty() {
            return None;
        }
        let order = self.queue.order(now_ms, TRIED);
        self.first_of(&mut order.into_iter(), may_open, now_ms)
    }

    /// The first of these for whom something can be done now. Nobody after the one for whom there is no room is tried.
    fn first_of(
        &mut self,
        tickets: &mut impl Iterator<Item = u64>,
        may_open: bool,
        now_ms: f64,
    ) -> Option<Next<T>> {
        let mut yielding_wait = false;
        for ticket in tickets {
            let (_, (wanted, _)) = self.queue.get(ticket)?;
            if wanted.yields && yielding_wait && wanted.excluded.is_empty() {
                continue; // where the one before found no room
            }
            let result = match self.scheduler.place(wanted, now_ms) {
                Ok(placement) => Ok(placement),
                Err(not_placed) => match not_placed.no_place {
                    NoPlace::AllExcluded => Err(Refusal::AllExcluded),
                    NoPlace::NoneOpen if !may_open => Err(Refusal::NoneOpen),
                    // others may go where this one may not; where it is only a matter of room, they may not either
                    NoPlace::AllFull if !wanted.excluded.is_empty() || wanted.yields => {
                        yielding_wait |= wanted.excluded.is_empty();
                        continue;
                    }
                    NoPlace::NoneOpen | NoPlace::AllFull => return None,
                },
            };
            let taken = match &result {
                Ok(_) => self.queue.take(ticket),
                Err(_) => self.queue.leave(ticket),
            };
            let (entry, (_, item)) = taken?;
            return Some((entry, item, result));
        }
        None
    }

    /// False if one of them waits for a room that nobody else may have then.
    fn dispatch_returning(
        &mut self,
        now_ms: f64,
        deliver: &mut impl FnMut(T, Result<Placement, Refusal>, &Scheduler<W>) -> bool,
    ) -> bool {
        // workers that may have room, after one who may go to all others found none; `None` before that
        let mut left: Option<Vec<WorkerId>> = None;
        let (mut next, mut in_vain) = (RequestId(0), 0);
        while let Some((&request, (wanted, _))) = self.returning.range(next..).next() {
            next = RequestId(request.0 + 1);
            let hopeless =
                |left: &Vec<WorkerId>| left.iter().all(|id| wanted.excluded.contains(id));
            if left.as_ref().is_some_and(hopeless) {
                continue;
            }
            match self.scheduler.place(wanted, now_ms) {
                Ok(placement) => {
                    let Some((wanted, item)) = self.returning.remove(&request) else { continue };
                    let legs = legs(&placement);
                    self.passed_by(&wanted, &placement);
                    let charge = placement.expected_block_seconds;
                    if !deliver(item, Ok(placement), &self.scheduler) {
                        self.queue.charge(wanted.tenant, -charge);
                        self.give_back(legs, now_ms);
                    }
                }
                // others may go where this one may not
                Err(not_placed) if !wanted.excluded.is_empty() => {
                    in_vain += 1;
                    if in_vain == TRIED {
                        break;
                    }
                    let Some(failed_by) = not_placed.where_it_failed else { continue };
                    let mut room = left.take().unwrap_or_else(|| failed_by.clone());
                    room.retain(|id| failed_by.contains(id));
                    if room.is_empty() {
                        return false;
                    }
                    left = Some(room);
                }
                Err(_) => return false,
            }
        }
        true
    }

    /// Nobody took the placement: it costs nobody anything.
    fn give_back(&mut self, legs: [Option<RequestId>; 2], now_ms: f64) {
        for request in legs.into_iter().flatten() {
            self.scheduler.end(request, LegOutput::default(), now_ms);
        }
    }
}

fn legs(placement: &Placement) -> [Option<RequestId>; 2] {
    [Some(placement.request), placement.prefill.map(|prefill| prefill.request)]
}
