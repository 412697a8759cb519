//! The scheduler's state as one decision sees it: every worker as a candidate.

mod prospects;

use std::sync::Arc;

pub(super) use self::prospects::ProspectLists;
use self::prospects::SeenWorkers;
use super::holdings::Found;
use super::worker::Worker;
use super::worker::answers::Wanted;
use super::worker::outline::Outline;
use super::{PlacementRequest, Scheduler};
use crate::core::candidate::{Ask, Candidate, Exclusion, digest};
use crate::core::decision::{LeftOut, Weighed};
use crate::core::estimate::{Demand, PromptQueue, WorkerLoad, estimate, prefill_leg};
use crate::core::frame::Role;
use crate::core::policy::{Policy, PolicyName, Shortlist, soonest_ms};

/// For a request that makes way for others, a queue of this share of `worker_queue_ms` is long already. A guess.
const YIELDING_QUEUE: f64 = 0.75;
/// Among so few workers all are looked at: about as many are kept of a decision.
const FEW: usize = 16;
/// A prompt for which no floor is known: see `ENDLESS_TOKENS` in `core/estimate/floor.rs`. No model takes one.
const LONG_TOKENS: u32 = 500_000;

/// What a decision asks of each worker, and what it knows beside the workers.
pub(super) struct PlacementView<'a> {
    pub(super) wanted: &'a PlacementRequest,
    /// Of the blocks that a cache can give.
    pub(super) keys: &'a [u64],
    /// See [`WorkerLoad::pressure`]; of workers that only compute prompts, and of the others.
    pub(super) pressure: [f64; 2],
    /// See [`WorkerLoad::reuse`].
    pub(super) reuse: f64,
    /// Its prompt may be computed by another worker.
    splits: bool,
    /// It began before, and all workers that could go on with it failed it: then one of them has to do.
    failed_by_all: bool,
    pub(super) now_ms: f64,
}

impl PlacementView<'_> {
    /// How a worker stands now, but for others of its group.
    pub(super) fn worker_load(&self, outline: &Outline) -> WorkerLoad {
        let pressure = self.pressure[usize::from(outline.decodes())];
        outline.worker_load(self.now_ms, pressure, self.reuse)
    }

    /// It takes the KV of prompts that others compute.
    pub(super) fn can_pull(&self, outline: &Outline) -> bool {
        self.splits && outline.decodes() && outline.moves_kv
    }

    #[inline]
    pub(super) fn exclusion(&self, outline: &Outline) -> Option<Exclusion> {
        let excluded = outline.excluded(self.wanted.yields);
        if self.wanted.excluded.is_empty() {
            return excluded;
        }
        let forgiven = self.failed_by_all && outline.decodes();
        match excluded {
            Some(Exclusion::Closed) => Some(Exclusion::Closed),
            _ if self.wanted.excluded.contains(&outline.id) && !forgiven => Some(Exclusion::Failed),
            excluded => excluded,
        }
    }
}

impl<W> Scheduler<W> {
    pub(super) fn ask(&self, wanted: &PlacementRequest, now_ms: f64) -> Ask {
        Ask {
            prompt_tokens: wanted.prompt_tokens,
            max_tokens: wanted.max_tokens,
            output_tokens: self.demand.lengths.of(wanted.tenant).min(wanted.max_tokens.into()),
            block_tokens: self.block_tokens,
            block_bytes: self.workers.kv_block_bytes(),
            session: wanted.session.as_deref().map(digest),
            deadline_ms: wanted.deadline_ms.map(|deadline| deadline - now_ms),
        }
    }

