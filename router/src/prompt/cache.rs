//! Tokens of recently seen stretches of text, in one bound of bytes for all models: those seen once go first, then the least
//! recently used.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;

use crate::core::blocks::{GROUP, Keyed};

/// What the cache did so far for one model, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Why there is no cache for this model; `None` when there is one.
    pub off: Option<&'static str>,
    /// Why `tokenizers` makes the tokens; `None` where the fast encoder does.
    pub slow: Option<&'static str>,
    /// Why long texts are not tokenised in pieces; `None` where they are.
    pub uncut: Option<&'static str>,
    /// Stretches found. Those too short to be worth a look-up are not counted anywhere.
    pub hits: u64,
    /// Stretches that had to be tokenised.
    pub misses: u64,
    /// Text bytes that were not tokenised again.
    pub hit_bytes: u64,
    /// Text bytes of the stretches that had to be tokenised.
    pub tokenized_bytes: u64,
}

impl CacheStats {
    /// What makes the tokens.
    #[must_use]
    pub fn encoder(&self) -> &'static str {
        if self.slow.is_none() { "fast" } else { "tokenizers" }
    }
}

/// Tokens of stretches of text, of all models together.
///
/// A stretch is known by a BLAKE3 hash of model, salt and text, so that nobody can make two that collide, and the text itself
/// is not kept.
///
/// Stretches that nobody asked for again make room for new ones before those that somebody did, so however much text comes
/// that nobody will send again, three quarters of the room are for what was found useful. Of the latter the least recently
/// used ones go back among the former.
#[derive(Debug)]
pub struct PrefixCache {
    limit_bytes: usize,
    /// By a byte of the name, so that threads seldom wait for each other.
    shards: Box<[Mutex<State>]>,
}

/// Name of a stretch of text of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StretchHash([u8; 32]);

#[derive(Debug, Default)]
struct State {
    limit_bytes: usize,
    index: HashMap<StretchHash, u32, RandomState>,
    /// The greatest capacity that `index` has had: it is less while places of former entries are not reclaimed.
    index_capacity: usize,
    /// Entries, and places of former ones. Those in use are two rings in order of use, where the oldest follows the newest.
    slots: Vec<Slot>,
    /// Of those seen once, and of those seen again.
    newest: [Option<u32>; 2],
    /// Places of former entries, chained by `older`.
    free: Option<u32>,
    /// Of the tokens alone.
    ids_bytes: usize,
    /// Of entries seen again, all told.
    again_bytes: usize,
}

#[derive(Debug)]
struct Slot {
    name: StretchHash,
    ids: Arc<[u32]>,
    older: u32,
    newer: u32,
    /// It was asked for since it is here.
    again: bool,
}

/// Bytes of a shard, and shards, at most: a cache of less has fewer.
const SHARD_BYTES: usize = 8 << 20;
const SHARDS: usize = 8;

/// What an allocation costs, the allocator's rounding included: mimalloc's size classes are an eighth apart, so that a
/// sixteenth is lost on average; glibc adds 8 bytes.
fn allocated(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { bytes + bytes / 12 + 8 }
}

/// Counts of an `Arc`.
const ARC_BYTES: usize = 2 * size_of::<usize>();

impl PrefixCache {
    /// A cache of at most so many bytes; 0 switches it off.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        let shards = (limit_bytes / SHARD_BYTES).clamp(1, SHARDS);
        let state = |_| Mutex::new(State { limit_bytes: limit_bytes / shards, ..State::default() });
        Arc::new(Self { limit_bytes, shards: (0..shards).map(state).collect() })
    }

    /// Memory held, tables and the allocator's share included. Never more than the limit.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).bytes()).sum()
    }

    /// Stretches of text whose tokens are kept.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).index.len()).sum()
    }

    pub(crate) fn is_off(&self) -> bool {
        self.limit_bytes == 0
    }

    pub(crate) fn get(&self, name: &StretchHash) -> Option<Arc<[u32]>> {
        let mut state = self.shard(name);
        let slot = *state.index.get(name)?;
        state.use_again(slot);
        Some(Arc::clone(&state.slots[slot as usize].ids))
    }

    pub(crate) fn insert(&self, name: StretchHash, ids: &[u32]) {
        let limit_bytes = self.limit_bytes / self.shards.len();
        // One huge text must not push everything else out.
        if ids_bytes(ids) > limit_bytes / 4 {
            return;
        }
        let ids: Arc<[u32]> = ids.into();
        let mut state = self.shard(&name);
        if state.index.contains_key(&name) {
            return;
        }
        while state.bytes_with(ids_bytes(&ids)) > limit_bytes {
            if !state.remove_oldest() {
                return; // not even the tables fit
            }
        }
        state.add(name, ids);
        // the index may grow earlier than it has to
        while state.bytes() > limit_bytes && state.remove_oldest() {}
    }

    fn shard(&self, name: &StretchHash) -> MutexGuard<'_, State> {
        lock(&self.shards[usize::from(name.0[0]) % self.shards.len()])
    }
}

