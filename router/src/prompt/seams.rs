//! Where a text may be cut between two words without any token coming out differently, so that a long text is tokenised
//! piece by piece.

use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer as _, Tokenizer};

use super::pipeline::{Pipeline, kind, string_pattern};

/// The seams of one tokenizer's texts: between a letter and some character after it that is neither letter nor mark.
///
/// # Why cutting there changes no token
/// A tokenizer finds added tokens, normalises, splits into words and looks each word up. None of these sees across a seam:
/// - **Added tokens.** None of them, normalised or not, has a seam inside (`next` lacks what follows a letter in one of
///   them), none depends on its neighbours (`single_word`), and none that ends in a letter reaches on to the right.
/// - **Normalisers.** Those let in treat characters one by one, or reorder and compose a character with *marks* after it.
///   Where decomposing happens, only ASCII letters count, which stay letters. What a text gets put before it
///   (`Prepend`) is the space that the rest begins with, which is left out in turn ([`Seams::leaves_space_out`]).
/// - **Words.** No alternative of the regular expressions in [`BRANCHES`] lets a letter be followed by anything but
///   letters, marks and apostrophes; one of them matches every letter; nothing looks back, and nothing looks ahead but
///   `(?!\S)` at the end of white space, which a piece that ends in a letter has not got there. So the match that holds the
///   letter ends at the seam, with the rest of the text or without it, and the next one begins there.
/// - **Where all is one word** (SentencePiece's BPE), merging two symbols makes a token of the vocabulary. None of them has
///   that letter before a space inside, so nothing is ever merged across the seam.
#[derive(Debug)]
pub(crate) struct Seams {
    /// ASCII letters after which a seam may be.
    letters: [bool; 128],
    /// Letters beyond ASCII may stand before a seam, too.
    foreign: bool,
    /// ASCII characters before which a seam may be.
    next: [bool; 128],
    /// [`STOPS`] before which a seam may be.
    next_stops: Vec<char>,
    /// The rest is tokenised without the space that it begins with.
    leaves_space_out: bool,
}

/// What may follow a letter at a seam, as far as it is no ASCII character: punctuation of texts without spaces.
const STOPS: [char; 6] = ['\u{3001}', '\u{3002}', '\u{FF01}', '\u{FF0C}', '\u{FF1A}', '\u{FF1F}'];

/// How SentencePiece spells a space.
const SPELLED_SPACE: char = '\u{2581}';

/// Alternatives of regular expressions that split into words, and which letters each matches: 1 those of words with a
/// small letter, 2 those of words with a capital one, 3 all.
const BRANCHES: [(&str, u8); 24] = [
    // GPT-2
    ("'s", 0),
    ("'t", 0),
    ("'re", 0),
    ("'ve", 0),
    ("'m", 0),
    ("'ll", 0),
    ("'d", 0),
    (r" ?\p{L}+", 3),
    (r" ?\p{N}+", 0),
    (r" ?[^\s\p{L}\p{N}]+", 0),
    (r"\s+(?!\S)", 0),
    (r"\s+", 0),
    // cl100k and what follows it: Llama 3, Qwen
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", 0),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+", 3),
    (r"\p{N}{1,3}", 0),
    (r"\p{N}", 0),
    (r" ?[^\s\p{L}\p{N}]+[\r\n]*", 0),
    (r"\s*[\r\n]+", 0),
    // o200k and Mistral's, with and without endings such as 's
    (O200K_SMALL, 1),
    (O200K_CAPITAL, 2),
    (r" ?[^\s\p{L}\p{N}]+[\r\n/]*", 0),
    // DeepSeek-V3
    (DEEPSEEK_ASCII, 0),
    (r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", 3),
    (r" ?[\p{P}\p{S}]+[\r\n]*", 0),
];

const O200K_SMALL: &str =
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
const O200K_CAPITAL: &str =
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*";
/// What may follow o200k's words.
const O200K_ENDING: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
const DEEPSEEK_ASCII: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##;
/// Ideographs and kana.
const DEEPSEEK_IDEOGRAPHS: &str = "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";

/// Scripts whose letters stay what they are under NFC, and have long been letters to everybody.
fn is_foreign_letter(c: char) -> bool {
    matches!(c,
        '\u{C0}'..='\u{D6}' | '\u{D8}'..='\u{F6}' | '\u{F8}'..='\u{17F}' // Latin
        | '\u{3B1}'..='\u{3C9}' // Greek
        | '\u{410}'..='\u{44F}' // Cyrillic
        | '\u{5D0}'..='\u{5EA}' // Hebrew
        | '\u{621}'..='\u{64A}' // Arabic
        | '\u{E01}'..='\u{E2E}' // Thai
        | '\u{3041}'..='\u{3094}' | '\u{30A1}'..='\u{30FA}' // kana
        | '\u{4E00}'..='\u{9FA5}' // ideographs
        | '\u{AC00}'..='\u{D7A3}' // Hangul
    )
}

