//! Log-probabilities in the two forms that OpenAI has for them, written straight into the body: a token is its number
//! until then.

use std::fmt;

use bytes::BytesMut;

use crate::core::frame::Ranked;
use crate::http::reply::events::{json, number};
use crate::prompt::PromptEngine;
use crate::request::ScoredToken;

/// What stands for a probability of 0, whose logarithm JSON cannot write; OpenAI's own value.
const NEVER: f64 = -9999.0;

fn finite(logprob: f64) -> f64 {
    if logprob.is_nan() { NEVER } else { logprob.max(NEVER) }
}

/// What the tokens of a model stand for.
pub(in crate::http) trait Vocabulary: fmt::Debug + Send + Sync {
    /// Bytes of a token, none for an unknown one.
    fn bytes(&self, id: u32) -> &[u8];
}

impl Vocabulary for PromptEngine {
    fn bytes(&self, id: u32) -> &[u8] {
        self.token_bytes(id)
    }
}

/// Appends a token of a chat.
pub(in crate::http) fn chat_token(
    vocabulary: &dyn Vocabulary,
    token: &ScoredToken,
    out: &mut BytesMut,
) {
    open_chat_token(vocabulary, token.id, token.logprob.unwrap_or(NEVER), out);
    out.extend_from_slice(b",\"top_logprobs\":[");
    for (i, Ranked(id, logprob)) in token.top.iter().enumerate() {
        if i > 0 {
            out.extend_from_slice(b",");
        }
        open_chat_token(vocabulary, *id, *logprob, out);
        out.extend_from_slice(b"}");
    }
    out.extend_from_slice(b"]}");
}

/// As far as tokens and their alternatives look alike.
fn open_chat_token(vocabulary: &dyn Vocabulary, id: u32, logprob: f64, out: &mut BytesMut) {
    let bytes = vocabulary.bytes(id);
    out.extend_from_slice(b"{\"token\":");
    json(out, &String::from_utf8_lossy(bytes));
    out.extend_from_slice(b",\"logprob\":");
    json(out, &finite(logprob));
    out.extend_from_slice(b",\"bytes\":");
    json(out, bytes);
}

/// Appends what a chat chunk or a choice has of these tokens.
pub(in crate::http) fn chat(
    vocabulary: &dyn Vocabulary,
    tokens: &[ScoredToken],
    out: &mut BytesMut,
) {
    out.extend_from_slice(CHAT_OPEN);
    for (i, token) in tokens.iter().enumerate() {
        if i > 0 {
            out.extend_from_slice(b",");
        }
        chat_token(vocabulary, token, out);
    }
    out.extend_from_slice(CHAT_CLOSE);
}

/// Appends a token of a prompt as vLLM has it: an object by token ids, of the token itself and of the most probable ones
/// there; null for the first token. The rank of a token that is not among those is not known, and null.
pub(in crate::http) fn prompt_token(
    vocabulary: &dyn Vocabulary,
    token: &ScoredToken,
    out: &mut BytesMut,
) {
    let Some(logprob) = token.logprob else { return out.extend_from_slice(b"null") };
    let place = token.top.iter().position(|Ranked(id, _)| *id == token.id);
    let others = token.top.iter().enumerate().filter(|(_, Ranked(id, _))| *id != token.id);
    let others = others.map(|(place, ranked)| (ranked.0, ranked.1, Some(place)));
    out.extend_from_slice(b"{");
    for (i, (id, logprob, place)) in
        [(token.id, logprob, place)].into_iter().chain(others).enumerate()
    {
        out.extend_from_slice(if i > 0 { b",\"" } else { b"\"" });
        number(out, id);
        out.extend_from_slice(b"\":{\"logprob\":");
        json(out, &finite(logprob));
        out.extend_from_slice(b",\"rank\":");
        json(out, &place.map(|place| place + 1));
        out.extend_from_slice(b",\"decoded_token\":");
        json(out, &String::from_utf8_lossy(vocabulary.bytes(id)));
        out.extend_from_slice(b"}");
    }
    out.extend_from_slice(b"}");
}

pub(in crate::http) const CHAT_OPEN: &[u8] = b"{\"content\":[";
pub(in crate::http) const CHAT_CLOSE: &[u8] = b"],\"refusal\":null}";

/// The four arrays side by side that a plain completion has, each with what stands before its first item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) enum Column {
    Tokens,
    Logprobs,
    Top,
    Offsets,
}

impl Column {
    pub(in crate::http) const ALL: [Self; 4] =
        [Self::Tokens, Self::Logprobs, Self::Top, Self::Offsets];

