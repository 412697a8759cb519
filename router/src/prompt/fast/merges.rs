//! Words to tokens by byte-pair encoding: of all pairs of neighbours the one of the lowest rank is merged first, of equal
//! ones the leftmost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokenizers::models::bpe::BPE;

use super::super::pieces::byte_alphabet;

/// What a BPE model knows.
#[derive(Debug)]
pub(super) struct Merges {
    letters: Letters,
    pairs: Pairs,
    /// Words that are tokens as they are, whatever the merges say; empty where the merges decide.
    whole: HashMap<Box<[u8]>, u32>,
}

/// The tokens that words are spelled with.
#[derive(Debug)]
enum Letters {
    /// One for each byte. What a vocabulary lacks is left out of the text, as `tokenizers` does it.
    Bytes(Box<[Option<u32>; 256]>),
    /// One for each character, or for each of its bytes where the vocabulary lacks it.
    Chars(Box<CharLetters>),
}

#[derive(Debug)]
struct CharLetters {
    ascii: [Option<u32>; 128],
    others: HashMap<char, u32>,
    bytes: [u32; 256],
}

/// What two tokens become, in a table with open addresses.
#[derive(Debug)]
struct Pairs {
    /// Two tokens; rank and token that they become.
    slots: Vec<(u64, u64)>,
    shift: u32,
}

/// Memory for one word at a time.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    ids: Vec<u32>,
    /// What becomes of a symbol and the next one, [`NONE`] at the last one.
    merged: Vec<u64>,
    long: LongWord,
}

/// Of a word that is too long to be looked through at each merge.
#[derive(Debug, Default)]
struct LongWord {
    /// Neighbours of each symbol, which is gone where `next` is itself.
    links: Vec<(u32, u32)>,
    /// Merges that were possible, by rank and place, with what they make.
    queue: BinaryHeap<Reverse<(u64, u32)>>,
}

/// Tokens by their texts.
type Vocabulary = HashMap<String, u32>;

/// Nothing: no pair has this.
const NONE: u64 = u64::MAX;

/// Words of so many bytes are looked through at each merge, longer ones have a heap. A guess.
pub(super) const SHORT: usize = 48;

/// Symbols for which memory is kept.
const KEPT_SYMBOLS: usize = 16 << 10;

/// Slots that a look-up may go through.
const MOST_PROBES: usize = 64;

