//! The worker, or the pair of workers, where the request costs the least time, its own and that of others.

use serde::{Deserialize, Serialize};

use super::Choosable;
use super::session_hash::rank;
use crate::core::candidate::WorkerId;
use crate::core::policy::pairs::{ChosenPair, Options};

/// Costs that differ by less than this share are equal: no prediction is that good, and ties are to rotate.
const TIE: f64 = 1e-6;

/// Takes the least predicted total among the workers and pairs that meet the request's deadline; if none does, among those
/// that are soonest. Among equals a session's own worker, otherwise the next one in turn; no pair where one worker does as
/// well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kv {
    last: Option<WorkerId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_prefill: Option<WorkerId>,
}

impl Kv {
    pub(super) fn pick(&mut self, options: &Options<'_>) -> ChosenPair {
        let costs = Costs { options, latest_ms: latest_ms(options) };
        // of each worker, itself alone or with its best partner
        let mut least_each = Vec::with_capacity(options.wholes.len());
        let mut best_pair = (f64::INFINITY, None);
        for whole in 0..options.wholes.len() {
            let mut least = costs.alone(whole);
            for (prefill, cost) in costs.pairs(whole) {
                least = least.min(cost);
                if cost < best_pair.0 {
                    best_pair = (cost, Some((prefill, whole)));
                }
            }
            least_each.push(least);
        }
        let session = options.ask.session;
        let least = least_each.iter().copied().fold(f64::INFINITY, f64::min);
        let enough = least * (1.0 + TIE);
        let equals = least_each.iter().enumerate().filter(|(_, cost)| **cost <= enough);
        let whole = turn(&options.wholes, self.last, session, equals.map(|(i, _)| i));
        let whole = whole.unwrap_or(0); // all costs are NaN: a worker lies about its speed, and the audit is to find it
        self.last = Some(options.wholes[whole].candidate.id);
        let prefill = if costs.alone(whole) <= enough {
            None
        } else {
            let equals = costs.pairs(whole).filter(|(_, cost)| *cost <= enough);
            turn(&options.prefills, self.last_prefill, session, equals.map(|(i, _)| i))
        };
        if let Some(prefill) = prefill {
            self.last_prefill = Some(options.prefills[prefill].candidate.id);
        }
        let best_pair = prefill.map_or(best_pair.1, |prefill| Some((prefill, whole)));
        ChosenPair { whole, prefill, best_pair }
    }
}

/// Whose turn it is among equals.
fn turn(
    workers: &[Choosable<'_>],
    last: Option<WorkerId>,
    session: Option<u64>,
    mut equals: impl Iterator<Item = usize> + Clone,
) -> Option<usize> {
    match session {
        Some(session) => equals.max_by_key(|&i| rank(session, workers[i].candidate)),
        None => {
            let first = equals.clone().next();
            let after = |i: &usize| last.is_none_or(|last| workers[*i].candidate.id > last);
            equals.find(after).or(first)
        }
    }
}

/// The first token has to come by then: the deadline, or the soonest that is possible after it.
fn latest_ms(options: &Options<'_>) -> f64 {
    let Some(deadline_ms) = options.ask.deadline_ms else { return f64::INFINITY };
    let can_pull = (0..options.wholes.len()).any(|whole| options.can_pull(whole));
    let prefills = options.prefills.iter().filter(|_| can_pull);
    let ttfts = options.wholes.iter().chain(prefills).map(|one| one.estimate.ttft_ms());
    let soonest_ms = ttfts.fold(f64::INFINITY, f64::min);
    if soonest_ms <= deadline_ms { deadline_ms } else { soonest_ms * (1.0 + TIE) }
}

/// What options cost; infinity for those that are too late.
struct Costs<'a> {
    options: &'a Options<'a>,
    latest_ms: f64,
}

impl Costs<'_> {
    fn alone(&self, whole: usize) -> f64 {
        let estimate = self.options.wholes[whole].estimate;
        if estimate.ttft_ms() <= self.latest_ms { estimate.total_ms() } else { f64::INFINITY }
    }

    fn pairs(&self, whole: usize) -> impl Iterator<Item = (usize, f64)> + Clone {
        let totals = self.options.pair_totals_ms(whole).enumerate();
        totals.filter(|(prefill, _)| {
            self.options.prefills[*prefill].estimate.ttft_ms() <= self.latest_ms
        })
    }
}
