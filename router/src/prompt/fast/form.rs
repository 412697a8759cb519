//! How a text gets to the model: as bytes that are cut into words, or as characters with spaces spelled out.

use std::borrow::Cow;

use tokenizers::NormalizedString;
use tokenizers::models::bpe::BPE;

use super::super::pipeline::{Pipeline, kind};
use super::classes::{COMPOSED, Classes};
use super::spelled::SpelledSpaces;
use super::split::Splitter;

/// See the head of this file.
#[derive(Debug)]
pub(super) enum Form {
    /// As bytes, cut into words.
    Bytes {
        splitter: Splitter,
        /// Characters are composed (NFC).
        composes: Option<&'static Classes>,
    },
    /// As characters.
    Chars(SpelledSpaces),
}

impl Form {
    /// # Errors
    /// Why this tokenizer is not one of those written out.
    pub(super) fn new(
        pipeline: &Pipeline,
        model: &BPE,
        on_bytes: bool,
    ) -> Result<Self, &'static str> {
        if on_bytes {
            Self::bytes(pipeline)
        } else {
            SpelledSpaces::new(pipeline, model).map(Self::Chars)
        }
    }

    fn bytes(pipeline: &Pipeline) -> Result<Self, &'static str> {
        let steps: Vec<&str> = pipeline.normalizers.iter().map(kind).collect();
        let composes = match steps[..] {
            [] => None,
            ["NFC"] => Some(Classes::get()?),
            _ => return Err("its normaliser is not written out"),
        };
        Ok(Self::Bytes { splitter: Splitter::new(pipeline)?, composes })
    }

    /// A part of a text between added tokens that are looked for in the text as it is.
    pub(super) fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let classes = match self {
            Self::Bytes { composes: Some(classes), .. } => classes,
            Self::Bytes { composes: None, .. } => return Cow::Borrowed(text),
            Self::Chars(spaces) => return spaces.normalize(text),
        };
        if text.is_ascii() || text.chars().all(|c| classes.of(c as u32) & COMPOSED != 0) {
            return Cow::Borrowed(text);
        }
        Cow::Owned(NormalizedString::from(text).nfc().get().to_owned())
    }
}
