//! What each token id contributes to the text: the tokenizer's decoder, taken apart once per model.
//!
//! `tokenizers` decodes a whole sequence. Nearly all of its decoders work token by token and differ only for the
//! first token, so their work is done here for every id, and [`super::detokenize`] joins the results as they stream.

use std::collections::HashMap;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::strip::Strip;
use tokenizers::{Decoder as _, Tokenizer};

use super::PromptError;

/// The pieces of every token id of a model.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Piece of id `i` is `bytes[starts[i]..starts[i + 1]]`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    kinds: Vec<PieceKind>,
    special: Vec<bool>,
    /// Pieces as the first token of a text, where the decoder treats that one differently.
    first: Option<FirstPieces>,
    /// How pieces become text.
    pub(crate) join: Join,
    /// Leading characters that are stripped from the whole text.
    pub(crate) strip: Option<(char, usize)>,
}

#[derive(Debug)]
struct FirstPieces {
    bytes: Vec<u8>,
    starts: Vec<u32>,
}

/// No tokenizer is near it; a wrong id must not become a huge table.
const MAX_IDS: usize = 1 << 24;

/// What a token is to the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// No such id: decoders skip it.
    Missing,
    Piece,
    /// One byte of a run that is text only together (`<0x0A>` of SentencePiece). Its piece is that byte.
    RunByte,
}

/// How pieces become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Join {
    /// Pieces are bytes; the text is their UTF-8, invalid parts replaced.
    Bytes,
    /// Pieces are text; runs of [`PieceKind::RunByte`] are text if the whole run is UTF-8.
    Text,
}

/// The decoder's steps in the order in which they apply.
#[derive(Default)]
struct Steps<'a> {
    per_token: Vec<&'a DecoderWrapper>,
    byte_level: bool,
    byte_fallback: bool,
    fused: bool,
    strip: Option<&'a Strip>,
}

impl Pieces {
    /// # Errors
    /// [`PromptError::Decoder`] for a decoder whose result for one token depends on those after it.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, PromptError> {
        let mut steps = Steps::default();
        if let Some(decoder) = tokenizer.get_decoder() {
            steps.add(decoder)?;
        }
        let has_decoder = tokenizer.get_decoder().is_some();
        let vocab = tokenizer.get_vocab(true);
        let len = vocab.values().max().map_or(0, |max| *max as usize + 1);
        if len > MAX_IDS {
            return Err(PromptError::Decoder(format!("token id {} is out of range", len - 1)));
        }
        let mut pieces = Self {
            bytes: Vec::new(),
            starts: vec![0],
            kinds: Vec::with_capacity(len),
            special: Vec::with_capacity(len),
            first: None,
            join: if steps.byte_level { Join::Bytes } else { Join::Text },
            strip: steps.strip.map(|s| (s.content, s.start)),
        };
        let mut first = FirstPieces { bytes: Vec::new(), starts: vec![0] };
        let alphabet = byte_alphabet();
        for id in 0..u32::try_from(len).expect("ids are u32") {
            let token = tokenizer.id_to_token(id);
            let added = tokenizer.get_added_vocabulary();
            pieces.special.push(token.as_deref().is_some_and(|t| added.is_special_token(t)));
            let kind = match token {
                None => PieceKind::Missing,
                Some(token) => {
                    let (lead, rest) = if has_decoder {
                        steps.piece(&token)?
                    } else {
                        (token.clone(), format!(" {token}")) // without a decoder tokens are words
                    };
                    // A run's first byte is the same as its others: `Steps::add` lets no step tell them apart.
                    if let Some(byte) = steps.byte_fallback.then(|| run_byte(&rest)).flatten() {
                        pieces.bytes.push(byte);
                        PieceKind::RunByte
                    } else {
                        if steps.byte_level {
                            push_bytes(&alphabet, &rest, &mut pieces.bytes);
                            push_bytes(&alphabet, &lead, &mut first.bytes);
                        } else {
                            pieces.bytes.extend_from_slice(rest.as_bytes());
                            first.bytes.extend_from_slice(lead.as_bytes());
                        }
                        PieceKind::Piece
                    }
                }
            };
            pieces.kinds.push(kind);
            pieces.starts.push(offset(&pieces.bytes)?);
            first.starts.push(offset(&first.bytes)?);
        }
        pieces.first = (!steps.first_is_like_rest(has_decoder)).then_some(first);
        Ok(pieces)
    }

    /// What `id` is; ids outside the vocabulary are missing.
    pub(crate) fn kind(&self, id: u32) -> PieceKind {
        self.kinds.get(id as usize).copied().unwrap_or(PieceKind::Missing)
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Bytes of a token that is not the first of its text; empty for a missing id.
    pub(crate) fn piece(&self, id: u32) -> &[u8] {
        slice(&self.bytes, &self.starts, id)
    }

    /// Bytes of a token that is the first of its text.
    pub(crate) fn first_piece(&self, id: u32) -> &[u8] {
        match &self.first {
            Some(first) if self.kind(id) == PieceKind::Piece => {
                slice(&first.bytes, &first.starts, id)
            }
            _ => self.piece(id),
        }
    }
}