impl Seams {
    /// # Errors
    /// Why texts of this tokenizer cannot be cut.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        let pipeline = Pipeline::new(tokenizer);
        let (ModelWrapper::BPE(_) | ModelWrapper::WordPiece(_)) = tokenizer.get_model() else {
            return Err("its model weighs whole texts");
        };
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|p| p > 0.0)
        {
            return Err("dropout makes tokenisation random");
        }
        let mut seams = Self {
            letters: std::array::from_fn(|i| (i as u8).is_ascii_alphabetic()),
            foreign: true,
            next: [false; 128],
            next_stops: Vec::new(),
            leaves_space_out: false,
        };
        let (spaces_spelled, prepends) = seams.normalizers(&pipeline)?;
        let words = Words::of(&pipeline.pre_tokenizers, spaces_spelled)?;
        if words.letters == 3 && !spaces_spelled && !prepends {
            seams.next = std::array::from_fn(|i| {
                let byte = i as u8;
                let break_or_digit = matches!(byte, b' ' | b'\n' | b'\r' | b'0'..=b'9');
                break_or_digit || (byte.is_ascii_punctuation() && byte != b'\'')
            });
            seams.next_stops = STOPS.to_vec();
            if words.only_spaces {
                seams.only_before_spaces();
            }
        } else if words.letters == 0 && (spaces_spelled || words.spells_spaces) {
            let ModelWrapper::BPE(model) = tokenizer.get_model() else {
                return Err("its model weighs whole texts");
            };
            seams.only_before_spaces();
            seams.foreign = false;
            seams.leaves_space_out = prepends;
            seams.drop_merged_letters(model);
        } else {
            return Err("nothing is known of how it splits words");
        }
        seams.drop_inside_added(tokenizer)?;
        if !seams.letters.contains(&true) || !seams.next[usize::from(b' ')] {
            return Err("tokens go on across words");
        }
        Ok(seams)
    }

    /// Where the longest piece of `text[from..to]` ends that is no longer than `piece`; where there is none, the shortest
    /// one, if that is no longer than `most`. The rest begins at the second number.
    pub(crate) fn end(
        &self,
        text: &str,
        (from, to): (usize, usize),
        piece: usize,
        most: usize,
    ) -> Option<(usize, usize)> {
        if to - from <= piece {
            return Some((to, to));
        }
        let seam = (from + 1..=from + piece).rev().find(|at| self.is_seam(text, *at));
        let seam = seam.or_else(|| {
            let far = to.min(from.saturating_add(most).saturating_add(1));
            (from + piece + 1..far).find(|at| self.is_seam(text, *at))
        });
        match seam {
            Some(at) => Some((at, at + usize::from(self.leaves_space_out))),
            None => (to - from <= most).then_some((to, to)),
        }
    }

    /// The first place from `from` on, and before `to`, at which `text` may be cut, and where the rest begins.
    pub(crate) fn first(&self, text: &str, from: usize, to: usize) -> Option<(usize, usize)> {
        let at = (from.max(1)..to).find(|at| self.is_seam(text, *at))?;
        Some((at, at + usize::from(self.leaves_space_out)))
    }

    /// All places at which `text` may be cut, and where the rest begins.
    pub(crate) fn all<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
        (1..text.len())
            .filter(|at| self.is_seam(text, *at))
            .map(|at| (at, at + usize::from(self.leaves_space_out)))
    }

    fn is_seam(&self, text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        let (before, after) = (bytes[at - 1], bytes[at]);
        let follows = match after {
            0..=127 => self.next[usize::from(after)],
            0xE3 | 0xEF => self.next_stops.iter().any(|stop| text[at..].starts_with(*stop)),
            _ => false,
        };
        if !follows {
            return false;
        }
        // the space that is left out must not be all that stands between a letter and something special
        if self.leaves_space_out && !bytes.get(at + 1).is_some_and(u8::is_ascii_alphanumeric) {
            return false;
        }
        match before {
            0..=127 => self.letters[usize::from(before)],
            _ => self.foreign && text[..at].chars().next_back().is_some_and(is_foreign_letter),
        }
    }

    fn only_before_spaces(&mut self) {
        self.next = std::array::from_fn(|i| i == usize::from(b' '));
        self.next_stops.clear();
    }

    /// Whether spaces are spelled as [`SPELLED_SPACE`], and whether each text gets one put before it.
    fn normalizers(&mut self, pipeline: &Pipeline) -> Result<(bool, bool), &'static str> {
        let (mut spelled, mut prepends) = (false, false);
        for step in &pipeline.normalizers {
            match kind(step) {
                "NFC" => {}
                "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "BertNormalizer" => {
                    self.foreign = false;
                }
                "Replace" if is_space(string_pattern(step)) && spells(&step["content"]) => {
                    spelled = true;
                }
                "Prepend" if spells(&step["prepend"]) => prepends = true,
                _ => return Err("nothing is known of how it normalises"),
            }
        }
        if prepends && !spelled {
            return Err("nothing is known of how it normalises");
        }
        Ok((spelled, prepends))
    }

    /// Where all of a text is one word, a letter that some token has before a space is not one to cut after.
    fn drop_merged_letters(&mut self, model: &BPE) {
        let vocab = model.get_vocab();
        for letter in (0..128_u8).filter(u8::is_ascii_alphabetic) {
            let known = vocab.contains_key(char::from(letter).encode_utf8(&mut [0; 4]));
            self.letters[usize::from(letter)] &= known;
        }
        if !vocab.contains_key(SPELLED_SPACE.encode_utf8(&mut [0; 4])) {
            self.letters = [false; 128];
        }
        let affix = |affix: &Option<String>| affix.as_ref().is_some_and(|a| !a.is_empty());
        if affix(&model.continuing_subword_prefix) || affix(&model.end_of_word_suffix) {
            self.letters = [false; 128];
        }
        for token in vocab.keys() {
            for (before, after) in token.chars().zip(token.chars().skip(1)) {
                if after == SPELLED_SPACE && before.is_ascii() {
                    self.letters[before as usize] = false;
                }
            }
        }
    }

    /// No added token may have a seam inside, or notice one at its ends.
    fn drop_inside_added(&mut self, tokenizer: &Tokenizer) -> Result<(), &'static str> {
        let is_letter = |c: char| c.is_alphabetic();
        for token in tokenizer.get_added_tokens_decoder().values() {
            if token.single_word {
                return Err("an added token depends on its neighbours");
            }
            if token.rstrip && token.content.ends_with(is_letter) {
                return Err("an added token that ends in a letter swallows what follows");
            }
            let first_is_plain = |c: char| c == ' ' || c == SPELLED_SPACE || c.is_alphanumeric();
            if self.leaves_space_out && token.content.starts_with(first_is_plain) {
                return Err("an added token begins with a space or a letter");
            }
            let mut normalized = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut normalized).map_err(|_| "its normaliser fails")?;
            }
            for content in [token.content.as_str(), normalized.get()] {
                for (before, after) in content.chars().zip(content.chars().skip(1)) {
                    let after = if after == SPELLED_SPACE { ' ' } else { after };
                    if !is_letter(before) {
                        continue;
                    }
                    if after.is_ascii() {
                        self.next[after as usize] = false;
                    }
                    self.next_stops.retain(|stop| *stop != after);
                }
            }
        }
        Ok(())
    }
}

