//! The scheduler's state as one decision sees it: every worker as a candidate.

use std::sync::Arc;

use super::holdings::Found;
use super::worker::Worker;
use super::worker::answers::Wanted;
use super::{PlacementRequest, Scheduler};
use crate::core::candidate::{Ask, Candidate, Exclusion, digest};
use crate::core::decision::Weighed;
use crate::core::estimate::{Demand, PromptQueue, WorkerLoad, estimate, prefill_leg};
use crate::core::frame::Role;
use crate::core::policy::PolicyName;

/// For a request that makes way for others, a queue of this share of `worker_queue_ms` is long already. A guess.
const YIELDING_QUEUE: f64 = 0.75;

impl<W> Scheduler<W> {
    pub(super) fn ask(&self, wanted: &PlacementRequest, now_ms: f64) -> Ask {
        Ask {
            prompt_tokens: wanted.prompt_tokens,
            max_tokens: wanted.max_tokens,
            output_tokens: self.demand.lengths.of(wanted.tenant).min(wanted.max_tokens.into()),
            block_tokens: self.block_tokens,
            block_bytes: self.block_bytes(),
            session: wanted.session.as_deref().map(digest),
            deadline_ms: wanted.deadline_ms.map(|deadline| deadline - now_ms),
        }
    }

    pub(super) fn candidates(&mut self, wanted: &PlacementRequest, now_ms: f64) -> Weighed {
        let usable = if wanted.reuses {
            usable_blocks(wanted.prompt_tokens, &wanted.keys, self.block_tokens)
        } else {
            0
        };
        self.holdings.overlaps(&wanted.keys[..usable as usize], &mut self.overlaps);
        let pressure = [Role::Prefill, Role::Both].map(|role| {
            let of_kind = |worker: &&Worker<W>| worker.decodes() == (role != Role::Prefill);
            let open = self.workers.iter().filter(of_kind).filter(|worker| worker.open).count();
            self.demand.pressure.of(role).at(open, now_ms)
        });
        // one that generates nothing leaves no KV that somebody else could go on with
        let splits = wanted.max_tokens > 0 && self.block_bytes() > 0;
        if splits {
            self.workers.iter_mut().for_each(|worker| worker.inbound.refresh(now_ms));
        }
        self.workers.iter_mut().for_each(Worker::plan);
        let mut weighed = std::mem::take(&mut self.weighed);
        let candidates = &mut weighed.candidates;
        self.begin(candidates, now_ms);
        self.meet_ranks(candidates, now_ms);
        let hopeless = self.failed_by_all(wanted);
        for (worker, candidate) in self.workers.iter().zip(&mut *candidates) {
            let found = if worker.credit.given() {
                self.overlaps.of(&worker.places)
            } else {
                Found::default()
            };
            candidate.worker_load.pressure = pressure[usize::from(worker.decodes())];
            candidate.worker_load.reuse = (1.0 - self.demand.uncached_share).max(0.0);
            let tokens = |blocks: u32| blocks * self.block_tokens;
            let awaits = worker.computes(
                &wanted.keys[..found.booked as usize],
                found.held,
                self.block_tokens,
            );
            worker.queue(awaits, &mut candidate.queue);
            let keys = &wanted.keys[..usable as usize];
            let needs = Wanted { prompt_tokens: wanted.prompt_tokens, keys };
            let used = candidate.worker_load.blocks_used;
            candidate.queue.room_ms =
                worker.room_ms(&needs, used, &self.demand.lengths, self.block_tokens);
            let pulls = splits && worker.decodes() && worker.kv_block_bytes > 0;
            candidate.excluded = exclusion(worker, wanted, hopeless);
            candidate.occupied = worker.occupied();
            candidate.booked_tokens = worker.booked_tokens;
            candidate.held_tokens = tokens(found.held);
            candidate.cached_tokens = tokens(found.held.max(found.booked));
            candidate.coming_tokens = tokens(found.pulled);
            candidate.lower_tier_tokens = tokens(found.lower);
            candidate.sources = pulls.then(|| Arc::clone(worker.inbound.costs()));
        }
        self.hold_back(candidates, wanted.yields);
        weighed
    }

