//! The whole placement of one model's requests: those that find a worker go there, those that do not wait in order, those
//! that would wait in vain are told so at once. The router and the simulator both drive this.

mod gathering;
mod waiting;

use std::collections::BTreeMap;

use crate::core::admission::{Admission, Class, Entry, QueueBound, QueueRules};
use crate::core::candidate::WorkerId;
use crate::core::decision::NoPlace;
use crate::core::frame::RequestId;
use crate::core::scheduler::{
    Ended, LegOutput, ModelDemand, Placement, PlacementRequest, Scheduler, WaitingPrompts,
};

/// Nobody is told to come back sooner or later than this.
const RETRY_AFTER_MS: std::ops::RangeInclusive<f64> = 1_000.0..=600_000.0;

/// Scheduler and queue of one model. `T` is the caller's handle of one who waits, `W` what the caller keeps of a worker.
#[derive(Debug)]
pub struct Dispatch<T, W = ()> {
    /// The workers, and what is known of them.
    pub scheduler: Scheduler<W>,
    queue: Admission<(PlacementRequest, T)>,
    /// Those that began before and go on, by their names, so the first to come first. They are before all others and outside
    /// the bounds of the queue: each is an answer in flight, of which the caller bounds the number.
    returning: BTreeMap<RequestId, (PlacementRequest, T)>,
    /// While the requests of a moment gather in the queue: until when.
    gathers_until_ms: Option<f64>,
}

/// What became of a request that asked for a place.
#[derive(Debug)]
pub enum Submitted<T> {
    /// It goes there.
    Placed(Placement, T),
    /// It waits; a later [`Dispatch::dispatch_waiting`] places it, at the latest when [`Dispatch::gathers_until_ms`] has come if it
    /// only waits for others.
    Waits,
    /// It was not taken.
    Refused(Refusal, T),
}

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refusal {
    /// No worker takes new work.
    NoneOpen,
    /// Those that do failed it before.
    AllExcluded,
    /// The queue is full.
    QueueFull {
        /// The bound of the queue that was reached.
        what: QueueBound,
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
        let (queue, returning) = (Admission::new(rules), BTreeMap::new());
        Self { scheduler, queue, returning, gathers_until_ms: None }
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
        self.scheduler.arrived(wanted.prompt_tokens, now_ms);
        if let Some(refusal) = self.too_late(&wanted, now_ms) {
            return Submitted::Refused(refusal, item);
        }
        let class = Class::of(wanted.priority);
        let mut has_place = false;
        if self.nobody_is_before() {
            match self.scheduler.place_if_soon(&wanted, self.gathers_from_ms(&wanted), now_ms) {
                Ok(Some(placement)) => {
                    self.passed_by(&wanted, &placement);
                    return Submitted::Placed(placement, item);
                }
                Ok(None) => {
                    self.gather(now_ms);
                    has_place = true;
                }
                Err(not_placed) => match not_placed.no_place {
                    NoPlace::AllFull => {}
                    NoPlace::NoneOpen if may_open => {}
                    NoPlace::NoneOpen => return Submitted::Refused(Refusal::NoneOpen, item),
                    NoPlace::AllExcluded => return Submitted::Refused(Refusal::AllExcluded, item),
                },
            }
        }
        if let Some(what) = self.queue.crowded().filter(|_| wanted.yields && !has_place) {
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

    fn passed_by(&mut self, wanted: &PlacementRequest, placement: &Placement) {
        self.queue.passed_by(wanted.prompt_tokens.into());
        self.queue.charge(wanted.tenant, placement.expected_block_seconds);
    }

    /// A leg ended, or never started. Its tenant pays for what it took.
    pub fn end(&mut self, request: RequestId, output: LegOutput, now_ms: f64) -> Option<Ended> {
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

    /// What is asked of the model's workers.
    #[must_use]
    pub fn asked(&self, now_ms: f64) -> ModelDemand {
        let waiting = WaitingPrompts { requests: self.queue.len(), tokens: self.queue.tokens() };
        self.scheduler.asked(waiting, now_ms)
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

fn clamp(ms: f64) -> f64 {
    ms.clamp(*RETRY_AFTER_MS.start(), *RETRY_AFTER_MS.end())
}

#[cfg(test)]
mod tests;
