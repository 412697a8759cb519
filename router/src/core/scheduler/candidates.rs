//! The scheduler's state as one decision sees it: every worker as a candidate.

use std::sync::Arc;

use super::holdings::Found;
use super::worker::Worker;
use super::{Scheduler, Want};
use crate::core::candidate::{Ask, Candidate, Exclusion, digest};
use crate::core::cost::estimate;
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

    pub(super) fn candidates(&mut self, want: &Want, ask: &Ask, now_ms: f64) -> Vec<Candidate> {
        let usable = usable_blocks(want.prompt_tokens, &want.keys, self.block_tokens);
        self.holdings.overlaps(&want.keys[..usable as usize], &mut self.overlaps);
        let open = self.workers.iter().filter(|worker| worker.open).count();
        let pressure = self.pressure.at(open, now_ms);
        let grouped = self.workers.iter().any(|worker| worker.group.is_some());
        let mut candidates = Vec::with_capacity(self.workers.len());
        for worker in &self.workers {
            let found = if worker.credit.given() {
                self.overlaps.of(&worker.places)
            } else {
                Found::default()
            };
            let mut standing = worker.standing(self.block_tokens, now_ms);
            standing.pressure = pressure;
            if grouped {
                (standing.group_ms, standing.group_rows) = self.rest_of_group(worker);
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
        self.hold_back(&mut candidates, ask);
        candidates
    }

    /// Longest step and all rows of the other ranks.
    fn rest_of_group(&self, worker: &Worker) -> (f64, f64) {
        let Some(group) = &worker.group else { return (0.0, 0.0) };
        let others =
            self.workers.iter().filter(|w| w.id != worker.id && w.group.as_ref() == Some(group));
        others.fold((0.0, 0.0), |(ms, rows), other| {
            (other.running_ms().max(ms), rows + f64::from(other.load.running))
        })
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
    fn hold_back(&self, candidates: &mut [Candidate], ask: &Ask) {
        let limit_ms = self.rules.worker_queue_ms;
        if self.rules.policy != PolicyName::Kv {
            return; // the baselines know nothing of ms
        }
        let queue_ms = |c: &Candidate| estimate(&c.standing, &ask.demand(0)).queue_ms;
        let open = |c: &&Candidate| c.excluded.is_none();
        let long = |c: &Candidate| c.standing.backlog_tokens > 0.0 && queue_ms(c) > limit_ms;
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
