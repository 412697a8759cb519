//! The pairs that a choice has to look at. What a pair costs has a part of the decode worker, a part of the prefill worker, and the
//! transfer between them, so that floors of all three tell most pairs apart from the best one.

use super::{Prospects, ShortlistSearch};
use crate::core::estimate::SURE;

/// A pair, and what it costs in all.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundPair {
    pub(super) ms: f64,
    pub(super) decode: usize,
    pub(super) prefill: usize,
}

impl FoundPair {
    /// It comes first in the order in which all pairs are walked through.
    fn is_before(&self, other: &Self) -> bool {
        let order = |pair: &Self| (pair.decode, pair.prefill);
        self.ms < other.ms || (self.ms == other.ms && order(self) < order(other))
    }
}

/// The prefill workers that may be in time, those with the lowest floors first.
pub(super) struct PrefillFloors {
    floors: Vec<(f64, usize)>,
    /// Tokens that each computes in its last step at least.
    last_tokens: f64,
}

impl PrefillFloors {
    pub(super) fn of<P: Prospects>(search: &ShortlistSearch<'_, P>, prefills: &[usize]) -> Self {
        let (mut floors, mut last_tokens) = (Vec::with_capacity(prefills.len()), f64::INFINITY);
        for &place in prefills {
            let known = search.prospects.floors();
            if known.ttft_ms(place) <= search.latest_ms {
                floors.push((known.total_ms(place), place));
                last_tokens = last_tokens.min(search.prospects.last_tokens(place));
            }
        }
        floors.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        Self { floors, last_tokens }
    }
}

impl<P: Prospects> ShortlistSearch<'_, P> {
    /// What a pair costs whose prefill worker is in time.
    pub(super) fn pair_ms(&mut self, prefill: usize, decode: usize) -> Option<f64> {
        let in_time = self.prospects.estimate(prefill).ttft_ms() <= self.latest_ms;
        in_time.then(|| self.prospects.pair_ms(prefill, decode))
    }

    /// The best pair, the first one of equals.
    pub(super) fn best_pair(
        &mut self,
        wholes: &[usize],
        sources: &PrefillFloors,
    ) -> Option<FoundPair> {
        let mut floors = Vec::with_capacity(wholes.len());
        let mut lowest: Option<(f64, usize)> = None;
        for &decode in wholes {
            if !sources.floors.is_empty() && self.prospects.can_pull(decode) {
                let floor_ms = self.prospects.decode_floor_ms(decode, sources.last_tokens);
                floors.push((floor_ms, decode));
                if lowest.is_none_or(|(lowest_ms, _)| floor_ms < lowest_ms) {
                    lowest = Some((floor_ms, decode));
                }
            }
        }
        let mut best: Option<FoundPair> = None;
        for &(floor_ms, decode) in lowest.iter().chain(&floors) {
            for &(source_ms, prefill) in &sources.floors {
                let best_ms = best.map_or(f64::INFINITY, |best| best.ms);
                if SURE * (floor_ms + source_ms) > best_ms {
                    break;
                }
                if SURE * (floor_ms + self.prospects.floors().total_ms(prefill)) > best_ms {
                    continue;
                }
                if let Some(ms) = self.pair_ms(prefill, decode) {
                    let pair = FoundPair { ms, decode, prefill };
                    if ms < f64::INFINITY && best.is_none_or(|best| pair.is_before(&best)) {
                        best = Some(pair);
                    }
                }
            }
        }
        best
    }

    /// Some pair with this decode worker is in time and costs no more than `enough_ms`.
    pub(super) fn is_enough_with_any(
        &mut self,
        decode: usize,
        sources: &PrefillFloors,
        enough_ms: f64,
    ) -> bool {
        if sources.floors.is_empty() || !self.prospects.can_pull(decode) {
            return false;
        }
        let floor_ms = self.prospects.decode_floor_ms(decode, sources.last_tokens);
        let mut may_be =
            sources.floors.iter().take_while(|(ms, _)| SURE * (floor_ms + ms) <= enough_ms);
        may_be.any(|(_, prefill)| self.pair_ms(*prefill, decode).is_some_and(|ms| ms <= enough_ms))
    }
}
