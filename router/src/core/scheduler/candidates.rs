//! The scheduler's state as one decision sees it: every worker as a candidate.

use std::sync::Arc;

use super::holdings::Found;
use super::worker::Worker;
use super::{Scheduler, Want};
use crate::core::candidate::{Ask, Candidate, Exclusion, WorkerId, digest};
use crate::core::frame::Role;
use crate::core::policy::PolicyName;

impl Scheduler {
    pub(super) fn ask(&self, want: &Want, now_ms: f64) -> Ask {
        Ask {
            prompt_tokens: want.prompt_tokens,
            max_tokens: want.max_tokens,
            output_tokens: self.output_tokens.min(want.max_tokens.into()),
            block_tokens: self.block_tokens,
            session: want.session.as_deref().map(digest),
            deadline_ms: want.deadline_ms.map(|deadline| deadline - now_ms),
        }
    }

    pub(super) fn candidates(&mut self, want: &Want, now_ms: f64) -> Vec<Candidate> {
        let usable = if want.reuses {
            usable_blocks(want.prompt_tokens, &want.keys, self.block_tokens)
        } else {
            0
        };
        self.holdings.overlaps(&want.keys[..usable as usize], &mut self.overlaps);
        let open = self.workers.iter().filter(|worker| worker.open).count();
        let pressure = self.pressure.at(open, now_ms);
        let groups = self.groups();
        let mut candidates = Vec::with_capacity(self.workers.len());
        for worker in self.workers.iter().filter(|worker| worker.role != Role::Prefill) {
            let found = if worker.credit.given() {
                self.overlaps.of(&worker.places)
            } else {
                Found::default()
            };
            let mut standing = worker.standing(self.block_tokens, now_ms);
            standing.pressure = pressure;
            if let Some(group) = groups.iter().find(|group| worker.is_in(group.name)) {
                (standing.group_ms, standing.group_rows) = group.rest(worker);
            }
            let tokens = |blocks: u32| blocks * self.block_tokens;
            candidates.push(Candidate {
                id: worker.id,
                name: Arc::clone(&worker.name),
                excluded: self.exclusion(worker, want),
                occupied: worker.occupied(),
                sequences: worker.capacity.sequences,
                booked_tokens: worker.booked_tokens,
                held_tokens: tokens(found.held),
                cached_tokens: tokens(found.held.max(found.booked)),
                lower_tier_tokens: tokens(found.lower),
                standing,
            });
        }
        self.hold_back(&mut candidates);
        candidates
    }

    /// What the ranks of each group do at the moment, in one pass.
    fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<Group<'_>> = Vec::new();
        for worker in &self.workers {
            let Some(name) = &worker.group else { continue };
            let (ms, rows) = (worker.running_ms(), f64::from(worker.load.running));
            match groups.iter_mut().find(|group| Arc::ptr_eq(group.name, name)) {
                Some(group) => group.add(worker, ms, rows),
                None => groups.push(Group { name, slowest: worker.id, ms, next_ms: 0.0, rows }),
            }
        }
        groups
    }

    fn exclusion(&self, worker: &Worker, want: &Want) -> Option<Exclusion> {
        if !worker.open {
            Some(Exclusion::Closed)
        } else if want.excluded.contains(&worker.id) {
            Some(Exclusion::Failed)
        } else if worker.occupied() >= worker.places_for_requests() {
            Some(Exclusion::Full)
        } else {
            None
        }
    }

    /// Where every worker has a long queue, one more request is better kept here, where the order may still change.
    fn hold_back(&self, candidates: &mut [Candidate]) {
        if self.rules.policy != PolicyName::Kv {
            return; // the baselines know nothing of ms
        }
        let open = |c: &&Candidate| c.excluded.is_none();
        let long = |c: &Candidate| self.has_long_queue(&c.standing);
        if candidates.iter().filter(open).all(long) {
            for candidate in candidates.iter_mut().filter(|c| c.excluded.is_none()) {
                candidate.excluded = Some(Exclusion::Backlog);
            }
        }
    }
}

/// Leading blocks of a prompt that a cache can give: the one that holds the last token is always computed.
pub(super) fn usable_blocks(prompt_tokens: u32, keys: &[u64], block_tokens: u32) -> u32 {
    let full = prompt_tokens.saturating_sub(1) / block_tokens;
    full.min(u32::try_from(keys.len()).unwrap_or(u32::MAX))
}

/// Ranks that step together.
struct Group<'a> {
    name: &'a Arc<str>,
    /// The rank with the longest step, that step, and the longest of the others.
    slowest: WorkerId,
    ms: f64,
    next_ms: f64,
    rows: f64,
}

impl Group<'_> {
    fn add(&mut self, worker: &Worker, ms: f64, rows: f64) {
        self.rows += rows;
        if ms > self.ms {
            (self.slowest, self.next_ms, self.ms) = (worker.id, self.ms, ms);
        } else {
            self.next_ms = self.next_ms.max(ms);
        }
    }

    /// Longest step and all rows of the others.
    fn rest(&self, worker: &Worker) -> (f64, f64) {
        let ms = if self.slowest == worker.id { self.next_ms } else { self.ms };
        (ms, self.rows - f64::from(worker.load.running))
    }
}
