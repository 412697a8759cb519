//! What the blocks of a mock engine hold: their names, for whom they are announced, and who waits for them.

use headrace_router::core::frame::{Blocks, Freed};

use super::Engine;
use super::sequence::{Sequence, Stage};

impl Engine {
    pub(super) fn take_events(&mut self) -> Option<Blocks> {
        let changes = self.pool.take_changes();
        if changes.is_empty() {
            return None;
        }
        self.sequence += 1;
        Some(Blocks {
            epoch: self.config.epoch,
            sequence: self.sequence,
            stored: changes.runs(),
            removed: changes.removed.iter().flat_map(|key| key.to_le_bytes()).collect(),
            cleared: false,
            tier: 0,
        })
    }

    /// Names the blocks that became full.
    pub(super) fn publish(&mut self, sequence: &mut Sequence) {
        let full = sequence.computed / self.config.block_tokens;
        for place in sequence.published..full {
            let parent = place.checked_sub(1).map(|before| sequence.key(before));
            let key = sequence.key(place);
            let block = &mut sequence.blocks[place as usize];
            *block = self.pool.publish(*block, key, parent);
            if sequence.is_awaited && (place as usize) < sequence.leg.keys.len() {
                self.no_longer_computing(key);
            }
        }
        sequence.published = full.max(sequence.published);
    }

    /// Others may wait for the blocks that it will publish.
    pub(super) fn is_awaited_from_now(&mut self, sequence: &mut Sequence) {
        sequence.is_awaited = true;
        for key in sequence.to_publish() {
            *self.computing.entry(*key).or_default() += 1;
        }
    }

    /// It leaves the queue.
    pub(super) fn no_longer_waiting(&mut self, sequence: &Sequence) {
        if sequence.stage == Stage::Own {
            self.waiting_tokens -= u64::from(sequence.total());
        }
    }

    pub(super) fn free(&mut self, sequence: &Sequence) -> Freed {
        for key in sequence.to_publish() {
            self.no_longer_computing(*key);
        }
        for block in sequence.blocks.iter().rev() {
            self.pool.release(*block);
        }
        let blocks = u32::try_from(sequence.blocks.len()).expect("at most the pool");
        Freed { request: sequence.leg.request, blocks }
    }

    fn no_longer_computing(&mut self, key: u64) {
        let left = self.computing.get_mut(&key).expect("it was counted at admission");
        *left -= 1;
        if *left == 0 {
            self.computing.remove(&key);
        }
    }

    /// Asserts that each block in use has a holder, and that nothing is kept for nobody.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        self.pool.check();
        let holders = self.running.iter().chain(&self.parked);
        let held: std::collections::HashSet<_> = holders.flat_map(|s| &s.blocks).collect();
        assert_eq!(held.len(), self.pool.used() as usize, "used blocks have a holder");
        assert!(self.waiting.iter().all(|s| s.blocks.is_empty()), "who waits holds nothing");
        let own = self.waiting.iter().filter(|s| s.stage == Stage::Own);
        let waiting = own.map(|s| u64::from(s.total())).sum::<u64>();
        assert_eq!(self.waiting_tokens, waiting);
        assert_eq!(self.known.len(), self.running.len() + self.waiting.len() + self.parked.len());
        if self.is_idle() {
            assert_eq!(self.pool.used(), 0, "an idle engine holds blocks");
            assert!(self.computing.is_empty(), "an idle engine computes blocks");
        }
    }
}
