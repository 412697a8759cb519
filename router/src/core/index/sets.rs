//! Holder sets, each kept once and counted by the entries that have it.
//!
//! Blocks of one conversation have the same holders, so there are far fewer sets than blocks, and an event over a run of
//! blocks makes the same change to the same set again and again. A `SetChange` remembers the last one, a small cache the
//! recent ones; only what neither knows is worked out.
//!
//! A set that no entry has is not freed at once (the next event often brings it back) but in batches, and only between
//! runs of events. So numbers remembered within a run stay valid, and the cache is emptied once a batch.

use super::places::BlockHolders;

/// The number of the empty set. It is always there.
pub(super) const EMPTY: u32 = 0;

/// Unused sets that are kept; a bound on their memory, and enough to make freeing them rare.
const MOST_UNUSED: usize = 1024;
/// Entries of the cache of changes: 48 KiB, so that it stays in the second-level cache.
const CACHE_LOG2: u32 = 12;
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Sets {
    sets: Vec<Set>,
    free: Vec<u32>,
    unused: Vec<u32>,
    /// Hash table of all sets: the first of a chain that goes on in `Set::next`. As long as a power of two.
    chains: Vec<u32>,
    cache: Vec<Cached>,
    /// Where members are put together.
    draft: Vec<u16>,
    member_bytes: usize,
    /// How often unused sets were freed.
    batches: u64,
}

#[derive(Debug)]
struct Set {
    /// In ascending order. Two bytes a holder, so that many small sets in a large fleet stay small.
    members: Box<[u16]>,
    /// Entries with this set.
    entries: u32,
    next: u32,
    /// Waits in `unused`.
    listed: bool,
    hash: u32,
    /// This set without the places that were leaving, worked out at `cleaned_at` of `without_leaving`.
    cleaned: u32,
    cleaned_at: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetChange {
    Add,
    Remove,
}

#[derive(Debug, Clone, Copy)]
struct Cached {
    from: u32,
    /// Place and kind of the change.
    change: u32,
    to: u32,
}

impl Cached {
    const NOTHING: Self = Self { from: NONE, change: 0, to: 0 };
}

impl Sets {
    pub(super) fn new() -> Self {
        let mut sets = Self {
            sets: Vec::new(),
            free: Vec::new(),
            unused: Vec::new(),
            chains: vec![NONE; 64],
            cache: vec![Cached::NOTHING; 1 << CACHE_LOG2],
            draft: Vec::new(),
            member_bytes: 0,
            batches: 0,
        };
        let empty = sets.intern();
        sets.sets[empty as usize].entries = 1; // in use for ever
        sets
    }

    pub(super) fn members(&self, set: u32) -> &[u16] {
        &self.sets[set as usize].members
    }

    /// The same change of many sets in a row.
    pub(super) fn change(&mut self, kind: SetChange, place: u16) -> SameChange<'_> {
        SameChange { sets: self, kind, place, last: (NONE, NONE) }
    }

    /// An entry had the set `from` and has `to` now; either may be `EMPTY`.
    #[inline]
    pub(super) fn replace(&mut self, from: u32, to: u32) {
        if to != EMPTY {
            self.sets[to as usize].entries += 1;
        }
        if from != EMPTY {
            let set = &mut self.sets[from as usize];
            set.entries -= 1;
            if set.entries == 0 && !set.listed {
                set.listed = true;
                self.unused.push(from);
            }
        }
    }

    /// `set` without the places that are leaving.
    #[inline]
    pub(super) fn without_leaving(&mut self, set: u32, places: &BlockHolders) -> u32 {
        let now = places.version() + self.batches; // grows whenever the answer may be another
        if self.sets[set as usize].cleaned_at == now {
            return self.sets[set as usize].cleaned;
        }
        let Self { sets, draft, .. } = self;
        let members = &sets[set as usize].members;
        draft.clear();
        draft.extend(members.iter().filter(|&&place| !places.is_leaving(place)));
        let cleaned = self.intern();
        (self.sets[set as usize].cleaned, self.sets[set as usize].cleaned_at) = (cleaned, now);
        cleaned
    }

    /// Frees unused sets once there are many.
    pub(super) fn free_unused(&mut self) {
        if self.unused.len() < MOST_UNUSED {
            return;
        }
        while let Some(set) = self.unused.pop() {
            self.sets[set as usize].listed = false;
            if self.sets[set as usize].entries == 0 {
                self.unlink(set);
                let members = std::mem::take(&mut self.sets[set as usize].members);
                self.member_bytes -= size_of_val(&*members);
                self.free.push(set);
            }
        }
        // the cache and the `cleaned` of sets may name sets that are gone
        self.cache.fill(Cached::NOTHING);
        self.batches += 1;
    }

