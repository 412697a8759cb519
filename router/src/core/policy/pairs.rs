//! All that a choice is among: workers that could take the request whole, and pairs of one that computes the prompt and one
//! that decodes. What is the same for all partners of a worker is computed once.

use crate::core::candidate::{Ask, Candidate, Exclusion};
use crate::core::estimate::{DecodeLeg, Estimate, Source};
use crate::core::policy::Choosable;
use crate::core::transfer::TransferCost;

/// See the head of this file. Indices are into `wholes` and `prefills`.
pub(in crate::core) struct Options<'a> {
    pub(in crate::core) ask: &'a Ask,
    /// Those with room that decode, with what the whole request would cost there; in the order of their ids.
    pub(in crate::core) wholes: Vec<Choosable<'a>>,
    /// Those with room that only compute prompts, with what the prompt would cost there; in the order of their ids. Where all
    /// of them have long queues they are among them nevertheless: whoever wants one has to wait.
    pub(in crate::core) prefills: Vec<Choosable<'a>>,
    sources: Vec<Source>,
    /// One for each of `wholes` that can pull.
    decodes: Vec<Option<Decode<'a>>>,
}

struct Decode<'a> {
    leg: DecodeLeg,
    /// What pulling from each of `prefills` costs.
    costs: Vec<&'a TransferCost>,
}

/// What was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::core) struct ChosenPair {
    /// Who takes the request, or its answer.
    pub(in crate::core) whole: usize,
    /// Who computes the prompt, if it is another one.
    pub(in crate::core) prefill: Option<usize>,
    /// The best pair, by indices of prefill and whole, if one was looked for.
    pub(in crate::core) best_pair: Option<(usize, usize)>,
}

impl<'a> Options<'a> {
    pub(in crate::core) fn of(
        candidates: &'a [Candidate],
        estimates: &'a [Estimate],
        ask: &'a Ask,
    ) -> Self {
        let (mut wholes, mut prefills) = (Vec::with_capacity(candidates.len()), Vec::new());
        for (candidate, estimate) in candidates.iter().zip(estimates) {
            let choosable = Choosable { candidate, estimate };
            match candidate.excluded {
                None if candidate.decodes() => wholes.push(choosable),
                None | Some(Exclusion::Backlog) if !candidate.decodes() => prefills.push(choosable),
                _ => {}
            }
        }
        let source = |one: &Choosable<'_>| one.candidate.source(ask, one.estimate);
        let sources = prefills.iter().map(source).collect();
        let mut options = Self { ask, wholes, prefills, sources, decodes: Vec::new() };
        if !options.prefills.is_empty() {
            options.decodes = options.wholes.iter().map(|one| options.decode(one)).collect();
        }
        options
    }

    fn decode(&self, one: &Choosable<'a>) -> Option<Decode<'a>> {
        let ids = self.prefills.iter().map(|prefill| prefill.candidate.id);
        let costs = one.candidate.sources.as_ref()?.each(ids).collect();
        Some(Decode { leg: one.candidate.decode_leg(self.ask, one.estimate), costs })
    }

    /// This worker could have the prompt computed elsewhere.
    pub(in crate::core) fn can_pull(&self, whole: usize) -> bool {
        self.decodes.get(whole).is_some_and(Option::is_some)
    }

    /// What each pair with this worker costs in all, in the order of `prefills`; none if it cannot pull.
    pub(in crate::core) fn pair_totals_ms(
        &self,
        whole: usize,
    ) -> impl Iterator<Item = f64> + Clone {
        let decode = self.decodes.get(whole).and_then(Option::as_ref);
        decode.into_iter().flat_map(|Decode { leg, costs }| {
            let parts = self.prefills.iter().zip(&self.sources).zip(costs);
            parts.map(move |((prefill, source), cost)| {
                leg.pair_ms(prefill.estimate.total_ms(), source, cost)
            })
        })
    }

    /// What a pair would cost; `None` if there is no such pair.
    pub(in crate::core) fn pair(&self, prefill: usize, whole: usize) -> Option<Estimate> {
        let Decode { leg, costs } = self.decodes.get(whole)?.as_ref()?;
        let transfer_ms = leg.transfer_ms(self.sources.get(prefill)?, costs[prefill]);
        Some(leg.with(self.prefills[prefill].estimate, transfer_ms))
    }
}

#[cfg(test)]
mod tests;
