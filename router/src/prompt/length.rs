//! How few tokens a text can have, from its length alone: what cannot fit is refused before it is tokenised.

use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{ModelWrapper, Tokenizer};

use super::pieces::byte_alphabet;
use super::pipeline::{Pipeline, kind, string_pattern};

/// Least numbers of tokens for the texts of one tokenizer.
///
/// # Why no text has fewer
/// Bytes are counted by class. Where normaliser and pre-tokeniser leave every byte of a class in the text, and the model
/// has a token for each of them alone, every one is part of some token. So there are at least as many tokens as there are
/// bytes of the class, divided by the most of them in any one token of the vocabulary. The greatest of these bounds
/// counts: a token of 128 spaces makes room for many spaces, and for no letters.
///
/// Composing normalisers merge a character with marks that follow it. So they take at most one ASCII character away for
/// each other character, and under NFC nothing shrinks to less than a quarter (see the test).
///
/// What a tokenizer may drop or fuse without end has no such bound. There, and where the vocabulary lacks some bytes, a
/// text is held to have a token for every [`MOST_TOKEN_BYTES`] bytes by our own rule.
#[derive(Debug)]
pub(crate) struct LeastTokens {
    /// Most bytes of each class in one token; `None` where a token may stand for any number of them.
    most: [Option<usize>; CLASSES],
    /// Most bytes of all classes together that one token can stand for.
    most_of_all: Option<usize>,
    /// A normaliser may merge characters.
    composes: bool,
    /// Most bytes of text for which a token can stand.
    token_bytes: usize,
}

/// Where the tokenizer sets no bound, a text needs a token for so many bytes. More than twice what tokens of run-of-the-mill
/// vocabularies come to (81 bytes in the default model's, 128 spaces in that of Llama 3).
const MOST_TOKEN_BYTES: usize = 256;

/// NFC makes nothing shorter than a quarter of it.
const NFC_SHRINKS: usize = 4;

const CLASSES: usize = 5;
const DIGIT: usize = 0;
const LETTER: usize = 1;
const SPACE: usize = 2;
const PUNCT: usize = 3;
/// All bytes of a character that is not ASCII, but its first.
const REST: usize = 4;

/// Class of a byte. Control characters and the first bytes of characters are in none: vocabularies lack some of them.
const fn class(byte: u8) -> Option<usize> {
    match byte {
        b'0'..=b'9' => Some(DIGIT),
        b'a'..=b'z' | b'A'..=b'Z' => Some(LETTER),
        b' ' | b'\t' | b'\n' | b'\r' => Some(SPACE),
        b'!'..=b'~' => Some(PUNCT),
        0x80..=0xBF => Some(REST),
        0..=0x1F | 0x7F | 0xC0..=0xFF => None,
    }
}

/// What a tokenizer leaves in a text, class by class.
struct Kept {
    classes: [bool; CLASSES],
    composes: bool,
    /// Only normalisers that are known to shrink no text to less than a quarter.
    shrinks_little: bool,
}

impl LeastTokens {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        let pipeline = Pipeline::new(tokenizer);
        let on_bytes = pipeline.works_on_bytes();
        let mut kept = Kept::by(&pipeline);
        kept.drop_unknown(tokenizer.get_model(), on_bytes);
        let added = tokenizer.get_added_tokens_decoder();
        if added.values().any(|token| token.lstrip || token.rstrip) {
            kept.lose(&[SPACE, REST]); // they swallow white space without end
        }

