//! Tokens to text as they come: only whole characters, nothing that may begin a stop string, bounded state.

use std::sync::Arc;

use super::pieces::{Join, PieceKind, Pieces};
use super::stop::StopMatcher;

/// Text that a [`Decoder`] is certain of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Text before any stop string.
    pub text: String,
    /// A stop string was found. It is part of the text only where that was asked for.
    pub stopped: bool,
    /// How many of the pushed ids were looked at: all, or those up to the one that completed the stop string.
    pub consumed: usize,
    /// Where in `text` each of these ends, if that is noted.
    pub ends: Vec<usize>,
}

/// Text of one choice, from its tokens as they arrive.
///
/// All that it returns, joined, is what `tokenizers` decodes from all ids at once, cut before the stop string; bytes
/// that are no UTF-8 become U+FFFD just as there. Its state does not grow with the answer. One departure: SentencePiece's
/// byte tokens (`<0x..>`) are text only if their whole unbroken run is UTF-8, and a run of more than 64 bytes that was
/// valid so far is not waited for.
#[derive(Debug)]
pub struct Decoder {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// Special tokens that are not skipped, in order.
    kept: Vec<u32>,
    notes_ends: bool,
    text: TextState,
    stop: StopMatcher,
    /// Reused between tokens.
    scratch: String,
}

/// Bytes of a run of byte tokens that are waited for before the run's valid part is let go.
const RUN_BYTES: usize = 64;

#[derive(Debug)]
struct TextState {
    /// No token has counted yet.
    first: bool,
    /// Character and how many of it are still to be stripped from the start.
    strip: Option<(char, usize)>,
    /// Begun character (`Join::Bytes`) or run of byte tokens (`Join::Text`).
    pending: Vec<u8>,
    /// The run of byte tokens is no UTF-8: every byte of it is U+FFFD.
    broken_run: bool,
}

impl Decoder {
    pub(crate) fn new(pieces: Arc<Pieces>, stop: StopMatcher, skip_special: bool) -> Self {
        let text =
            TextState { first: true, strip: pieces.strip, pending: Vec::new(), broken_run: false };
        Self {
            pieces,
            skip_special,
            kept: Vec::new(),
            notes_ends: false,
            text,
            stop,
            scratch: String::new(),
        }
    }

    /// These special tokens, in order, stay in the text.
    #[must_use]
    pub fn keeping(mut self, ids: &[u32]) -> Self {
        self.kept.extend_from_slice(ids);
        self
    }

    /// Says where the text of each token ends.
    #[must_use]
    pub fn noting_ends(mut self) -> Self {
        self.notes_ends = true;
        self
    }

    /// The tokens go on a text that was there before: what the tokenizer leaves out at the beginning of a text, such as
    /// the space before its first word, stays.
    #[must_use]
    pub fn going_on(mut self) -> Self {
        self.text.first = false;
        self.text.strip = None;
        self
    }

    /// Takes the next tokens. After a stop string nothing more comes out.
    pub fn push(&mut self, ids: &[u32]) -> Decoded {
        let mut decoded = Decoded::default();
        for &id in ids {
            if self.stop.stopped() {
                break;
            }
            decoded.consumed += 1;
            if !self.skips(id) {
                self.scratch.clear();
                self.text.push(&self.pieces, id, &mut self.scratch);
                self.stop.push(&self.scratch, &mut decoded.text);
            }
            if self.notes_ends {
                decoded.ends.push(decoded.text.len());
            }
        }
        decoded.stopped = self.stop.stopped();
        decoded
    }

    fn skips(&self, id: u32) -> bool {
        self.skip_special && self.pieces.is_special(id) && self.kept.binary_search(&id).is_err()
    }

    /// The answer ended: returns the text held back. A second call returns nothing.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        if self.stop.stopped() {
            return out;
        }
        self.scratch.clear();
        self.text.finish(self.pieces.join, &mut self.scratch);
        self.stop.push(&self.scratch, &mut out);
        self.stop.finish(&mut out);
        out
    }

    /// The stop string that was found.
    #[must_use]
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.found()
    }

    /// True once a stop string was found, also if only [`Self::finish`] completed it.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stop.stopped()
    }
}