/// No code that can panic runs under these locks but for a broken invariant, after which a miss is all that happens.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of a text that are hashed side by side with others.
const PIECE: usize = 128;
/// Of such pieces, apart from all that has no key.
static PIECES: LazyLock<Keyed> =
    LazyLock::new(|| Keyed::new(blake3::hash(b"headrace pieces of a stretch").as_bytes()));

impl StretchHash {
    /// `model` sets the texts of one model apart from those of all others, and `salt` those of one tenant: by the time that
    /// a prompt takes, nobody learns what others sent.
    ///
    /// BLAKE3 hashes the 1,024 bytes of a chunk one after the other, and a stretch has two or three. So what is hashed in the place
    /// of the text are digests of its pieces, of which SIMD makes 16 at once, and what is left over. Which bytes are which follows
    /// from the length, so two texts of the same hash would be a collision of BLAKE3's.
    pub(crate) fn new(model: u64, salt: &[u8], text: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        for number in [model, salt.len() as u64, text.len() as u64] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(salt);
        let mut digests = [[0; 32]; GROUP];
        for group in text.as_bytes().chunks(GROUP * PIECE) {
            PIECES.group(group, PIECE, &mut digests);
            let (pieces, rest) = group.split_at(group.len() / PIECE * PIECE);
            hasher.update(digests[..pieces.len() / PIECE].as_flattened()).update(rest);
        }
        Self(*hasher.finalize().as_bytes())
    }
}

impl State {
    fn bytes(&self) -> usize {
        tables(self.index_capacity, self.slots.capacity()) + self.ids_bytes
    }

    /// The same after another entry with so many bytes of tokens.
    fn bytes_with(&self, ids_bytes: usize) -> usize {
        let grown = |full: bool, capacity: usize, least: usize| {
            if full { (2 * capacity).max(least) } else { capacity }
        };
        let index = grown(self.index.len() >= self.index_capacity, self.index_capacity, 3);
        let full = self.free.is_none() && self.slots.len() == self.slots.capacity();
        let slots = grown(full, self.slots.capacity(), 4);
        tables(index, slots) + self.ids_bytes + ids_bytes
    }

    fn add(&mut self, name: StretchHash, ids: Arc<[u32]>) {
        self.ids_bytes += ids_bytes(&ids);
        let slot = Slot { name, ids, older: 0, newer: 0, again: false };
        let at = if let Some(at) = self.free {
            self.free = Some(self.slots[at as usize].older).filter(|next| *next != at);
            self.slots[at as usize] = slot;
            at
        } else {
            self.slots.push(slot);
            u32::try_from(self.slots.len() - 1).expect("4 G entries are more than memory holds")
        };
        self.index.insert(name, at);
        self.index_capacity = self.index_capacity.max(self.index.capacity());
        self.link_newest(at);
    }

    /// Somebody asked for an entry.
    fn use_again(&mut self, at: u32) {
        self.unlink(at);
        let slot = &mut self.slots[at as usize];
        if !slot.again {
            slot.again = true;
            self.again_bytes += all_bytes(&slot.ids);
        }
        self.link_newest(at);
        while self.again_bytes > self.limit_bytes / 4 * 3 {
            let Some(oldest) = self.oldest(true) else { return };
            self.unlink(oldest);
            let slot = &mut self.slots[oldest as usize];
            slot.again = false;
            self.again_bytes -= all_bytes(&slot.ids);
            self.link_newest(oldest);
        }
    }

    fn oldest(&self, again: bool) -> Option<u32> {
        self.newest[usize::from(again)].map(|newest| self.slots[newest as usize].newer)
    }

    fn remove_oldest(&mut self) -> bool {
        let Some(oldest) = self.oldest(false).or_else(|| self.oldest(true)) else { return false };
        self.unlink(oldest);
        let slot = &mut self.slots[oldest as usize];
        if slot.again {
            self.again_bytes -= all_bytes(&slot.ids);
        }
        let ids = std::mem::replace(&mut slot.ids, Arc::from([]));
        slot.older = self.free.unwrap_or(oldest); // the last one of the chain points at itself
        self.free = Some(oldest);
        self.ids_bytes -= ids_bytes(&ids);
        let name = slot.name;
        self.index.remove(&name);
        true
    }

