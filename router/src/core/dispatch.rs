//! The whole placement of one model's requests: those that find a worker go there, those that do not wait in order, those
//! that would wait in vain are told so at once. The router and the simulator both drive this.

use std::collections::BTreeMap;

use crate::core::admission::{Admission, Class, Entry, Full, Rules as QueueRules};
use crate::core::candidate::WorkerId;
use crate::core::decision::NoPlace;
use crate::core::frame::RequestId;
use crate::core::scheduler::{Ended, Output, Placement, PlacementRequest, Scheduler};

/// Requests of the queue that are tried in vain when room appears. More than one, because the first may not go where others
/// may. Of those that began before, only one is tried of all that were failed by the same workers.
const TRIED: usize = 64;
/// Nobody is told to come back sooner or later than this.
const RETRY_AFTER_MS: std::ops::RangeInclusive<f64> = 1_000.0..=600_000.0;

/// Scheduler and queue of one model. `T` is the caller's handle of one who waits, `W` what the caller keeps of a worker.
#[derive(Debug)]
pub struct Dispatch<T, W = ()> {
    /// The workers, and what is known of them.
    pub scheduler: Scheduler<W>,
    queue: Admission<(PlacementRequest, T)>,
    /// Those that began before and go on, by their names, so the first to come first. They are before all others and outside the
    /// bounds of the queue: each is an answer under way, of which the caller bounds the number.
    returning: BTreeMap<RequestId, (PlacementRequest, T)>,
}

/// What became of a request that asked for a place.
#[derive(Debug)]
pub enum Submitted<T> {
    /// It goes there.
    Placed(Placement, T),
    /// It waits; a later [`Dispatch::dispatch_waiting`] places it.
    Waits,
    /// It was not taken.
    Refused(Refusal, T),
}

/// One who need not wait any longer, and why.
type Next<T> = (Entry, T, Result<Placement, Refusal>);

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refusal {
    /// No worker takes new work.
    NoneOpen,
    /// Those that do failed it before.
    AllExcluded,
    /// The queue is full.
    QueueFull {
        /// Which bound.
        what: Full,
        /// Ms after which there is likely to be room.
        retry_after_ms: f64,
    },
    /// Its first token is predicted to come too late.
    TooLate {
        /// From now, in ms.
        predicted_ms: f64,
        /// What was asked for.
        deadline_ms: f64,
        /// Ms after which the deadline is likely to be met.
        retry_after_ms: f64,
    },
}

impl<T, W> Dispatch<T, W> {
    /// With an empty queue.
    #[must_use]
    pub fn new(scheduler: Scheduler<W>, rules: QueueRules) -> Self {
        Self { scheduler, queue: Admission::new(rules), returning: BTreeMap::new() }
    }

    /// Places a request, lets it wait, or refuses it. `may_open`: a worker that is closed now may soon take work.
    pub fn submit(
        &mut self,
        wanted: PlacementRequest,
        item: T,
        may_open: bool,
        now_ms: f64,
    ) -> Submitted<T> {
        if wanted.resumes {
            return self.go_on(wanted, item, now_ms);
        }
        if let Some(refusal) = self.too_late(&wanted, now_ms) {
            return Submitted::Refused(refusal, item);
        }
        let class = Class::of(wanted.priority);
        if self.nobody_waits() {
            match self.scheduler.place(&wanted, now_ms) {
                Ok(placement) => {
                    self.passed_by(&wanted, &placement);
                    return Submitted::Placed(placement, item);
                }
                Err(decision) => match decision.no_place() {
                    NoPlace::AllFull => {}
                    NoPlace::NoneOpen if may_open => {}
                    NoPlace::NoneOpen => return Submitted::Refused(Refusal::NoneOpen, item),
                    NoPlace::AllExcluded => return Submitted::Refused(Refusal::AllExcluded, item),
                },
            }
        }
        if let Some(what) = self.queue.crowded().filter(|_| wanted.yields) {
            let retry_after_ms = self.retry_after_ms();
            return Submitted::Refused(Refusal::QueueFull { what, retry_after_ms }, item);
        }
        let entry = Entry {
            ticket: wanted.request.0,
            class,
            tenant: wanted.tenant,
            tokens: wanted.prompt_tokens.into(),
            bytes: wanted.bytes(),
            since_ms: now_ms,
            deadline_ms: wanted.deadline_ms.unwrap_or(f64::INFINITY),
        };
        match self.queue.join(entry, (wanted, item)) {
            Ok(()) => Submitted::Waits,
            Err((what, (_, item))) => {
                let retry_after_ms = self.retry_after_ms();
                Submitted::Refused(Refusal::QueueFull { what, retry_after_ms }, item)
            }
        }
    }

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
        while let Some((entry, item, result)) = self.next(may_open, now_ms) {
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
    }

