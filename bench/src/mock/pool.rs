//! Who owns which KV block of a mock worker, and which contents are still in its cache.
//!
//! A block is *used* (some sequence holds a reference), *cached* (nobody holds it, but its contents have a key and may
//! be shared again) or *free*; every block is in exactly one of these states. A sequence holds the blocks before a keyed
//! block too, and gives its blocks back last one first: a parent is always evicted after its children.

use std::collections::HashMap;

use headrace_router::core::frame::StoredRun;

/// End of the list of cached blocks.
const NONE: u32 = u32::MAX;

/// Blocks numbered from 0. Every operation costs O(1) for each block that it names.
#[derive(Debug)]
pub(crate) struct BlockPool {
    size: u32,
    /// Those that were ever used: a fleet of hundreds would else fill the memory with blocks that it never needs.
    blocks: Vec<Block>,
    by_key: HashMap<u64, u32>,
    free: Vec<u32>,
    /// Ends of the list of cached blocks, by last use.
    oldest: u32,
    newest: u32,
    cached: u32,
    /// Counts stores: an older number is a parent of, or unrelated to, a younger one.
    stores: u64,
    changes: Changes,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    references: u32,
    key: Option<u64>,
    /// `BlockPool::stores` when `key` was set.
    stored: u64,
    older: u32,
    newer: u32,
}

/// What came into the cache and what left it, in order. What left did so before anything came.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Parent and key.
    pub(crate) stored: Vec<(Option<u64>, u64)>,
    pub(crate) removed: Vec<u64>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.stored.is_empty() && self.removed.is_empty()
    }

    /// The stored keys as runs, each block the child of the one before.
    pub(crate) fn runs(&self) -> Vec<StoredRun> {
        let mut runs: Vec<StoredRun> = Vec::new();
        let mut last = None;
        for &(parent, key) in &self.stored {
            match runs.last_mut() {
                Some(run) if parent.is_some() && parent == last => {
                    run.hashes.extend_from_slice(&key.to_le_bytes());
                }
                Some(_) | None => {
                    runs.push(StoredRun { parent, hashes: key.to_le_bytes().to_vec() });
                }
            }
            last = Some(key);
        }
        runs
    }
}

impl BlockPool {
    /// `blocks` free blocks.
    pub(crate) fn new(blocks: u32) -> Self {
        assert!((1..NONE).contains(&blocks), "a pool has blocks");
        Self {
            size: blocks,
            blocks: Vec::new(),
            by_key: HashMap::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            cached: 0,
            stores: 0,
            changes: Changes::default(),
        }
    }

