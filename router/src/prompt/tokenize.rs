//! Text to tokens, exactly as `tokenizers` makes them: in pieces, so that memory and time of each are bounded, and without
//! doing again what a longer chat has in common with the last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenizers::{AddedToken, Tokenizer};

use super::PromptError;
use super::cache::{CacheStats, PrefixCache, StretchHash};
use super::cuts::{Cuts, MIN_SEGMENT_BYTES, SEGMENT_BYTES};
use super::fast::FastEncoder;
use super::length::LeastTokens;
use super::seams::Seams;

/// The tokenizer of one model.
///
/// A text is cut before added tokens ([`Cuts`]) and between words ([`Seams`]) into stretches of some [`SEGMENT_BYTES`] that
/// are remembered. Where one ends depends on what stands before alone, so texts that begin alike have the same stretches as
/// far as they are alike. Stretches without seams may be long; they are cut into pieces where they can be, each of which is tokenised alone: by [`FastEncoder`] where this tokenizer is written out, else
/// by `tokenizers`. What the post-processor adds is the same for
/// every text: it is found with two probes; where they differ, a text that gets it is never cut.
#[derive(Debug)]
pub(crate) struct TextTokenizer {
    tokenizer: Tokenizer,
    /// Or why `tokenizers` makes all tokens.
    fast: Result<FastEncoder, &'static str>,
    least: LeastTokens,
    cuts: Result<Cuts, &'static str>,
    seams: Result<Seams, &'static str>,
    /// What surrounds a text when special tokens are added; `None` if that depends on the text.
    frame: Option<Frame>,
    cache: Arc<PrefixCache>,
    /// Sets its texts apart in the cache.
    number: u64,
    counts: Counts,
}

#[derive(Debug, PartialEq, Eq)]
struct Frame {
    before: Vec<u32>,
    after: Vec<u32>,
}

#[derive(Debug, Default)]
struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
    hit_bytes: AtomicU64,
    tokenized_bytes: AtomicU64,
}

/// A text on its way to tokens.
#[derive(Debug)]
pub(crate) struct Walk {
    text: String,
    /// Sets it apart in the cache from what has another one.
    salt: Vec<u8>,
    /// What the tokenizer puts around a text is wanted.
    special: bool,
    /// Everything before is done.
    at: usize,
    /// Where the next added token is that it may be cut before; known for places that are [`MIN_SEGMENT_BYTES`] before.
    cut: usize,
    /// The stretch that is done in pieces.
    open: Option<Stretch>,
    /// Its tokens, if they were known.
    cached: Option<Arc<[u32]>>,
    ids: Vec<u32>,
}

/// A part of a text that is tokenised alone.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    start: usize,
    end: usize,
    /// The rest begins there.
    next: usize,
    /// Its tokens begin there.
    first_id: usize,
    /// Under which its tokens are kept.
    name: Option<StretchHash>,
}

/// How far a text may go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WalkLimits {
    /// Tokens; what has more is given up.
    pub(crate) tokens: usize,
    /// Bytes of a stretch that cannot be cut.
    pub(crate) stretch_bytes: usize,
    /// A piece of more than [`SLOW_BYTES`] may be done now.
    pub(crate) slow: bool,
}

/// How far it came.
#[derive(Debug)]
pub(crate) enum Walked {
    /// To its end.
    Done(Vec<u32>),
    /// Not yet; `slow` if the next piece is a long one.
    Pausing { slow: bool },
}

/// Why a text has no tokens.
#[derive(Debug)]
pub(crate) enum WalkError {
    /// It has more tokens than it may; so many were found until then.
    TooMany(usize),
    /// There is nowhere to cut in the bytes that follow this place.
    Uncut(usize),
    Tokenizer(PromptError),
}

/// Most bytes of a piece where there is a seam, and about what one turn goes through: 10 to 30 ms, and some 10 MB of
/// memory, as `tokenizers` takes up to 350 bytes for one of text.
pub(crate) const PIECE_BYTES: usize = 32 << 10;

/// Pieces of more bytes are for the slow lane.
pub(crate) const SLOW_BYTES: usize = 2 * PIECE_BYTES;

/// What was cached costs this much less than what is tokenised, as a guess.
const CACHED_DISCOUNT: usize = 64;

/// What [`FastEncoder`] does costs this much less than with `tokenizers`, and less than it does: a turn is some 5 ms.
const FAST_DISCOUNT: usize = 8;