    /// Takes an entry out of its ring.
    fn unlink(&mut self, at: u32) {
        let Slot { older, newer, again, .. } = self.slots[at as usize];
        let newest = &mut self.newest[usize::from(again)];
        if older == at {
            *newest = None;
            return;
        }
        if *newest == Some(at) {
            *newest = Some(older);
        }
        self.slots[older as usize].newer = newer;
        self.slots[newer as usize].older = older;
    }

    /// Puts an entry into its ring as the one used last.
    fn link_newest(&mut self, at: u32) {
        let ring = usize::from(self.slots[at as usize].again);
        let (older, newer) = match self.newest[ring] {
            None => (at, at),
            Some(newest) => (newest, self.slots[newest as usize].newer),
        };
        self.slots[at as usize].older = older;
        self.slots[at as usize].newer = newer;
        self.slots[older as usize].newer = at;
        self.slots[newer as usize].older = at;
        self.newest[ring] = Some(at);
    }
}

/// Bytes of index and slots with these capacities.
fn tables(index: usize, slots: usize) -> usize {
    // hash tables hold 7 entries in 8 buckets (the smallest 3 in 4), and have a byte of control for each and 16 more
    let buckets = if index == 0 { 0 } else { (index * 8 / 7).next_power_of_two().max(4) };
    let control = if buckets == 0 { 0 } else { buckets + 16 };
    allocated(buckets * size_of::<(StretchHash, u32)>() + control)
        + allocated(slots * size_of::<Slot>())
}

/// Of one entry's tokens, counted as they are allocated.
fn ids_bytes(ids: &[u32]) -> usize {
    allocated(ARC_BYTES + size_of_val(ids))
}

