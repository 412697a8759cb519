//! The worker, or the pair of workers, where the request costs the least time, its own and that of others.

pub(in crate::core) mod shortlist;

use serde::{Deserialize, Serialize};

use super::Choosable;
use super::session_hash::rank;
use crate::core::candidate::{Candidate, WorkerId};
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
        let turns = EqualsTurn { last: self.last, session };
        let whole = turns.next(&mut (), &options.wholes, named, |(), i| least_each[i] <= enough);
        let whole = whole.unwrap_or(0); // all costs are NaN: a worker lies about its speed, and the audit is to find it
        self.last = Some(options.wholes[whole].candidate.id);
        let prefill = if costs.alone(whole) <= enough {
            None
        } else {
            let mut is_equal = vec![false; options.prefills.len()];
            for (prefill, cost) in costs.pairs(whole) {
                is_equal[prefill] = cost <= enough;
            }
            let turns = EqualsTurn { last: self.last_prefill, session };
            turns.next(&mut (), &options.prefills, named, |(), i| is_equal[i])
        };
        if let Some(prefill) = prefill {
            self.last_prefill = Some(options.prefills[prefill].candidate.id);
        }
        let best_pair = prefill.map_or(best_pair.1, |prefill| Some((prefill, whole)));
        ChosenPair { whole, prefill, best_pair }
    }
}

/// What a turn goes by: a worker's number, and the digest of its name.
type TurnName = (WorkerId, u64);

fn named((): &(), choosable: &Choosable<'_>) -> TurnName {
    let Candidate { id, name, .. } = choosable.candidate;
    (*id, name.digest())
}

/// Whose turn it is among equals.
struct EqualsTurn {
    last: Option<WorkerId>,
    session: Option<u64>,
}

impl EqualsTurn {
    /// Index into `workers`, which are in the order of their ids. As few as possible are asked whether they are among the equals;
    /// both questions go to `whom`.
    fn next<S, T>(
        &self,
        whom: &mut S,
        workers: &[T],
        named: impl Fn(&S, &T) -> TurnName,
        mut is_equal: impl FnMut(&mut S, usize) -> bool,
    ) -> Option<usize> {
        let Some(session) = self.session else {
            let had_it = |one: &T| self.last.is_some_and(|last| named(whom, one).0 <= last);
            let after = workers.partition_point(had_it);
            return (after..workers.len()).chain(0..after).find(|i| is_equal(whom, *i));
        };
        let mut highest = None;
        for (i, one) in workers.iter().enumerate() {
            let rank = rank(session, named(whom, one).1);
            if highest.is_none_or(|(_, other)| rank >= other) && is_equal(whom, i) {
                highest = Some((i, rank));
            }
        }
        highest.map(|(i, _)| i)
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