/// Texts that show where the arguments for cutting between words are wrong, if they are, or other tokens come of
/// [`FastEncoder`].
pub(super) const PROBES: [&str; 7] = [
    "It's a river's, I'd say: the 12 mills (of 1834) run 7x faster.\r\n\r\n  They   do\tnot\nstop! re-run U.S. \u{e9}t\u{e9} 3",
    "fn main() { let x_1 = foo(a, b)[0]; }\n\n\n    // TODO: 100% of it\n#include <stdio.h> a=b c-d e+f g/h i*j",
    "\u{65e5}\u{672c}\u{8a9e}\u{3002}\u{6c34}\u{8eca}\u{ff0c}\u{4e2d}\u{6587} \u{ad}\u{d55c}\u{ad6d}\u{c5b4} \u{442}\u{435}\u{43a}\u{441}\u{442}, \u{3b1}\u{3b2}\u{3b3}! \u{645}\u{631}\u{62d}\u{628}\u{627} e\u{301} a\u{308}. o=\u{338}p \u{e01}\u{e34}\u{e19} \u{2581}q r\u{2581} s",
    "WORDS Of MixedCase andDigits42 end's can't we'LL x' y'\u{a0}z \u{1f469}\u{200d}\u{1f33e} fi\u{fb01} \u{212a}elvin \u{130} \u{0}\u{1f} a a a  b  c",
    "aGVsbG8gd29ybGQ+/abc= https://example.org/a_b?c=d&e=f#g <b>x</b> {\"k\": [1, 2.50, -3e10]} __init__ `y` ~z ^w |v| \\u @t",
    "\u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947} \u{926}\u{941}\u{928}\u{93f}\u{92f}\u{93e}, \u{627}\u{644}\u{645}\u{64e}\u{627}\u{621}\u{64f} \u{661}\u{662}\u{663} \u{5de}\u{5b7}\u{5d9}\u{5b4}\u{5dd} \u{10d0}\u{10d1} \u{1f44d}\u{1f3fd} \u{2764}\u{fe0f} \u{1f1eb}\u{1f1f7} \u{304b}\u{3099}\u{30fb}\u{30ab}\u{3001} \u{bd} \u{2167} x\u{b2} 1234567 \u{ff11}\u{ff12} \u{1c5}Aa \u{2b0}B",
    "she'S he'\u{17f} we'Re I'M \u{2019}tis ''x  \u{a0} \u{2003}\u{3000}y\u{85}z \n \n\t w\r\r\n  !?\n\n//\n/ ...\u{2014}\u{2026} \u{fffd}\u{7f}\u{200b}\u{feff}v \u{e000} aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa   \n",
];

impl TextTokenizer {
    pub(crate) fn new(json: &str, cache: Arc<PrefixCache>) -> Result<Self, PromptError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(PromptError::Tokenizer)?;
        // A prompt is never cut or padded silently.
        tokenizer.with_truncation(None).map_err(PromptError::Tokenizer)?;
        tokenizer.with_padding(None);
        let mut this = Self {
            fast: FastEncoder::new(&tokenizer, json),
            least: LeastTokens::new(&tokenizer),
            cuts: Cuts::new(&tokenizer),
            seams: Seams::new(&tokenizer),
            frame: None,
            tokenizer,
            cache,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            counts: Counts::default(),
        };
        this.check_fast()?;
        this.frame = this.find_frame()?;
        this.check_cuts()?;
        this.check_seams()?;
        Ok(this)
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Tokens of words that are not to be written, at the beginning of a text and after a space.
    pub(crate) fn banned(&self, words: &[String]) -> Result<Vec<Vec<u32>>, PromptError> {
        let ids = |text: &str| {
            let encoding = self.tokenizer.encode(text, false).map_err(PromptError::Encode)?;
            Ok::<_, PromptError>(encoding.get_ids().to_vec())
        };
        let mut found: Vec<Vec<u32>> = Vec::with_capacity(2 * words.len());
        for word in words {
            let word = word.trim_start();
            let (plain, spaced) = (ids(word)?, ids(&format!(" {word}"))?);
            // a space that is a token of its own comes before the same tokens
            let differs = spaced.len() == plain.len() && spaced.first() != plain.first();
            found.extend([plain].into_iter().chain(differs.then_some(spaced)));
        }
        found.retain(|ids| !ids.is_empty());
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// What lengths of texts say of their tokens.
    pub(crate) fn least(&self) -> &LeastTokens {
        &self.least
    }

    /// Why long texts cannot be cut between words; `None` where they can.
    pub(crate) fn uncut(&self) -> Option<&'static str> {
        self.seams.as_ref().err().copied()
    }

