//! What a worker says of its blocks, applied as far as it may be believed, and a bounded number of keys at a time: whoever
//! holds the scheduler lets others have it between two pieces.

use std::num::NonZeroUsize;

use super::{Scheduler, Tier, Withdrawal};
use crate::core::candidate::WorkerId;
use crate::core::events::{Change, Verdict, keys_le};
use crate::core::frame::StoredRun;

/// What applying an event showed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// The worker is not believed any more: ask it for a new snapshot.
    pub withdrawn: Option<Withdrawal>,
    /// Blocks that it removed without having said that it holds them.
    pub unknown_removed: u32,
}

/// A block event on its way into the index.
#[derive(Debug)]
pub struct Applying<'a> {
    rest: Rest<'a>,
    applied: Applied,
    /// How often all that the worker had said was forgotten, as of the last piece.
    forgotten: Option<u64>,
    /// Where keys are put together.
    keys: Vec<u64>,
}

/// What is still to be applied.
#[derive(Debug)]
enum Rest<'a> {
    Nothing,
    Lost,
    Snapshot { first: bool, keys: &'a [u8], last: bool },
    Delta { tier: Tier, cleared: bool, removed: &'a [u8], stored: Stored<'a> },
}

#[derive(Debug)]
struct Stored<'a> {
    /// What is left of a run that was begun.
    run: &'a [u8],
    runs: &'a [StoredRun],
}

const KEY_BYTES: usize = 8;

impl<'a> Applying<'a> {
    /// Nothing of it is applied yet.
    #[must_use]
    pub fn new(verdict: &Verdict<'a>) -> Self {
        let rest = match *verdict {
            Verdict::Ignore(_) => Rest::Nothing,
            Verdict::Lost(_) => Rest::Lost,
            Verdict::Apply(Change::Snapshot { first, keys, last }) => {
                Rest::Snapshot { first, keys, last }
            }
            Verdict::Apply(Change::Delta { tier, cleared, removed, stored }) => {
                let stored = Stored { run: &[], runs: stored };
                let tier = Tier::from_wire(tier);
                tier.map_or(Rest::Nothing, |tier| Rest::Delta { tier, cleared, removed, stored })
            }
        };
        Self { rest, applied: Applied::default(), forgotten: None, keys: Vec::new() }
    }

    /// What it showed, once all of it is applied.
    #[must_use]
    pub fn applied(&self) -> Applied {
        self.applied
    }

    /// Takes up to `left` keys from `bytes`, and as many from `left`.
    fn take(&mut self, bytes: &mut &'a [u8], left: &mut usize) {
        let (now, later) = bytes.split_at(bytes.len().min(left.saturating_mul(KEY_BYTES)));
        self.keys.clear();
        self.keys.extend(keys_le(now));
        *bytes = later;
        *left -= self.keys.len();
    }
}

impl<W> Scheduler<W> {
    /// Applies a block event of a worker, all of it.
    #[must_use = "a withdrawn credit asks for a new snapshot"]
    pub fn apply(&mut self, id: WorkerId, verdict: &Verdict<'_>) -> Applied {
        let mut applying = Applying::new(verdict);
        while !self.apply_piece(id, &mut applying, NonZeroUsize::MAX) {}
        drop(self.take_leftovers());
        applying.applied()
    }

    /// Applies about `most` keys of a block event; true once nothing is left. Pieces of one worker's events have to come in
    /// their order. What is left when the worker goes, or is not believed any more, is not applied.
    pub fn apply_piece(
        &mut self,
        id: WorkerId,
        applying: &mut Applying<'_>,
        most: NonZeroUsize,
    ) -> bool {
        let mut rest = std::mem::replace(&mut applying.rest, Rest::Nothing);
        let Some(i) = self.find(id) else { return true };
        let worker = &self.workers[i];
        if applying.forgotten.is_some_and(|then| then != worker.forgotten) {
            applying.applied.withdrawn = worker.credit.withdrawn();
            return true;
        }
        let done = match &mut rest {
            Rest::Nothing => true,
            Rest::Lost => {
                self.withdraw(id, Withdrawal::Lost);
                true
            }
            Rest::Snapshot { first, keys, last } => {
                if std::mem::take(first) {
                    self.snapshot_begins(id);
                }
                applying.take(keys, &mut most.get());
                let withdrawn = self.stored(id, Tier::Device, &applying.keys);
                applying.applied.withdrawn = withdrawn;
                let in_vain = withdrawn.is_some() || self.stores_in_vain(i);
                if keys.is_empty() && *last && !in_vain {
                    self.snapshot_complete(id);
                }
                keys.is_empty() || in_vain
            }
            Rest::Delta { tier, cleared, removed, stored } => {
                let mut left = most.get();
                if std::mem::take(cleared) {
                    self.cleared(id, *tier);
                }
                if applying.forgotten.is_none() || !removed.is_empty() {
                    applying.take(removed, &mut left);
                    let unknown = self.removed(id, *tier, &applying.keys);
                    applying.applied.unknown_removed += unknown;
                }
                removed.is_empty() && self.store_runs(id, *tier, stored, applying, left)
            }
        };
        if !done {
            applying.rest = rest;
            applying.forgotten = Some(self.workers[i].forgotten);
        }
        done
    }

    /// It said that it holds more than there is room for, so what it stores is passed over.
    fn stores_in_vain(&self, i: usize) -> bool {
        self.workers[i].credit.withdrawn() == Some(Withdrawal::OverShare)
    }

    /// Stores about `left` keys of the runs; true once none is left, or the rest is not believed.
    fn store_runs<'a>(
        &mut self,
        id: WorkerId,
        tier: Tier,
        stored: &mut Stored<'a>,
        applying: &mut Applying<'a>,
        mut left: usize,
    ) -> bool {
        if self.find(id).is_none_or(|i| self.stores_in_vain(i)) {
            return true;
        }
        loop {
            if stored.run.is_empty() {
                let Some((first, runs)) = stored.runs.split_first() else { return true };
                left = left.saturating_sub(1); // a run is some work, however short it is
                *stored = Stored { run: &first.hashes, runs };
            }
            if left == 0 {
                return false;
            }
            applying.take(&mut stored.run, &mut left);
            applying.applied.withdrawn = self.stored(id, tier, &applying.keys);
            if applying.applied.withdrawn.is_some() {
                return true;
            }
        }
    }
}
