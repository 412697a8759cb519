//! One choice with everything that it was made from: what `explain` shows, what the decision log keeps, and what a
//! simulator makes again.

use serde::{Deserialize, Serialize};

use crate::core::candidate::{Ask, Candidate, Exclusion, Random, WorkerId};
use crate::core::cost::Estimate;
use crate::core::policy::{Choosable, Policy};

/// A policy together with its source of chance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chooser {
    /// The policy, as it stood before the choice.
    pub policy: Policy,
    /// The numbers it may draw.
    pub random: Random,
}

/// Another policy's opinion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shadow {
    /// As it stood before.
    pub chooser: Chooser,
    /// What it would have chosen.
    pub winner: WorkerId,
    /// Predicted total of its choice, less that of the real one, in ms: what following it would have cost.
    pub regret_ms: f64,
}

/// One choice. Its inputs are `at_ms`, `ask`, `chooser`, the candidates and the shadow's chooser; the rest follows from
/// them, the same on every machine ([`replay`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Name of the request, as its client knows it.
    pub request: String,
    /// Ms since the router started.
    pub at_ms: f64,
    /// What was to be placed.
    pub ask: Ask,
    /// Who chose.
    pub chooser: Chooser,
    /// Among whom, in the order of their ids.
    pub candidates: Vec<Candidate>,
    /// What each of them would cost.
    pub estimates: Vec<Estimate>,
    /// Which of them was taken; `None` if none could be.
    pub winner: Option<WorkerId>,
    /// The shadow policy, where there is one.
    pub shadow: Option<Shadow>,
}

/// Why nothing was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// No worker takes new work.
    NoneOpen,
    /// Those that take new work are full.
    AllFull,
    /// Those that take new work failed this request before.
    AllExcluded,
}

impl Decision {
    /// The candidate that was taken, and what it is predicted to cost.
    #[must_use]
    pub fn chosen(&self) -> Option<(&Candidate, &Estimate)> {
        let i = self.position(self.winner?)?;
        Some((&self.candidates[i], &self.estimates[i]))
    }

    /// Why none was taken; only if none was.
    #[must_use]
    pub fn no_place(&self) -> NoPlace {
        let any = |wanted: &[Exclusion]| {
            self.candidates.iter().any(|c| c.excluded.is_some_and(|why| wanted.contains(&why)))
        };
        if any(&[Exclusion::Full, Exclusion::Backlog]) {
            NoPlace::AllFull
        } else if any(&[Exclusion::Failed]) {
            NoPlace::AllExcluded
        } else {
            NoPlace::NoneOpen
        }
    }

    fn position(&self, id: WorkerId) -> Option<usize> {
        self.candidates.binary_search_by_key(&id, |candidate| candidate.id).ok()
    }
}

/// Makes a choice. `chooser` and `shadow` move on; the decision keeps them as they stood before.
pub fn decide(
    request: String,
    at_ms: f64,
    ask: Ask,
    candidates: Vec<Candidate>,
    chooser: &mut Chooser,
    shadow: Option<&mut Chooser>,
) -> Decision {
    let estimates: Vec<Estimate> = candidates.iter().map(|c| c.estimate(&ask)).collect();
    let open: Vec<Choosable<'_>> = candidates
        .iter()
        .zip(&estimates)
        .filter(|(candidate, _)| candidate.excluded.is_none())
        .map(|(candidate, estimate)| Choosable { candidate, estimate })
        .collect();
    let before = chooser.clone();
    let pick = |chooser: &mut Chooser| {
        (!open.is_empty()).then(|| {
            let chosen = open[chooser.policy.pick(&open, &ask, &mut chooser.random)];
            (chosen.candidate.id, chosen.estimate.total_ms())
        })
    };
    let chosen = pick(chooser);
    let shadow = shadow.and_then(|chooser| {
        let before = chooser.clone();
        let (winner, total_ms) = pick(chooser)?;
        let regret_ms = total_ms - chosen?.1;
        Some(Shadow { chooser: before, winner, regret_ms })
    });
    let winner = chosen.map(|(id, _)| id);
    Decision { request, at_ms, ask, chooser: before, estimates, winner, shadow, candidates }
}

/// Makes a decision again from its inputs. Equal to the original unless code or figures changed.
#[must_use]
pub fn replay(decision: &Decision) -> Decision {
    let mut chooser = decision.chooser.clone();
    let mut shadow = decision.shadow.as_ref().map(|shadow| shadow.chooser.clone());
    decide(
        decision.request.clone(),
        decision.at_ms,
        decision.ask.clone(),
        decision.candidates.clone(),
        &mut chooser,
        shadow.as_mut(),
    )
}

#[cfg(test)]
mod tests;