    /// Why `tokenizers` makes all tokens; `None` where [`FastEncoder`] does.
    pub(crate) fn slow(&self) -> Option<&'static str> {
        self.fast.as_ref().err().copied()
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let Counts { hits, misses, hit_bytes, tokenized_bytes } = &self.counts;
        let off = if self.cache.is_off() {
            Some("switched off")
        } else {
            self.cuts.as_ref().err().copied()
        };
        CacheStats {
            slow: self.slow(),
            uncut: self.uncut(),
            off,
            hits: hits.load(Ordering::Relaxed),
            misses: misses.load(Ordering::Relaxed),
            hit_bytes: hit_bytes.load(Ordering::Relaxed),
            tokenized_bytes: tokenized_bytes.load(Ordering::Relaxed),
        }
    }

    /// Begins to tokenise. `special` adds what the tokenizer puts around a text, such as a begin-of-text token.
    pub(crate) fn begin(&self, text: String, special: bool) -> Walk {
        // some 4 bytes a token; what needs more grows
        let mut ids = Vec::with_capacity(text.len().min(SLOW_BYTES) / 4 + 2);
        if let (true, Some(frame)) = (special, &self.frame) {
            ids.extend(&frame.before);
        }
        Walk { text, salt: Vec::new(), special, at: 0, cut: 0, open: None, cached: None, ids }
    }

    /// Goes on for about [`PIECE_BYTES`] of text.
    ///
    /// # Errors
    /// The text is not to be tokenised any further.
    pub(crate) fn go_on(&self, walk: &mut Walk, limits: &WalkLimits) -> Result<Walked, WalkError> {
        let mut work = 0;
        while walk.at < walk.text.len() {
            if work >= PIECE_BYTES {
                return Ok(Walked::Pausing { slow: false });
            }
            let stretch = match walk.open {
                Some(stretch) => stretch,
                None => self.open(walk),
            };
            if let Some(cached) = walk.cached.take() {
                walk.ids.extend_from_slice(&cached);
                work += (stretch.end - stretch.start) / CACHED_DISCOUNT;
                (walk.at, walk.open) = (stretch.next, None);
            } else {
                let (end, next) = self.piece_end(walk, stretch, limits.stretch_bytes)?;
                let bytes = end - walk.at;
                if bytes > SLOW_BYTES && !limits.slow {
                    return Ok(Walked::Pausing { slow: true });
                }
                let special = walk.special && self.frame.is_none();
                let encoded = self.encode(&walk.text[walk.at..end], special, &mut walk.ids);
                encoded.map_err(WalkError::Tokenizer)?;
                work += if self.fast.is_ok() { bytes / FAST_DISCOUNT } else { bytes };
                walk.at = next;
                if next >= stretch.end {
                    if let Some(name) = stretch.name {
                        self.cache.insert(name, &walk.ids[stretch.first_id..]);
                    }
                    (walk.at, walk.open) = (stretch.next, None);
                }
            }
            if walk.ids.len() > limits.tokens {
                return Err(WalkError::TooMany(walk.ids.len()));
            }
        }
        if let (true, Some(frame)) = (walk.special, &self.frame) {
            walk.ids.extend(&frame.after);
        }
        Ok(Walked::Done(std::mem::take(&mut walk.ids)))
    }

    /// The next stretch, and its tokens if they are known.
    fn open(&self, walk: &mut Walk) -> Stretch {
        let start = walk.at;
        let (end, next) = self.stretch_end(walk);
        let text = &walk.text[start..end];
        let cached = text.len() >= MIN_SEGMENT_BYTES && self.cuts.is_ok() && !self.cache.is_off();
        let name = cached.then(|| StretchHash::new(self.number, &walk.salt, text));
        walk.cached = name.and_then(|name| self.lookup(&name, text.len()));
        let stretch = Stretch { start, end, next, first_id: walk.ids.len(), name };
        walk.open = Some(stretch);
        stretch
    }

    /// Where the stretch ends that begins here, and where the rest begins.
    fn stretch_end(&self, walk: &mut Walk) -> (usize, usize) {
        let (text, start) = (walk.text.as_str(), walk.at);
        let cuts = match &self.cuts {
            Ok(cuts) if !walk.special || self.frame.is_some() => cuts,
            Ok(_) | Err(_) => return (text.len(), text.len()),
        };
        if walk.cut < start + MIN_SEGMENT_BYTES {
            walk.cut = cuts.end(text, start);
        }
        let seams = self.seams.as_ref().ok();
        let seam = seams.and_then(|seams| seams.first(text, start + SEGMENT_BYTES, walk.cut));
        seam.unwrap_or((walk.cut, walk.cut))
    }

    /// Where the next piece of an open stretch ends, and where the one after begins.
    fn piece_end(
        &self,
        walk: &Walk,
        stretch: Stretch,
        most: usize,
    ) -> Result<(usize, usize), WalkError> {
        let whole = walk.special && self.frame.is_none();
        let end = match &self.seams {
            Ok(seams) if !whole => {
                seams.end(&walk.text, (walk.at, stretch.end), PIECE_BYTES, most.max(PIECE_BYTES))
            }
            Ok(_) | Err(_) => (stretch.end - walk.at <= most).then_some((stretch.end, stretch.end)),
        };
        end.ok_or(WalkError::Uncut(walk.at))
    }

    fn encode(&self, text: &str, special: bool, ids: &mut Vec<u32>) -> Result<(), PromptError> {
        match &self.fast {
            Ok(fast) if !special => fast.encode(text, ids),
            Ok(_) | Err(_) => ids.extend(self.encode_whole(text, special)?),
        }
        Ok(())
    }

    /// By `tokenizers`.
    fn encode_whole(&self, text: &str, special: bool) -> Result<Vec<u32>, PromptError> {
        let encoding = self.tokenizer.encode_fast(text, special);
        Ok(encoding.map_err(PromptError::Encode)?.get_ids().to_vec())
    }

    fn lookup(&self, name: &StretchHash, bytes: usize) -> Option<Arc<[u32]>> {
        let found = self.cache.get(name);
        let (times, of_text) = if found.is_some() {
            (&self.counts.hits, &self.counts.hit_bytes)
        } else {
            (&self.counts.misses, &self.counts.tokenized_bytes)
        };
        times.fetch_add(1, Ordering::Relaxed);
        of_text.fetch_add(bytes as u64, Ordering::Relaxed);
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

    /// What is written out has to have the tokens of `tokenizers` on all probes, together and alone.
    fn check_fast(&mut self) -> Result<(), PromptError> {
        let Ok(fast) = &self.fast else { return Ok(()) };
        let mut ids = Vec::new();
        let probes = self.probes();
        for text in [probes.concat()].into_iter().chain(probes) {
            ids.clear();
            fast.encode(&text, &mut ids);
            if ids != self.encode_whole(&text, false)? {
                self.fast = Err("the fast tokens of a probe text are others");
                return Ok(());
            }
        }
        Ok(())
    }

    /// Belt and braces: the argument for [`Cuts`], tried on texts that would show where it is wrong.
    fn check_cuts(&mut self) -> Result<(), PromptError> {
        let Ok(cuts) = &self.cuts else { return Ok(()) };
        for token in self.some_added().iter().filter(|t| !t.normalized) {
            let t = &token.content;
            let text = format!("{t}a {t} b{t}\n{t}{t}  c\u{301} {t}\u{e9} \u{2581}{t} <{t}>{t}");
            let (mut parts, mut start) = (Vec::new(), 0);
            while start < text.len() {
                let end = cuts.nearest_end(&text, start);
                parts.extend(self.encode_whole(&text[start..end], false)?);
                start = end;
            }
            if parts != self.encode_whole(&text, false)? {
                self.cuts = Err("cutting changed a probe text");
                return Ok(());
            }
        }
        Ok(())
    }

    /// The same for [`Seams`].
    fn check_seams(&mut self) -> Result<(), PromptError> {
        let Ok(seams) = &self.seams else { return Ok(()) };
        for text in self.probes() {
            let (mut parts, mut start) = (Vec::new(), 0);
            for (end, next) in seams.all(&text).chain([(text.len(), text.len())]) {
                parts.extend(self.encode_whole(&text[start..end], false)?);
                start = next;
            }
            if parts != self.encode_whole(&text, false)? {
                self.seams = Err("cutting changed a probe text");
                return Ok(());
            }
        }
        Ok(())
    }

    /// Texts of many kinds, and some around added tokens.
    fn probes(&self) -> Vec<String> {
        let added = self.some_added();
        let around = added.iter().map(|token| {
            let t = &token.content;
            format!("a{t}b {t}c d{t} {t} e{t}f1{t}\n{t} g h")
        });
        PROBES.iter().map(|probe| (*probe).to_owned()).chain(around).collect()
    }

    /// The first added tokens in the order of their text.
    fn some_added(&self) -> Vec<AddedToken> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<AddedToken> = added.into_values().collect();
        tokens.sort_by(|a, b| a.content.cmp(&b.content));
        tokens.truncate(64);
        tokens
    }
}

impl Walk {
    /// Shares what is cached only with texts of the same salt.
    pub(crate) fn salted(self, salt: Vec<u8>) -> Self {
        Self { salt, ..self }
    }

    /// Bytes of text that are not tokenised yet.
    pub(crate) fn left(&self) -> usize {
        self.text.len() - self.at
    }

    /// The text that is not tokenised yet.
    pub(crate) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// Nothing of it was looked at.
    pub(crate) fn is_new(&self) -> bool {
        self.at == 0 && self.open.is_none()
    }
}
