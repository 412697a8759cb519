//! One flat hash table of 16-byte slots: a block's key and the number of its holder set. Linear probing, backward-shift
//! delete, no wrap-around.
//!
//! The home of a key is the top bits of a product with an odd constant. Keys are random already; the product only makes
//! keys that are not (counters in a test) spread as well. Homes of a larger table are in the same order, so moving the
//! entries reads and writes memory in order.
//!
//! Instead of wrapping around at the end the table has a tail. An entry is at most `PROBES - 1` slots behind its home, so
//! the tail holds all that pass the end, and the last slot of it is always empty. Without wrap-around, entries only ever
//! move to lower slots (when an entry before them is deleted), which is what the sweep rests on.
//!
//! A table that entries move into has slots as far as they have come, for zeroing takes 0.7 ms a MB where the allocator
//! gives memory that was used before: a second for the largest table, with everybody waiting.

use std::hint::black_box;

use super::sets::EMPTY;

/// Slots that a key may use from its home on. With random keys, at 13/16 full, runs of n taken slots are rarer than
/// exp(-0.02 n): never this many.
const PROBES: usize = 4096;

/// Key in the low half, set in the high half; 0 is an empty slot, since no entry has the set `EMPTY`.
type Slot = u128;

#[derive(Debug)]
pub(super) struct Table {
    /// Those that may be used so far, see [`Self::reach`]. The last one is empty.
    slots: Vec<Slot>,
    /// 64 - log2 of the number of homes.
    shift: u32,
    len: usize,
}

impl Table {
    /// With all its slots.
    pub(super) fn new(homes_log2: u32) -> Self {
        let mut table = Self::unreached(homes_log2);
        table.reach(1 << homes_log2);
        table
    }

    /// With memory for its slots, and none of them to be used yet.
    pub(super) fn unreached(homes_log2: u32) -> Self {
        let slots = Vec::with_capacity((1 << homes_log2) + PROBES);
        Self { slots, shift: 64 - homes_log2, len: 0 }
    }

    /// From here on keys may be looked for and stored whose home is one of the first `homes`, if they could not before.
    #[inline]
    pub(super) fn reach(&mut self, homes: usize) {
        let slots = homes.min(1 << self.homes_log2()) + PROBES;
        if slots > self.slots.len() {
            self.slots.resize(slots, 0);
        }
    }

    pub(super) fn homes_log2(&self) -> u32 {
        64 - self.shift
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Homes and tail, once all of them are reached.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    #[inline]
    pub(super) fn home(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    /// Reads the home of a key for no other reason than to have it in the cache.
    #[inline]
    pub(super) fn read_ahead(&self, key: u64) {
        black_box(self.slots[self.home(key)] as u64);
    }

    /// The same with the next cache line: where a key is new, or its entry goes, one probe in two gets there.
    #[inline]
    pub(super) fn read_ahead_far(&self, key: u64) {
        let home = self.home(key);
        black_box(self.slots[home] as u64 ^ self.slots[home + 4] as u64);
    }

    /// The slot with this key, or the empty one where it belongs; `None` if all slots it may use are taken.
    #[inline]
    pub(super) fn find(&self, key: u64) -> Option<usize> {
        let home = self.home(key);
        let found = |&slot: &Slot| slot == 0 || slot as u64 == key;
        self.slots[home..home + PROBES].iter().position(found).map(|probes| home + probes)
    }

    /// The set in a slot; `EMPTY` if there is no entry.
    #[inline]
    pub(super) fn set(&self, at: usize) -> u32 {
        (self.slots[at] >> 64) as u32
    }

    /// The key in a slot that has an entry.
    pub(super) fn key(&self, at: usize) -> u64 {
        self.slots[at] as u64
    }

    /// Writes an entry where `find` said.
    #[inline]
    pub(super) fn put(&mut self, at: usize, key: u64, set: u32) {
        debug_assert_ne!(set, EMPTY);
        self.len += usize::from(self.slots[at] == 0);
        self.slots[at] = Slot::from(set) << 64 | Slot::from(key);
    }

    /// Deletes the entry in a slot: later ones that may stand there move up, so that no probe meets a gap.
    #[inline]
    pub(super) fn delete(&mut self, at: usize) {
        let mut gap = at;
        let mut next = at + 1; // exists: the last slot is empty
        while self.slots[next] != 0 {
            if self.home(self.key(next)) <= gap {
                self.slots[gap] = self.slots[next];
                gap = next;
            }
            next += 1;
        }
        self.slots[gap] = 0;
        self.len -= 1;
    }

    /// The entry in a slot was copied elsewhere and will not be read here again.
    pub(super) fn moved(&mut self) {
        self.len -= 1;
    }
}
