//! The chains of stretches that many prompts have in common: who shares a system prompt or a conversation of thousands of tokens
//! would else have it chained again for each request, one compression a block after the other.
//!
//! A stretch is known by the hash of the block before it and the digests of its own blocks, all 16 bytes of each. So what is found has
//! the tokens and the salt of all that is before it, too: tenants that are kept apart do not find each other's.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;

use super::{BlockHash, Chain, Digest};
use crate::core::secret::HashKey;

/// Tokens of a stretch, rounded down to whole blocks. A guess: long enough that a look-up is little beside what it saves, short
/// enough that little is chained again where prompts part.
const STRETCH_TOKENS: usize = 1_024;
/// So that threads seldom wait for each other.
const SHARDS: usize = 8;
/// Names that are remembered, for each of the largest stretches that there is room for.
const NAMES_A_STRETCH: usize = 4;
/// Of a chain whose blocks have as few tokens as those of any engine.
const LARGEST_STRETCH: usize = ChainStretch::bytes_of(STRETCH_TOKENS / 16);

/// See the head of this file. Stretches are kept once they come a second time, in one bound of bytes for all models. What was not
/// asked for while half of the room was filled anew makes room.
#[derive(Debug)]
pub struct ChainMemo {
    names: RandomState,
    /// By the name of the stretch. None at all where there is no room.
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Debug)]
struct Shard {
    half_bytes: usize,
    /// Of the present half, and of the one before it.
    young: MemoHalf,
    old: MemoHalf,
    /// Names that came once, each at the place that follows from it, where a later one replaces an earlier one.
    seen: Box<[u64]>,
}

#[derive(Debug, Default)]
struct MemoHalf {
    stretches: HashMap<u64, Arc<ChainStretch>>,
    bytes: usize,
}

#[derive(Debug)]
struct ChainStretch {
    after: BlockHash,
    digests: Box<[Digest]>,
    hashes: Box<[BlockHash]>,
}

impl ChainMemo {
    /// Room for stretches of so many bytes; 0 keeps nothing.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        let half_bytes = limit_bytes / SHARDS / 2;
        let names = 2 * half_bytes / LARGEST_STRETCH * NAMES_A_STRETCH;
        let shard = |_| {
            let (young, old) = Default::default();
            Mutex::new(Shard { half_bytes, young, old, seen: vec![0; names].into() })
        };
        let shards = if names == 0 { 0 } else { SHARDS };
        Arc::new(Self { names: RandomState::default(), shards: (0..shards).map(shard).collect() })
    }

    /// As [`super::hash_blocks`].
    #[must_use]
    pub fn hash_blocks(
        &self,
        key: &HashKey,
        parent: BlockHash,
        tokens: &[u32],
        block_tokens: NonZeroUsize,
    ) -> Vec<BlockHash> {
        let mut chain = Chain::new(key, parent, block_tokens);
        let mut hashes = Vec::with_capacity(tokens.len() / block_tokens);
        let blocks = if self.shards.is_empty() { 0 } else { STRETCH_TOKENS / block_tokens };
        let Some(blocks) = NonZeroUsize::new(blocks) else {
            chain.extend(tokens, &mut hashes);
            return hashes;
        };
        let mut stretches = tokens.chunks_exact(blocks.get() * block_tokens.get());
        let mut digests = Vec::with_capacity(blocks.get());
        for tokens in &mut stretches {
            digests.clear();
            chain.digest(tokens, &mut digests);
            self.link(&mut chain, &digests, &mut hashes);
        }
        chain.extend(stretches.remainder(), &mut hashes);
        hashes
    }

    /// Memory that stretches take, at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let bytes = |shard| Self::lock(shard).bytes();
        self.shards.iter().map(bytes).sum()
    }

    /// As [`Chain::link`], for one stretch.
    fn link(&self, chain: &mut Chain, digests: &[Digest], hashes: &mut Vec<BlockHash>) {
        let after = chain.last;
        let name = self.names.hash_one((after.0, digests.as_flattened()));
        // maps go by the lowest and the seven highest bits
        let shard = &self.shards[(name >> 32) as usize % self.shards.len()];
        let found = Self::lock(shard).find(name);
        if let Some(found) = found.filter(|found| found.is(after, digests)) {
            hashes.extend_from_slice(&found.hashes);
            chain.last = *found.hashes.last().expect("a stretch has a block");
            return;
        }
        let before = hashes.len();
        chain.link(digests, hashes);
        let mut shard = Self::lock(shard);
        if shard.came_before(name) {
            let hashes = hashes[before..].into();
            shard.keep(name, ChainStretch { after, digests: digests.into(), hashes });
        }
    }

    /// No code that can panic runs under these locks but for a broken invariant, after which stretches are chained again.
    fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn bytes(&self) -> usize {
        self.young.bytes + self.old.bytes + size_of_val(&*self.seen)
    }

    fn find(&mut self, name: u64) -> Option<Arc<ChainStretch>> {
        if let Some(found) = self.young.stretches.get(&name) {
            return Some(Arc::clone(found));
        }
        let found = self.old.take(name)?;
        self.add(name, Arc::clone(&found));
        Some(found)
    }

    /// Whether it did, as far as is remembered; from now on it has.
    fn came_before(&mut self, name: u64) -> bool {
        let at = name as usize % self.seen.len();
        std::mem::replace(&mut self.seen[at], name) == name
    }

    /// In the place of another one of this name.
    fn keep(&mut self, name: u64, stretch: ChainStretch) {
        self.young.take(name);
        self.add(name, Arc::new(stretch));
    }

    fn add(&mut self, name: u64, stretch: Arc<ChainStretch>) {
        let bytes = stretch.bytes();
        if self.young.bytes + bytes > self.half_bytes {
            self.old = std::mem::take(&mut self.young);
        }
        if bytes <= self.half_bytes {
            self.young.bytes += bytes;
            self.young.stretches.insert(name, stretch);
        }
    }
}