impl Merges {
    /// `on_bytes`: it sees bytes, each as a character of its own; else characters.
    ///
    /// # Errors
    /// Why this model is not one of these.
    pub(super) fn new(model: &BPE, on_bytes: bool, json: &str) -> Result<Self, &'static str> {
        let given = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        if given(&model.continuing_subword_prefix) || given(&model.end_of_word_suffix) {
            return Err("its tokens depend on their place in a word");
        }
        if model.dropout.is_some_and(|p| p > 0.0) {
            return Err("dropout makes tokenisation random");
        }
        let vocab = model.get_vocab();
        let letters =
            if on_bytes { Letters::bytes(model, &vocab)? } else { Letters::chars(&vocab)? };
        let unreadable = "its merges cannot be read";
        let file: File<'_> = serde_json::from_str(json).map_err(|_| unreadable)?;
        let mut merges = HashMap::with_capacity(file.model.merges.len());
        let mut token = String::new();
        for (rank, Pair(left, right)) in (0..).zip(&file.model.merges) {
            token.clear();
            token.extend([left.as_ref(), right.as_ref()]);
            let id = |token: &str| vocab.get(token).copied().ok_or(unreadable);
            let (left, right) = (id(left)?, id(right)?);
            if letters.are_bytes_alone(left, right) {
                return Err("it merges bytes of characters that it does not know");
            }
            let pair = u64::from(left) << 32 | u64::from(right);
            // a pair that is there twice has its last rank
            merges.insert(pair, rank << 32 | u64::from(id(&token)?));
        }
        let mut whole = HashMap::new();
        if model.ignore_merges && !on_bytes {
            return Err("it looks for whole texts in its vocabulary");
        }
        if model.ignore_merges {
            let alphabet = byte_alphabet();
            for (token, id) in &vocab {
                let spelled: Option<Box<[u8]>> =
                    token.chars().map(|c| alphabet.get(&c).copied()).collect();
                whole.extend(spelled.map(|bytes| (bytes, *id)));
            }
        }
        Ok(Self { letters, pairs: Pairs::new(&merges)?, whole })
    }

    /// The tokens of a word.
    pub(super) fn encode(&self, word: &[u8], symbols: &mut Symbols, out: &mut Vec<u32>) {
        if !self.whole.is_empty()
            && let Some(id) = self.whole.get(word)
        {
            return out.push(*id);
        }
        symbols.ids.clear();
        self.letters.spell(word, &mut symbols.ids);
        symbols.merged.clear();
        symbols.merged.extend(symbols.ids.windows(2).map(|pair| self.pairs.get(pair[0], pair[1])));
        symbols.merged.push(NONE);
        if symbols.ids.len() <= SHORT {
            self.merge_short(symbols);
            out.extend_from_slice(&symbols.ids);
        } else {
            self.merge_long(symbols, out);
            symbols.shrink();
        }
    }

    fn merge_short(&self, symbols: &mut Symbols) {
        let Symbols { ids, merged, .. } = symbols;
        loop {
            let (mut best, mut at) = (NONE, 0);
            for (i, made) in merged.iter().enumerate() {
                // the leftmost of equal ones
                if *made < best {
                    (best, at) = (*made, i);
                }
            }
            if best == NONE {
                return;
            }
            ids[at] = token(best);
            ids.remove(at + 1);
            merged.remove(at + 1);
            merged[at] = ids.get(at + 1).map_or(NONE, |next| self.pairs.get(ids[at], *next));
            if at > 0 {
                merged[at - 1] = self.pairs.get(ids[at - 1], ids[at]);
            }
        }
    }

    fn merge_long(&self, symbols: &mut Symbols, out: &mut Vec<u32>) {
        let Symbols { ids, merged, long: LongWord { links, queue } } = symbols;
        let end =
            u32::try_from(ids.len()).expect("words are shorter than texts, and those than 4 GiB");
        links.clear();
        links.extend((0..end).map(|i| (i.wrapping_sub(1), i + 1)));
        let waiting = (0..end).zip(&*merged).filter(|(_, made)| **made != NONE);
        let mut heap = std::mem::take(queue).into_vec();
        heap.clear();
        heap.extend(waiting.map(|(i, made)| Reverse((*made, i))));
        *queue = heap.into();
        while let Some(Reverse((made, at))) = queue.pop() {
            let here = at as usize;
            // it was possible once, but one of both has become something else since
            if merged[here] != made {
                continue;
            }
            let (before, gone) = links[here];
            let after = links[gone as usize].1;
            ids[here] = token(made);
            merged[gone as usize] = NONE;
            links[here].1 = after;
            links[gone as usize] = (gone, gone);
            merged[here] = NONE;
            if after < end {
                links[after as usize].0 = at;
                merged[here] = self.pairs.get(ids[here], ids[after as usize]);
            }
            if merged[here] != NONE {
                queue.push(Reverse((merged[here], at)));
            }
            if before < end {
                let made = self.pairs.get(ids[before as usize], ids[here]);
                merged[before as usize] = made;
                if made != NONE {
                    queue.push(Reverse((made, before)));
                }
            }
        }
        let mut at = 0;
        while at < end {
            out.push(ids[at as usize]);
            at = links[at as usize].1;
        }
    }
}

impl Letters {
    fn bytes(model: &BPE, vocab: &Vocabulary) -> Result<Self, &'static str> {
        let mut bytes = [None; 256];
        for (c, byte) in &byte_alphabet() {
            let id = vocab.get(c.encode_utf8(&mut [0; 4]) as &str).copied();
            bytes[usize::from(*byte)] = id;
        }
        if bytes.contains(&None) && (model.unk_token.is_some() || model.byte_fallback) {
            return Err("it has a token for bytes that it does not know");
        }
        Ok(Self::Bytes(Box::new(bytes)))
    }

    fn chars(vocab: &Vocabulary) -> Result<Self, &'static str> {
        let mut letters =
            CharLetters { ascii: [None; 128], others: HashMap::new(), bytes: [0; 256] };
        for (byte, id) in (0..=255_u8).zip(&mut letters.bytes) {
            let known = vocab.get(&format!("<0x{byte:02X}>")).copied();
            *id = known.ok_or("it has no token for some byte")?;
        }
        for (token, id) in vocab {
            let mut chars = token.chars();
            let (Some(c), None) = (chars.next(), chars.next()) else { continue };
            match letters.ascii.get_mut(c as usize) {
                Some(letter) => *letter = Some(*id),
                None => _ = letters.others.insert(c, *id),
            }
        }
        Ok(Self::Chars(Box::new(letters)))
    }

    /// One of both stands for a byte of a character that has no token. Where such tokens could be merged, characters would
    /// not say any more where a text can be cut.
    fn are_bytes_alone(&self, left: u32, right: u32) -> bool {
        match self {
            Self::Bytes(_) => false,
            Self::Chars(letters) => letters.bytes.contains(&left) || letters.bytes.contains(&right),
        }
    }

    fn spell(&self, word: &[u8], ids: &mut Vec<u32>) {
        match self {
            Self::Bytes(bytes) => {
                ids.extend(word.iter().filter_map(|byte| bytes[usize::from(*byte)]));
            }
            Self::Chars(letters) => letters.spell(word, ids),
        }
    }
}

