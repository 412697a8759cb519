//! How a worker is chosen among those that could serve: one file for each policy, all selectable by name.

mod kv;
mod least_loaded;
pub(super) mod pairs;
mod power_of_two;
mod round_robin;
mod session_hash;

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use self::pairs::{ChosenPair, Options};
use crate::core::candidate::{Candidate, Random};
use crate::core::estimate::Estimate;

pub use kv::Kv;
pub(super) use kv::shortlist::{Eligible, Prospects, Shortlist, soonest_ms};
pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use round_robin::RoundRobin;
pub use session_hash::SessionHash;

/// The policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// The one where the request costs the least time, its own and that of others.
    Kv,
    /// One after the other.
    RoundRobin,
    /// The one with the least to do.
    LeastLoaded,
    /// The less loaded of two drawn by lot.
    PowerOfTwo,
    /// A session stays with its worker as long as that one is not overloaded.
    SessionHash,
}

impl PolicyName {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Kv, Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo, Self::SessionHash];

    /// As users write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
            Self::SessionHash => "session-hash",
        }
    }
}

impl FromStr for PolicyName {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.as_str() == name).ok_or(())
    }
}

/// A policy with the little that it remembers between two choices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// See [`Kv`].
    Kv(Kv),
    /// See [`RoundRobin`].
    RoundRobin(RoundRobin),
    /// See [`LeastLoaded`].
    LeastLoaded(LeastLoaded),
    /// See [`PowerOfTwo`].
    PowerOfTwo(PowerOfTwo),
    /// See [`SessionHash`].
    SessionHash(SessionHash),
}

/// What could be chosen, and what it would cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choosable<'a> {
    pub(super) candidate: &'a Candidate,
    pub(super) estimate: &'a Estimate,
}

impl Policy {
    /// A fresh one.
    #[must_use]
    pub fn new(name: PolicyName) -> Self {
        match name {
            PolicyName::Kv => Self::Kv(Kv::default()),
            PolicyName::RoundRobin => Self::RoundRobin(RoundRobin::default()),
            PolicyName::LeastLoaded => Self::LeastLoaded(LeastLoaded::default()),
            PolicyName::PowerOfTwo => Self::PowerOfTwo(PowerOfTwo::default()),
            PolicyName::SessionHash => Self::SessionHash(SessionHash::default()),
        }
    }

    /// Which one it is.
    #[must_use]
    pub fn name(&self) -> PolicyName {
        match self {
            Self::Kv(_) => PolicyName::Kv,
            Self::RoundRobin(_) => PolicyName::RoundRobin,
            Self::LeastLoaded(_) => PolicyName::LeastLoaded,
            Self::PowerOfTwo(_) => PolicyName::PowerOfTwo,
            Self::SessionHash(_) => PolicyName::SessionHash,
        }
    }

    /// Chooses among `options`, of which one at least could take the whole request. Only `kv` weighs both halves together;
    /// the others choose one half after the other by the same rule, with `prefill` for the prompts, and always split where
    /// they can.
    pub(super) fn pick(
        &mut self,
        prefill: &mut Option<Self>,
        options: &Options<'_>,
        random: &mut Random,
    ) -> ChosenPair {
        let session = options.ask.session;
        let whole = match self {
            Self::Kv(policy) => return policy.pick(options),
            Self::RoundRobin(_)
            | Self::LeastLoaded(_)
            | Self::PowerOfTwo(_)
            | Self::SessionHash(_) => self.pick_one(&options.wholes, session, random),
        };
        if options.prefills.is_empty() || !options.can_pull(whole) {
            return ChosenPair { whole, prefill: None, best_pair: None };
        }
        let rule = prefill.get_or_insert_with(|| Self::new(self.name()));
        let prefill = rule.pick_one(&options.prefills, session, random);
        ChosenPair { whole, prefill: Some(prefill), best_pair: Some((prefill, whole)) }
    }

    /// Index into `open`, which is not empty, holds only workers with room, and is in the order of their ids.
    fn pick_one(
        &mut self,
        open: &[Choosable<'_>],
        session: Option<u64>,
        random: &mut Random,
    ) -> usize {
        match self {
            Self::Kv(_) => unreachable!("it weighs both halves together"),
            Self::RoundRobin(policy) => policy.pick(open),
            Self::LeastLoaded(policy) => policy.pick(open),
            Self::PowerOfTwo(policy) => policy.pick(open, random),
            Self::SessionHash(policy) => policy.pick(open, session),
        }
    }
}

#[cfg(test)]
mod tests;
