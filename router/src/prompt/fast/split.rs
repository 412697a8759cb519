//! Texts to words as the pre-tokenizers of known models cut them: each regular expression written out by hand.
//!
//! A test compares every one with the expression itself.

use serde_json::Value;

use super::super::pipeline::{Pipeline, kind};
use super::classes::{
    CAPITAL, Classes, DIGIT, IDEOGRAPH, LETTER, MARK, NEWLINE, NUMBER, OTHER, SMALL, SPACE, SYMBOL,
};

/// How a tokenizer cuts texts into words.
#[derive(Debug)]
pub(super) struct Splitter {
    classes: &'static Classes,
    rule: Rule,
}

/// The families, by the model that made each known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Gpt2 {
        /// Every digit stands alone, as the default model has it.
        lone_digits: bool,
    },
    /// Llama 3 and Qwen, too.
    Cl100k {
        /// Numbers are cut after so many digits.
        digits: u8,
    },
    /// Mistral's newer ones, too.
    O200k {
        digits: u8,
        /// Words end with what was elided after them, such as `'s`.
        endings: bool,
    },
    DeepSeekV3,
}

/// The expressions known, as they stand in `tokenizer.json`.
const RULES: [(&str, Rule); 6] = [
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        Rule::Gpt2 { lone_digits: false },
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Cl100k { digits: 3 },
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Cl100k { digits: 1 },
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::O200k { digits: 3, endings: true },
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::O200k { digits: 1, endings: false },
    ),
    (
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        Rule::DeepSeekV3,
    ),
];
/// What DeepSeek-V3 sets apart before.
const DEEPSEEK_FIRST: [&str; 2] =
    [r"\p{N}{1,3}", "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+"];

impl Splitter {
    /// # Errors
    /// Why texts of this tokenizer cannot be cut by hand.
    pub(super) fn new(pipeline: &Pipeline) -> Result<Self, &'static str> {
        let unknown = "its way to cut words is not written out";
        let [first @ .., bytes] = &pipeline.pre_tokenizers[..] else { return Err(unknown) };
        if kind(bytes) != "ByteLevel" {
            return Err("its model does not work on bytes");
        }
        if bytes["add_prefix_space"] != false {
            return Err("it puts a space before texts");
        }
        let gpt2 = bytes["use_regex"] != false;
        let rule = match first {
            [] if gpt2 => Rule::Gpt2 { lone_digits: false },
            [digits] if gpt2 && kind(digits) == "Digits" && digits["individual_digits"] == true => {
                Rule::Gpt2 { lone_digits: true }
            }
            [split] if !gpt2 => {
                rule_of(split).filter(|rule| *rule != Rule::DeepSeekV3).ok_or(unknown)?
            }
            [numbers, ideographs, split] if !gpt2 => {
                let first = [expression(numbers), expression(ideographs)];
                let known = first == DEEPSEEK_FIRST.map(Some);
                rule_of(split).filter(|rule| known && *rule == Rule::DeepSeekV3).ok_or(unknown)?
            }
            _ => return Err(unknown),
        };
        Ok(Self { classes: Classes::get()?, rule })
    }

    /// Gives each word of `text` to `word`, as the range of its bytes.
    pub(super) fn words(&self, text: &str, mut word: impl FnMut(usize, usize)) {
        let text = Scan { bytes: text.as_bytes(), classes: self.classes };
        let (mut at, end) = (0, text.bytes.len());
        while at < end {
            let (chunk, alone) = self.chunk(text, at);
            if alone {
                word(at, chunk);
                at = chunk;
                continue;
            }
            let text = Scan { bytes: &text.bytes[..chunk], ..text };
            // what an expression does not match stays together
            let mut left_over = at;
            while at < chunk {
                let next = match self.rule {
                    Rule::Gpt2 { .. } => text.gpt2(at),
                    Rule::Cl100k { digits } => text.cl100k(at, digits),
                    Rule::O200k { digits, endings } => text.o200k(at, digits, endings),
                    Rule::DeepSeekV3 => match text.deepseek(at) {
                        Some(next) => next,
                        None => {
                            at += text.at(at).1;
                            continue;
                        }
                    },
                };
                if left_over < at {
                    word(left_over, at);
                }
                word(at, next);
                (at, left_over) = (next, next);
            }
            if left_over < at {
                word(left_over, at);
            }
        }
    }

    /// Where the part ends that is cut as if there were no other, and whether it is a word as it is.
    fn chunk(&self, text: Scan<'_>, at: usize) -> (usize, bool) {
        match self.rule {
            Rule::Gpt2 { lone_digits: true } => match text.at(at) {
                (class, len) if class & DIGIT != 0 => (at + len, true),
                (_, len) => (text.until(at + len, DIGIT), false),
            },
            Rule::DeepSeekV3 => match text.at(at) {
                (class, _) if class & NUMBER != 0 => (text.numbers(at, 3), true),
                (class, len) if class & IDEOGRAPH != 0 => (text.run(at + len, IDEOGRAPH), false),
                (_, len) => (text.until(at + len, NUMBER | IDEOGRAPH), false),
            },
            Rule::Gpt2 { .. } | Rule::Cl100k { .. } | Rule::O200k { .. } => {
                (text.bytes.len(), false)
            }
        }
    }
}