    pub(in crate::http) fn open(self) -> &'static [u8] {
        match self {
            Self::Tokens => b"{\"tokens\":[",
            Self::Logprobs => b"],\"token_logprobs\":[",
            Self::Top => b"],\"top_logprobs\":[",
            Self::Offsets => b"],\"text_offset\":[",
        }
    }

    /// Appends what it has of a token.
    pub(in crate::http) fn token(
        self,
        vocabulary: &dyn Vocabulary,
        token: &ScoredToken,
        offset: &mut Offset,
        out: &mut BytesMut,
    ) {
        let bytes = vocabulary.bytes(token.id);
        match self {
            Self::Tokens => name(bytes, out),
            Self::Logprobs => json(out, &token.logprob.map(finite)),
            Self::Top => match token.logprob {
                Some(logprob) => top(vocabulary, token, logprob, out),
                // The first token of a prompt has neither probability nor alternatives.
                None => out.extend_from_slice(b"null"),
            },
            Self::Offsets => {
                json(out, &offset.0);
                // Continuation bytes begin no character.
                offset.0 += bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
            }
        }
    }
}

pub(in crate::http) const COLUMNS_CLOSE: &[u8] = b"]}";

/// Characters before the next token. A token that begins inside a character counts as beginning after it.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::http) struct Offset(usize);

/// Appends what a piece of a plain completion has of these tokens.
pub(in crate::http) fn columns<'a>(
    vocabulary: &dyn Vocabulary,
    tokens: &(impl Iterator<Item = &'a ScoredToken> + Clone),
    offset: &mut Offset,
    out: &mut BytesMut,
) {
    for column in Column::ALL {
        out.extend_from_slice(column.open());
        for (i, token) in tokens.clone().enumerate() {
            if i > 0 {
                out.extend_from_slice(b",");
            }
            column.token(vocabulary, token, offset, out);
        }
    }
    out.extend_from_slice(COLUMNS_CLOSE);
}

/// The alternatives as an object. The token itself is among them, be it one of the best or not; of two that look alike
/// the better one stays.
fn top(vocabulary: &dyn Vocabulary, token: &ScoredToken, logprob: f64, out: &mut BytesMut) {
    let itself = Ranked(token.id, logprob);
    let mut seen: Vec<&[u8]> = Vec::with_capacity(token.top.len() + 1);
    out.extend_from_slice(b"{");
    for Ranked(id, logprob) in token.top.iter().chain([&itself]) {
        let bytes = vocabulary.bytes(*id);
        if seen.contains(&bytes) {
            continue;
        }
        if !seen.is_empty() {
            out.extend_from_slice(b",");
        }
        seen.push(bytes);
        name(bytes, out);
        out.extend_from_slice(b":");
        json(out, &finite(*logprob));
    }
    out.extend_from_slice(b"}");
}

/// A token as a string: its text, or what OpenAI writes for one that is no text.
fn name(bytes: &[u8], out: &mut BytesMut) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return json(out, text);
    }
    out.extend_from_slice(b"\"bytes:");
    for byte in bytes {
        out.extend_from_slice(format!("\\\\x{byte:02x}").as_bytes());
    }
    out.extend_from_slice(b"\"");
}

/// Tokens of tests: each id is a place in this list.
#[cfg(test)]
#[derive(Debug)]
pub(in crate::http) struct TestPieces(pub(in crate::http) &'static [&'static [u8]]);

#[cfg(test)]
impl Vocabulary for TestPieces {
    fn bytes(&self, id: u32) -> &[u8] {
        self.0.get(id as usize).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn token(id: u32, logprob: Option<f64>, top: Vec<Ranked>) -> ScoredToken {
        ScoredToken { id, logprob, top }
    }

    fn written(write: impl FnOnce(&mut BytesMut)) -> Value {
        let mut out = BytesMut::new();
        write(&mut out);
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn chat_tokens_carry_bytes_and_alternatives() {
        let words = TestPieces(&[b"a", b"b"]);
        let tokens = [token(0, Some(-0.5), vec![Ranked(1, f64::NEG_INFINITY)])];
        let got = written(|out| chat(&words, &tokens, out));
        let want = json!({"refusal": null, "content": [{"token": "a", "logprob": -0.5, "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": [98]}]}]});
        assert_eq!(got, want);
    }

    #[test]
    fn plain_tokens_have_offsets_in_characters() {
        let words = TestPieces(&[b"\xc3\xa9", b"\xf0\x9f", b"\x98\x80", b"z", b"x", b"x"]);
        let tokens = [
            token(0, None, vec![]),
            token(1, Some(-1.0), vec![Ranked(4, -0.1), Ranked(5, -0.2)]),
            token(2, Some(f64::NAN), vec![]),
            token(3, Some(-2.0), vec![]),
        ];
        let got = written(|out| columns(&words, &tokens.iter(), &mut Offset::default(), out));
        assert_eq!(got["text_offset"], json!([0, 1, 2, 2]));
        assert_eq!(got["tokens"], json!(["é", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "z"]));
        assert_eq!(got["token_logprobs"], json!([null, -1.0, -9999.0, -2.0]));
        assert_eq!(got["top_logprobs"][0], json!(null));
        assert_eq!(got["top_logprobs"][1], json!({"x": -0.1, "bytes:\\xf0\\x9f": -1.0}));
    }

    #[test]
    fn no_tokens_are_empty_lists() {
        let none =
            written(|out| columns(&TestPieces(&[]), &[].iter(), &mut Offset::default(), out));
        let want =
            json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []});
        assert_eq!(none, want);
    }
}