fn slice<'a>(bytes: &'a [u8], starts: &[u32], id: u32) -> &'a [u8] {
    match starts.get(id as usize..).and_then(|s| s.get(..2)) {
        Some(&[start, end]) => &bytes[start as usize..end as usize],
        _ => &[],
    }
}

fn offset(bytes: &[u8]) -> Result<u32, PromptError> {
    u32::try_from(bytes.len()).map_err(|_| PromptError::Decoder("pieces of 4 GiB".to_owned()))
}

impl<'a> Steps<'a> {
    /// Adds `decoder` after the steps so far, if the result still streams.
    fn add(&mut self, decoder: &'a DecoderWrapper) -> Result<(), PromptError> {
        let start_of_text = self.byte_level || self.fused;
        match decoder {
            DecoderWrapper::Sequence(sequence) => {
                return sequence.get_decoders().iter().try_for_each(|d| self.add(d));
            }
            DecoderWrapper::Replace(_)
            | DecoderWrapper::WordPiece(_)
            | DecoderWrapper::Metaspace(_)
                if !start_of_text && !self.byte_fallback =>
            {
                self.per_token.push(decoder);
            }
            DecoderWrapper::Strip(strip) if start_of_text => {
                if strip.stop > 0 || self.strip.is_some() {
                    return Err(unsupported("Strip at the end of the text"));
                }
                self.strip = Some(strip);
            }
            DecoderWrapper::Strip(strip) if !self.byte_fallback && strip.stop == 0 => {
                self.per_token.push(decoder);
            }
            DecoderWrapper::ByteLevel(_) if !start_of_text && !self.byte_fallback => {
                self.byte_level = true;
            }
            DecoderWrapper::ByteFallback(_) if !start_of_text && self.first_is_like_rest(true) => {
                self.byte_fallback = true;
            }
            DecoderWrapper::Fuse(_) => self.fused = true,
            DecoderWrapper::ByteLevel(_) => {
                return Err(unsupported("ByteLevel after another step"));
            }
            DecoderWrapper::ByteFallback(_) => {
                return Err(unsupported("ByteFallback after another step"));
            }
            DecoderWrapper::Replace(_) => {
                return Err(unsupported("Replace after ByteFallback or Fuse"));
            }
            DecoderWrapper::WordPiece(_) => return Err(unsupported("WordPiece after Fuse")),
            DecoderWrapper::Metaspace(_) => {
                return Err(unsupported("Metaspace after ByteFallback or Fuse"));
            }
            DecoderWrapper::Strip(_) => return Err(unsupported("Strip of the end of each token")),
            DecoderWrapper::BPE(_) => return Err(unsupported("BPEDecoder")),
            DecoderWrapper::CTC(_) => return Err(unsupported("CTC")),
        }
        Ok(())
    }

    /// The token after the steps that look at one token: as the first of a text, and as a later one.
    fn piece(&self, token: &str) -> Result<(String, String), PromptError> {
        let decode = |mut tokens: Vec<String>| {
            for step in &self.per_token {
                tokens =
                    step.decode_chain(tokens).map_err(|e| PromptError::Decoder(e.to_string()))?;
            }
            tokens.pop().ok_or_else(|| unsupported("steps that drop tokens"))
        };
        let lead = decode(vec![token.to_owned()])?;
        let rest = decode(vec!["a".to_owned(), token.to_owned()])?;
        Ok((lead, rest))
    }

    fn first_is_like_rest(&self, has_decoder: bool) -> bool {
        has_decoder
            && !self.per_token.iter().any(|step| {
                matches!(step, DecoderWrapper::WordPiece(_) | DecoderWrapper::Metaspace(_))
            })
    }
}

fn unsupported(what: &str) -> PromptError {
    PromptError::Decoder(format!("{what} does not stream"))
}

/// The byte that `ByteFallback` reads in a token such as `<0x0A>`.
fn run_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if token.len() != 6 {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// The characters that stand for bytes in byte-level tokens, as GPT-2 defined them.
pub(crate) fn byte_alphabet() -> HashMap<char, u8> {
    let plain = |b: &u8| matches!(*b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let (plain, rest): (Vec<u8>, Vec<u8>) = (0..=255).partition(plain);
    let shifted = rest.into_iter().zip('\u{100}'..).map(|(byte, c)| (c, byte));
    plain.into_iter().map(|byte| (char::from(byte), byte)).chain(shifted).collect()
}

/// Bytes of a byte-level token. Added tokens may hold other characters; those stand for themselves.
fn push_bytes(alphabet: &HashMap<char, u8>, token: &str, out: &mut Vec<u8>) {
    let len = out.len();
    for c in token.chars() {
        let Some(byte) = alphabet.get(&c) else {
            out.truncate(len);
            out.extend_from_slice(token.as_bytes());
            return;
        };
        out.push(*byte);
    }
}
