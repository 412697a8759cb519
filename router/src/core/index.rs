//! Which places (a worker's tier) hold which KV blocks: block key -> set of places.
//!
//! A block has one 16-byte entry in a flat table (`index/table.rs`), whatever the number of its holders: key and the
//! number of its holder set. Equal holder sets are kept once (`index/sets.rs`); blocks of one conversation nearly always
//! share theirs. So memory is about 16 to 64 bytes a block, and "did the holders change between these two blocks?" is a
//! comparison of two integers.
//!
//! **Holders shrink along a chain.** A worker evicts the leaves of its prefix tree first, so who holds block `i` of a
//! prompt holds all blocks before it. `overlaps` rests on that: it reads every 64th block and looks between two of them
//! only where the sets differ. A worker that evicts out of order (a block in the middle, its followers kept) is credited
//! with blocks it lacks, up to the end of its chain. That is a wrong estimate, never a wrong answer: the worker computes
//! what it lacks, and the scheduler's audit of predicted against actual cached tokens takes credit from a worker that
//! errs often.
//!
//! **Nothing waits for a big worker to go.** `leave` marks the place. Its entries are cleaned by later calls, a bounded
//! number of slots each, and its number is given out again once its last entry is gone; growing the table works the same
//! way (`index/map.rs`).

mod map;
mod places;
mod sets;
mod table;
#[cfg(test)]
mod tests;

use map::BlockMap;
use places::BlockHolders;
use sets::{EMPTY, SetChange, Sets};
use table::Table;

/// One holder of blocks: a worker's tier. Numbers are small, dense, and used again some time after `leave`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHolder(pub u16);

/// Why blocks were not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The place holds as many blocks as it announced. Those that fitted were stored.
    #[error("more blocks than the capacity of {capacity}")]
    OverCapacity {
        /// What it announced.
        capacity: u32,
    },
    /// The place never joined, or left.
    #[error("blocks for a place that did not join or has left")]
    NotJoined,
}

/// Block key -> places that hold the block. Keys are expected to be uniformly random, such as bytes of a keyed hash.
#[derive(Debug)]
pub struct BlockIndex {
    map: BlockMap,
    sets: Sets,
    places: BlockHolders,
}

/// A table that the index has outgrown.
#[derive(Debug)]
pub(super) struct SpareTable(Table);

impl SpareTable {
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// Keys whose table slots are read ahead of their use: independent reads overlap their cache misses.
const RUN: usize = 64;
/// Slots that are swept or moved for each key of a `store` or `remove`. The move into a larger table then ends before
/// 1/16 of the slots' number came in, and the old table is never more than 13/16 full (`map.rs`).
const SLOTS_PER_KEY: usize = 16;
/// Slots that a `join` sweeps, so that joining and leaving alone reaches the end, too.
const SLOTS_PER_JOIN: usize = 4096;
/// Distance of the blocks of a prompt that `overlaps` reads first. A block missing between two of them is not seen, so not
/// larger than it needs to be: with 32, 64, 128 a prompt of 768 blocks that one worker holds takes 1.4, 0.9, 0.7 us, one
/// that 32 workers hold different parts of 2.5, 2.5, 2.4 us (p50 of `headrace-bench index`, EPYC 25/17).
const FAR: usize = 64;
/// How many of these are read at the same time.
const BATCH: usize = 16;
/// Where two differ, what is between them is cut in so many parts, again and again; their ends are read at the same time.
const PARTS: usize = 4;

impl BlockIndex {
    /// An index without places.
    #[must_use]
    pub fn new() -> Self {
        Self { map: BlockMap::new(), sets: Sets::new(), places: BlockHolders::default() }
    }

    /// The same, where [`Self::take_spare`] takes the tables that it outgrows.
    pub(super) fn with_spares() -> Self {
        let mut index = Self::new();
        index.map.keeps_spare = true;
        index
    }