    /// The next one of the queue for whom something can be done now.
    fn next(&mut self, may_open: bool, now_ms: f64) -> Option<Next<T>> {
        if self.queue.is_empty() {
            return None;
        }
        let mut yielding_wait = false;
        for ticket in self.queue.order(now_ms, TRIED) {
            let (_, (wanted, _)) = self.queue.get(ticket)?;
            if wanted.yields && yielding_wait && wanted.excluded.is_empty() {
                continue; // where the one before found no room
            }
            let result = match self.scheduler.place(wanted, now_ms) {
                Ok(placement) => Ok(placement),
                Err(decision) => match decision.no_place() {
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

    /// One that began before is placed before all others, or waits for whatever becomes of the workers; its caller has a
    /// deadline for that.
    fn go_on(&mut self, wanted: PlacementRequest, item: T, now_ms: f64) -> Submitted<T> {
        match self.scheduler.place(&wanted, now_ms) {
            Ok(placement) => {
                self.passed_by(&wanted, &placement);
                Submitted::Placed(placement, item)
            }
            Err(_) => {
                self.returning.insert(wanted.request, (wanted, item));
                Submitted::Waits
            }
        }
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
                Err(decision) if !wanted.excluded.is_empty() => {
                    in_vain += 1;
                    if in_vain == TRIED {
                        break;
                    }
                    let Some(failed_by) = decision.where_it_failed() else { continue };
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

    fn passed_by(&mut self, wanted: &PlacementRequest, placement: &Placement) {
        self.queue.passed_by(wanted.prompt_tokens.into());
        self.queue.charge(wanted.tenant, placement.expected_block_seconds);
    }

    /// Nobody took the placement: it costs nobody anything.
    fn give_back(&mut self, legs: [Option<RequestId>; 2], now_ms: f64) {
        for request in legs.into_iter().flatten() {
            self.scheduler.end(request, Output::default(), now_ms);
        }
    }

    /// A leg ended, or never started. Its tenant pays for what it took.
    pub fn end(&mut self, request: RequestId, output: Output, now_ms: f64) -> Option<Ended> {
        let ended = self.scheduler.end(request, output, now_ms)?;
        self.settle(&ended);
        Some(ended)
    }

    /// One who waited gave up.
    pub fn leave(&mut self, request: RequestId) -> Option<T> {
        let returning = self.returning.remove(&request).map(|(_, item)| item);
        returning.or_else(|| self.queue.leave(request.0).map(|(_, (_, item))| item))
    }

    /// All who wait, in no order; the queue is empty then.
    pub fn refuse_all(&mut self) -> Vec<T> {
        let returning = self.returning.keys().copied();
        let all: Vec<_> = returning.chain(self.queue.tickets().map(RequestId)).collect();
        all.into_iter().filter_map(|request| self.leave(request)).collect()
    }

    /// Nobody waits for a worker.
    #[must_use]
    pub fn nobody_waits(&self) -> bool {
        self.returning.is_empty() && self.queue.is_empty()
    }

    /// How many of those that began before wait.
    #[must_use]
    pub fn returning(&self) -> usize {
        self.returning.len()
    }

    /// Those who wait, but for those that began before.
    #[must_use]
    pub fn queue(&self) -> &Admission<(PlacementRequest, T)> {
        &self.queue
    }

    /// A worker left, and the legs on it with it; what the caller kept of it. The tenants of the legs pay for what they got,
    /// not for what was foreseen.
    pub fn worker_left(&mut self, id: WorkerId, now_ms: f64) -> Option<W> {
        let (member, legs) = self.scheduler.leave(id, now_ms)?;
        legs.iter().for_each(|ended| self.settle(ended));
        Some(member)
    }

    fn settle(&mut self, ended: &Ended) {
        self.queue.charge(ended.tenant, ended.block_seconds - ended.expected_block_seconds);
    }

    /// Set if the first token is predicted to come after the deadline, wherever the request goes.
    fn too_late(&mut self, wanted: &PlacementRequest, now_ms: f64) -> Option<Refusal> {
        let deadline_ms = wanted.deadline_ms? - now_ms;
        let soonest = self.scheduler.soonest_ms(wanted, now_ms)?;
        let waits = self.queue_ms(Class::of(wanted.priority));
        let predicted_ms = soonest + waits;
        (predicted_ms > deadline_ms).then(|| Refusal::TooLate {
            predicted_ms,
            deadline_ms,
            retry_after_ms: clamp(predicted_ms - deadline_ms),
        })
    }

    fn soonest_ms(&mut self, wanted: &PlacementRequest, now_ms: f64) -> f64 {
        self.scheduler.soonest_ms(wanted, now_ms).unwrap_or(0.0)
    }

    /// Ms after which there is likely to be room.
    #[must_use]
    pub fn retry_after_ms(&self) -> f64 {
        clamp(self.queue_ms(Class::Low))
    }

    /// Ms until what goes before one more of this class is computed, roughly: floors and ageing left out.
    fn queue_ms(&self, class: Class) -> f64 {
        let ahead = [Class::Low, Class::Normal, Class::High].into_iter().filter(|c| *c >= class);
        self.scheduler.prefill_ms(ahead.map(|class| self.queue.of_class(class).tokens).sum())
    }
}

fn legs(placement: &Placement) -> [Option<RequestId>; 2] {
    [Some(placement.request), placement.prefill.map(|prefill| prefill.request)]
}

fn clamp(ms: f64) -> f64 {
    ms.clamp(*RETRY_AFTER_MS.start(), *RETRY_AFTER_MS.end())
}

#[cfg(test)]
mod tests;
