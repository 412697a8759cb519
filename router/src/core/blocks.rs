//! Chained block hashes: two prompts with the same hash share all blocks up to it.
//!
//! Scheme v2, where `H` is keyed BLAKE3, and a hash is its first 16 bytes:
//! ```text
//! h[-1] = H(key, "headrace root" || salt)                 root
//! d[i]  = H(block key, tokens of block i as u32 LE)       digest;  block key = all 32 bytes of H(key, "headrace tokens")
//! h[i]  = H(key, "headrace chained" || h[i-1] || d[i])    hash of a block
//! ```
//! Only full blocks have a hash. The digests, nearly all of the bytes, do not depend on each other, so SIMD computes many at
//! once; what is sequential is one compression a block.
//!
//! Why equal hashes mean equal tokens: no input of one kind is an input of another (the tokens, which clients choose, have a
//! key of their own; the three labels under `key` differ in their tenth byte). So if no two inputs of `H` collide, equal
//! `h[i]` have equal `d[i]`, thus equal tokens, and equal `h[i-1]`, and so on to the root, thus equal salts. To who does not
//! know the key, `H` is random: among n distinct blocks two hashes or two digests are equal with a probability below
//! n^2 / 2^128, 3e-21 for a billion. Who knows it (router and workers) could search a collision in 2^64 steps.
//! Caches name blocks by all 16 bytes; the index by 8, where a collision (n^2 / 2^65) only misjudges an overlap.

mod keyed;
mod memo;

use std::num::NonZeroUsize;

use crate::core::secret::HashKey;

pub(crate) use keyed::{GROUP, Keyed};
pub use memo::ChainMemo;

/// Name of this hash in `Fingerprints::hash_scheme`.
pub const HASH_SCHEME: &str = "blake3-chain-v2";

/// Hash of a block and of all blocks before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

/// What the index and the events use for a block: the first 8 bytes of its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

impl BlockHash {
    /// Parent of the first block. Requests with other salts share no block.
    #[must_use]
    pub fn root(key: &HashKey, salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        Self::cut(hasher.update(b"headrace root").update(salt).finalize().as_bytes())
    }

    /// The key under which this block is indexed.
    #[must_use]
    pub fn key(self) -> BlockKey {
        BlockKey(u64::from_le_bytes(self.0[..8].try_into().expect("8 of 16 bytes")))
    }

    fn cut(hash: &[u8; 32]) -> Self {
        Self(hash[..16].try_into().expect("16 of 32 bytes"))
    }
}

/// Hashes of the full blocks of `tokens`, which follow the block `parent`.
#[must_use]
pub fn hash_blocks(
    key: &HashKey,
    parent: BlockHash,
    tokens: &[u32],
    block_tokens: NonZeroUsize,
) -> Vec<BlockHash> {
    let mut chain = Chain::new(key, parent, block_tokens);
    let mut hashes = Vec::with_capacity(tokens.len() / block_tokens);
    chain.extend(tokens, &mut hashes);
    hashes
}

/// The same for tokens as `Submit.tokens` has them: u32, little-endian. Bytes after the last full block count for
/// nothing.
#[must_use]
pub fn hash_blocks_le(
    key: &HashKey,
    parent: BlockHash,
    tokens: &[u8],
    block_tokens: NonZeroUsize,
) -> Vec<BlockHash> {
    let mut chain = Chain::new(key, parent, block_tokens);
    let mut hashes = Vec::with_capacity(tokens.len() / chain.block_bytes);
    let mut digests = Vec::with_capacity(GROUP);
    for group in tokens.chunks(chain.block_bytes.saturating_mul(GROUP)) {
        digests.clear();
        chain.digest_le(group, &mut digests);
        chain.link(&digests, &mut hashes);
    }
    hashes
}

/// Tokens as frames have them: u32, little-endian.
#[must_use]
pub fn tokens_le(tokens: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * tokens.len()];
    for (place, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    bytes
}

/// The first 16 bytes of a digest, which are all that a chain takes of it.
type Digest = [u8; 16];

/// A chain that grows by groups of blocks.
struct Chain {
    block_bytes: usize,
    blocks: Keyed,
    links: Keyed,
    last: BlockHash,
    /// Of the group at hand, kept for the next one.
    bytes: Vec<u8>,
}

impl Chain {
    fn new(key: &HashKey, parent: BlockHash, block_tokens: NonZeroUsize) -> Self {
        Self {
            block_bytes: block_tokens.get().saturating_mul(4),
            blocks: Keyed::new(blake3::keyed_hash(&key.0, b"headrace tokens").as_bytes()),
            links: Keyed::new(&key.0),
            last: parent,
            bytes: Vec::new(),
        }
    }

    /// Appends the hashes of the full blocks of `tokens`.
    fn extend(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) {
        let mut digests = Vec::with_capacity(4 * tokens.len() / self.block_bytes);
        self.digest(tokens, &mut digests);
        self.link(&digests, hashes);
    }

    /// Appends the digests of the full blocks of `tokens`.
    fn digest(&mut self, tokens: &[u32], digests: &mut Vec<Digest>) {
        let mut bytes = std::mem::take(&mut self.bytes);
        for group in tokens.chunks(self.block_bytes.saturating_mul(GROUP) / 4) {
            bytes.clear();
            bytes.extend(group.iter().flat_map(|token| token.to_le_bytes()));
            self.digest_le(&bytes, digests);
        }
        self.bytes = bytes;
    }

    /// Appends the digests of the full blocks of `group`, which has at most [`GROUP`].
    fn digest_le(&self, group: &[u8], digests: &mut Vec<Digest>) {
        let mut whole = [[0; 32]; GROUP];
        self.blocks.group(group, self.block_bytes, &mut whole);
        let whole = &whole[..group.len() / self.block_bytes];
        digests.extend(whole.iter().map(|digest| *digest.first_chunk::<16>().expect("of 32")));
    }

    /// Appends the hashes of the blocks that have these digests.
    fn link(&mut self, digests: &[Digest], hashes: &mut Vec<BlockHash>) {
        let mut link = [0; 64]; // label, hash before, digest, zeros
        link[..16].copy_from_slice(b"headrace chained");
        for digest in digests {
            link[16..32].copy_from_slice(&self.last.0);
            link[32..48].copy_from_slice(digest);
            self.last = BlockHash::cut(&self.links.one(&link, 48));
            hashes.push(self.last);
        }
    }
}
