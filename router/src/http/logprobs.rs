//! Log-probabilities in the two forms that OpenAI has for them.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::request::TokenText;

/// What stands for a probability of 0, whose logarithm JSON cannot write; OpenAI's own value.
const NEVER: f64 = -9999.0;

fn finite(logprob: f64) -> f64 {
    if logprob.is_nan() { NEVER } else { logprob.max(NEVER) }
}

/// `logprobs` of a chat choice.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken<'a> {
    token: &'a str,
    logprob: f64,
    bytes: &'a [u8],
    top_logprobs: Vec<TopToken<'a>>,
}

#[derive(Debug, Serialize)]
struct TopToken<'a> {
    token: &'a str,
    logprob: f64,
    bytes: &'a [u8],
}

impl<'a> ChatLogprobs<'a> {
    pub(super) fn of(tokens: &'a [TokenText]) -> Self {
        // a token of which its worker said nothing has none to show
        let known = tokens.iter().filter(|token| token.logprob.is_some());
        let content = known.map(|token| ChatToken {
            token: &token.text,
            logprob: token.logprob.map_or(NEVER, finite),
            bytes: &token.bytes,
            top_logprobs: token.top.iter().map(TopToken::of).collect(),
        });
        Self { content: content.collect(), refusal: None }
    }
}

impl<'a> TopToken<'a> {
    fn of(token: &'a TokenText) -> Self {
        let logprob = token.logprob.map_or(NEVER, finite);
        Self { token: &token.text, logprob, bytes: &token.bytes }
    }
}

/// `logprobs` of a plain completion: four arrays side by side.
#[derive(Debug, Default, Serialize)]
pub(super) struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

/// Characters before the next token. A token that begins inside a character counts as beginning after it.
#[derive(Debug, Clone, Default)]
pub(super) struct Offset(usize);

impl LegacyLogprobs {
    pub(super) fn push(&mut self, token: &TokenText, offset: &mut Offset) {
        let logprob = token.logprob.map(finite);
        // The token itself is among the alternatives, be it one of the best or not. The first token of a prompt has
        // neither probability nor alternatives.
        let top = logprob.map(|logprob| {
            let mut top = Map::new();
            for one in &token.top {
                let logprob = one.logprob.map_or(NEVER, finite);
                top.entry(name(one)).or_insert_with(|| logprob.into());
            }
            top.entry(name(token)).or_insert_with(|| logprob.into());
            top
        });
        self.tokens.push(name(token));
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(top);
        self.text_offset.push(offset.0);
        // Continuation bytes begin no character.
        offset.0 += token.bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
    }
}

/// A token as text, or as OpenAI writes one that is no text.
fn name(token: &TokenText) -> String {
    if std::str::from_utf8(&token.bytes).is_ok() {
        return token.text.clone();
    }
    let mut name = String::from("bytes:");
    for byte in &token.bytes {
        name.push_str(&format!("\\x{byte:02x}"));
    }
    name
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn token(bytes: &[u8], logprob: Option<f64>, top: Vec<TokenText>) -> TokenText {
        let text = String::from_utf8_lossy(bytes).into_owned();
        TokenText { id: 0, text, bytes: bytes.to_vec(), logprob, top }
    }

    #[test]
    fn chat_tokens_carry_bytes_and_alternatives() {
        let tokens = [token(b"a", Some(-0.5), vec![token(b"b", Some(f64::NEG_INFINITY), vec![])])];
        let got = serde_json::to_value(ChatLogprobs::of(&tokens)).unwrap();
        let want = json!({"refusal": null, "content": [{"token": "a", "logprob": -0.5, "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": [98]}]}]});
        assert_eq!(got, want);
    }

    #[test]
    fn legacy_tokens_have_offsets_in_characters() {
        let mut logprobs = LegacyLogprobs::default();
        let mut offset = Offset::default();
        let smile = "😀".as_bytes();
        logprobs.push(&token("é".as_bytes(), None, vec![]), &mut offset);
        logprobs.push(
            &token(&smile[..2], Some(-1.0), vec![token(b"x", Some(-0.1), vec![])]),
            &mut offset,
        );
        logprobs.push(&token(&smile[2..], Some(-1.0), vec![]), &mut offset);
        logprobs.push(&token(b"z", Some(-2.0), vec![]), &mut offset);
        let got = serde_json::to_value(logprobs).unwrap();
        assert_eq!(got["text_offset"], json!([0, 1, 2, 2]));
        assert_eq!(got["tokens"], json!(["é", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "z"]));
        assert_eq!(got["token_logprobs"], json!([null, -1.0, -1.0, -2.0]));
        assert_eq!(got["top_logprobs"][0], json!(null));
        assert_eq!(got["top_logprobs"][1], json!({"x": -0.1, "bytes:\\xf0\\x9f": -1.0}));
    }
}