/// How a tokenizer splits into words.
struct Words {
    /// Which letters some step matches, as in [`BRANCHES`].
    letters: u8,
    /// A piece that does not begin with a space would get one.
    only_spaces: bool,
    /// Spaces become [`SPELLED_SPACE`] here.
    spells_spaces: bool,
}

impl Words {
    fn of(steps: &[Value], spaces_spelled: bool) -> Result<Self, &'static str> {
        let mut words = Self { letters: 0, only_spaces: false, spells_spaces: false };
        for step in steps {
            match kind(step) {
                "ByteLevel" => {
                    words.only_spaces |= step["add_prefix_space"] != false;
                    if step["use_regex"] != false {
                        words.letters |= 3; // GPT-2's
                    }
                }
                "Digits" => {}
                // as Gemma has it, whose normaliser leaves no space to split at
                "Split" if spaces_spelled && is_space(string_pattern(step)) => {}
                "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                    let pattern = step["pattern"]["Regex"].as_str();
                    words.letters |= pattern
                        .and_then(letters)
                        .ok_or("its words are not known to end at seams")?;
                }
                // white space is dropped, wherever it is
                "BertPreTokenizer" => {
                    words.letters |= 3;
                    words.only_spaces = true;
                }
                "Metaspace" if spells(&step["replacement"]) => words.spells_spaces = true,
                _ => return Err("nothing is known of how it splits words"),
            }
        }
        if words.spells_spaces && words.letters != 0 {
            return Err("nothing is known of how it splits words");
        }
        Ok(words)
    }
}

/// Which letters a regular expression matches, as in [`BRANCHES`]; `None` unless all its alternatives are known.
fn letters(pattern: &str) -> Option<u8> {
    if pattern == DEEPSEEK_IDEOGRAPHS {
        return Some(0);
    }
    branches(pattern).into_iter().try_fold(0, |letters, branch| {
        let bare = branch.strip_suffix(O200K_ENDING).unwrap_or(branch);
        let is_word = [O200K_SMALL, O200K_CAPITAL].contains(&bare);
        let branch = if is_word { bare } else { branch };
        let (_, own) = BRANCHES.iter().find(|(known, _)| *known == branch)?;
        Some(letters | own)
    })
}

/// The alternatives of a regular expression.
fn branches(pattern: &str) -> Vec<&str> {
    let (mut branches, mut start) = (Vec::new(), 0);
    let (mut groups, mut in_class, mut escaped) = (0_usize, false, false);
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            '[' => in_class = true,
            _ if in_class => {}
            '(' => groups += 1,
            ')' => groups = groups.saturating_sub(1),
            '|' if groups == 0 => {
                branches.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    branches.push(&pattern[start..]);
    branches
}

fn is_space(pattern: Option<&str>) -> bool {
    pattern == Some(" ")
}

fn spells(value: &Value) -> bool {
    value.as_str() == Some("\u{2581}")
}

#[cfg(test)]
mod tests;
