//! Shares of what all workers together may take of the router's memory: room in the block index, bytes of descriptions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// No worker gets more than this share of the index: so many of them have to be large before others go without.
const WORKERS: u64 = 8;

/// Room of the block index that is not promised to anybody.
#[derive(Debug)]
pub(super) struct IndexRoom {
    most: u64,
    left: u64,
}

impl IndexRoom {
    pub(super) fn new(blocks: u64) -> Self {
        Self { most: blocks, left: blocks }
    }

    /// Room for a worker of this capacity, by tier: for as much of it as there is, the device first.
    pub(super) fn take(&mut self, capacity: [u32; 3]) -> [u32; 3] {
        let mut share = (self.most / WORKERS).min(self.left);
        capacity.map(|blocks| {
            let room = u64::from(blocks).min(share);
            share -= room;
            self.left -= room;
            u32::try_from(room).expect("at most the capacity, which is one")
        })
    }

    /// The worker is gone.
    pub(super) fn give_back(&mut self, room: [u32; 3]) {
        self.left += room.into_iter().map(u64::from).sum::<u64>();
    }
}

/// Bytes that all descriptions of models may take, those on their way included.
#[derive(Debug)]
pub(super) struct DescriptionBytes {
    most: usize,
    used: Arc<AtomicUsize>,
}

/// A part of them, until it drops.
#[derive(Debug)]
pub(super) struct DescriptionCharge {
    bytes: usize,
    used: Arc<AtomicUsize>,
}

impl DescriptionBytes {
    pub(super) fn new(most: usize) -> Self {
        Self { most, used: Arc::default() }
    }

    /// So many more for one of them. False if there are not as many.
    pub(super) fn more(&self, charge: &mut DescriptionCharge, bytes: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.most);
        let taken = self.used.fetch_update(Relaxed, Relaxed, fits).is_ok();
        charge.bytes += if taken { bytes } else { 0 };
        taken
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Of no bytes yet.
    pub(super) fn charge(&self) -> DescriptionCharge {
        DescriptionCharge { bytes: 0, used: Arc::clone(&self.used) }
    }
}

impl Drop for DescriptionCharge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_worker_gets_more_than_its_share_and_all_together_no_more_than_there_is() {
        let mut room = IndexRoom::new(800);
        assert_eq!(room.take([30, 1_000, 7]), [30, 70, 0], "the device first");
        assert_eq!(room.take([u32::MAX, u32::MAX, 0]), [100, 0, 0]);
        let mut taken = vec![[100, 0, 0]];
        for _ in 0..20 {
            taken.push(room.take([90, 0, 5]));
        }
        let sum: u32 = taken.iter().flatten().sum();
        assert_eq!((sum, room.left, taken.pop()), (700, 0, Some([0, 0, 0])));
        taken.into_iter().for_each(|one| room.give_back(one));
        room.give_back([30, 70, 0]);
        assert_eq!(room.left, 800);
    }

    #[test]
    fn descriptions_share_their_bytes_and_give_them_back() {
        let all = DescriptionBytes::new(100);
        let (mut one, mut two) = (all.charge(), all.charge());
        assert!(all.more(&mut one, 60) && all.more(&mut two, 40));
        assert!(!all.more(&mut two, 1) && !all.more(&mut one, usize::MAX));
        assert_eq!(all.used(), 100);
        drop(one);
        assert!(all.more(&mut two, 60) && !all.more(&mut two, 1));
        drop(two);
        assert_eq!(all.used(), 0);
    }
}
