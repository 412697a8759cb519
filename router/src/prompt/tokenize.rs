//! Text to tokens, exactly as `tokenizers` does it, without doing again what a longer chat has in common with the last.

use std::sync::{Arc, Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{
    AddedToken, ModelWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
};

use super::PromptError;
use super::cache::{CacheStats, SegmentCache};
use super::pieces::{Pieces, byte_alphabet};

/// The tokenizer of one model and its cache.
///
/// # Why the cache is exact
/// `tokenizers` first finds the added tokens that are matched in the raw text, leftmost longest, and then normalises,
/// splits and tokenises every stretch between them alone. So the text may be cut *before* such a token if
/// 1. the scan over the whole text matches it there (we run the same scan),
/// 2. it does not reach to its left (`lstrip`) and does not depend on its neighbours (`single_word`),
/// 3. it begins with an ASCII punctuation character: neither white space that an earlier `rstrip` token would
///    swallow, nor part of a word that an earlier `single_word` token must not touch.
///
/// Every stretch but the first then begins with its added token, so "is this the start of the text?" (Metaspace
/// `first`) has the same answer as in the whole text. What the post-processor adds is the same for every text: it is
/// found with two probes, and where they differ only chats are cached. Random sampling (BPE dropout) has no cache.
#[derive(Debug)]
pub(crate) struct TextTokenizer {
    tokenizer: Tokenizer,
    cuts: Result<Cuts, &'static str>,
    /// What surrounds a text when special tokens are added; `None` if that depends on the text.
    frame: Option<Frame>,
    cache: Mutex<Counted>,
}

#[derive(Debug, PartialEq, Eq)]
struct Frame {
    before: Vec<u32>,
    after: Vec<u32>,
}

#[derive(Debug)]
struct Counted {
    segments: SegmentCache,
    stats: CacheStats,
}

/// Where texts may be cut.
#[derive(Debug)]
struct Cuts {
    /// All added tokens matched in raw text, as `tokenizers` builds it.
    scan: AhoCorasick,
    /// By pattern: the text may be cut before it.
    usable: Vec<bool>,
}

/// Segments end before the first possible cut after this many bytes: short ones cost more to look up than to tokenise
/// (a guess, not tuned).
const MIN_SEGMENT_BYTES: usize = 512;

impl TextTokenizer {
    pub(crate) fn new(json: &str, cache_bytes: usize) -> Result<Self, PromptError> {
        let mut tokenizer =
            Tokenizer::from_bytes(json).map_err(|e| PromptError::Tokenizer(e.to_string()))?;
        // A prompt is never cut or padded silently.
        tokenizer.with_truncation(None).map_err(|e| PromptError::Tokenizer(e.to_string()))?;
        tokenizer.with_padding(None);
        let segments = SegmentCache::new(cache_bytes);
        let mut this = Self {
            cuts: if cache_bytes == 0 { Err("switched off") } else { Cuts::new(&tokenizer) },
            frame: None,
            tokenizer,
            cache: Mutex::new(Counted { segments, stats: CacheStats::default() }),
        };
        this.frame = this.find_frame()?;
        this.check_cuts()?;
        Ok(this)
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Bytes of text that one token can stand for, where every byte of a text is in exactly one token: its length then
    /// bounds the number of tokens from below. `None` otherwise: normalisers may drop text, and `lstrip` or `rstrip`
    /// tokens swallow any amount of white space.
    pub(crate) fn max_token_bytes(&self, pieces: &Pieces) -> Option<usize> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let exact = self.tokenizer.get_normalizer().is_none()
            && self.tokenizer.get_pre_tokenizer().is_some_and(keeps_every_byte)
            && byte_alphabet().keys().all(|c| self.tokenizer.token_to_id(&c.to_string()).is_some())
            && !added.values().any(|t| t.lstrip || t.rstrip);
        let longest_added = added.values().map(|t| t.content.len()).max().unwrap_or(0);
        exact.then(|| pieces.longest().max(longest_added))
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, entries) = (cache.segments.bytes(), cache.segments.len());
        CacheStats { off: self.cuts.as_ref().err().copied(), bytes, entries, ..cache.stats }
    }

    /// Ids of `text`. `special` adds what the tokenizer puts around a text, such as a begin-of-text token.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, PromptError> {
        match (&self.cuts, special, &self.frame) {
            (Ok(cuts), false, _) => self.encode_segments(cuts, text),
            (Ok(cuts), true, Some(Frame { before, after })) => {
                let mut ids = before.clone();
                ids.extend(self.encode_segments(cuts, text)?);
                ids.extend(after);
                Ok(ids)
            }
            (Ok(_), true, None) | (Err(_), _, _) => self.encode_whole(text, special),
        }
    }

    pub(crate) fn encode_whole(&self, text: &str, special: bool) -> Result<Vec<u32>, PromptError> {
        let encoding = self.tokenizer.encode_fast(text, special);
        Ok(encoding.map_err(|e| PromptError::Encode(e.to_string()))?.get_ids().to_vec())
    }

    fn encode_segments(&self, cuts: &Cuts, text: &str) -> Result<Vec<u32>, PromptError> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        for segment in cuts.segments(text) {
            if segment.len() < MIN_SEGMENT_BYTES {
                ids.extend(self.encode_whole(segment, false)?);
                continue;
            }
            if let Some(cached) = self.lookup(segment) {
                ids.extend_from_slice(&cached);
                continue;
            }
            let new: Arc<[u32]> = self.encode_whole(segment, false)?.into();
            ids.extend_from_slice(&new);
            let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            cache.segments.insert(segment, new);
        }
        Ok(ids)
    }

    fn lookup(&self, segment: &str) -> Option<Arc<[u32]>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let found = cache.segments.get(segment);
        let len = segment.len() as u64;
        let stats = &mut cache.stats;
        if found.is_some() {
            stats.hits += 1;
            stats.hit_bytes += len;
        } else {
            stats.misses += 1;
            stats.tokenized_bytes += len;
        }
        found
    }

    /// What the post-processor puts around any text.
    fn find_frame(&self) -> Result<Option<Frame>, PromptError> {
        let mut frames = Vec::new();
        for probe in ["a", "b c, d"] {
            let bare = self.encode_whole(probe, false)?;
            let full = self.encode_whole(probe, true)?;
            if bare.is_empty() {
                return Ok(None);
            }
            let at = full.windows(bare.len()).position(|window| window == bare);
            let Some(at) = at else { return Ok(None) };
            let (before, after) = (full[..at].to_vec(), full[at + bare.len()..].to_vec());
            frames.push(Frame { before, after });
        }
        frames.dedup();
        Ok(if frames.len() == 1 { frames.pop() } else { None })
    }

    /// Belt and braces: the argument above, tried on texts that would show where it is wrong.
    fn check_cuts(&mut self) -> Result<(), PromptError> {
        let Ok(cuts) = &self.cuts else { return Ok(()) };
        let token = self.tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<&AddedToken> = token.values().filter(|t| !t.normalized).collect();
        tokens.sort_by(|a, b| a.content.cmp(&b.content));
        for token in tokens.into_iter().take(64) {
            let t = &token.content;
            let text = format!("{t}a {t} b{t}\n{t}{t}  c\u{301} {t}é ▁{t} <{t}>{t}");
            let mut parts = Vec::new();
            for segment in cuts.cut_everywhere(&text) {
                parts.extend(self.encode_whole(segment, false)?);
            }
            if parts != self.encode_whole(&text, false)? {
                self.cuts = Err("cutting changed a probe text");
                return Ok(());
            }
        }
        Ok(())
    }
}

