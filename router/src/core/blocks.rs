//! Chained block hashes: two prompts with the same hash share all blocks up to it.
//!
//! `h[-1] = BLAKE3 keyed(key, "headrace root" || salt)`, `h[i] = BLAKE3 keyed(key, h[i-1] || tokens of block i as u32 LE)`,
//! the first 16 bytes of each. Only full blocks have a hash.

use std::num::NonZeroUsize;

use crate::core::secret::HashKey;

/// Name of this hash in `Fingerprints::hash_scheme`.
pub const HASH_SCHEME: &str = "blake3-chain-v1";

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
        Self::cut(&hasher.update(b"headrace root").update(salt).finalize())
    }

    /// The key under which this block is indexed.
    #[must_use]
    pub fn key(self) -> BlockKey {
        BlockKey(u64::from_le_bytes(self.0[..8].try_into().expect("8 of 16 bytes")))
    }

    fn cut(hash: &blake3::Hash) -> Self {
        Self(hash.as_bytes()[..16].try_into().expect("16 of 32 bytes"))
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
    chain(key, parent, tokens.chunks_exact(block_tokens.get()), |block, input| {
        input.extend(block.iter().flat_map(|token| token.to_le_bytes()));
    })
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
    let block_bytes = block_tokens.get().saturating_mul(4);
    chain(key, parent, tokens.chunks_exact(block_bytes), |block, input| {
        input.extend_from_slice(block);
    })
}

fn chain<B>(
    key: &HashKey,
    parent: BlockHash,
    blocks: impl ExactSizeIterator<Item = B>,
    append: impl Fn(B, &mut Vec<u8>),
) -> Vec<BlockHash> {
    let mut hashes = Vec::with_capacity(blocks.len());
    let mut input = Vec::new();
    let mut last = parent;
    for block in blocks {
        input.clear();
        input.extend_from_slice(&last.0);
        append(block, &mut input);
        last = BlockHash::cut(&blake3::keyed_hash(&key.0, &input));
        hashes.push(last);
    }
    hashes
}
