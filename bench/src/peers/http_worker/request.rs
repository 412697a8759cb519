//! What a request wants, read with as little work as that takes.

use std::borrow::Cow;

use serde::Deserialize;

/// Tokens of an answer whose request says no number.
const MAX_TOKENS: u32 = 16;
/// Most tokens of an answer, which is made in memory where it is not streamed.
const MOST_TOKENS: u32 = 1 << 20;
/// Headers of a request; routers add theirs.
const MOST_HEADERS: usize = 96;

/// The head of a request.
#[derive(Debug, PartialEq)]
pub(super) struct Head {
    pub(super) method: String,
    /// Without its query.
    pub(super) path: String,
    pub(super) body_bytes: usize,
}

/// Why a request cannot be read. The connection ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("not HTTP/1.1")]
    NotHttp,
    #[error("a body without Content-Length")]
    NoLength,
    #[error("the request, or the answer that it wants, is longer than this worker takes")]
    TooLong,
    #[error("the body is no request of OpenAI's API")]
    NotJson,
}

/// What an answer is made from.
#[derive(Debug, PartialEq)]
pub(super) struct Asked<'a> {
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) max_tokens: u32,
    pub(super) chat: bool,
    /// The text of the first message, or the prompt.
    pub(super) text: Cow<'a, str>,
}

/// What a path stands for.
#[derive(Debug, PartialEq)]
pub(super) enum Wanted<'a> {
    Answer(Result<Asked<'a>, Unreadable>),
    /// The prompt's tokens, for a router that does not tokenise.
    Tokens(Result<Asked<'a>, Unreadable>),
    Other,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    max_tokens: Option<u32>,
    #[serde(default)]
    max_completion_tokens: Option<u32>,
    #[serde(default, borrow)]
    messages: Vec<Message<'a>>,
    #[serde(default, borrow)]
    prompt: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Cow<'a, str>,
}

impl Head {
    /// The head at the beginning of `bytes` and its length; `None` while it is not whole.
    pub(super) fn of(bytes: &[u8]) -> Result<Option<(Self, usize)>, Unreadable> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let Ok(parsed) = request.parse(bytes) else { return Err(Unreadable::NotHttp) };
        let httparse::Status::Complete(length) = parsed else { return Ok(None) };
        let value = |name: &str| {
            let found = request.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(found.value).ok()
        };
        if value("transfer-encoding").is_some() {
            return Err(Unreadable::NoLength);
        }
        let body_bytes = value("content-length").map_or(Ok(0), |text| text.trim().parse());
        let path = request.path.unwrap_or_default();
        let head = Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: path.split('?').next().unwrap_or_default().to_owned(),
            body_bytes: body_bytes.map_err(|_| Unreadable::NotHttp)?,
        };
        Ok(Some((head, length)))
    }
}

impl<'a> Wanted<'a> {
    pub(super) fn of(head: &Head, body: &'a [u8]) -> Self {
        match (head.method.as_str(), head.path.as_str()) {
            ("POST", "/v1/chat/completions" | "/v1/completions") => Self::Answer(Asked::of(body)),
            ("POST", "/tokenize" | "/v1/chat/completions/render" | "/v1/completions/render") => {
                Self::Tokens(Asked::of(body))
            }
            _ => Self::Other,
        }
    }
}

impl<'a> Asked<'a> {
    fn of(body: &'a [u8]) -> Result<Self, Unreadable> {
        let body: Body<'a> = serde_json::from_slice(body).map_err(|_| Unreadable::NotJson)?;
        let chat = !body.messages.is_empty();
        let first = body.messages.into_iter().next().map(|message| message.content);
        let text = first.or(body.prompt).ok_or(Unreadable::NotJson)?;
        let max_tokens = body.max_completion_tokens.or(body.max_tokens).unwrap_or(MAX_TOKENS);
        if max_tokens > MOST_TOKENS {
            return Err(Unreadable::TooLong);
        }
        let usage = body.stream_options.and_then(|options| options.include_usage);
        Ok(Self {
            stream: body.stream.unwrap_or(false),
            usage: usage.unwrap_or(false),
            max_tokens: max_tokens.max(1),
            chat,
            text,
        })
    }

    /// A word is a token here.
    pub(super) fn words(&self) -> usize {
        words(&self.text)
    }
}

pub(super) fn words(text: &str) -> usize {
    text.split_ascii_whitespace().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: &str) -> Result<Asked<'_>, Unreadable> {
        Asked::of(body.as_bytes())
    }

    fn asked_tokens(body: &str) -> Result<u32, Unreadable> {
        asked(body).map(|asked| asked.max_tokens)
    }

    #[test]
    fn a_head_is_read_once_it_is_whole() {
        let text = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\ncontent-LENGTH: 12\r\n\r\n{";
        let end = text.len() - 1;
        for cut in 0..end {
            assert_eq!(Head::of(&text[..cut]), Ok(None), "{cut}");
        }
        let (method, path) = ("POST".to_owned(), "/v1/completions".to_owned());
        assert_eq!(Head::of(text), Ok(Some((Head { method, path, body_bytes: 12 }, end))));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (text, why) in [
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Unreadable::NotHttp),
            ("\u{1}\r\n\r\n", Unreadable::NotHttp),
            ("POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", Unreadable::NotHttp),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", Unreadable::NoLength),
        ] {
            assert_eq!(Head::of(text.as_bytes()), Err(why), "{text}");
        }
        for body in ["", "[]", "{", r#"{"messages": []}"#, r#"{"messages": [{"content": 3}]}"#] {
            assert_eq!(asked(body), Err(Unreadable::NotJson), "{body}");
        }
    }

    #[test]
    fn chats_and_prompts_say_what_they_want() {
        let chat = r#"{"model": "m", "messages": [{"role": "user", "content": "a b"}, {"content": "c"}],
            "max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}}"#;
        let found = asked(chat).unwrap();
        assert_eq!((found.text.as_ref(), found.words(), found.max_tokens), ("a b", 2, 5));
        assert!(found.chat && found.stream && found.usage);
        let prompt = asked(r#"{"prompt": "x\ny", "max_completion_tokens": 3, "stream": null}"#);
        let prompt = prompt.unwrap();
        assert_eq!((prompt.text.as_ref(), prompt.max_tokens), ("x\ny", 3));
        assert!(!prompt.chat && !prompt.stream && !prompt.usage);
        assert_eq!(asked(r#"{"prompt": "x"}"#).unwrap().max_tokens, MAX_TOKENS);
        let of =
            |tokens: u32| asked_tokens(&format!(r#"{{"prompt": "x", "max_tokens": {tokens}}}"#));
        assert_eq!((of(0), of(MOST_TOKENS)), (Ok(1), Ok(MOST_TOKENS)));
        assert_eq!(of(MOST_TOKENS + 1), Err(Unreadable::TooLong));
    }

    #[test]
    fn paths_are_told_apart() {
        let of = |method: &str, path: &str| {
            let head = Head { method: method.into(), path: path.into(), body_bytes: 0 };
            match Wanted::of(&head, br#"{"prompt": "x"}"#) {
                Wanted::Answer(asked) => asked.map(|_| "answer"),
                Wanted::Tokens(asked) => asked.map(|_| "tokens"),
                Wanted::Other => Ok("other"),
            }
        };
        assert_eq!(of("POST", "/v1/chat/completions"), Ok("answer"));
        assert_eq!(of("POST", "/tokenize"), Ok("tokens"));
        assert_eq!(of("GET", "/v1/chat/completions"), Ok("other"));
        assert_eq!(of("GET", "/health"), Ok("other"));
    }
}
