//! Text to tokens some twenty times as fast as `tokenizers`, for those tokenizers that are written out here: byte-pair
//! encoding on bytes, with one of the ways of cutting words that [`split`] knows, or on characters with spaces [`spelled`] out.
//!
//! `tokenizers` keeps for every character where it came from, runs regular expressions and allocates for every word. Here
//! words are cut by hand and looked up in a table; only those that are not in it are merged. Everything else about a
//! tokenizer, and all tokenizers that are not of this kind, stay with `tokenizers`, which the tests compare with. So does
//! [`super::tokenize`] when a model is loaded.

mod classes;
mod form;
mod merges;
mod spelled;
mod split;
mod words;

use std::sync::{Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{ModelWrapper, NormalizedString, Normalizer as _, Tokenizer};

use self::form::Form;
use self::merges::{Merges, Symbols};
use self::words::{WordTokens, Words};
use super::pipeline::Pipeline;

/// A tokenizer that is written out.
#[derive(Debug)]
pub(super) struct FastEncoder {
    /// Added tokens that are looked for in the text as it is.
    raw: AddedTokens,
    /// Those that are looked for in what the normaliser makes of the rest.
    normalized: AddedTokens,
    form: Form,
    merges: Merges,
    /// One for each thread that was here at once.
    desks: Mutex<Vec<Desk>>,
}

/// What one thread works with.
#[derive(Debug, Default)]
struct Desk {
    words: Words,
    symbols: Symbols,
}

/// Desks that are kept. A pool of more threads makes some anew.
const KEPT_DESKS: usize = 16;

#[derive(Debug)]
struct AddedTokens {
    /// `None` if there are none.
    scan: Option<AhoCorasick>,
    ids: Vec<u32>,
}

impl FastEncoder {
    /// `json` is the file that `tokenizer` was read from.
    ///
    /// # Errors
    /// Why this tokenizer is not one of those written out.
    pub(super) fn new(tokenizer: &Tokenizer, json: &str) -> Result<Self, &'static str> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err("its model is not BPE");
        };
        let pipeline = Pipeline::new(tokenizer);
        let on_bytes = !model.byte_fallback || pipeline.works_on_bytes();
        let added = tokenizer.get_added_tokens_decoder();
        if added.values().any(|token| token.single_word || token.lstrip || token.rstrip) {
            return Err("an added token depends on its neighbours");
        }
        let (mut raw, mut normalized) = (Vec::new(), Vec::new());
        for (id, token) in added.iter().filter(|(_, token)| !token.content.is_empty()) {
            let mut content = NormalizedString::from(token.content.as_str());
            if let (true, Some(normalizer)) = (token.normalized, tokenizer.get_normalizer()) {
                normalizer.normalize(&mut content).map_err(|_| "its normaliser fails")?;
            }
            let patterns = if token.normalized { &mut normalized } else { &mut raw };
            patterns.push((content.get().to_owned(), *id));
        }
        Ok(Self {
            raw: AddedTokens::new(raw)?,
            normalized: AddedTokens::new(normalized)?,
            form: Form::new(&pipeline, model, on_bytes)?,
            merges: Merges::new(model, on_bytes, json)?,
            desks: Mutex::default(),
        })
    }

    /// Appends the tokens of a text, without what the tokenizer puts around one.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut desk = self.desks().pop().unwrap_or_default();
        for part in self.raw.parts(text) {
            match part {
                Part::Added(id) => out.push(id),
                Part::Text(part) => {
                    let begins = std::ptr::eq(part.as_ptr(), text.as_ptr());
                    let normal = self.form.normalize(part);
                    for part in self.normalized.parts(&normal) {
                        match part {
                            Part::Added(id) => out.push(id),
                            Part::Text(part) => {
                                let first = begins && std::ptr::eq(part.as_ptr(), normal.as_ptr());
                                self.encode_part(part, first, &mut desk, out);
                            }
                        }
                    }
                }
            }
        }
        let mut desks = self.desks();
        if desks.len() < KEPT_DESKS {
            desks.push(desk);
        }
    }

    fn encode_part(&self, text: &str, first: bool, desk: &mut Desk, out: &mut Vec<u32>) {
        match &self.form {
            Form::Bytes { splitter, .. } => {
                splitter.words(text, |start, end| self.encode_word(text, (start, end), desk, out));
            }
            Form::Chars(spaces) => {
                let text = &*spaces.pre_tokenize(text, first);
                spaces.words(text, |start, end| self.encode_word(text, (start, end), desk, out));
            }
        }
    }

    #[inline]
    fn encode_word(
        &self,
        text: &str,
        (start, end): (usize, usize),
        desk: &mut Desk,
        out: &mut Vec<u32>,
    ) {
        let Desk { words, symbols } = desk;
        match words.find(text.as_bytes(), start, end) {
            WordTokens::Known(ids) => out.extend_from_slice(ids),
            WordTokens::Place(place) => {
                let first = out.len();
                self.merges.encode(&text.as_bytes()[start..end], symbols, out);
                words.keep(place, &out[first..]);
            }
            WordTokens::TooLong => {
                self.merges.encode(&text.as_bytes()[start..end], symbols, out);
            }
        }
    }

    /// No code that can panic runs under this lock.
    fn desks(&self) -> std::sync::MutexGuard<'_, Vec<Desk>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Part<'a> {
    Added(u32),
    Text(&'a str),
}

impl AddedTokens {
    fn new(mut tokens: Vec<(String, u32)>) -> Result<Self, &'static str> {
        tokens.sort_unstable();
        if tokens.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err("two added tokens are the same text");
        }
        let (contents, ids): (Vec<String>, Vec<u32>) = tokens.into_iter().unzip();
        if contents.is_empty() {
            return Ok(Self { scan: None, ids });
        }
        let scan = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(contents)
            .map_err(|_| "the added tokens are too many to scan for")?;
        Ok(Self { scan: Some(scan), ids })
    }

    /// The added tokens of a text and what stands between them, which is never empty.
    fn parts<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Part<'a>> {
        let mut matches = self.scan.as_ref().map(|scan| scan.find_iter(text));
        let (mut at, mut added) = (0, None);
        std::iter::from_fn(move || {
            if let Some(id) = added.take() {
                return Some(Part::Added(id));
            }
            let found = matches.as_mut().and_then(Iterator::next);
            let (start, end) = found.map_or((text.len(), text.len()), |m| (m.start(), m.end()));
            let before = &text[at..start];
            at = end;
            added = found.map(|m| self.ids[m.pattern().as_usize()]);
            if !before.is_empty() {
                return Some(Part::Text(before));
            }
            added.take().map(Part::Added)
        })
    }
}

#[cfg(test)]
mod tests;
