//! What is kept of a decision among many workers that nobody asked to be explained: who was chosen, the best of the others, and
//! of the rest how many there were and what they would have cost.

use serde::{Deserialize, Serialize};

use super::{Decision, WorkerPair};
use crate::core::candidate::{Candidate, WorkerId};
use crate::core::estimate::{Estimate, coarse};

/// Candidates of each kind, those that generate and those that only compute prompts, that are kept beside those chosen: the
/// best, and of those that cost the same ([`coarse`]) the first.
pub(in crate::core) const KEPT: usize = 8;

/// The candidates that a decision does not have any more: it explains itself, and cannot be made again.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LeftOut {
    /// How many there were.
    pub candidates: u32,
    /// Of them, those that could not be chosen.
    pub excluded: u32,
    /// What the cheapest of the others would have cost in all, in ms, to a millionth; 0 where there were no others.
    pub least_ms: f64,
}

/// Lists for the candidates of a decision, whose memory serves one decision after the other.
#[derive(Debug, Default)]
pub struct Weighed {
    /// The candidates, in the order of their ids.
    pub candidates: Vec<Candidate>,
    /// What each of them would cost.
    pub(super) estimates: Vec<Estimate>,
}

impl From<Vec<Candidate>> for Weighed {
    fn from(candidates: Vec<Candidate>) -> Self {
        Self { candidates, estimates: Vec::new() }
    }
}

impl Decision {
    /// The same with few candidates, and the memory of all of them; as it is, where there are few. `beside`: candidates that were
    /// left out before.
    #[must_use]
    pub fn shortened(mut self, beside: LeftOut) -> (Self, Weighed) {
        let mut kept = self.worth_keeping();
        self.left_out = Some(beside).filter(|beside| beside.candidates > 0);
        if kept.len() == self.candidates.len() {
            // lists that grew have room for more, and the decision stays as long as its answer
            self.candidates.shrink_to_fit();
            self.estimates.shrink_to_fit();
            return (self, Weighed::default());
        }
        kept.sort_unstable();
        let of_kept = || kept.iter().copied();
        let few = (
            of_kept().map(|i| self.candidates[i].clone()).collect(),
            of_kept().map(|i| self.estimates[i]).collect(),
        );
        self.left_out = Some(beside.with(&LeftOut::of(&self, &kept)));
        let candidates = std::mem::replace(&mut self.candidates, few.0);
        let estimates = std::mem::replace(&mut self.estimates, few.1);
        (self, Weighed { candidates, estimates })
    }

    /// The best candidates of each kind, and all that the decision names; in no order.
    fn worth_keeping(&self) -> Vec<usize> {
        let mut best: [Vec<usize>; 2] = std::array::from_fn(|_| Vec::with_capacity(KEPT + 1));
        let cost = |i: usize| {
            (self.candidates[i].excluded.is_some(), coarse(self.estimates[i].total_ms()))
        };
        let is_before = |one: usize, other: usize| {
            let (one, other) = (cost(one), cost(other));
            one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)).is_lt()
        };
        for (i, candidate) in self.candidates.iter().enumerate() {
            let best = &mut best[usize::from(candidate.decodes())];
            if best.len() == KEPT && !is_before(i, best[KEPT - 1]) {
                continue;
            }
            let at = best.iter().position(|other| is_before(i, *other)).unwrap_or(best.len());
            best.insert(at, i);
            best.truncate(KEPT);
        }
        let [prefills, mut kept] = best;
        kept.extend(prefills);
        for id in self.named() {
            kept.extend(self.position(id).filter(|i| !kept.contains(i)));
        }
        kept
    }

    /// Workers that it speaks of by their ids.
    fn named(&self) -> impl Iterator<Item = WorkerId> {
        let of_pair = |WorkerPair { prefill, decode, .. }: WorkerPair| [prefill, decode];
        let shadow = self.shadow.iter().flat_map(|shadow| [Some(shadow.winner), shadow.prefill]);
        let chosen = [self.winner, self.prefill].into_iter().chain(shadow).flatten();
        chosen.chain(self.pair.map(of_pair).into_iter().flatten())
    }
}

impl LeftOut {
    /// Some of which only these figures are known.
    pub(in crate::core) fn new(candidates: usize, excluded: usize, least_ms: f64) -> Self {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let least_ms = if candidates == excluded { 0.0 } else { coarse(least_ms) };
        Self { candidates: count(candidates), excluded: count(excluded), least_ms }
    }

    /// All but those that are kept, whose places are in order.
    fn of(decision: &Decision, kept: &[usize]) -> Self {
        let (mut left_out, mut kept) = (Self::default(), kept.iter().peekable());
        let all = decision.candidates.iter().zip(&decision.estimates);
        for (i, (candidate, estimate)) in all.enumerate() {
            if kept.next_if(|kept| **kept == i).is_none() {
                let excluded = usize::from(candidate.excluded.is_some());
                left_out = left_out.with(&Self::new(1, excluded, estimate.total_ms()));
            }
        }
        left_out
    }

    /// These and others.
    pub(in crate::core) fn with(&self, other: &Self) -> Self {
        let able = |one: &Self| one.candidates > one.excluded;
        let least_ms = match (able(self), able(other)) {
            (true, true) => self.least_ms.min(other.least_ms),
            (true, false) => self.least_ms,
            (false, _) => other.least_ms,
        };
        Self {
            candidates: self.candidates + other.candidates,
            excluded: self.excluded + other.excluded,
            least_ms,
        }
    }
}