impl TextState {
    fn push(&mut self, pieces: &Pieces, id: u32, out: &mut String) {
        let kind = pieces.kind(id);
        if kind == PieceKind::Missing {
            return;
        }
        let piece = if self.first { pieces.first_piece(id) } else { pieces.piece(id) };
        self.first = false;
        match (pieces.join, kind) {
            (Join::Bytes, _) => {
                if self.pending.is_empty() {
                    let kept = decode_lossy(piece, |text| self.strip_into(text, out));
                    self.pending.extend_from_slice(&piece[piece.len() - kept..]);
                } else {
                    let mut bytes = std::mem::take(&mut self.pending);
                    bytes.extend_from_slice(piece);
                    let kept = decode_lossy(&bytes, |text| self.strip_into(text, out));
                    bytes.drain(..bytes.len() - kept);
                    self.pending = bytes;
                }
            }
            (Join::Text, PieceKind::RunByte) => self.push_run_byte(piece, out),
            (Join::Text, PieceKind::Piece | PieceKind::Missing) => {
                self.end_run(out);
                let text = std::str::from_utf8(piece).expect("pieces were made from strings");
                self.strip_into(text, out);
            }
        }
    }

    fn finish(&mut self, join: Join, out: &mut String) {
        match join {
            Join::Bytes => {
                if !self.pending.is_empty() {
                    self.pending.clear();
                    self.strip_into(REPLACEMENT, out);
                }
            }
            Join::Text => self.end_run(out),
        }
    }

    fn push_run_byte(&mut self, byte: &[u8], out: &mut String) {
        if self.broken_run {
            self.strip_into(REPLACEMENT, out);
            return;
        }
        self.pending.extend_from_slice(byte);
        match std::str::from_utf8(&self.pending) {
            Ok(_) if self.pending.len() < RUN_BYTES => {}
            Ok(_) => self.end_run(out),
            Err(e) if e.error_len().is_none() => {} // a character began; at most 3 bytes over the bound
            Err(_) => {
                self.broken_run = true;
                for _ in 0..self.pending.len() {
                    self.strip_into(REPLACEMENT, out);
                }
                self.pending.clear();
            }
        }
    }

    /// The run of byte tokens is complete.
    fn end_run(&mut self, out: &mut String) {
        self.broken_run = false;
        let run = std::mem::take(&mut self.pending);
        match std::str::from_utf8(&run) {
            Ok(text) => self.strip_into(text, out),
            Err(_) => run.iter().for_each(|_| self.strip_into(REPLACEMENT, out)),
        }
        self.pending = run;
        self.pending.clear();
    }

    fn strip_into(&mut self, mut text: &str, out: &mut String) {
        while let Some((c, left)) = self.strip {
            match text.chars().next() {
                None => return,
                Some(next) if next == c && left > 0 => {
                    text = &text[c.len_utf8()..];
                    self.strip = Some((c, left - 1));
                }
                Some(_) => self.strip = None,
            }
        }
        out.push_str(text);
    }
}

const REPLACEMENT: &str = "\u{FFFD}";

/// Passes on the text in `bytes` as `String::from_utf8_lossy` would, and returns how many bytes at the end began a
/// character that may still be completed.
fn decode_lossy(mut bytes: &[u8], mut emit: impl FnMut(&str)) -> usize {
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(text) => {
                emit(text);
                return 0;
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        emit(std::str::from_utf8(valid).expect("checked up to here"));
        let Some(bad) = error.error_len() else { return rest.len() };
        emit(REPLACEMENT);
        bytes = &rest[bad..];
    }
}

/// Text and exact bytes of one token on its own, for log-probabilities.
pub(crate) fn token_text(pieces: &Pieces, id: u32) -> (String, Vec<u8>) {
    let bytes = pieces.piece(id).to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}