    pub(crate) fn free(&self) -> u32 {
        let held = self.blocks.len() - self.free.len();
        self.size - u32::try_from(held).expect("at most as many as blocks")
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    pub(crate) fn used(&self) -> u32 {
        self.size - self.available()
    }

    /// Blocks that `allocate` can hand out: the free ones, then the cached ones.
    pub(crate) fn available(&self) -> u32 {
        self.free() + self.cached
    }

    /// The blocks of the longest leading run of `keys` in the cache. Takes no reference.
    pub(crate) fn find(&self, keys: &[u64]) -> Vec<u32> {
        keys.iter().map_while(|key| self.by_key.get(key).copied()).collect()
    }

    /// How many of `blocks` would leave `available` if they were shared.
    pub(crate) fn unreferenced(&self, blocks: &[u32]) -> u32 {
        blocks.iter().map(|&block| u32::from(self.blocks[block as usize].references == 0)).sum()
    }

    /// Takes one more reference to a block from `find`.
    pub(crate) fn share(&mut self, block: u32) {
        if self.blocks[block as usize].references == 0 {
            self.unlink(block);
        }
        self.blocks[block as usize].references += 1;
    }

    /// A block without contents, with one reference; `None` where all are used.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None if self.blocks.len() < self.size as usize => self.touch(),
            None if self.oldest == NONE => return None,
            None => self.evict(self.oldest),
        };
        self.blocks[block as usize].references = 1;
        Some(block)
    }

    /// A block that was never used.
    fn touch(&mut self) -> u32 {
        self.blocks.push(Block { references: 0, key: None, stored: 0, older: NONE, newer: NONE });
        u32::try_from(self.blocks.len() - 1).expect("below the size")
    }

    fn evict(&mut self, block: u32) -> u32 {
        self.unlink(block);
        let key = self.blocks[block as usize].key.take().expect("only keyed blocks are cached");
        self.by_key.remove(&key);
        self.changes.removed.push(key);
        block
    }

    /// Names the contents of a full block that the caller holds, so that others can share it.
    ///
    /// Where the cache has these contents already, the caller's reference moves to that block and its own one goes:
    /// use the returned block from now on.
    pub(crate) fn publish(&mut self, block: u32, key: u64, parent: Option<u64>) -> u32 {
        if let Some(&known) = self.by_key.get(&key) {
            if known != block {
                self.share(known);
                self.release(block);
            }
            return known;
        }
        self.stores += 1;
        let entry = &mut self.blocks[block as usize];
        assert!(entry.references > 0 && entry.key.is_none(), "a holder names new contents");
        entry.key = Some(key);
        entry.stored = self.stores;
        self.by_key.insert(key, block);
        self.changes.stored.push((parent, key));
        block
    }

    /// Gives back one reference. A sequence releases its last block first.
    pub(crate) fn release(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        assert!(entry.references > 0, "released twice");
        entry.references -= 1;
        if entry.references > 0 {
            return;
        }
        if entry.key.is_some() { self.link_newest(block) } else { self.free.push(block) }
    }

    /// Forgets all keys without a word in `Changes`: cached blocks become free, used ones stay with their holders.
    pub(crate) fn clear(&mut self) {
        while self.oldest != NONE {
            let block = self.oldest;
            self.unlink(block);
            self.free.push(block);
        }
        for block in &mut self.blocks {
            block.key = None;
        }
        self.by_key.clear();
        self.changes = Changes::default();
    }

    /// Forgets one cached block that nobody holds, without a word in `Changes`. False if there is none.
    pub(crate) fn forget(&mut self, key: u64) -> bool {
        let Some(&block) = self.by_key.get(&key) else { return false };
        if self.blocks[block as usize].references > 0 {
            return false;
        }
        self.evict(block);
        self.changes.removed.pop();
        self.free.push(block);
        true
    }

    /// All keys in the cache, held or not, parents before children.
    pub(crate) fn keys(&self) -> Vec<u64> {
        let keyed = self.blocks.iter().filter_map(|block| Some((block.stored, block.key?)));
        let mut keys: Vec<_> = keyed.collect();
        keys.sort_unstable();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    /// What changed since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    fn link_newest(&mut self, block: u32) {
        let older = std::mem::replace(&mut self.newest, block);
        match older {
            NONE => self.oldest = block,
            older => self.blocks[older as usize].newer = block,
        }
        let entry = &mut self.blocks[block as usize];
        (entry.older, entry.newer) = (older, NONE);
        self.cached += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { older, newer, .. } = self.blocks[block as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        self.cached -= 1;
    }

    /// Asserts that every block is in exactly one state.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let mut states = vec![Vec::new(); self.blocks.len()];
        let mut at = self.oldest;
        while at != NONE {
            states[at as usize].push("cached");
            assert!(states[at as usize].len() == 1, "the list of cached blocks is a ring");
            at = self.blocks[at as usize].newer;
        }
        for block in &self.free {
            states[*block as usize].push("free");
        }
        for (number, block) in self.blocks.iter().enumerate() {
            if block.references > 0 {
                states[number].push("used");
            }
            assert_eq!(states[number].len(), 1, "block {number} is {:?}", states[number]);
            let keyed = block.key.is_some();
            assert!(states[number] != ["free"] || !keyed, "a free block has contents");
            assert!(states[number] != ["cached"] || keyed, "a cached block has none");
            let known = block.key.and_then(|key| self.by_key.get(&key).copied());
            assert_eq!(known.map(|known| known as usize), keyed.then_some(number));
        }
        let count = |state| states.iter().filter(|states| **states == [state]).count() as u32;
        let untouched = self.size - self.blocks.len() as u32;
        let counts = (untouched + count("free"), count("cached"), count("used"));
        assert_eq!(counts, (self.free(), self.cached(), self.used()));
        assert_eq!(self.by_key.len(), self.blocks.iter().filter(|b| b.key.is_some()).count());
    }
}