    /// The table that was outgrown last, once. It stays until the next one is, if nobody takes it.
    pub(super) fn take_spare(&mut self) -> Option<SpareTable> {
        self.map.take_spare().map(SpareTable)
    }

    /// A new place, which will hold at most `capacity` blocks. `None` while all 65,536 numbers are taken by places that
    /// are alive or not yet swept.
    pub fn join(&mut self, capacity: u32) -> Option<BlockHolder> {
        self.tidy(SLOTS_PER_JOIN, 0);
        self.places.join(capacity).map(BlockHolder)
    }

    /// Forgets a place and all it holds, at once for every later answer and in constant time. Its entries are freed
    /// little by little by later calls. Of a place that is not there it does nothing.
    pub fn leave(&mut self, place: BlockHolder) {
        self.places.leave(place.0);
    }

    /// `place` holds the blocks `keys` from now on; how many of them it did not hold before.
    ///
    /// A key that finds 4,096 taken slots from its own on is skipped, which random keys never do. So a worker that makes
    /// keys up spoils its own credit, takes a bounded time, and at worst costs others as many blocks as it may hold.
    ///
    /// # Errors
    /// `OverCapacity`: keys up to the first that did not fit were stored. `NotJoined`: none was.
    pub fn store(&mut self, place: BlockHolder, keys: &[u64]) -> Result<u32, StoreError> {
        let capacity = self.places.capacity(place.0).ok_or(StoreError::NotJoined)?;
        let held_before = self.places.held(place.0);
        for run in keys.chunks(RUN) {
            self.tidy(run.len() * SLOTS_PER_KEY, run.len());
            self.map.read_ahead_far(run);
            let mut change = self.sets.change(SetChange::Add, place.0);
            for &key in run {
                let table = self.map.table_mut(key);
                let Some(at) = table.find(key) else { continue };
                let from = table.set(at);
                let to = change.of(from);
                if to == from {
                    continue; // it holds this block already
                }
                if self.places.held(place.0) == capacity {
                    return Err(StoreError::OverCapacity { capacity });
                }
                table.put(at, key, to);
                change.apply(from, to);
                self.places.gained(place.0);
            }
        }
        Ok(self.places.held(place.0) - held_before)
    }

    /// `place` no longer holds the blocks `keys`; how many of them it did hold.
    pub fn remove(&mut self, place: BlockHolder, keys: &[u64]) -> u32 {
        if self.places.capacity(place.0).is_none() {
            return 0;
        }
        let held_before = self.places.held(place.0);
        for run in keys.chunks(RUN) {
            self.tidy(run.len() * SLOTS_PER_KEY, 0);
            self.map.read_ahead_far(run);
            let mut change = self.sets.change(SetChange::Remove, place.0);
            for &key in run {
                let table = self.map.table_mut(key);
                let Some(at) = table.find(key) else { continue };
                let from = table.set(at);
                let to = change.of(from);
                if to == from {
                    continue; // no entry, or one without this place
                }
                if to == EMPTY {
                    table.delete(at);
                } else {
                    table.put(at, key, to);
                }
                change.apply(from, to);
                self.places.lost(place.0);
            }
        }
        held_before - self.places.held(place.0)
    }

    /// Sets `out[place]` to the number of leading blocks of `prompt` that each place holds, for all places at once. `out`
    /// gets `places()` entries; places that left have 0. Exact as long as holders shrink along a chain (see the top).
    pub fn overlaps(&self, prompt: &[u64], out: &mut Vec<u32>) {
        out.clear();
        out.resize(self.places(), 0);
        let Some(&first) = prompt.first() else { return };
        let mut walk = Walk { sets: &self.sets, out, set: self.map.get(first), start: 0 };
        if walk.set == EMPTY {
            return; // nobody has seen this prompt: one read was enough
        }
        self.walk(prompt, &mut walk);
        for &place in self.places.leaving() {
            out[usize::from(place)] = 0;
        }
    }

