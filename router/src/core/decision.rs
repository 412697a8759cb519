//! One choice with everything that it was made from: what `explain` shows, what the decision log keeps, and what a
//! simulator makes again.

mod shortened;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::candidate::{Ask, Candidate, Exclusion, Random, WorkerId};
use crate::core::estimate::Estimate;
use crate::core::policy::pairs::{ChosenPair, Options};
use crate::core::policy::{Policy, PolicyName};

pub(super) use self::shortened::KEPT;
pub use self::shortened::{LeftOut, Weighed};

/// A policy together with its source of chance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chooser {
    /// The policy, as it stood before the choice.
    pub policy: Policy,
    /// The same for prefill workers, once there were some; `kv` needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Policy>,
    /// The numbers it may draw.
    pub random: Random,
}

impl Chooser {
    /// A fresh one.
    #[must_use]
    pub fn new(policy: PolicyName, seed: u64) -> Self {
        Self { policy: Policy::new(policy), prefill: None, random: Random::new(seed) }
    }

    fn choose(&mut self, options: &Options<'_>) -> Option<ChosenPair> {
        let some = !options.wholes.is_empty();
        some.then(|| self.policy.pick(&mut self.prefill, options, &mut self.random))
    }
}

/// Another policy's opinion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shadow {
    /// As it stood before.
    pub chooser: Chooser,
    /// What it would have chosen.
    pub winner: WorkerId,
    /// With whom, if it would have split the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<WorkerId>,
    /// Predicted total of its choice, less that of the real one, in ms: what following it would have cost.
    pub regret_ms: f64,
}

/// A pair of workers, and what it would cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WorkerPair {
    /// Computes the prompt.
    pub prefill: WorkerId,
    /// Generates the answer.
    pub decode: WorkerId,
    /// Both halves, and what lies between them.
    pub estimate: Estimate,
}

/// One choice. Its inputs are `at_ms`, `ask`, `chooser`, the candidates and the shadow's chooser; the rest follows from
/// them, the same on every machine ([`replay`]), unless candidates were left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Name of the request, as its client knows it.
    pub request: Arc<str>,
    /// Ms since the router started.
    pub at_ms: f64,
    /// What was to be placed.
    pub ask: Ask,
    /// The policy that chose, as it stood before.
    pub chooser: Chooser,
    /// Among whom, in the order of their ids.
    pub candidates: Vec<Candidate>,
    /// What each of them would cost: the whole request; of those that only compute prompts, the prompt.
    pub estimates: Vec<Estimate>,
    /// The candidates that are not there any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<LeftOut>,
    /// Which of them was taken, in a split to decode; `None` if none could be.
    pub winner: Option<WorkerId>,
    /// Which of them computes the prompt, if it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<WorkerId>,
    /// The pair that was taken; where none was, the best one that could have been. What the winner alone would have cost is
    /// among the estimates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pair: Option<WorkerPair>,
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
    /// The candidate that was taken, in a split to decode, and what all of it is predicted to cost.
    #[must_use]
    pub fn chosen(&self) -> Option<(&Candidate, &Estimate)> {
        let i = self.position(self.winner?)?;
        let pair = self.pair.as_ref().filter(|_| self.prefill.is_some());
        Some((&self.candidates[i], pair.map_or(&self.estimates[i], |pair| &pair.estimate)))
    }

    /// The candidate that computes the prompt, if it is another one.
    #[must_use]
    pub fn chosen_prefill(&self) -> Option<&Candidate> {
        Some(&self.candidates[self.position(self.prefill?)?])
    }

    /// The shadow policy would have chosen otherwise.
    #[must_use]
    pub fn shadow_differs(&self) -> bool {
        let own = (self.winner, self.prefill);
        self.shadow.as_ref().is_some_and(|shadow| (Some(shadow.winner), shadow.prefill) != own)
    }

    /// Why none was taken; only if none was.
    #[must_use]
    pub fn no_place(&self) -> NoPlace {
        // one that could take it and was not chosen: it is to wait for a worker that computes its prompt
        let room = |why: &Option<Exclusion>| {
            matches!(why, None | Some(Exclusion::Full | Exclusion::Backlog))
        };
        let able = || self.candidates.iter().filter(|c| c.decodes()).map(|c| c.excluded);
        if able().any(|why| room(&why)) {
            NoPlace::AllFull
        } else if able().any(|why| why == Some(Exclusion::Failed)) {
            NoPlace::AllExcluded
        } else {
            NoPlace::NoneOpen
        }
    }

    /// Workers that were left out because they failed it before, if no other one has room for anybody; only if none was
    /// taken.
    #[must_use]
    pub fn where_it_failed(&self) -> Option<Vec<WorkerId>> {
        let none_is_free = self.candidates.iter().all(|c| c.excluded.is_some());
        let failed = self.candidates.iter().filter(|c| c.excluded == Some(Exclusion::Failed));
        none_is_free.then(|| failed.map(|c| c.id).collect())
    }

    fn position(&self, id: WorkerId) -> Option<usize> {
        self.candidates.binary_search_by_key(&id, |candidate| candidate.id).ok()
    }
}