    pub(super) fn bytes(&self) -> usize {
        self.sets.capacity() * size_of::<Set>()
            + self.member_bytes
            + (self.free.capacity() + self.unused.capacity() + self.chains.capacity()) * 4
            + self.cache.capacity() * size_of::<Cached>()
    }

    /// The set that a change leads to.
    fn changed(&mut self, kind: SetChange, place: u16, from: u32) -> u32 {
        let change = u32::from(place) << 1 | u32::from(kind == SetChange::Add);
        let at = mix(from ^ change.rotate_left(16)) >> (32 - CACHE_LOG2);
        let cached = self.cache[at as usize];
        if (cached.from, cached.change) == (from, change) {
            return cached.to;
        }
        let to = self.work_out(kind, place, from);
        self.cache[at as usize] = Cached { from, change, to };
        to
    }

    fn work_out(&mut self, kind: SetChange, place: u16, from: u32) -> u32 {
        let Self { sets, draft, .. } = self;
        let members = &sets[from as usize].members;
        draft.clear();
        draft.extend_from_slice(members);
        match (kind, draft.binary_search(&place)) {
            (SetChange::Add, Err(at)) => draft.insert(at, place),
            (SetChange::Remove, Ok(at)) => drop(draft.remove(at)),
            (SetChange::Add, Ok(_)) | (SetChange::Remove, Err(_)) => return from,
        }
        self.intern()
    }

    /// The number of the set with the members in `draft`.
    fn intern(&mut self) -> u32 {
        let hash = self.draft.iter().fold(0, |sum, &place| mix(place.into()).wrapping_add(sum));
        let chain = self.chain_of(hash);
        let mut at = self.chains[chain];
        while at != NONE {
            let set = &self.sets[at as usize];
            if set.hash == hash && *set.members == *self.draft {
                return at;
            }
            at = set.next;
        }
        let set = Set {
            members: self.draft.as_slice().into(),
            entries: 0,
            next: self.chains[chain],
            listed: true,
            hash,
            cleaned: NONE,
            cleaned_at: u64::MAX,
        };
        self.member_bytes += size_of_val(&*set.members);
        let number = if let Some(number) = self.free.pop() {
            self.sets[number as usize] = set;
            number
        } else {
            let number = u32::try_from(self.sets.len()).expect("fewer sets than entries");
            self.sets.push(set);
            number
        };
        self.unused.push(number); // until an entry has it
        self.chains[chain] = number;
        if self.sets.len() > self.chains.len() {
            self.lengthen();
        }
        number
    }

    fn unlink(&mut self, set: u32) {
        let next = self.sets[set as usize].next;
        let chain = self.chain_of(self.sets[set as usize].hash);
        let mut at = self.chains[chain];
        if at == set {
            self.chains[chain] = next;
            return;
        }
        while self.sets[at as usize].next != set {
            at = self.sets[at as usize].next;
        }
        self.sets[at as usize].next = next;
    }

    /// Doubles the number of chains.
    fn lengthen(&mut self) {
        self.chains = vec![NONE; self.chains.len() * 2];
        for number in 0..self.sets.len() {
            if self.sets[number].members.is_empty() && number != EMPTY as usize {
                continue; // a free number
            }
            let chain = self.chain_of(self.sets[number].hash);
            self.sets[number].next = std::mem::replace(&mut self.chains[chain], number as u32);
        }
    }

    fn chain_of(&self, hash: u32) -> usize {
        hash as usize & (self.chains.len() - 1)
    }
}

/// The same change, made to the sets of one entry after the other.
pub(super) struct SameChange<'a> {
    sets: &'a mut Sets,
    kind: SetChange,
    place: u16,
    last: (u32, u32),
}

impl SameChange<'_> {
    /// What `from` becomes.
    #[inline]
    pub(super) fn of(&mut self, from: u32) -> u32 {
        if self.last.0 != from {
            self.last = (from, self.sets.changed(self.kind, self.place, from));
        }
        self.last.1
    }

    /// An entry was changed so.
    #[inline]
    pub(super) fn apply(&mut self, from: u32, to: u32) {
        self.sets.replace(from, to);
    }
}

/// Each bit of the result depends on all of `x`; a bijection.
fn mix(x: u32) -> u32 {
    let x = (x ^ x >> 16).wrapping_mul(0x7FEB_352D);
    let x = (x ^ x >> 15).wrapping_mul(0x846C_A68B);
    x ^ x >> 16
}
