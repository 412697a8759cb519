//! The workers as a choice among many looks at them: floors of all, estimates of those that it asks for.

use super::PlacementView;
use crate::core::candidate::{Ask, Exclusion, WorkerId};
use crate::core::estimate::{
    CostFloors, DecodeLeg, Estimate, FloorsAsked, PromptQueue, Source, TokensThere, WorkerLoad,
    last_tokens, of_role,
};
use crate::core::policy::{Eligible, Prospects};
use crate::core::scheduler::Scheduler;

/// Lists of all workers, whose memory serves one decision after the other.
#[derive(Debug, Default)]
pub(in crate::core::scheduler) struct ProspectLists {
    has: TokensThere,
    floors: CostFloors,
    estimates: KnownOf<Estimate>,
    decode_legs: KnownOf<DecodeLeg>,
    queue: PromptQueue,
}

/// What is known of some workers.
#[derive(Debug)]
struct KnownOf<T> {
    /// By the worker's place, one more than the place among the values; 0 if there is none.
    at: Vec<u32>,
    values: Vec<T>,
    /// Places of those that have one.
    known: Vec<usize>,
}

impl<T> Default for KnownOf<T> {
    fn default() -> Self {
        Self { at: Vec::new(), values: Vec::new(), known: Vec::new() }
    }
}

impl<T: Copy> KnownOf<T> {
    /// Nothing is known, of so many workers.
    fn begin(&mut self, workers: usize) {
        self.known.drain(..).for_each(|place| self.at[place] = 0);
        self.at.resize(workers, 0);
        self.values.clear();
    }

    fn get(&self, place: usize) -> Option<T> {
        let at = self.at[place].checked_sub(1)?;
        Some(self.values[at as usize])
    }

    fn put(&mut self, place: usize, value: T) -> T {
        self.values.push(value);
        self.at[place] = u32::try_from(self.values.len()).expect("each worker once");
        self.known.push(place);
        value
    }
}

/// See the head of this file.
pub(super) struct SeenWorkers<'a, W> {
    scheduler: &'a Scheduler<W>,
    asking: &'a PlacementView<'a>,
    ask: &'a Ask,
    lists: &'a mut ProspectLists,
}

impl<'a, W> SeenWorkers<'a, W> {
    pub(super) fn of(
        scheduler: &'a Scheduler<W>,
        asking: &'a PlacementView<'a>,
        ask: &'a Ask,
        lists: &'a mut ProspectLists,
        held_back: [bool; 2],
        eligible: &mut Eligible,
    ) -> Self {
        let mut seen = Self { scheduler, asking, ask, lists };
        seen.fill(held_back, eligible);
        seen
    }

    fn fill(&mut self, held_back: [bool; 2], eligible: &mut Eligible) {
        let (scheduler, asking, ask) = (self.scheduler, self.asking, self.ask);
        let outlines = scheduler.workers.outlines();
        let tokens = |blocks: u32| f64::from(blocks * ask.block_tokens);
        let lists = &mut *self.lists;
        eligible.clear();
        let has = lists.has.of_all(outlines.len());
        for ((place, outline), (cached, with_coming)) in outlines.iter().enumerate().zip(has) {
            let decodes = outline.decodes();
            let held_back = held_back[usize::from(decodes)];
            let excluded = asking.exclusion(outline).or(held_back.then_some(Exclusion::Backlog));
            eligible.add(place, decodes, excluded);
            let found = scheduler.overlaps.at(&outline.places);
            *cached = tokens(found.cached());
            if asking.splits {
                *with_coming = tokens(found.cached().max(found.pulled));
            }
        }
        let asked = FloorsAsked {
            prompt_tokens: ask.prompt_tokens.into(),
            output_tokens: ask.output_tokens,
            block_tokens: ask.block_tokens.into(),
            pressure: asking.pressure,
            reuse: asking.reuse,
            now_ms: asking.now_ms,
            splits: asking.splits,
        };
        scheduler.workers.floors().floors(&asked, &lists.has, &mut lists.floors);
        lists.estimates.begin(outlines.len());
        lists.decode_legs.begin(outlines.len());
    }

    /// How a worker stands now, with its queue in `lists.queue`.
    fn load(&mut self, place: usize) -> WorkerLoad {
        let outline = &self.scheduler.workers.outlines()[place];
        let load = self.asking.worker_load(outline);
        let found = self.scheduler.overlaps.at(&outline.places);
        let worker = &self.scheduler.workers[place];
        self.scheduler.queue_of(worker, self.asking, &load, &found, &mut self.lists.queue);
        load
    }

    fn source(&mut self, place: usize) -> (f64, Source) {
        let leg = self.estimate(place);
        let load = &self.scheduler.workers.outlines()[place].worker_load;
        let demand = self.ask.demand(self.lists.has.cached(place) as u32);
        (leg.total_ms(), Source::new(load, &demand, &leg))
    }

    fn decode_leg(&mut self, place: usize) -> DecodeLeg {
        if let Some(leg) = self.lists.decode_legs.get(place) {
            return leg;
        }
        let alone = self.estimate(place);
        let load = self.load(place);
        let demand = self.ask.demand(self.lists.has.with_coming(place) as u32);
        let bytes = self.ask.block_bytes as f64;
        let leg = DecodeLeg::new(&load, &self.lists.queue, &demand, bytes, &alone);
        self.lists.decode_legs.put(place, leg)
    }
}

impl<W> Prospects for SeenWorkers<'_, W> {
    fn can_pull(&self, place: usize) -> bool {
        self.asking.can_pull(&self.scheduler.workers.outlines()[place])
    }

    fn named(&self, place: usize) -> (WorkerId, u64) {
        let outline = &self.scheduler.workers.outlines()[place];
        (outline.id, outline.digest)
    }

    fn floors(&self) -> &CostFloors {
        &self.lists.floors
    }

    fn estimate(&mut self, place: usize) -> Estimate {
        if let Some(estimate) = self.lists.estimates.get(place) {
            return estimate;
        }
        let load = self.load(place);
        let demand = self.ask.demand(self.lists.has.cached(place) as u32);
        let role = self.scheduler.workers.outlines()[place].role;
        let estimate = of_role(role, &load, &self.lists.queue, &demand);
        self.lists.floors.raise(place, &estimate);
        self.lists.estimates.put(place, estimate)
    }

    fn decode_floor_ms(&self, decode: usize, last_tokens: f64) -> f64 {
        let pulls = &self.scheduler.workers.outlines()[decode].pulls;
        let lacks =
            (f64::from(self.ask.prompt_tokens) - self.lists.has.with_coming(decode)).max(1.0);
        let token_mib = self.ask.block_bytes as f64
            / f64::from(1 << 20)
            / f64::from(self.ask.block_tokens.max(1));
        let transfer_ms = pulls.latency_ms + pulls.mib_ms * token_mib * lacks.min(last_tokens);
        self.lists.floors.decode_leg_ms(decode) + transfer_ms
    }

    fn last_tokens(&self, prefill: usize) -> f64 {
        let load = &self.scheduler.workers.outlines()[prefill].worker_load;
        last_tokens(load, self.ask.prompt_tokens.into(), self.lists.has.cached(prefill))
    }

    fn pair_ms(&mut self, prefill: usize, decode: usize) -> f64 {
        let leg = self.decode_leg(decode);
        let (prefill_ms, source) = self.source(prefill);
        let worker = &self.scheduler.workers[decode];
        let from = self.scheduler.workers.outlines()[prefill].id;
        leg.pair_ms(prefill_ms, &source, worker.inbound.costs().from(from))
    }
}
