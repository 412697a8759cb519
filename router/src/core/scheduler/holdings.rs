//! Which worker holds which block: what workers announce, and beside it what was booked and is on its way.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use super::legs::LegPart;
use crate::core::index::{BlockHolder, BlockIndex, SpareTable};

/// Where a worker keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// The memory that attention reads.
    Device,
    /// The host's memory.
    Host,
    /// A disk of the worker's machine.
    Disk,
}

impl Tier {
    /// As `Blocks.tier` has it; `None` for a number that means nothing.
    #[must_use]
    pub fn from_wire(tier: u8) -> Option<Self> {
        match tier {
            0 => Some(Self::Device),
            1 => Some(Self::Host),
            2 => Some(Self::Disk),
            _ => None,
        }
    }
}

/// One worker's names in the two indexes. `None` where it announced no room, or the index has no place left: such a
/// worker serves without credit.
#[derive(Debug, Default)]
pub(super) struct WorkerHolders {
    tiers: [Option<BlockHolder>; 3],
    /// Blocks that are kept of each tier.
    room: [u32; 3],
    booked: Option<BlockHolder>,
    pulled: Option<BlockHolder>,
    /// A worker cannot be about to store more than its pool holds.
    most_booked: u32,
}

/// Where decisions find what a worker has of a prompt: places in [`Overlaps`], or beyond all of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct HolderPlaces {
    device: usize,
    booked: usize,
    pulled: usize,
}

impl WorkerHolders {
    /// `counts`: the worker is believed.
    pub(super) fn places(&self, counts: bool) -> HolderPlaces {
        let at = |holder: Option<BlockHolder>| {
            holder.filter(|_| counts).map_or(usize::MAX, |holder| holder.0.into())
        };
        let device = at(self.tiers[Tier::Device as usize]);
        HolderPlaces { device, booked: at(self.booked), pulled: at(self.pulled) }
    }

    /// Blocks that are kept of this tier.
    pub(super) fn room(&self, tier: Tier) -> u32 {
        self.room[tier as usize]
    }

    /// What a leg computes here is there for those behind it in the queue; what it pulls comes whenever it comes.
    fn of(&self, part: LegPart) -> Option<BlockHolder> {
        match part {
            LegPart::Whole | LegPart::Prefill => self.booked,
            LegPart::Decode => self.pulled,
        }
    }
}

/// Everything that is held, by all workers of a model.
#[derive(Debug)]
pub(super) struct Holdings {
    announced: BlockIndex,
    /// Blocks of prompts that were placed and whose first token has not come. Apart from the announced ones, so that taking a
    /// prediction back can never take back what a worker said itself.
    booked: BlockIndex,
    /// By how many legs each of them is booked: several may share a prefix, and each gives back only its own.
    bookings: HashMap<(u16, u64), u32, BuildHasherDefault<KeyHasher>>,
    changed: Vec<u64>,
}

/// Keys are random already.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only numbers are hashed")
    }

    fn write_u16(&mut self, place: u16) {
        self.0 ^= u64::from(place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u64(&mut self, key: u64) {
        self.0 ^= key;
    }
}

/// Leading blocks of a prompt that one worker has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// On its device, as it says.
    pub(super) held: u32,
    /// Booked there, to be computed.
    pub(super) booked: u32,
    /// Booked there, to be pulled.
    pub(super) pulled: u32,
    /// In a lower tier.
    pub(super) lower: u32,
}

impl Found {
    /// Those that whoever computes the prompt there counts on.
    #[inline]
    pub(super) fn cached(&self) -> u32 {
        self.held.max(self.booked)
    }
}

/// The answer for all workers at once: leading blocks by place, of each index.
#[derive(Debug, Default)]
pub(super) struct Overlaps {
    announced: Vec<u32>,
    booked: Vec<u32>,
}

impl Overlaps {
    /// Of a worker that is believed.
    pub(super) fn of(&self, holders: &WorkerHolders) -> Found {
        let of_tier = |holder: Option<BlockHolder>| {
            holder.map_or(0, |holder| leading(&self.announced, holder.0.into()))
        };
        let [_, host, disk] = holders.tiers;
        Found { lower: of_tier(host).max(of_tier(disk)), ..self.at(&holders.places(true)) }
    }

    /// The same, without lower tiers.
    #[inline]
    pub(super) fn at(&self, places: &HolderPlaces) -> Found {
        Found {
            held: leading(&self.announced, places.device),
            booked: leading(&self.booked, places.booked),
            pulled: leading(&self.booked, places.pulled),
            lower: 0,
        }
    }
}

#[inline]
fn leading(overlaps: &[u32], place: usize) -> u32 {
    overlaps.get(place).copied().unwrap_or(0)
}

impl Default for Holdings {
    fn default() -> Self {
        Self {
            announced: BlockIndex::with_spares(),
            booked: BlockIndex::new(),
            bookings: HashMap::default(),
            changed: Vec::new(),
        }
    }
}

impl Holdings {
    /// A table that is of no use any more.
    pub(super) fn take_spare(&mut self) -> Option<SpareTable> {
        self.announced.take_spare()
    }

