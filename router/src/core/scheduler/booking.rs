//! The life of a leg, from its placement to its end: what is booked for it, and what it teaches.

use std::sync::Arc;

use super::candidates::usable_blocks;
use super::claims::usual;
use super::legs::{BookedLeg, LegPart};
use super::worker::Worker;
use super::worker::list::Workers;
use super::{
    Begun, Ended, LegOutput, NotPlaced, Placement, PlacementRequest, PrefillLeg, Scheduler,
};
use crate::core::candidate::{Ask, Candidate, WorkerId};
use crate::core::decision::{Decision, LeftOut, decide};
use crate::core::estimate::Estimate;
use crate::core::frame::{RequestId, Role};

/// A half of a placement, or all of it.
struct Half<'a> {
    request: RequestId,
    part: LegPart,
    on: &'a Candidate,
    /// To its own first token.
    first_ms: f64,
    /// Tokens that it holds on average, and how long.
    tokens: f64,
    ms: f64,
    /// Of each token after the first.
    tpot_ms: f64,
}

impl<W> Scheduler<W> {
    /// Chooses a worker, or one for each half of the request, and books what goes there.
    ///
    /// # Errors
    /// Nothing is booked.
    pub fn place(
        &mut self,
        wanted: &PlacementRequest,
        now_ms: f64,
    ) -> Result<Placement, NotPlaced> {
        let decision = self.choose(wanted, now_ms)?;
        Ok(self.take(wanted, decision, now_ms))
    }

    /// The same for one that would rather wait than be placed where its prompt waits for `enough_ms` or longer, by costs that are
    /// known and no guess: it is not placed then, and nothing was decided.
    ///
    /// # Errors
    /// Nothing is booked.
    pub fn place_if_soon(
        &mut self,
        wanted: &PlacementRequest,
        enough_ms: f64,
        now_ms: f64,
    ) -> Result<Option<Placement>, NotPlaced> {
        let before = (self.chooser.clone(), self.shadow.clone());
        let decision = self.choose(wanted, now_ms)?;
        if self.waits_ms(&decision).is_some_and(|ms| ms >= enough_ms) {
            (self.chooser, self.shadow) = before;
            return Ok(None);
        }
        Ok(Some(self.take(wanted, decision, now_ms)))
    }

    /// How long its prompt waits for the worker that computes it, as far as that is known.
    fn waits_ms(&self, decision: &Decision) -> Option<f64> {
        let (chosen, estimate) = decision.chosen()?;
        let computes = decision.chosen_prefill().unwrap_or(chosen).id;
        self.workers[self.find(computes)?].fit.is_known().then_some(estimate.queue_ms)
    }

    /// Chooses, and books nothing. Of a decision without an error there is a winner.
    fn choose(
        &mut self,
        wanted: &PlacementRequest,
        now_ms: f64,
    ) -> Result<Arc<Decision>, NotPlaced> {
        let ask = self.ask(wanted, now_ms);
        let asking = self.asking(wanted, &ask, now_ms);
        // whoever may look at all of it wants all candidates
        let all = wanted.explains || self.keeps_candidates || self.shadow.is_some();
        let (weighed, left_out) = self.weigh(&asking, &ask, all);
        let decision = decide(
            wanted.name.clone(),
            now_ms,
            ask,
            weighed,
            &mut self.chooser,
            self.shadow.as_mut(),
        );
        let reasons =
            decision.winner.is_none().then(|| (decision.no_place(), decision.where_it_failed()));
        let decision = Arc::new(if all { decision } else { self.shorten(decision, left_out) });
        if let Some((no_place, where_it_failed)) = reasons {
            return Err(NotPlaced { no_place, where_it_failed, decision });
        }
        Ok(decision)
    }

    /// Books what was chosen.
    fn take(
        &mut self,
        wanted: &PlacementRequest,
        decision: Arc<Decision>,
        now_ms: f64,
    ) -> Placement {
        let (chosen, estimate) = decision.chosen().expect("there is a winner");
        let Estimate { transfer_ms, decode_ms, .. } = *estimate;
        let (ttft_ms, output) = (estimate.ttft_ms(), decision.ask.output_tokens);
        let tokens = f64::from(wanted.prompt_tokens);
        let pair = decision.chosen_prefill();
        let mut answer = Half {
            request: wanted.request,
            part: if pair.is_some() { LegPart::Decode } else { LegPart::Whole },
            on: chosen,
            first_ms: ttft_ms,
            tokens: tokens + output / 2.0,
            ms: ttft_ms + transfer_ms + decode_ms,
            tpot_ms: decode_ms / (output - 1.0).max(1.0),
        };
        if pair.is_some() {
            answer.first_ms += transfer_ms + answer.tpot_ms;
        }
        let mut expected_block_seconds = self.book(wanted, &answer, &decision.ask, now_ms);
        let prefill = pair.map(|on| {
            let (request, ms) = (wanted.prefill_request, ttft_ms + transfer_ms);
            let (part, first_ms) = (LegPart::Prefill, ttft_ms);
            let half = Half { request, part, on, first_ms, tokens, ms, tpot_ms: 0.0 };
            expected_block_seconds += self.book(wanted, &half, &decision.ask, now_ms);
            PrefillLeg { request, worker: on.id }
        });
        let (request, worker) = (wanted.request, chosen.id);
        Placement { request, worker, prefill, expected_block_seconds, decision }
    }

