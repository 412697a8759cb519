//! What a worker says of its blocks, applied as far as it may be believed.

use super::{Scheduler, Tier, Withdrawal};
use crate::core::candidate::WorkerId;
use crate::core::events::{Change, Verdict, keys_le};

/// What applying an event showed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// The worker is not believed any more: ask it for a new snapshot.
    pub withdrawn: Option<Withdrawal>,
    /// Blocks that it removed without having said that it holds them.
    pub unknown_removed: u32,
}

impl Scheduler {
    /// Applies a block event of a worker.
    #[must_use = "a withdrawn credit asks for a new snapshot"]
    pub fn apply(&mut self, id: WorkerId, verdict: &Verdict<'_>) -> Applied {
        let mut applied = Applied::default();
        match verdict {
            Verdict::Ignore(_) => {}
            Verdict::Lost(_) => self.withdraw(id, Withdrawal::Lost),
            Verdict::Apply(Change::Snapshot { first, keys, last }) => {
                if *first {
                    self.snapshot_begins(id);
                }
                let keys: Vec<u64> = keys_le(keys).collect();
                applied.withdrawn = self.stored(id, Tier::Device, &keys);
                if *last && applied.withdrawn.is_none() {
                    self.snapshot_complete(id);
                }
            }
            Verdict::Apply(Change::Delta { tier, cleared, removed, stored }) => {
                let Some(tier) = Tier::from_wire(*tier) else { return applied };
                if *cleared {
                    self.cleared(id, tier);
                }
                let removed: Vec<u64> = keys_le(removed).collect();
                applied.unknown_removed = self.removed(id, tier, &removed);
                for run in *stored {
                    let keys: Vec<u64> = keys_le(&run.hashes).collect();
                    applied.withdrawn = self.stored(id, tier, &keys);
                    if applied.withdrawn.is_some() {
                        break; // the rest is not believed either
                    }
                }
            }
        }
        applied
    }
}
