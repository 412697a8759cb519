//! Texts as the BPE of SentencePiece sees them (Gemma, Llama 2, the first Mistrals): spaces are spelled as a character of their own, and
//! a text is one word. It is cut here nevertheless, before each space that no token can reach across.
//!
//! What a merge makes is a token of the vocabulary. If none of them has `c` before a spelled space, then nothing that is merged
//! ever holds both, wherever a text has the two side by side: the merges on the left and on the right do not know of each other,
//! and the order in which they happen does not matter to either side.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::Value;
use tokenizers::models::bpe::BPE;

use super::super::pipeline::{Pipeline, kind, string_pattern};

/// How a space is spelled.
const SPACE: char = '\u{2581}';
const SPELLED: &str = "\u{2581}";

/// What a tokenizer does to spaces.
#[derive(Debug)]
pub(super) struct SpelledSpaces {
    stage: Stage,
    prepends: Prepends,
    /// Each spelled space begins a word, whatever the vocabulary says.
    splits: bool,
    /// ASCII characters that some token has before a spelled space.
    joined_ascii: [bool; 128],
    /// And others.
    joined: HashSet<char>,
}

/// Where spaces are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before added tokens are looked for that are looked for in normalised texts.
    Normalizer,
    /// After it.
    PreTokenizer,
}

/// Which parts of a text get a spelled space put before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prepends {
    Never,
    /// The part at the start of the text, unless it has one.
    First,
    /// All that have none.
    Missing,
    /// All.
    Always,
}

impl SpelledSpaces {
    /// # Errors
    /// Why texts of this tokenizer cannot be cut by hand.
    pub(super) fn new(pipeline: &Pipeline, model: &BPE) -> Result<Self, &'static str> {
        let normalizer = Self::normalizer(&pipeline.normalizers)?;
        let (stage, prepends, splits) = match (normalizer, &pipeline.pre_tokenizers[..]) {
            (Some(prepends), []) => (Stage::Normalizer, prepends, false),
            // there is none left to split at
            (Some(prepends), [split])
                if kind(split) == "Split" && string_pattern(split) == Some(" ") =>
            {
                (Stage::Normalizer, prepends, false)
            }
            (None, [metaspace]) if kind(metaspace) == "Metaspace" => {
                let prepends = Self::scheme(metaspace)?;
                (Stage::PreTokenizer, prepends, metaspace["split"] != false)
            }
            _ => return Err("its way to cut words is not written out"),
        };
        let (mut joined_ascii, mut joined) = ([false; 128], HashSet::new());
        for token in model.get_vocab().keys() {
            for (before, after) in token.chars().zip(token.chars().skip(1)) {
                if after != SPACE {
                    continue;
                }
                match joined_ascii.get_mut(before as usize) {
                    Some(joined) => *joined = true,
                    None => _ = joined.insert(before),
                }
            }
        }
        Ok(Self { stage, prepends, splits, joined_ascii, joined })
    }

    /// What normalisers do, if they spell spaces; `None` if there are none.
    fn normalizer(steps: &[Value]) -> Result<Option<Prepends>, &'static str> {
        let replaces = |step: &Value| {
            kind(step) == "Replace"
                && string_pattern(step) == Some(" ")
                && step["content"] == SPELLED
        };
        match steps {
            [] => Ok(None),
            [replace] if replaces(replace) => Ok(Some(Prepends::Never)),
            [prepend, replace]
                if kind(prepend) == "Prepend"
                    && prepend["prepend"] == SPELLED
                    && replaces(replace) =>
            {
                Ok(Some(Prepends::Always))
            }
            _ => Err("its normaliser is not written out"),
        }
    }

    fn scheme(metaspace: &Value) -> Result<Prepends, &'static str> {
        if metaspace["replacement"] != SPELLED {
            return Err("it spells spaces in another way");
        }
        match metaspace["prepend_scheme"].as_str() {
            Some("never") => Ok(Prepends::Never),
            Some("first") => Ok(Prepends::First),
            Some("always") => Ok(Prepends::Missing),
            _ => Err("its way to begin texts is not written out"),
        }
    }

    /// A part of a text between added tokens that are looked for in the text as it is.
    pub(super) fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.stage {
            Stage::Normalizer => self.spell(text, false),
            Stage::PreTokenizer => Cow::Borrowed(text),
        }
    }

    /// Such a part, between all added tokens, as the model gets it; `first`: it is at the start of the text.
    pub(super) fn pre_tokenize<'a>(&self, text: &'a str, first: bool) -> Cow<'a, str> {
        match self.stage {
            Stage::Normalizer => Cow::Borrowed(text),
            Stage::PreTokenizer => self.spell(text, first),
        }
    }

    fn spell<'a>(&self, text: &'a str, first: bool) -> Cow<'a, str> {
        let has_one = || text.starts_with([' ', SPACE]);
        let prepends = match self.prepends {
            Prepends::Never => false,
            Prepends::First => first && !has_one(),
            Prepends::Missing => !has_one(),
            Prepends::Always => true,
        };
        if !prepends && !text.contains(' ') {
            return Cow::Borrowed(text);
        }
        let mut spelled = String::with_capacity(text.len() + text.len() / 2 + SPELLED.len());
        if prepends {
            spelled.push(SPACE);
        }
        for (i, word) in text.split(' ').enumerate() {
            if i > 0 {
                spelled.push(SPACE);
            }
            spelled.push_str(word);
        }
        Cow::Owned(spelled)
    }

    /// Gives each word of a spelled text to `word`, as the range of its bytes.
    pub(super) fn words(&self, text: &str, mut word: impl FnMut(usize, usize)) {
        let mut begin = 0;
        for (at, _) in text.match_indices(SPACE) {
            if at > begin && (self.splits || !self.is_joined(&text[..at])) {
                word(begin, at);
                begin = at;
            }
        }
        if begin < text.len() {
            word(begin, text.len());
        }
    }

    /// Some token has the last character of a text before a spelled space.
    fn is_joined(&self, text: &str) -> bool {
        match text.as_bytes().last() {
            Some(byte) if *byte < 128 => self.joined_ascii[usize::from(*byte)],
            _ => text.chars().next_back().is_some_and(|c| self.joined.contains(&c)),
        }
    }
}