    /// What is kept of a decision that was made without those that are left out.
    fn shorten(&mut self, decision: Decision, left_out: LeftOut) -> Decision {
        let (decision, weighed) = decision.shortened(left_out);
        self.weighed = weighed;
        decision
    }

    /// Block-seconds that it is likely to take.
    fn book(&mut self, wanted: &PlacementRequest, half: &Half<'_>, ask: &Ask, now_ms: f64) -> f64 {
        let i = self.find(half.on.id).expect("it was a candidate");
        if half.part != LegPart::Decode {
            self.delays(i, half.on, ask, now_ms);
        }
        let worker = &mut self.workers[i];
        // also what another leg has booked: that one may be given up first
        let news = half.on.held_tokens + self.block_tokens < wanted.prompt_tokens;
        let booked = news && self.holdings.book(&worker.places, half.part, &wanted.keys);
        let mut leg = BookedLeg::new(wanted, half.part, half.on.id, now_ms, half.first_ms);
        leg.booked = booked;
        leg.predicted_tpot_ms = half.tpot_ms;
        leg.held_blocks = half.on.held_tokens / self.block_tokens;
        leg.cached_tokens = match half.part {
            LegPart::Whole | LegPart::Prefill => half.on.cached_tokens,
            LegPart::Decode => half.on.decode_cached_tokens(),
        };
        if half.part != LegPart::Decode {
            let booked = usize::try_from(leg.cached_tokens / self.block_tokens).unwrap_or(0);
            let booked = wanted.keys.get(..booked).unwrap_or_default();
            leg.awaits = worker.computes(booked, leg.held_blocks, self.block_tokens);
        }
        leg.reports = worker.reports;
        leg.expected_block_seconds =
            half.tokens / f64::from(self.block_tokens) * half.ms.max(0.0) / 1e3;
        worker.book(half.request, &leg, ask.output_tokens, now_ms);
        let expected_block_seconds = leg.expected_block_seconds;
        let lease_ms = leg.lease_ms;
        self.demand.placed(leg.part);
        self.legs.insert(half.request, leg);
        if booked {
            self.lease(half.request, lease_ms);
        }
        expected_block_seconds
    }

    /// The first token of a leg came; the worker says how much of its prompt was in its own cache. A prefill leg has done
    /// its work then, and only its KV stays until it ends.
    pub fn begun(&mut self, request: RequestId, cached_tokens: u32, now_ms: f64) -> Option<Begun> {
        let leg = self.legs.get_mut(&request)?;
        if leg.begun {
            return None;
        }
        let i = self.workers.binary_search_by_key(&leg.worker, |worker| worker.id).ok()?;
        let worker = &mut self.workers[i];
        (leg.begun, leg.begun_ms) = (true, now_ms);
        // from here on the worker's own events say what it holds
        if std::mem::take(&mut leg.booked) {
            self.holdings.unbook(&worker.places, leg.part, &leg.keys);
        }
        worker.begun(request, leg);
        if leg.part != LegPart::Decode {
            worker.claims.gave(leg.prompt_tokens.saturating_sub(cached_tokens).into());
            self.demand.found(leg.prompt_tokens, cached_tokens);
        }
        let held_tokens = leg.held_blocks * self.block_tokens;
        let withdrawn = worker.credit.audit(held_tokens, cached_tokens, self.block_tokens);
        // what a step stores is announced before the step, so all but the last block is known by now
        let full = usable_blocks(leg.prompt_tokens, &leg.keys, self.block_tokens);
        let announced = self.holdings.still_held(&worker.places, &leg.keys, full);
        worker.credit.computed(full - announced);
        let mut doubted = false;
        if leg.part != LegPart::Decode && is_judged(leg) {
            let times = (leg.predicted_ttft_ms, now_ms - leg.placed_ms);
            doubted = audit_request(&mut self.workers, i, times);
        }
        let begun = Begun {
            worker: leg.worker,
            held_tokens,
            cached_tokens,
            predicted_ttft_ms: leg.predicted_ttft_ms,
            settled_ttft_ms: leg.predicted_ttft_ms + leg.settled_ms,
            last_ttft_ms: leg.predicted_ttft_ms + leg.delayed_ms,
            ttft_ms: now_ms - leg.placed_ms,
            withdrawn,
        };
        if withdrawn.is_some() {
            self.forget_blocks(i);
        }
        if doubted {
            self.doubt_changed(i);
        }
        Some(begun)
    }