/// Of one entry with its share of the tables, at most.
fn all_bytes(ids: &[u32]) -> usize {
    ids_bytes(ids) + 2 * (size_of::<(StretchHash, u32)>() + size_of::<Slot>())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> StretchHash {
        StretchHash::new(0, b"", text)
    }

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let cache = PrefixCache::new(100_000);
        let ids = [7; 5_000];
        for text in ["a", "b", "c", "d"] {
            cache.insert(name(text), &ids);
        }
        assert_eq!(cache.entries(), 4);
        assert!(cache.get(&name("a")).is_some());
        cache.insert(name("e"), &ids);
        assert!(cache.get(&name("b")).is_none());
        assert!(cache.get(&name("a")).is_some() && cache.get(&name("e")).is_some());
    }

    #[test]
    fn models_do_not_see_each_others_entries_and_share_the_bound() {
        let cache = PrefixCache::new(1 << 20);
        for model in 0..256 {
            cache.insert(StretchHash::new(model, b"", "text"), &[model as u32; 10_000]);
            assert_eq!(cache.get(&StretchHash::new(model, b"", "text")).unwrap()[0], model as u32);
            assert!(cache.bytes() <= 1 << 20);
        }
        assert!(cache.get(&StretchHash::new(0, b"", "text")).is_none());
        assert!(cache.entries() > 10);
    }

    #[test]
    fn each_bit_of_a_text_and_its_length_count() {
        let mut names = std::collections::HashSet::new();
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, GROUP * PIECE, GROUP * PIECE + PIECE + 9]
        {
            let text = "a".repeat(length);
            assert!(names.insert(name(&text)), "{length}");
            for at in 0..length {
                let mut other = text.clone().into_bytes();
                other[at] = b'b';
                assert!(
                    names.insert(name(std::str::from_utf8(&other).unwrap())),
                    "{at} of {length}"
                );
            }
        }
        let parts = [[b'x'; PIECE], [b'y'; PIECE]];
        let texts =
            [[parts[0], parts[1]], [parts[1], parts[0]]].map(|two| two.as_flattened().to_vec());
        for text in texts {
            assert!(names.insert(name(std::str::from_utf8(&text).unwrap())));
        }
    }

    #[test]
    fn salts_set_texts_apart() {
        let cache = PrefixCache::new(1 << 20);
        cache.insert(StretchHash::new(0, b"a", "text"), &[1]);
        for (salt, text) in [(&b""[..], "text"), (b"b", "text"), (b"", "atext"), (b"at", "ext")] {
            assert!(cache.get(&StretchHash::new(0, salt, text)).is_none(), "{salt:?} {text}");
        }
        assert!(cache.get(&StretchHash::new(0, b"a", "text")).is_some());
    }

    #[test]
    fn one_text_may_not_take_it_all_and_no_bytes_is_no_cache() {
        let cache = PrefixCache::new(1_000);
        cache.insert(name("long"), &[0; 100]);
        assert!(cache.get(&name("long")).is_none());
        for limit in [0, 10, 100] {
            let none = PrefixCache::new(limit);
            none.insert(name("a"), &[1]);
            assert_eq!((none.entries(), none.bytes()), (0, 0));
        }
    }

    #[test]
    fn places_of_former_entries_are_used_again() {
        let cache = PrefixCache::new(3_000);
        let mut most = 0;
        for text in 0..1_000 {
            cache.insert(name(&text.to_string()), &[text; 20]);
            most = most.max(cache.entries());
        }
        assert!(most > 3 && cache.entries() > 3, "{most} entries at most");
        assert!(lock(&cache.shards[0]).slots.len() <= most, "no more places than entries at once");
    }

    #[test]
    fn where_one_entry_fits_the_next_one_takes_its_place() {
        let ids = [7; 26];
        let limit = tables(3, 4) + ids_bytes(&ids);
        let cache = PrefixCache::new(limit);
        for round in 0..9 {
            let text = round.to_string();
            cache.insert(name(&text), &ids);
            assert_eq!((cache.entries(), cache.bytes()), (1, limit));
            assert!(cache.get(&name(&text)).is_some(), "{round}");
        }
    }

    #[test]
    fn texts_that_nobody_sends_again_push_out_nothing_that_somebody_did() {
        let cache = PrefixCache::new(100_000);
        let useful = ["a", "b", "c", "d"];
        for text in useful {
            cache.insert(name(text), &[1; 1_000]);
            assert!(cache.get(&name(text)).is_some());
        }
        for round in 0..1_000 {
            cache.insert(name(&round.to_string()), &[2; 1_000]);
        }
        assert!(useful.iter().all(|text| cache.get(&name(text)).is_some()));
        // until others are found useful in their turn
        for round in 0..100 {
            let text = format!("new {round}");
            cache.insert(name(&text), &[3; 1_000]);
            assert!(cache.get(&name(&text)).is_some());
        }
        assert!(useful.iter().all(|text| cache.get(&name(text)).is_none()));
    }

    #[test]
    fn shards_share_the_bound_and_the_names() {
        let limit = 40 << 20;
        let cache = PrefixCache::new(limit);
        assert_eq!(cache.shards.len(), 5);
        for text in 0..60_u32 {
            cache.insert(name(&text.to_string()), &vec![text; 400_000]);
            assert!(cache.bytes() <= limit);
            assert_eq!(cache.get(&name(&text.to_string())).unwrap()[0], text);
        }
        assert!(cache.shards.iter().all(|shard| !lock(shard).index.is_empty()));
        assert!(cache.entries() > 15 && cache.bytes() > limit / 2);
    }

    proptest! {
        #[test]
        fn it_is_an_exact_bounded_lru_of_two_parts(ops in prop::collection::vec((0_u8..12, 0_usize..40), 0..300)) {
            let limit = 3_000;
            let cache = PrefixCache::new(limit);
            // oldest first: those seen once, those seen again; each with the number of its tokens
            let [mut once, mut again]: [Vec<(u8, usize)>; 2] = [vec![], vec![]];
            let all = |of: &[(u8, usize)]| of.iter().map(|(_, len)| all_bytes(&vec![0; *len])).sum::<usize>();
            for (key, len) in ops {
                let text = key.to_string();
                if let Some(ids) = cache.get(&name(&text)) {
                    prop_assert!(ids.iter().all(|id| *id == u32::from(key)));
                    for of in [&mut once, &mut again] {
                        of.retain(|(other, _)| *other != key);
                    }
                    again.push((key, ids.len()));
                    while all(&again) > limit / 4 * 3 {
                        once.push(again.remove(0));
                    }
                } else {
                    prop_assert!(once.iter().chain(&again).all(|(other, _)| *other != key));
                    cache.insert(name(&text), &vec![u32::from(key); len]);
                    once.push((key, len));
                    let there = lock(&cache.shards[0]).index.contains_key(&name(&text));
                    while once.len() + again.len() > cache.entries() {
                        // the new one goes last, where tables that grew leave it no room
                        let others = once.len() > 1 || !there;
                        (if others { &mut once } else { &mut again }).remove(0);
                    }
                }
                let state = lock(&cache.shards[0]);
                let held: usize = once.iter().chain(&again).map(|(key, len)| {
                    let slot = state.index[&name(&key.to_string())];
                    assert_eq!(state.slots[slot as usize].ids.len(), *len);
                    ids_bytes(&state.slots[slot as usize].ids)
                }).sum();
                prop_assert_eq!(held, state.ids_bytes);
                prop_assert_eq!(all(&again), state.again_bytes);
                prop_assert_eq!(once.len() + again.len(), state.index.len());
                prop_assert!(state.bytes() <= limit);
            }
        }
    }
}