impl CharLetters {
    fn spell(&self, word: &[u8], ids: &mut Vec<u32>) {
        let word = std::str::from_utf8(word).expect("words are cut between characters");
        for c in word.chars() {
            let known = match self.ascii.get(c as usize) {
                Some(letter) => *letter,
                None => self.others.get(&c).copied(),
            };
            match known {
                Some(id) => ids.push(id),
                None => {
                    let mut utf8 = [0; 4];
                    let bytes = c.encode_utf8(&mut utf8).bytes();
                    ids.extend(bytes.map(|byte| self.bytes[usize::from(byte)]));
                }
            }
        }
    }
}

impl Symbols {
    /// Memory of a long word is not kept.
    fn shrink(&mut self) {
        if !self.is_small() {
            *self = Self::default();
        }
    }

    pub(super) fn is_small(&self) -> bool {
        self.ids.capacity() <= KEPT_SYMBOLS
    }
}

/// What a merge makes.
#[allow(clippy::cast_possible_truncation, reason = "the rank is cut off")]
fn token(made: u64) -> u32 {
    made as u32
}

impl Pairs {
    fn new(merges: &HashMap<u64, u64>) -> Result<Self, &'static str> {
        let len = (merges.len() * 2).next_power_of_two().max(2);
        let mut this = Self { slots: vec![(NONE, NONE); len], shift: 64 - len.ilog2() };
        for (pair, made) in merges {
            let mut probes = this.probes(*pair).take(MOST_PROBES);
            let free = probes.find(|at| this.slots[*at].0 == NONE);
            this.slots[free.ok_or("its merges fit no table")?] = (*pair, *made);
        }
        Ok(this)
    }

    /// Rank and token that two tokens become, [`NONE`] if they stay.
    #[inline]
    fn get(&self, left: u32, right: u32) -> u64 {
        let pair = u64::from(left) << 32 | u64::from(right);
        for at in self.probes(pair).take(MOST_PROBES) {
            let (known, made) = self.slots[at];
            if known == pair {
                return made;
            }
            if known == NONE {
                break;
            }
        }
        NONE
    }

    #[inline]
    fn probes(&self, pair: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        // 2^64 by the golden ratio; the upper half first, as the product's upper bits know the lower ones of a number
        let first =
            ((pair ^ pair >> 29).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize;
        (0..).map(move |i| (first + i) & mask)
    }
}

/// What is read of `tokenizer.json`: what `tokenizers` keeps to itself.
#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow)]
    model: Model<'a>,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(borrow)]
    merges: Vec<Pair<'a>>,
}

/// `"a b"`, or `["a", "b"]`.
struct Pair<'a>(std::borrow::Cow<'a, str>, std::borrow::Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Pair<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairVisitor;
        impl<'de> Visitor<'de> for PairVisitor {
            type Value = Pair<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_borrowed_str<E: serde::de::Error>(
                self,
                text: &'de str,
            ) -> Result<Pair<'de>, E> {
                let (left, right) = text.split_once(' ').ok_or_else(|| E::custom("one token"))?;
                Ok(Pair(left.into(), right.into()))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Pair<'de>, E> {
                let (left, right) = text.split_once(' ').ok_or_else(|| E::custom("one token"))?;
                Ok(Pair(left.to_owned().into(), right.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Pair<'de>, A::Error> {
                let mut next = || {
                    let token: Option<String> = seq.next_element()?;
                    token.ok_or_else(|| A::Error::custom("two tokens are a merge"))
                };
                let pair = Pair(next()?.into(), next()?.into());
                if seq.next_element::<String>()?.is_some() {
                    return Err(A::Error::custom("three tokens are no merge"));
                }
                Ok(pair)
            }
        }
        deserializer.deserialize_any(PairVisitor)
    }
}