/// True for byte-level tokenizers whose splits throw nothing away.
fn keeps_every_byte(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    let PreTokenizerWrapper::Sequence(steps) = pre_tokenizer else {
        return matches!(pre_tokenizer, PreTokenizerWrapper::ByteLevel(_));
    };
    let mut bytes = false;
    for step in steps.as_ref() {
        bytes |= matches!(step, PreTokenizerWrapper::ByteLevel(_));
        let keeps = if let PreTokenizerWrapper::Split(split) = step {
            split.behavior != SplitDelimiterBehavior::Removed
        } else {
            matches!(step, PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Digits(_))
        };
        if !keeps {
            return false;
        }
    }
    bytes
}

impl Cuts {
    /// # Errors
    /// Why texts of this tokenizer cannot be cut.
    fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
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

    /// `text` in stretches that may be tokenised alone, each of at least [`MIN_SEGMENT_BYTES`] but the last. Where they
    /// end depends only on the text before, so a longer text has the same ones up to its new part.
    fn segments<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        self.cut(text, MIN_SEGMENT_BYTES)
    }

    fn cut_everywhere<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        self.cut(text, 1)
    }

    fn cut<'a>(&self, text: &'a str, min: usize) -> impl Iterator<Item = &'a str> {
        let mut starts = self
            .scan
            .find_iter(text)
            .filter(|m| self.usable[m.pattern().as_usize()])
            .map(|m| m.start());
        let mut start = 0;
        std::iter::from_fn(move || {
            if start == text.len() {
                return None;
            }
            let end = starts.find(|at| at - start >= min).unwrap_or(text.len());
            let segment = &text[start..end];
            start = end;
            Some(segment)
        })
    }
}