    /// Looks up what workers hold of a prompt, and at workers that changed.
    pub(super) fn asking<'a>(
        &mut self,
        wanted: &'a PlacementRequest,
        ask: &Ask,
        now_ms: f64,
    ) -> PlacementView<'a> {
        let usable = if wanted.reuses {
            usable_blocks(wanted.prompt_tokens, &wanted.keys, self.block_tokens)
        } else {
            0
        };
        let keys = &wanted.keys[..usable as usize];
        self.holdings.overlaps(keys, &mut self.overlaps);
        self.workers.look(self.block_tokens);
        let pressure = [Role::Prefill, Role::Both]
            .map(|role| self.demand.pressure.of(role).at(self.workers.open(role), now_ms));
        // one that generates nothing leaves no KV that somebody else could go on with
        let splits = wanted.max_tokens > 0 && ask.block_bytes > 0;
        if splits {
            self.workers.look_at_pulls(now_ms);
        }
        let reuse = (1.0 - self.demand.uncached_share).max(0.0);
        let failed_by_all = self.failed_by_all(wanted);
        PlacementView { wanted, keys, pressure, reuse, splits, failed_by_all, now_ms }
    }

    /// The workers that a choice has to look at, as candidates, and those that are left out: `all` of them, or as few as do not
    /// change what is chosen and kept.
    pub(super) fn weigh(
        &mut self,
        asking: &PlacementView<'_>,
        ask: &Ask,
        all: bool,
    ) -> (Weighed, LeftOut) {
        if !all
            && self.has_floors(asking)
            && let Policy::Kv(kv) = &self.chooser.policy
        {
            let load = |place: usize| {
                let outline = &self.workers.outlines()[place];
                (asking.exclusion(outline).is_some(), asking.worker_load(outline))
            };
            let held_back = self.held_back(asking.wanted.yields, load);
            let (mut lists, mut eligible) = std::mem::take(&mut self.prospects);
            let mut seen = SeenWorkers::of(self, asking, ask, &mut lists, held_back, &mut eligible);
            let shortlist = kv.shortlist(&mut seen, &eligible, ask);
            self.prospects = (lists, eligible);
            if let Some(Shortlist { places, left_out }) = shortlist {
                let mut weighed = self.described(asking, places.into_iter());
                hold_back(&mut weighed.candidates, held_back);
                return (weighed, left_out);
            }
        }
        (self.candidates(asking), LeftOut::default())
    }

    /// There are floors of what workers cost, and enough workers to go by them.
    fn has_floors(&self, asking: &PlacementView<'_>) -> bool {
        let ranks = self.workers.has_ranks();
        !ranks && self.workers.len() > FEW && asking.wanted.prompt_tokens < LONG_TOKENS
    }

    /// What a placement would be predicted to take to the first token, wherever it is soonest; `None` without workers.
    #[must_use]
    pub fn soonest_ms(&mut self, wanted: &PlacementRequest, now_ms: f64) -> Option<f64> {
        let ask = self.ask(wanted, now_ms);
        let asking = self.asking(wanted, &ask, now_ms);
        let usable = |excluded: Option<Exclusion>| match excluded {
            None | Some(Exclusion::Full | Exclusion::Backlog) => true,
            Some(Exclusion::Closed | Exclusion::Failed | Exclusion::NoTransfer) => false,
        };
        let outlines = || self.workers.outlines().iter().enumerate();
        let usable = || outlines().filter(|(_, one)| usable(asking.exclusion(one)));
        let can_pull = usable().any(|(_, one)| asking.can_pull(one));
        let usable = usable().filter(|(_, one)| can_pull || one.decodes());
        let places: Vec<usize> = usable.map(|(place, _)| place).collect();
        if self.has_floors(&asking) {
            let (mut lists, mut eligible) = std::mem::take(&mut self.prospects);
            let mut seen =
                SeenWorkers::of(self, &asking, &ask, &mut lists, [false; 2], &mut eligible);
            let soonest = soonest_ms(&mut seen, &places);
            self.prospects = (lists, eligible);
            if soonest.is_some() {
                return soonest;
            }
        }
        let weighed = self.candidates(&asking);
        let ttfts = places.iter().map(|place| weighed.candidates[*place].estimate(&ask).ttft_ms());
        let soonest = ttfts.min_by(f64::total_cmp);
        self.weighed = weighed;
        soonest
    }

    /// All workers as candidates.
    pub(super) fn candidates(&mut self, asking: &PlacementView<'_>) -> Weighed {
        let mut weighed = self.described(asking, 0..self.workers.len());
        let candidates = &mut weighed.candidates;
        self.meet_ranks(candidates, asking.now_ms);
        let load = |place: usize| {
            let Candidate { excluded, worker_load, .. } = &candidates[place];
            (excluded.is_some(), *worker_load)
        };
        let held_back = self.held_back(asking.wanted.yields, load);
        hold_back(candidates, held_back);
        weighed
    }

    /// Some workers as candidates. Those of the decision before are used again: what never changes of a worker stays there, and
    /// so does the memory of its queue.
    fn described(
        &mut self,
        asking: &PlacementView<'_>,
        places: impl ExactSizeIterator<Item = usize>,
    ) -> Weighed {
        let mut weighed = std::mem::take(&mut self.weighed);
        weighed.candidates.truncate(places.len());
        for (at, place) in places.enumerate() {
            self.describe(place, asking, &mut weighed.candidates, at);
        }
        weighed
    }

    /// Fills the candidate at `at`, the next one at most, with the worker at `place`.
    fn describe(
        &self,
        place: usize,
        asking: &PlacementView<'_>,
        candidates: &mut Vec<Candidate>,
        at: usize,
    ) {
        let (worker, outline) = (&self.workers[place], &self.workers.outlines()[place]);
        let load = asking.worker_load(outline);
        match candidates.get_mut(at) {
            Some(candidate) if candidate.id == worker.id => candidate.worker_load = load,
            Some(candidate) => *candidate = worker.candidate(load),
            None => candidates.push(worker.candidate(load)),
        }
        let candidate = &mut candidates[at];
        let found =
            if worker.credit.given() { self.overlaps.of(&worker.places) } else { Found::default() };
        self.queue_of(worker, asking, &load, &found, &mut candidate.queue);
        let tokens = |blocks: u32| blocks * self.block_tokens;
        let pulls = asking.can_pull(outline);
        candidate.excluded = asking.exclusion(outline);
        candidate.occupied = worker.occupied();
        candidate.booked_tokens = worker.booked_tokens;
        candidate.held_tokens = tokens(found.held);
        candidate.cached_tokens = tokens(found.cached());
        candidate.coming_tokens = tokens(found.pulled);
        candidate.lower_tier_tokens = tokens(found.lower);
        candidate.sources = pulls.then(|| Arc::clone(worker.inbound.costs()));
    }

    /// Fills `queue` with what a request that finds so much there would wait for.
    pub(super) fn queue_of(
        &self,
        worker: &Worker<W>,
        asking: &PlacementView<'_>,
        worker_load: &WorkerLoad,
        found: &Found,
        queue: &mut PromptQueue,
    ) {
        let booked = &asking.wanted.keys[..found.booked as usize];
        let awaits = worker.computes(booked, found.held, self.block_tokens);
        worker.queue(awaits, queue);
        let needs = Wanted { prompt_tokens: asking.wanted.prompt_tokens, keys: asking.keys };
        let (used, lengths) = (worker_load.blocks_used, &self.demand.lengths);
        queue.room_ms = worker.room_ms(&needs, used, lengths, self.block_tokens);
    }

    fn failed_by_all(&self, wanted: &PlacementRequest) -> bool {
        let mut open = self.workers.iter().filter(|worker| worker.open && worker.decodes());
        wanted.resumes && open.all(|worker| wanted.excluded.contains(&worker.id))
    }

    /// Only `kv` keeps requests here where they would wait anyway; the baselines know nothing of ms.
    pub(super) fn holds_back(&self) -> bool {
        self.rules.policy == PolicyName::Kv
    }

    /// Whether workers that only compute prompts, and others, get nothing now. Where every worker has a long queue, one more
    /// request is better kept here, where the order may still change. Where only those that do nothing but prompts have, it is
    /// kept if one of them is best nevertheless. `load`: whether a worker is excluded anyway, and how it stands.
    fn held_back(&self, yields: bool, load: impl Fn(usize) -> (bool, WorkerLoad)) -> [bool; 2] {
        if !self.holds_back() {
            return [false; 2];
        }
        let long = |place: usize, role: Role, worker_load: &WorkerLoad| {
            if yields {
                let longest = YIELDING_QUEUE * self.rules.worker_queue_ms;
                self.has_queue_of(longest, role, worker_load)
            } else {
                let before_those = self.workers[place].load_before_yielding(worker_load);
                self.has_long_queue(role, &before_those)
            }
        };
        let all_long = |decode: bool| {
            if !decode && !self.workers.has_prefills() {
                return true;
            }
            let mut of_kind = self
                .workers
                .outlines()
                .iter()
                .enumerate()
                .filter(|(_, one)| one.decodes() == decode);
            of_kind.all(|(place, outline)| {
                let (excluded, worker_load) = load(place);
                excluded || long(place, outline.role, &worker_load)
            })
        };
        let prefills = all_long(false);
        [prefills, prefills && all_long(true)]
    }

    pub(super) fn has_long_queue(&self, role: Role, worker_load: &WorkerLoad) -> bool {
        self.has_queue_of(self.rules.worker_queue_ms, role, worker_load)
    }

    fn has_queue_of(&self, longest_ms: f64, role: Role, worker_load: &WorkerLoad) -> bool {
        let demand = Demand {
            prompt_tokens: 1.0,
            cached_tokens: 0.0,
            output_tokens: self.demand.lengths.usual(),
            block_tokens: self.block_tokens.into(),
        };
        // all that is ahead, whatever a short prompt may overtake of it
        let ahead = PromptQueue::default();
        let queue_ms = || match role {
            Role::Prefill => prefill_leg(worker_load, &ahead, &demand).queue_ms,
            Role::Decode | Role::Both => estimate(worker_load, &ahead, &demand).queue_ms,
        };
        worker_load.backlog_tokens > 0.0 && queue_ms() > longest_ms
    }
}

