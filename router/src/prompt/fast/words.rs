//! Tokens of words that came lately, one thread's own: most words of a text have come before.

/// A table in which a new word takes the place of another one. Bounded by its size.
#[derive(Debug)]
pub(super) struct Words {
    entries: Box<[Entry]>,
}

/// What is known of a word.
pub(super) enum WordTokens<'a> {
    Known(&'a [u32]),
    /// Nothing yet; its tokens may be kept.
    Place(Place),
    /// Words as long as this are not kept.
    TooLong,
}

/// Where the tokens of a word may be kept.
pub(super) struct Place {
    key: u128,
    at: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    /// Its bytes, and their number in the highest one; 0 is nothing.
    key: u128,
    ids: [u32; MOST_TOKENS],
    len: u32,
}

/// Words with more tokens are not kept.
const MOST_TOKENS: usize = 3;

/// Bytes of a key, but for the one with their number.
const MOST_BYTES: usize = 15;

/// Words of a long text, or of many alike; 256 KiB. A guess.
const ENTRIES: usize = 1 << 13;

impl Default for Words {
    fn default() -> Self {
        Self { entries: vec![Entry::default(); ENTRIES].into() }
    }
}

impl Words {
    /// What is known of `text[start..end]`.
    #[inline]
    pub(super) fn find(&self, text: &[u8], start: usize, end: usize) -> WordTokens<'_> {
        let len = end - start;
        if len > MOST_BYTES {
            return WordTokens::TooLong;
        }
        let bytes = match text[start..].first_chunk() {
            // what follows the word is cut off
            Some(bytes) => u128::from_le_bytes(*bytes) & ((1 << (8 * len)) - 1),
            None => {
                let mut bytes = [0; 16];
                bytes[..len].copy_from_slice(&text[start..end]);
                u128::from_le_bytes(bytes)
            }
        };
        let key = bytes | (len as u128) << (8 * MOST_BYTES);
        let at = place(key);
        let entry = &self.entries[at];
        if entry.key == key {
            WordTokens::Known(&entry.ids[..entry.len as usize])
        } else {
            WordTokens::Place(Place { key, at })
        }
    }

    /// Keeps the tokens of a word that was not known.
    pub(super) fn keep(&mut self, Place { key, at }: Place, tokens: &[u32]) {
        if tokens.len() > MOST_TOKENS {
            return;
        }
        let mut entry = Entry { key, ids: [0; MOST_TOKENS], len: tokens.len() as u32 };
        entry.ids[..tokens.len()].copy_from_slice(tokens);
        self.entries[at] = entry;
    }
}

#[allow(clippy::cast_possible_truncation, reason = "both halves of a key are wanted")]
fn place(key: u128) -> usize {
    let (low, high) = (key as u64, (key >> 64) as u64);
    // two odd numbers without a pattern, and the upper bits of the sum, which know all of the lower ones
    let mixed = low.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ high.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    let mixed = (mixed ^ mixed >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> (64 - ENTRIES.ilog2())) as usize
}
