//! Where texts may be cut before added tokens, such as the begin of a message.

use aho_corasick::{AhoCorasick, Input, MatchKind};
use tokenizers::{AddedToken, ModelWrapper, Tokenizer};

/// Where texts may be cut before added tokens.
///
/// # Why that changes no token
/// `tokenizers` first finds the added tokens that are matched in the raw text, leftmost longest, and then normalises,
/// splits and tokenises every stretch between them alone. So the text may be cut *before* such a token if
/// 1. the scan over the whole text matches it there (we run the same scan),
/// 2. it does not reach to its left (`lstrip`) and does not depend on its neighbours (`single_word`),
/// 3. it begins with an ASCII punctuation character: neither white space that an earlier `rstrip` token would
///    swallow, nor part of a word that an earlier `single_word` token must not touch.
///
/// Every stretch but the first then begins with its added token, so "is this the start of the text?" (Metaspace
/// `first`) has the same answer as in the whole text. Random sampling (BPE dropout) is never cut.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// All added tokens matched in raw text, as `tokenizers` builds it.
    scan: AhoCorasick,
    /// By pattern: the text may be cut before it.
    usable: Vec<bool>,
}

/// Stretches end before the first possible cut after this many bytes: short ones cost more to look up than to tokenise
/// (a guess, not tuned).
pub(crate) const MIN_SEGMENT_BYTES: usize = 512;

/// Stretches end at the first seam after this many bytes. What several prompts have in common is found up to the last
/// such place in it; every stretch costs a look-up (a guess, not tuned).
pub(crate) const SEGMENT_BYTES: usize = 2 << 10;

impl Cuts {
    /// # Errors
    /// Why texts of this tokenizer cannot be cut.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|p| p > 0.0)
        {
            return Err("dropout makes tokenisation random");
        }
        let added = tokenizer.get_added_tokens_decoder();
        let raw: Vec<&AddedToken> =
            added.values().filter(|t| !t.normalized && !t.content.is_empty()).collect();
        let usable: Vec<bool> = raw
            .iter()
            .map(|t| {
                let first = t.content.chars().next();
                let punctuation = first.is_some_and(|c| c.is_ascii_punctuation() && c != '_');
                punctuation && !t.lstrip && !t.single_word
            })
            .collect();
        if !usable.contains(&true) {
            return Err("no added token that text can be cut at");
        }
        let scan = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|t| &t.content))
            .map_err(|_| "the added tokens are too many to scan for")?;
        Ok(Self { scan, usable })
    }

    /// The first cut of `text` that is [`MIN_SEGMENT_BYTES`] or more after `start`, which is 0 or where another stretch
    /// begins; the text's end where there is none.
    pub(crate) fn end(&self, text: &str, start: usize) -> usize {
        self.end_after(text, start, MIN_SEGMENT_BYTES)
    }

    /// The same with no least distance.
    pub(crate) fn nearest_end(&self, text: &str, start: usize) -> usize {
        self.end_after(text, start, 1)
    }

    /// A scan may begin anew where a token matched, which it finds first, and at a seam, as no token has one inside.
    fn end_after(&self, text: &str, start: usize, min: usize) -> usize {
        let matches = self.scan.find_iter(Input::new(text).span(start..text.len()));
        let mut starts = matches.filter(|m| self.usable[m.pattern().as_usize()]).map(|m| m.start());
        starts.find(|at| at - start >= min).unwrap_or(text.len())
    }
}