    /// Reads what is needed of the blocks after the first: every `FAR`th, and between two only where they differ.
    fn walk(&self, prompt: &[u64], walk: &mut Walk<'_>) {
        let last = prompt.len() - 1;
        for low in (0..last).step_by(FAR) {
            if low.is_multiple_of(FAR * BATCH) {
                let ends = prompt[low..].iter().skip(FAR).step_by(FAR).take(BATCH);
                self.map.read_ahead(ends.copied());
            }
            if !self.search(prompt, walk, low, (low + FAR).min(last)) {
                return;
            }
        }
        walk.turn(prompt.len(), EMPTY);
    }

    /// Finds the changes after block `low`, whose holders are `walk.set`, up to `high`. False where `overlaps` is done.
    fn search(&self, prompt: &[u64], walk: &mut Walk<'_>, low: usize, high: usize) -> bool {
        let end = self.map.get(prompt[high]);
        if end == walk.set {
            return true; // the same holders at both ends, so also between
        }
        if high == low + 1 {
            return walk.turn(high, end);
        }
        let part = (high - low).div_ceil(PARTS);
        self.map.read_ahead(prompt[low..high].iter().skip(part).step_by(part).copied());
        for low in (low..high).step_by(part) {
            if !self.search(prompt, walk, low, (low + part).min(high)) {
                return false;
            }
            if walk.set == end {
                break; // the rest is the same, too
            }
        }
        true
    }

    /// True if `place` holds this block.
    #[must_use]
    pub fn holds(&self, place: BlockHolder, key: u64) -> bool {
        self.places.capacity(place.0).is_some()
            && self.sets.members(self.map.get(key)).binary_search(&place.0).is_ok()
    }

    /// Place numbers in use are below this. Between 0 and 65,536; falls again when the highest have left.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Blocks that a place holds; 0 of one that is not there.
    #[must_use]
    pub fn held(&self, place: BlockHolder) -> u32 {
        self.places.capacity(place.0).map_or(0, |_| self.places.held(place.0))
    }

    /// Blocks with an entry: those somebody holds, and those of places that left which are not swept yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// True without any entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory in use, in bytes; allocator overhead not counted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.map.bytes() + self.sets.bytes() + self.places.bytes()
    }

    /// The bounded share of work left over from leaving and growing that every call does: at most `slots` slots, and what
    /// room for `coming` new keys takes.
    fn tidy(&mut self, slots: usize, coming: usize) {
        let Self { map, sets, places } = self;
        sets.free_unused();
        map.resize_where_needed(coming);
        if !map.is_moving() && places.leaving().is_empty() {
            return;
        }
        let mut crowded = Vec::new();
        map.pass(slots, |set| clean(sets, places, set), &mut crowded);
        for set in crowded {
            for &place in sets.members(set) {
                places.lost(place);
            }
            sets.replace(set, EMPTY);
        }
    }
}

impl Default for BlockIndex {
    fn default() -> Self {
        Self::new()
    }
}

/// The set that the entry with `set` should have: without the places that left. Takes the entry from their counts.
fn clean(sets: &mut Sets, places: &mut BlockHolders, set: u32) -> u32 {
    let to = sets.without_leaving(set, places);
    if to != set {
        for &place in sets.members(set) {
            if places.is_leaving(place) {
                places.lost(place);
            }
        }
        sets.replace(set, to);
    }
    to
}

/// Where `overlaps` is: all blocks since `start` have the holders `set`.
struct Walk<'a> {
    sets: &'a Sets,
    out: &'a mut [u32],
    set: u32,
    start: u32,
}

impl Walk<'_> {
    /// The holders change to `set` at block `at`. False if nobody held everything up to there.
    fn turn(&mut self, at: usize, set: u32) -> bool {
        let end = u32::try_from(at).unwrap_or(u32::MAX);
        let mut any = false;
        for &place in self.sets.members(self.set) {
            let overlap = &mut self.out[usize::from(place)];
            if *overlap == self.start {
                *overlap = end;
                any = true;
            }
        }
        (self.set, self.start) = (set, end);
        any
    }
}
