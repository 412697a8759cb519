//! How a worker is chosen among those that could serve: one file for each policy, all selectable by name.

mod least_loaded;
mod power_of_two;
mod round_robin;
mod session_hash;

use std::str::FromStr;

use crate::core::schedule::{Ask, Random, WorkerView};

pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use round_robin::RoundRobin;
pub use session_hash::SessionHash;

/// The policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyName {
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
    pub const ALL: [Self; 4] =
        [Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo, Self::SessionHash];

    /// As users write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
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
#[derive(Debug)]
pub enum Policy {
    /// See [`RoundRobin`].
    RoundRobin(RoundRobin),
    /// See [`LeastLoaded`].
    LeastLoaded(LeastLoaded),
    /// See [`PowerOfTwo`].
    PowerOfTwo(PowerOfTwo),
    /// See [`SessionHash`].
    SessionHash(SessionHash),
}

impl Policy {
    /// A fresh one.
    #[must_use]
    pub fn new(name: PolicyName) -> Self {
        match name {
            PolicyName::RoundRobin => Self::RoundRobin(RoundRobin::default()),
            PolicyName::LeastLoaded => Self::LeastLoaded(LeastLoaded::default()),
            PolicyName::PowerOfTwo => Self::PowerOfTwo(PowerOfTwo),
            PolicyName::SessionHash => Self::SessionHash(SessionHash::default()),
        }
    }

    /// Index into `candidates`, which is not empty and holds only workers with room, in a fixed order.
    pub(super) fn pick(
        &mut self,
        candidates: &[&WorkerView],
        ask: &Ask<'_>,
        random: &mut Random,
    ) -> usize {
        match self {
            Self::RoundRobin(policy) => policy.pick(candidates),
            Self::LeastLoaded(policy) => policy.pick(candidates),
            Self::PowerOfTwo(policy) => policy.pick(candidates, random),
            Self::SessionHash(policy) => policy.pick(candidates, ask),
        }
    }
}

#[cfg(test)]
mod tests;