impl MemoHalf {
    fn take(&mut self, name: u64) -> Option<Arc<ChainStretch>> {
        let taken = self.stretches.remove(&name)?;
        self.bytes -= taken.bytes();
        Some(taken)
    }
}

impl ChainStretch {
    fn is(&self, after: BlockHash, digests: &[Digest]) -> bool {
        self.after == after && *self.digests == *digests
    }

    fn bytes(&self) -> usize {
        Self::bytes_of(self.hashes.len())
    }

    /// An eighth is for the rounding of the allocator, and maps have two places for each that is in use.
    const fn bytes_of(blocks: usize) -> usize {
        let own = size_of::<Self>() + 2 * size_of::<usize>();
        let chain = blocks * (size_of::<Digest>() + size_of::<BlockHash>());
        (own + chain) * 9 / 8 + 2 * (size_of::<(u64, Arc<Self>)>() + 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::blocks::hash_blocks;

    const KEY: HashKey = HashKey([7; 32]);

    fn size(block_tokens: usize) -> NonZeroUsize {
        NonZeroUsize::new(block_tokens).unwrap()
    }

    fn root(salt: &[u8]) -> BlockHash {
        BlockHash::root(&KEY, salt)
    }

    fn tokens(seed: u32, count: u32) -> Vec<u32> {
        (0..count).map(|place| place.wrapping_mul(2_654_435_761) ^ seed).collect()
    }

    /// Hashes, and how many stretches are kept afterwards.
    fn after(memo: &ChainMemo, salt: &[u8], tokens: &[u32], block_tokens: usize) -> usize {
        let block_tokens = size(block_tokens);
        let hashes = memo.hash_blocks(&KEY, root(salt), tokens, block_tokens);
        assert_eq!(hashes, hash_blocks(&KEY, root(salt), tokens, block_tokens));
        kept(memo)
    }

    fn kept(memo: &ChainMemo) -> usize {
        let count = |shard| {
            let shard = ChainMemo::lock(shard);
            shard.young.stretches.len() + shard.old.stretches.len()
        };
        memo.shards.iter().map(count).sum()
    }

    #[test]
    fn a_stretch_is_kept_when_it_comes_again_and_then_found() {
        let memo = ChainMemo::new(1 << 20);
        let prompt = tokens(1, 3 * 1_024 + 500);
        assert_eq!(after(&memo, b"", &prompt, 16), 0);
        assert_eq!(after(&memo, b"", &prompt, 16), 3, "whole stretches");
        assert_eq!(after(&memo, b"", &prompt, 16), 3);
        for shard in &memo.shards {
            let mut shard = ChainMemo::lock(shard);
            // a stretch that is found is not looked at further, so other hashes come out
            for stretch in shard.young.stretches.values_mut() {
                let stretch = Arc::get_mut(stretch).unwrap();
                stretch.hashes.fill(BlockHash([9; 16]));
            }
        }
        let hashes = memo.hash_blocks(&KEY, root(b""), &prompt, size(16));
        assert_eq!(hashes[..64], [BlockHash([9; 16]); 64]);
        let rest = hash_blocks(&KEY, BlockHash([9; 16]), &prompt[1_024..], size(16));
        assert_eq!(hashes[64..], rest, "the chain goes on from the last hash that was found");
    }

    #[test]
    fn what_differs_in_salt_key_blocks_or_a_token_is_not_found() {
        let memo = ChainMemo::new(1 << 20);
        let mut prompt = tokens(1, 2_048);
        for _ in 0..3 {
            after(&memo, b"a", &prompt, 16);
        }
        assert_eq!(after(&memo, b"b", &prompt, 16), 2);
        assert_eq!(after(&memo, b"a", &prompt, 32), 2);
        let other = HashKey([8; 32]);
        let hashes = memo.hash_blocks(&other, BlockHash::root(&other, b"a"), &prompt, size(16));
        assert_eq!(hashes, hash_blocks(&other, BlockHash::root(&other, b"a"), &prompt, size(16)));
        prompt[1_500] ^= 1;
        assert_eq!(after(&memo, b"a", &prompt, 16), 2);
        assert_eq!(after(&memo, b"a", &prompt, 16), 3, "the first stretch is one that was kept");
    }

    #[test]
    fn another_stretch_of_the_same_name_is_not_taken_for_it_and_replaces_it() {
        let memo = ChainMemo::new(1 << 20);
        let (one, two) = (tokens(1, 1_024), tokens(2, 1_024));
        after(&memo, b"", &one, 16);
        after(&memo, b"", &one, 16);
        let name = |prompt: &[u32]| {
            let mut digests = Vec::new();
            Chain::new(&KEY, root(b""), size(16)).digest(prompt, &mut digests);
            memo.names.hash_one((root(b"").0, digests.as_flattened()))
        };
        let stretch = memo.shards.iter().find_map(|shard| {
            ChainMemo::lock(shard).young.take(name(&one)) // its bytes go, too
        });
        let stretch = Arc::into_inner(stretch.unwrap()).unwrap();
        let place = (name(&two) >> 32) as usize % memo.shards.len();
        ChainMemo::lock(&memo.shards[place]).keep(name(&two), stretch);
        assert_eq!(after(&memo, b"", &two, 16), 1, "it came once");
        assert_eq!(after(&memo, b"", &two, 16), 1, "it came twice");
        let shard = ChainMemo::lock(&memo.shards[place]);
        let kept = &shard.young.stretches[&name(&two)];
        assert_eq!(*kept.hashes, hash_blocks(&KEY, root(b""), &two, size(16)));
        assert_eq!(shard.young.bytes, kept.bytes());
    }

    #[test]
    fn without_room_and_for_blocks_longer_than_a_stretch_nothing_is_kept() {
        for (limit, block_tokens) in [(0, 16), (LARGEST_STRETCH, 16), (1 << 20, 1_025)] {
            let memo = ChainMemo::new(limit);
            for _ in 0..3 {
                assert_eq!(after(&memo, b"", &tokens(1, 5_000), block_tokens), 0);
            }
            assert!(memo.bytes() <= limit, "{limit}");
        }
    }

    #[test]
    fn room_is_bounded_and_for_those_that_are_asked_for() {
        let limit = 64 * LARGEST_STRETCH;
        let memo = ChainMemo::new(limit);
        let often = tokens(0, 1_024);
        let names = 64 * NAMES_A_STRETCH * size_of::<u64>();
        for seed in 1..500 {
            after(&memo, b"", &often, 16);
            let prompt = tokens(seed, 1_024);
            after(&memo, b"", &prompt, 16);
            after(&memo, b"", &prompt, 16);
            assert!(memo.bytes() <= limit + names, "{}", memo.bytes());
        }
        assert!((16..=64).contains(&kept(&memo)), "{}", kept(&memo));
        let held = |seed| {
            let before = kept(&memo);
            after(&memo, b"", &tokens(seed, 1_024), 16);
            before == kept(&memo)
        };
        assert!(held(0));
        let mut counted = 0;
        for shard in &memo.shards {
            let shard = ChainMemo::lock(shard);
            for half in [&shard.young, &shard.old] {
                counted += half.stretches.values().map(|kept| kept.bytes()).sum::<usize>();
            }
        }
        assert_eq!(memo.bytes() - names, counted);
    }

    #[test]
    fn what_came_once_long_ago_is_forgotten() {
        let memo = ChainMemo::new(64 * LARGEST_STRETCH);
        after(&memo, b"", &tokens(0, 1_024), 16);
        for seed in 1..10_000 {
            after(&memo, b"", &tokens(seed, 1_024), 16);
        }
        assert_eq!(after(&memo, b"", &tokens(0, 1_024), 16), 0);
    }

    proptest! {
        #[test]
        fn hashes_are_those_without_a_memo(
            prompts in prop::collection::vec((0u32..3, 0u32..4_000, 0u32..4_000), 1..12),
            block_tokens in prop::sample::select(vec![1usize, 16, 24, 64, 512, 1_024]),
        ) {
            let memo = ChainMemo::new(64 * LARGEST_STRETCH);
            for (seed, same, other) in prompts {
                let prompt = [tokens(seed, same), tokens(same, other)].concat();
                after(&memo, b"", &prompt, block_tokens);
            }
        }
    }
}