fn expression(step: &Value) -> Option<&str> {
    let isolated =
        kind(step) == "Split" && step["behavior"] == "Isolated" && step["invert"] == false;
    step["pattern"]["Regex"].as_str().filter(|_| isolated)
}

fn rule_of(step: &Value) -> Option<Rule> {
    let wanted = expression(step)?;
    RULES.into_iter().find(|(known, _)| *known == wanted).map(|(_, rule)| rule)
}

/// A text that is looked at character by character.
#[derive(Clone, Copy)]
struct Scan<'a> {
    /// Of whole characters.
    bytes: &'a [u8],
    classes: &'static Classes,
}

impl Scan<'_> {
    /// Classes and length of the character there; none at the end.
    #[inline]
    fn at(self, at: usize) -> (u16, usize) {
        match self.bytes.get(at) {
            Some(byte) if *byte < 128 => (self.classes.ascii[usize::from(*byte)], 1),
            Some(_) => self.wide(at),
            None => (0, 0),
        }
    }

    #[inline(never)]
    fn wide(self, at: usize) -> (u16, usize) {
        let low = |i: usize| u32::from(self.bytes[at + i] & 0x3F);
        let first = u32::from(self.bytes[at]);
        let (code, len) = match first {
            0..0xE0 => ((first & 0x1F) << 6 | low(1), 2),
            0xE0..0xF0 => ((first & 0xF) << 12 | low(1) << 6 | low(2), 3),
            _ => ((first & 7) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4),
        };
        (self.classes.of(code), len)
    }

    /// Where the characters of a class end that begin at `at`.
    #[inline]
    fn run(self, at: usize, class: u16) -> usize {
        self.pass(at, |own| own & class != 0)
    }

    /// Where the first character of a class is.
    fn until(self, at: usize, class: u16) -> usize {
        self.pass(at, |own| own & class == 0)
    }

    /// Where the characters end, from `at` on, whose classes `goes_on`. Most are ASCII, and go by without a call.
    #[inline]
    fn pass(self, mut at: usize, goes_on: impl Fn(u16) -> bool) -> usize {
        loop {
            match self.bytes.get(at) {
                Some(byte) if *byte < 128 => {
                    if !goes_on(self.classes.ascii[usize::from(*byte)]) {
                        return at;
                    }
                    at += 1;
                }
                Some(_) => {
                    let (own, len) = self.wide(at);
                    if !goes_on(own) {
                        return at;
                    }
                    at += len;
                }
                None => return at,
            }
        }
    }

    /// `\p{N}{1,most}`
    fn numbers(self, mut at: usize, most: u8) -> usize {
        for _ in 0..most {
            let (class, len) = self.at(at);
            if class & NUMBER == 0 {
                break;
            }
            at += len;
        }
        at
    }

    /// `\s+(?!\S)|\s+`, with `\s*[\r\n]+` before it where `newlines` says so.
    fn spaces(self, from: usize, newlines: bool) -> usize {
        let (mut at, mut last, mut newline) = (from, from, None);
        loop {
            let (class, len) = self.at(at);
            if class & SPACE == 0 {
                break;
            }
            (last, at) = (at, at + len);
            if class & NEWLINE != 0 {
                newline = Some(at);
            }
        }
        match newline {
            Some(end) if newlines => end,
            // the last space belongs to the word after it
            _ if at < self.bytes.len() && last > from => last,
            _ => at,
        }
    }

    /// `'s|'t|'re|'ve|'m|'ll|'d`
    fn elided(self, at: usize) -> Option<usize> {
        let rest = &self.bytes[at + 1..];
        match rest {
            [b's' | b't' | b'm' | b'd', ..] => Some(at + 2),
            [b'r' | b'v', b'e', ..] | [b'l', b'l', ..] => Some(at + 3),
            _ => None,
        }
    }

    /// The same in capital letters, too, and with the long s, whose capital letter is S.
    fn elided_in_any_case(self, at: usize) -> Option<usize> {
        let rest = &self.bytes[at + 1..];
        match rest {
            [b's' | b't' | b'm' | b'd' | b'S' | b'T' | b'M' | b'D', ..] => Some(at + 2),
            [b'r' | b'v' | b'R' | b'V', b'e' | b'E', ..]
            | [b'l' | b'L', b'l' | b'L', ..]
            | [0xC5, 0xBF, ..] => Some(at + 3),
            _ => None,
        }
    }

    fn gpt2(self, at: usize) -> usize {
        let first = self.bytes[at];
        if first == b'\''
            && let Some(end) = self.elided(at)
        {
            return end;
        }
        let begin = at + usize::from(first == b' ');
        let (class, len) = self.at(begin);
        match class & (LETTER | NUMBER | OTHER) {
            0 => self.spaces(at, false),
            class => self.run(begin + len, class),
        }
    }

    fn cl100k(self, at: usize, digits: u8) -> usize {
        let (class, len) = self.at(at);
        if class & LETTER != 0 {
            return self.run(at + len, LETTER);
        }
        if class & NUMBER != 0 {
            return self.numbers(at, digits);
        }
        let first = self.bytes[at];
        if first == b'\''
            && let Some(end) = self.elided_in_any_case(at)
        {
            return end;
        }
        let (next, next_len) = self.at(at + len);
        if class & NEWLINE == 0 && next & LETTER != 0 {
            return self.run(at + len + next_len, LETTER);
        }
        let begin = at + usize::from(first == b' ');
        let symbols = self.run(begin, OTHER);
        if symbols > begin {
            return self.run(symbols, NEWLINE);
        }
        self.spaces(at, true)
    }

    fn o200k(self, at: usize, digits: u8, endings: bool) -> usize {
        let (class, len) = self.at(at);
        if class & NUMBER != 0 {
            return self.numbers(at, digits);
        }
        let after = at + len;
        let leads = class & (NEWLINE | LETTER | NUMBER) == 0;
        let word = leads
            .then(|| self.small_word(after))
            .flatten()
            .or_else(|| self.small_word(at))
            .or_else(|| leads.then(|| self.capital_word(after)).flatten())
            .or_else(|| self.capital_word(at));
        if let Some(end) = word {
            let ending = endings && self.bytes.get(end) == Some(&b'\'');
            return ending.then(|| self.elided_in_any_case(end)).flatten().unwrap_or(end);
        }
        let begin = at + usize::from(self.bytes[at] == b' ');
        let mut symbols = self.run(begin, OTHER);
        if symbols > begin {
            while let Some(b'\r' | b'\n' | b'/') = self.bytes.get(symbols) {
                symbols += 1;
            }
            return symbols;
        }
        self.spaces(at, true)
    }

    /// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`
    fn small_word(self, from: usize) -> Option<usize> {
        let (mut at, mut last) = (from, None);
        loop {
            let (class, len) = self.at(at);
            if class & CAPITAL == 0 {
                break;
            }
            at += len;
            if class & SMALL != 0 {
                last = Some(at);
            }
        }
        let end = self.run(at, SMALL);
        // where no small letter follows, the last one that is neither is given back
        if end > at { Some(end) } else { last }
    }

    /// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`
    fn capital_word(self, from: usize) -> Option<usize> {
        let at = self.run(from, CAPITAL);
        (at > from).then(|| self.run(at, SMALL))
    }

    fn deepseek(self, at: usize) -> Option<usize> {
        let (class, len) = self.at(at);
        let first = self.bytes[at];
        if first.is_ascii_punctuation() {
            let letters = self.bytes[at + 1..].iter().take_while(|b| b.is_ascii_alphabetic());
            let letters = letters.count();
            if letters > 0 {
                return Some(at + 1 + letters);
            }
        }
        if class & (LETTER | MARK) != 0 {
            return Some(self.run(at + len, LETTER | MARK));
        }
        let (next, next_len) = self.at(at + len);
        if class & (NEWLINE | SYMBOL) == 0 && next & (LETTER | MARK) != 0 {
            return Some(self.run(at + len + next_len, LETTER | MARK));
        }
        let begin = at + usize::from(first == b' ');
        let symbols = self.run(begin, SYMBOL);
        if symbols > begin {
            return Some(self.run(symbols, NEWLINE));
        }
        (class & SPACE != 0).then(|| self.spaces(at, true))
    }
}