/// Makes a choice. `chooser` and `shadow` move on; the decision keeps them as they stood before.
pub fn decide(
    request: Arc<str>,
    at_ms: f64,
    ask: Ask,
    weighed: impl Into<Weighed>,
    chooser: &mut Chooser,
    shadow: Option<&mut Chooser>,
) -> Decision {
    let Weighed { candidates, mut estimates } = weighed.into();
    estimates.clear();
    estimates.extend(candidates.iter().map(|c| c.estimate(&ask)));
    let options = Options::of(&candidates, &estimates, &ask);
    let before = chooser.clone();
    let choice = chooser.choose(&options);
    let chosen = choice.and_then(|choice| Chosen::of(&choice, &options));
    let shadow = shadow.and_then(|chooser| {
        let before = chooser.clone();
        let other = Chosen::of(&chooser.choose(&options)?, &options)?;
        let regret_ms = other.total_ms - chosen?.total_ms;
        let Chosen { winner, prefill, .. } = other;
        Some(Shadow { chooser: before, winner, prefill, regret_ms })
    });
    let pair = choice.and_then(|choice| pair(choice.best_pair?, &options));
    let winner = chosen.map(|chosen| chosen.winner);
    let prefill = chosen.and_then(|chosen| chosen.prefill);
    Decision {
        request,
        at_ms,
        chooser: before,
        estimates,
        left_out: None,
        winner,
        prefill,
        pair,
        shadow,
        candidates,
        ask,
    }
}

/// A choice that can be carried out.
#[derive(Clone, Copy)]
struct Chosen {
    winner: WorkerId,
    prefill: Option<WorkerId>,
    total_ms: f64,
}

impl Chosen {
    /// `None` if what is best has to be waited for.
    fn of(choice: &ChosenPair, options: &Options<'_>) -> Option<Self> {
        let whole = &options.wholes[choice.whole];
        let winner = whole.candidate.id;
        let Some(prefill) = choice.prefill else {
            return Some(Self { winner, prefill: None, total_ms: whole.estimate.total_ms() });
        };
        if options.prefills[prefill].candidate.excluded.is_some() {
            return None;
        }
        let pair = pair((prefill, choice.whole), options)?;
        Some(Self { winner, prefill: Some(pair.prefill), total_ms: pair.estimate.total_ms() })
    }
}

fn pair((prefill, whole): (usize, usize), options: &Options<'_>) -> Option<WorkerPair> {
    Some(WorkerPair {
        prefill: options.prefills[prefill].candidate.id,
        decode: options.wholes[whole].candidate.id,
        estimate: options.pair(prefill, whole)?,
    })
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