/// See [`Scheduler::held_back`].
fn hold_back(candidates: &mut [Candidate], held_back: [bool; 2]) {
    for candidate in candidates.iter_mut().filter(|c| c.excluded.is_none()) {
        if held_back[usize::from(candidate.decodes())] {
            candidate.excluded = Some(Exclusion::Backlog);
        }
    }
}

impl<W> Worker<W> {
    /// As far as it does not depend on a request.
    fn candidate(&self, worker_load: WorkerLoad) -> Candidate {
        Candidate {
            id: self.id,
            name: self.name.clone(),
            role: self.role,
            group: self.group.clone(),
            excluded: None,
            occupied: 0,
            sequences: self.capacity.sequences,
            booked_tokens: 0,
            held_tokens: 0,
            cached_tokens: 0,
            coming_tokens: 0,
            lower_tier_tokens: 0,
            worker_load,
            queue: PromptQueue::default(),
            sources: None,
        }
    }
}

/// Leading blocks of a prompt that a cache can give: the one that holds the last token is always computed.
pub(super) fn usable_blocks(prompt_tokens: u32, keys: &[u64], block_tokens: u32) -> u32 {
    let full = prompt_tokens.saturating_sub(1) / block_tokens;
    full.min(u32::try_from(keys.len()).unwrap_or(u32::MAX))
}