        let alphabet = byte_alphabet();
        let (mut most, mut most_of_all, mut longest) = ([0; CLASSES], 0, 0);
        for token in tokenizer.get_vocab(true).keys() {
            let bytes: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
            // added tokens are spelled as they are, so a token of a model on bytes may be either
            let spellings = [Some(token.as_bytes().to_vec()), bytes.filter(|_| on_bytes)];
            for bytes in spellings.into_iter().flatten() {
                let mut counts = [0; CLASSES];
                bytes.iter().filter_map(|byte| class(*byte)).for_each(|class| counts[class] += 1);
                counts[SPACE] += token.matches(SPELLED_SPACE).count();
                for (most, count) in most.iter_mut().zip(counts) {
                    *most = count.max(*most);
                }
                most_of_all = most_of_all.max(counts.iter().sum());
                longest = longest.max(bytes.len());
            }
        }
        let shrinks = if kept.composes { NFC_SHRINKS } else { 1 };
        let all_kept = kept.shrinks_little && kept.classes == [true; CLASSES];
        let every_byte = all_kept && (on_bytes && has_every_byte(tokenizer));
        let floor = if every_byte { 1 } else { MOST_TOKEN_BYTES };
        Self {
            most: std::array::from_fn(|i| kept.classes[i].then_some(most[i].max(1))),
            most_of_all: all_kept.then_some(most_of_all.max(1) * shrinks),
            composes: kept.composes,
            token_bytes: (longest * shrinks).max(floor),
        }
    }

    /// No tokenisation of `text` has fewer tokens.
    pub(crate) fn of(&self, text: &str) -> usize {
        let (counts, merging) = count(text.as_bytes());
        let merging = if self.composes { merging } else { 0 };
        let mut least = text.len().div_ceil(self.token_bytes);
        for (class, most) in self.most.into_iter().enumerate() {
            let Some(most) = most else { continue };
            let sure = match class {
                REST if self.composes => 0, // counted with all the others only
                _ => counts[class].saturating_sub(merging),
            };
            least = least.max(sure.div_ceil(most));
        }
        if let Some(most) = self.most_of_all {
            least = least.max(counts.iter().sum::<usize>().div_ceil(most));
        }
        least
    }

    /// The least number of tokens of `text`, or of a first part of it that has too many already, if that is more than `room`.
    /// So a look at a text of many MiB ends where it is clear that it cannot fit.
    pub(crate) fn beyond(&self, text: &str, room: usize) -> Option<usize> {
        let mut end = FIRST_LOOK;
        while end < text.len() {
            let part = &text[..(0..=end).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)];
            // what follows may merge with its last character, and with no other
            let least = self.of(part).saturating_sub(char::MAX.len_utf8());
            if least > room {
                return Some(least);
            }
            end = end.saturating_mul(4);
        }
        Some(self.of(text)).filter(|least| *least > room)
    }

    /// Most bytes of text for which one token can stand, or is held to stand.
    pub(crate) fn token_bytes(&self) -> usize {
        self.token_bytes
    }
}

/// Bytes of a text that are looked at first.
const FIRST_LOOK: usize = 256 << 10;

/// How SentencePiece spells a space.
const SPELLED_SPACE: &str = "\u{2581}";

impl Kept {
    fn by(pipeline: &Pipeline) -> Self {
        let mut kept = Self { classes: [true; CLASSES], composes: false, shrinks_little: true };
        pipeline.normalizers.iter().for_each(|step| kept.normalize(step));
        pipeline.pre_tokenizers.iter().for_each(|step| kept.split(step));
        kept
    }

    fn lose(&mut self, classes: &[usize]) {
        classes.iter().for_each(|class| self.classes[*class] = false);
    }

    fn lose_all(&mut self) {
        self.classes = [false; CLASSES];
    }

    fn normalize(&mut self, step: &Value) {
        match kind(step) {
            "NFC" => self.composes = true,
            "NFD" | "NFKC" | "NFKD" => {
                self.composes = true;
                self.shrinks_little = false;
                self.lose(&[REST]);
            }
            "Lowercase" => self.lose(&[REST]),
            "StripAccents" | "Strip" => self.lose(&[SPACE, REST]),
            "BertNormalizer" => {
                self.composes = true;
                self.lose(&[SPACE, REST]);
            }
            "Prepend" => {}
            "Replace" => match string_pattern(step) {
                Some(" ") if step["content"] == SPELLED_SPACE => {}
                Some(pattern) => {
                    let classes: Vec<usize> = pattern.bytes().filter_map(class).collect();
                    self.lose(&classes);
                }
                None => self.lose_all(),
            },
            _ => self.lose_all(),
        }
    }

