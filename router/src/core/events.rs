//! The order of a worker's block events: a snapshot in parts, then deltas without a gap. What it lets pass may be
//! believed.

use crate::core::frame::{Blocks, Snapshot};

/// Follows the events of one link.
#[derive(Debug, Default)]
pub struct BlockEvents {
    epoch: u64,
    /// `None` until the last part of the snapshot.
    sequence: Option<u64>,
    blocks: u64,
}

/// Events that do not follow from those before: the view of the cache is worth nothing from here on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockGap {
    /// Not the epoch of the Hello.
    #[error("block events of epoch {got}, the worker said {expected}")]
    Epoch {
        /// Of the Hello.
        expected: u64,
        /// Of the event.
        got: u64,
    },
    /// A number is missing or comes twice.
    #[error("block events {got} after {last}")]
    Sequence {
        /// The one before.
        last: u64,
        /// This one.
        got: u64,
    },
    /// A delta before the end of the snapshot, or a snapshot after it.
    #[error("{0}")]
    Order(&'static str),
    /// A list of keys of 8 bytes whose length is no multiple of 8.
    #[error("a list of block keys has {0} bytes, no multiple of 8")]
    Keys(usize),
}

impl BlockEvents {
    /// Of a worker that started at `epoch`.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// True after the last part of the snapshot.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.sequence.is_some()
    }

    /// Blocks that the worker said it holds.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Takes in a part of the snapshot.
    ///
    /// # Errors
    /// It does not follow.
    pub fn snapshot(&mut self, part: &Snapshot) -> Result<(), BlockGap> {
        self.check_epoch(part.epoch)?;
        if self.complete() {
            return Err(BlockGap::Order("a part of a snapshot after its last one"));
        }
        self.blocks += count(&part.hashes)?;
        if part.last {
            self.sequence = Some(part.sequence);
        }
        Ok(())
    }

    /// Takes in a delta.
    ///
    /// # Errors
    /// It does not follow.
    pub fn blocks_changed(&mut self, delta: &Blocks) -> Result<(), BlockGap> {
        self.check_epoch(delta.epoch)?;
        let Some(last) = self.sequence else {
            return Err(BlockGap::Order("block events before the end of the snapshot"));
        };
        if last.checked_add(1) != Some(delta.sequence) {
            return Err(BlockGap::Sequence { last, got: delta.sequence });
        }
        self.sequence = Some(delta.sequence);
        if delta.cleared {
            self.blocks = 0;
        }
        self.blocks = self.blocks.saturating_sub(count(&delta.removed)?);
        for run in &delta.stored {
            self.blocks += count(&run.hashes)?;
        }
        Ok(())
    }

    fn check_epoch(&self, got: u64) -> Result<(), BlockGap> {
        let expected = self.epoch;
        if got == expected { Ok(()) } else { Err(BlockGap::Epoch { expected, got }) }
    }
}

fn count(keys: &[u8]) -> Result<u64, BlockGap> {
    if keys.len().is_multiple_of(8) {
        Ok(keys.len() as u64 / 8)
    } else {
        Err(BlockGap::Keys(keys.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::frame::StoredRun;

    fn part(keys: usize, last: bool) -> Snapshot {
        Snapshot { epoch: 7, sequence: 10, hashes: vec![0; 8 * keys], last }
    }

    fn delta(sequence: u64, stored: usize, removed: usize) -> Blocks {
        Blocks {
            epoch: 7,
            sequence,
            stored: vec![StoredRun { parent: None, hashes: vec![0; 8 * stored] }],
            removed: vec![0; 8 * removed],
            cleared: false,
            tier: 0,
        }
    }

    #[test]
    fn a_snapshot_in_parts_and_then_deltas_are_counted() {
        let mut events = BlockEvents::new(7);
        events.snapshot(&part(3, false)).unwrap();
        assert!(!events.complete());
        events.snapshot(&part(2, true)).unwrap();
        assert!(events.complete());
        events.blocks_changed(&delta(11, 4, 1)).unwrap();
        assert_eq!(events.blocks(), 8);
        events.blocks_changed(&Blocks { cleared: true, ..delta(12, 1, 0) }).unwrap();
        assert_eq!(events.blocks(), 1);
    }

    #[test]
    fn whatever_does_not_follow_is_named() {
        let mut events = BlockEvents::new(7);
        assert!(matches!(events.blocks_changed(&delta(1, 1, 0)), Err(BlockGap::Order(_))));
        let other_epoch = Snapshot { epoch: 6, ..part(1, true) };
        assert_eq!(events.snapshot(&other_epoch), Err(BlockGap::Epoch { expected: 7, got: 6 }));
        let odd = Snapshot { hashes: vec![0; 9], ..part(0, false) };
        assert_eq!(events.snapshot(&odd), Err(BlockGap::Keys(9)));
        events.snapshot(&part(1, true)).unwrap();
        assert!(matches!(events.snapshot(&part(1, true)), Err(BlockGap::Order(_))));
        for wrong in [10, 12] {
            let gap = BlockGap::Sequence { last: 10, got: wrong };
            assert_eq!(events.blocks_changed(&delta(wrong, 0, 0)), Err(gap));
        }
    }
}