    /// The prefill leg of a split request is lost: `request`, its decode leg, computes the prompt itself. Nothing happens
    /// to a leg that is whole or has begun.
    pub fn alone(&mut self, request: RequestId, now_ms: f64) {
        let Some(leg) = self.legs.get_mut(&request) else { return };
        if leg.part != LegPart::Decode || leg.begun {
            return;
        }
        let i = self.workers.binary_search_by_key(&leg.worker, |worker| worker.id);
        let worker = &mut self.workers[i.expect("its legs leave with a worker")];
        if leg.booked {
            self.holdings.unbook(&worker.places, leg.part, &leg.keys);
            leg.booked = self.holdings.book(&worker.places, LegPart::Whole, &leg.keys);
        }
        leg.part = LegPart::Whole;
        leg.reports = worker.reports;
        leg.cached_tokens = leg.held_blocks * self.block_tokens; // what was to come for others may not come either
        worker.alone(request, leg, now_ms);
    }

    /// A leg ended, or never started: everything booked for it is given back.
    pub fn end(&mut self, request: RequestId, output: LegOutput, now_ms: f64) -> Option<Ended> {
        let leg = self.legs.remove(&request)?;
        if let Some(i) = self.find(leg.worker) {
            let worker = &mut self.workers[i];
            if leg.booked {
                self.holdings.unbook(&worker.places, leg.part, &leg.keys);
            }
            worker.release(request, &leg);
            // only of answers that ended by themselves the end is known
            let (tokens, took_ms) = (f64::from(output.tokens) - 1.0, now_ms - leg.begun_ms);
            let of_answer = output.complete && leg.begun && tokens > 0.0 && is_judged(&leg);
            let times = (leg.predicted_tpot_ms * tokens, took_ms);
            if of_answer && audit_request(&mut self.workers, i, times) {
                self.doubt_changed(i);
            }
        }
        if output.complete {
            self.demand.lengths.ended(leg.tenant, output.tokens);
        }
        Some(leg.ended(output.tokens, self.block_tokens, now_ms))
    }

    /// A pull of so many bytes by worker `to` from the worker named `from` took so many ms, those of waiting for `from` to
    /// compute them left out.
    pub fn transferred(&mut self, to: WorkerId, from: &str, bytes: u64, ms: f64, now_ms: f64) {
        let mib = bytes as f64 / f64::from(1 << 20);
        self.pulled(to, from, Some((mib, ms)), now_ms);
    }

    /// A pull failed by the fault of the way or of its source; one that was cancelled did not.
    pub fn transfer_failed(&mut self, to: WorkerId, from: &str, now_ms: f64) {
        self.pulled(to, from, None, now_ms);
    }

    fn pulled(&mut self, to: WorkerId, from: &str, moved: Option<(f64, f64)>, now_ms: f64) {
        // a worker that dialled again has two links for a while: the later one counts
        let source = self.workers.iter().rev().find(|worker| *worker.name == *from);
        let source = source.map(|worker| worker.id);
        if let Some(worker) = self.worker(to) {
            worker.inbound.ended(source, moved, now_ms);
        }
    }

    /// Ms until the workers that take work have computed so many waiting prompt tokens, together, with as many found in
    /// caches as of late. Where some do nothing else, those that only generate are left out.
    #[must_use]
    pub fn prefill_ms(&self, waiting_tokens: u64) -> f64 {
        let rate = |computes: fn(&Worker<W>) -> bool| -> f64 {
            let open = self.workers.iter().filter(|worker| worker.open && computes(worker));
            open.map(Worker::prefill_tokens_per_ms).sum()
        };
        let of_those_meant_for_it = rate(|worker| worker.role != Role::Decode);
        let rate = if of_those_meant_for_it > 0.0 { of_those_meant_for_it } else { rate(|_| true) };
        if rate > 0.0 { waiting_tokens as f64 * self.demand.uncached_share / rate } else { 0.0 }
    }

    /// One more leg could go to this worker now, as far as it depends on the worker.
    #[must_use]
    pub fn has_room(&self, id: WorkerId, now_ms: f64) -> bool {
        let Some(worker) = self.find(id).map(|i| &self.workers[i]) else { return false };
        let free = worker.open && worker.occupied() < worker.places_for_requests();
        let worker_load =
            || worker.load_before_yielding(&worker.worker_load(self.block_tokens, now_ms));
        free && (!self.holds_back() || !self.has_long_queue(worker.role, &worker_load()))
    }
}

/// Whether a worker's word is held against what became of this leg. One that yields waits for others that come later, so how
/// long it takes is not in its worker's hands.
fn is_judged(leg: &BookedLeg) -> bool {
    !leg.yields
}

/// Holds what a part of a request was predicted to take against what it took. True if the worker is not believed any more.
fn audit_request<W>(
    workers: &mut Workers<W>,
    i: usize,
    (predicted_ms, took_ms): (f64, f64),
) -> bool {
    let (before, worker, after) = workers.split(i);
    let others = || before.iter().chain(after.iter()).map(|other| &other.claims);
    worker.claims.request(predicted_ms, took_ms, || usual(others()))
}