    /// `room` is by tier; `blocks` are those of the worker's pool.
    pub(super) fn join(&mut self, room: [u32; 3], blocks: u32) -> WorkerHolders {
        WorkerHolders {
            tiers: room.map(|blocks| (blocks > 0).then(|| self.announced.join(blocks)).flatten()),
            room,
            booked: self.booked.join(blocks),
            pulled: self.booked.join(blocks),
            most_booked: blocks,
        }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "places that were given back are no longer good"
    )]
    pub(super) fn leave(&mut self, places: WorkerHolders) {
        for place in places.tiers.into_iter().flatten() {
            self.announced.leave(place);
        }
        for place in [places.booked, places.pulled].into_iter().flatten() {
            self.booked.leave(place);
        }
    }

    /// All that was announced is gone; bookings stay.
    pub(super) fn clear(&mut self, places: &mut WorkerHolders) {
        for tier in [Tier::Device, Tier::Host, Tier::Disk] {
            self.clear_tier(places, tier);
        }
    }

    /// All that was announced for a tier is gone. In constant time: the worker gets a new place.
    pub(super) fn clear_tier(&mut self, places: &mut WorkerHolders, tier: Tier) {
        let blocks = places.room(tier);
        let place = &mut places.tiers[tier as usize];
        if let Some(old) = place.take() {
            self.announced.leave(old);
        }
        *place = (blocks > 0).then(|| self.announced.join(blocks)).flatten();
    }

    /// False if they are more than the worker can hold, or is given room for. A lower tier without room is passed over.
    pub(super) fn store(&mut self, places: &WorkerHolders, tier: Tier, keys: &[u64]) -> bool {
        match places.tiers[tier as usize] {
            Some(place) => self.announced.store(place, keys).is_ok(),
            None => tier != Tier::Device || keys.is_empty() || places.room(tier) > 0,
        }
    }

    /// How many of them it was not known to hold.
    pub(super) fn remove(&mut self, places: &WorkerHolders, tier: Tier, keys: &[u64]) -> u32 {
        let Some(place) = places.tiers[tier as usize] else { return 0 };
        let known = self.announced.remove(place, keys);
        u32::try_from(keys.len()).unwrap_or(u32::MAX).saturating_sub(known)
    }

    pub(super) fn holds(&self, places: &WorkerHolders, key: u64) -> bool {
        let place = places.tiers[Tier::Device as usize];
        place.is_some_and(|place| self.announced.holds(place, key))
    }

    /// Of the leading `blocks` that it held, those that it still holds. Leaves go first, so one look at the last one is
    /// nearly always enough.
    pub(super) fn still_held(&self, places: &WorkerHolders, keys: &[u64], blocks: u32) -> u32 {
        let Some(place) = places.tiers[Tier::Device as usize] else { return 0 };
        let held = |n: u32| n == 0 || self.announced.holds(place, keys[n as usize - 1]);
        if held(blocks) {
            return blocks;
        }
        let (mut low, mut high) = (0, blocks); // held(low), not held(high)
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if held(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Books all blocks of a prompt. False if they may not fit: then none is booked.
    pub(super) fn book(&mut self, places: &WorkerHolders, part: LegPart, keys: &[u64]) -> bool {
        let Some(place) = places.of(part) else { return false };
        if self.booked.held(place) as usize + keys.len() > places.most_booked as usize {
            return false;
        }
        self.changed.clear();
        for &key in keys {
            let count = self.bookings.entry((place.0, key)).or_insert(0);
            *count += 1;
            if *count == 1 {
                self.changed.push(key);
            }
        }
        self.booked.store(place, &self.changed).is_ok()
    }

    /// Takes back what [`Self::book`] booked.
    pub(super) fn unbook(&mut self, places: &WorkerHolders, part: LegPart, keys: &[u64]) {
        let Some(place) = places.of(part) else { return };
        self.changed.clear();
        for &key in keys {
            let Entry::Occupied(mut entry) = self.bookings.entry((place.0, key)) else { continue };
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
                self.changed.push(key);
            }
        }
        self.booked.remove(place, &self.changed);
    }

    /// Fills `overlaps`, whose memory serves one prompt after the other.
    pub(super) fn overlaps(&self, prompt: &[u64], overlaps: &mut Overlaps) {
        self.announced.overlaps(prompt, &mut overlaps.announced);
        self.booked.overlaps(prompt, &mut overlaps.booked);
    }

    pub(super) fn held(&self, places: &WorkerHolders) -> u32 {
        places.tiers[Tier::Device as usize].map_or(0, |place| self.announced.held(place))
    }

    /// Keys and bytes.
    pub(super) fn size(&self) -> (usize, usize) {
        let bookings = self.bookings.capacity() * (size_of::<((u16, u64), u32)>() + 1);
        (self.announced.len(), self.announced.bytes() + self.booked.bytes() + bookings)
    }

    /// Blocks that are booked on a worker.
    #[cfg(test)]
    pub(super) fn booked(&self, places: &WorkerHolders) -> u32 {
        let places = [places.booked, places.pulled].into_iter().flatten();
        places.map(|place| self.booked.held(place)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_room_and_found_no_place_in_the_index_may_hold_what_it_says() {
        let store = |room: [u32; 3], keys: &[u64]| {
            let places = WorkerHolders { room, ..WorkerHolders::default() };
            Holdings::default().store(&places, Tier::Device, keys)
        };
        assert!(store([5, 0, 0], &[7]));
        assert!(!store([0, 0, 0], &[7]) && store([0, 0, 0], &[]));
    }
}
