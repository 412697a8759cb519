//! Keyed BLAKE3 hashes of many short inputs at once: exactly what `blake3::keyed_hash` gives, several times faster.
//!
//! `keyed_hash` uses SIMD within one input, over its chunks of 1,024 bytes, so a block of tokens gains nothing. The
//! functions in `blake3::platform` under it hash up to 16 inputs side by side. They are public, yet undocumented and without
//! a promise: only this file calls them, the workspace keeps `blake3` to one minor version, and the tests compare every
//! block size with the documented functions.

use blake3::platform::{Platform, le_bytes_from_words_32, words_from_le_bytes_32};
use blake3::{BLOCK_LEN, IncrementCounter};

/// Blocks hashed at once: the widest SIMD (AVX-512) has 16 lanes of a word, and wider groups would gain nothing.
pub(crate) const GROUP: usize = 16;

// Domain flags of BLAKE3, from table 3 of its specification. An input of one chunk begins, ends and is the root.
const CHUNK_START: u8 = 1 << 0;
const CHUNK_END: u8 = 1 << 1;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// BLAKE3 under one key.
#[derive(Debug)]
pub(crate) struct Keyed {
    key: [u8; 32],
    words: [u32; 8],
    platform: Platform,
}

impl Keyed {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self { key: *key, words: words_from_le_bytes_32(key), platform: Platform::detect() }
    }

    /// Hash of the first `len` bytes of `input`; the rest must be zero.
    pub(super) fn one(&self, input: &[u8; BLOCK_LEN], len: u8) -> [u8; 32] {
        let mut state = self.words;
        let flags = KEYED_HASH | CHUNK_START | CHUNK_END | ROOT;
        self.platform.compress_in_place(&mut state, input, len, 0, flags);
        le_bytes_from_words_32(&state)
    }

    /// Hashes of the full blocks of `block_bytes` in `group`, at most [`GROUP`], at the start of `out`.
    pub(crate) fn group(&self, group: &[u8], block_bytes: usize, out: &mut [[u8; 32]; GROUP]) {
        match block_bytes {
            64 => self.lanes::<64>(group, out),
            128 => self.lanes::<128>(group, out),
            192 => self.lanes::<192>(group, out),
            256 => self.lanes::<256>(group, out),
            320 => self.lanes::<320>(group, out),
            384 => self.lanes::<384>(group, out),
            448 => self.lanes::<448>(group, out),
            512 => self.lanes::<512>(group, out),
            576 => self.lanes::<576>(group, out),
            640 => self.lanes::<640>(group, out),
            704 => self.lanes::<704>(group, out),
            768 => self.lanes::<768>(group, out),
            832 => self.lanes::<832>(group, out),
            896 => self.lanes::<896>(group, out),
            960 => self.lanes::<960>(group, out),
            1024 => self.lanes::<1024>(group, out),
            _ => {
                for (block, hash) in group.chunks_exact(block_bytes).zip(out) {
                    *hash = *blake3::keyed_hash(&self.key, block).as_bytes();
                }
            }
        }
    }

    /// One block in each SIMD lane. `N` is a multiple of 64, at most one chunk.
    fn lanes<const N: usize>(&self, group: &[u8], out: &mut [[u8; 32]; GROUP]) {
        let (blocks, _) = group.as_chunks::<N>();
        let mut inputs = [&[0; N]; GROUP];
        for (input, block) in inputs.iter_mut().zip(blocks) {
            *input = block;
        }
        self.platform.hash_many(
            &inputs[..blocks.len()],
            &self.words,
            0,
            IncrementCounter::No,
            KEYED_HASH,
            CHUNK_START,
            CHUNK_END | ROOT,
            out.as_flattened_mut(),
        );
    }
}