    fn split(&mut self, step: &Value) {
        match kind(step) {
            "ByteLevel" | "Digits" | "Metaspace" | "UnicodeScripts" => {}
            "Split" | "Punctuation" if step["behavior"] != "Removed" => {}
            "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer" => self.lose(&[SPACE, REST]),
            _ => self.lose_all(),
        }
    }

    /// A model that does not know a character leaves it out, or has one token for any number of such.
    fn drop_unknown(&mut self, model: &ModelWrapper, on_bytes: bool) {
        let knows = |token: &str| match model {
            ModelWrapper::BPE(model) => tokenizers::Model::token_to_id(model, token).is_some(),
            ModelWrapper::Unigram(model) => tokenizers::Model::token_to_id(model, token).is_some(),
            // a word that they do not know is one token, however long it is
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
        };
        let falls_back = match model {
            ModelWrapper::BPE(model) => model.byte_fallback,
            ModelWrapper::Unigram(model) => model.byte_fallback(),
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
        };
        let falls_back = falls_back && (0..=255_u8).all(|byte| knows(&format!("<0x{byte:02X}>")));
        if matches!(model, ModelWrapper::BPE(model) if spells_by_place(model)) {
            return self.lose_all();
        }
        let alphabet = byte_alphabet();
        let spelled = |byte: u8| {
            let c = alphabet.iter().find(|(_, other)| **other == byte).map(|(c, _)| *c);
            if on_bytes { c } else { byte.is_ascii().then_some(char::from(byte)) }
        };
        for byte in 0..=255_u8 {
            let Some(class) = class(byte) else { continue };
            let known = spelled(byte).is_some_and(|c| knows(c.encode_utf8(&mut [0; 4])));
            let known = known || (byte == b' ' && knows(SPELLED_SPACE));
            if !known && !falls_back {
                self.classes[class] = false;
            }
        }
    }
}

/// A character's token depends on where in its word it stands.
fn spells_by_place(model: &BPE) -> bool {
    let some = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
    some(&model.continuing_subword_prefix) || some(&model.end_of_word_suffix)
}

/// Every byte that UTF-8 can have is a token.
fn has_every_byte(tokenizer: &Tokenizer) -> bool {
    byte_alphabet().into_iter().all(|(c, byte)| {
        matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF)
            || tokenizer.token_to_id(c.encode_utf8(&mut [0; 4])).is_some()
    })
}

/// [`class`], and two more: first bytes of characters beyond ASCII, and all others.
const TABLE: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        #[allow(clippy::cast_possible_truncation, reason = "both are small")]
        let class = match class(byte as u8) {
            Some(class) => class as u8,
            None if byte >= 0xC0 => FIRST as u8,
            None => OTHER as u8,
        };
        table[byte] = class;
        byte += 1;
    }
    table
};
const FIRST: usize = CLASSES;
const OTHER: usize = CLASSES + 1;

/// Bytes of each class, and characters that are not ASCII.
fn count(bytes: &[u8]) -> ([usize; CLASSES], usize) {
    // four sums side by side, as one would wait for its own last step at each byte
    let mut sums = [[0_usize; CLASSES + 2]; 4];
    let groups = bytes.chunks_exact(4);
    for byte in groups.remainder() {
        sums[0][usize::from(TABLE[usize::from(*byte)])] += 1;
    }
    for group in groups {
        for (sum, byte) in sums.iter_mut().zip(group) {
            sum[usize::from(TABLE[usize::from(*byte)])] += 1;
        }
    }
    let of = |class: usize| sums.iter().map(|sum| sum[class]).sum();
    (std::array::from_fn(of), of(FIRST))
}

#[cfg(test)]
mod tests;