    /// One candidate for each worker, with its load. Those of the decision before are used again: what never changes of a
    /// worker stays there, and so does the memory of its queue.
    fn begin(&self, candidates: &mut Vec<Candidate>, now_ms: f64) {
        candidates.truncate(self.workers.len());
        for (i, worker) in self.workers.iter().enumerate() {
            let load = worker.worker_load(self.block_tokens, now_ms);
            match candidates.get_mut(i) {
                Some(candidate) if candidate.id == worker.id => candidate.worker_load = load,
                Some(candidate) => *candidate = worker.candidate(load),
                None => candidates.push(worker.candidate(load)),
            }
        }
    }

    /// Of the workers whose KV may have to be moved; one model's workers agree on it.
    fn block_bytes(&self) -> u64 {
        let prefills = self.workers.iter().filter(|worker| !worker.decodes());
        prefills.map(|worker| worker.kv_block_bytes).max().unwrap_or(0)
    }

    /// It began before, and all workers that could go on with it failed it: then one of them has to do.
    fn failed_by_all(&self, wanted: &PlacementRequest) -> bool {
        let mut open = self.workers.iter().filter(|worker| worker.open && worker.decodes());
        wanted.resumes && open.all(|worker| wanted.excluded.contains(&worker.id))
    }

    /// Only `kv` keeps requests here where they would wait anyway; the baselines know nothing of ms.
    pub(super) fn holds_back(&self) -> bool {
        self.rules.policy == PolicyName::Kv
    }

    /// Where every worker has a long queue, one more request is better kept here, where the order may still change. Where
    /// only those that do nothing but prompts have, it is kept if one of them is best nevertheless.
    fn hold_back(&self, candidates: &mut [Candidate], yields: bool) {
        if !self.holds_back() {
            return;
        }
        let long = |(c, worker): &(&Candidate, &Worker<W>)| {
            if yields {
                let longest = YIELDING_QUEUE * self.rules.worker_queue_ms;
                self.has_queue_of(longest, c.role, &c.worker_load)
            } else {
                self.has_long_queue(c.role, &worker.load_before_yielding(&c.worker_load))
            }
        };
        let all_long = |prefill: bool| {
            let workers = candidates.iter().zip(&self.workers);
            let of_kind =
                |(c, _): &(&Candidate, &Worker<W>)| c.excluded.is_none() && c.decodes() != prefill;
            workers.filter(of_kind).all(|one| long(&one))
        };
        let (prefills, others) = (all_long(true), all_long(false));
        for candidate in candidates.iter_mut().filter(|c| c.excluded.is_none()) {
            if prefills && (others || !candidate.decodes()) {
                candidate.excluded = Some(Exclusion::Backlog);
            }
        }
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

fn exclusion<W>(
    worker: &Worker<W>,
    wanted: &PlacementRequest,
    failed_by_all: bool,
) -> Option<Exclusion> {
    let forgiven = failed_by_all && worker.decodes();
    if !worker.open {
        Some(Exclusion::Closed)
    } else if wanted.excluded.contains(&worker.id) && !forgiven {
        Some(Exclusion::Failed)
    } else if !worker.decodes() && worker.kv_block_bytes == 0 {
        Some(Exclusion::NoTransfer)
    } else if worker.occupied() >= worker.places_for(wanted.yields) {
        Some(Exclusion::Full)
    } else {
        None
    }
}

/// Leading blocks of a prompt that a cache can give: the one that holds the last token is always computed.
pub(super) fn usable_blocks(prompt_tokens: u32, keys: &[u64], block_tokens: u32) -> u32 {
    let full = prompt_tokens.saturating_sub(1) / block_tokens;
    full.min(u32::try_from(keys.len()).unwrap_or(u32::MAX))
}
