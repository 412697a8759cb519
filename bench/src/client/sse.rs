//! Server-sent events as they come off a socket: whole lines, whatever the chunk borders, and what each event means.

use serde_json::Value;

/// What one `data:` line says.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    /// Text of at least one token.
    Tokens,
    /// A role, an end, or a usage still without numbers: nothing that a person would see.
    Nothing,
    /// The counts at the end, and whether the event carries text too.
    Usage(Usage, bool),
    Done,
    /// The server says that the answer failed.
    Error(String),
}

/// Token counts of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) cached_tokens: Option<u32>,
}

impl Usage {
    pub(crate) fn of(body: &Value) -> Self {
        let count = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let usage = &body["usage"];
        Self {
            prompt_tokens: count(&usage["prompt_tokens"]).unwrap_or(0),
            completion_tokens: count(&usage["completion_tokens"]).unwrap_or(0),
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        }
    }
}

impl Event {
    /// `None` for lines that are no data: comments, other fields, the blank lines between events.
    pub(crate) fn of(line: &[u8]) -> Option<Self> {
        let data = line.strip_prefix(b"data:")?;
        let data = data.strip_prefix(b" ").unwrap_or(data);
        if data == b"[DONE]" {
            return Some(Self::Done);
        }
        let has = |needle: &[u8]| data.windows(needle.len()).any(|window| window == needle);
        // Only events that are rare are parsed: parsing each would measure this client. A quote inside of text is
        // escaped, so these cannot be found in what the model said.
        if has(b"\"error\"") {
            return Some(Self::Error(String::from_utf8_lossy(data).into_owned()));
        }
        let empty = has(b"\"delta\":{}") || has(b"\"content\":\"\"") || has(b"\"text\":\"\"");
        let empty = empty && !has(b"\"reasoning");
        if has(b"\"prompt_tokens\":")
            && let Ok(body) = serde_json::from_slice::<Value>(data)
        {
            let choices = body["choices"].as_array().is_some_and(|choices| !choices.is_empty());
            return Some(Self::Usage(Usage::of(&body), choices && !empty));
        }
        Some(if empty { Self::Nothing } else { Self::Tokens })
    }
}

/// Splits a byte stream into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that `data` completes, without their line ends.
    pub(crate) fn push(&mut self, data: &[u8]) -> Vec<Vec<u8>> {
        self.rest.extend_from_slice(data);
        let mut lines = Vec::new();
        let mut begin = 0;
        while let Some(length) = self.rest[begin..].iter().position(|&b| b == b'\n') {
            let line = &self.rest[begin..begin + length];
            lines.push(line.strip_suffix(b"\r").unwrap_or(line).to_vec());
            begin += length + 1;
        }
        self.rest.drain(..begin);
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_whatever_the_borders() {
        let text = b"data: a\r\n\r\ndata: bc\n\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut got = lines.push(&text[..cut]);
            got.extend(lines.push(&text[cut..]));
            assert_eq!(got, [&b"data: a"[..], b"", b"data: bc", b""]);
        }
    }

    #[test]
    fn events_are_told_apart() {
        let of = |data: &str| Event::of(data.as_bytes());
        assert_eq!(of(""), None);
        assert_eq!(of(": a comment"), None);
        assert_eq!(of("event: message"), None);
        assert_eq!(of("data: [DONE]"), Some(Event::Done));
        assert_eq!(of("data:[DONE]"), Some(Event::Done));
        for text in [
            r#"data: {"choices":[{"delta":{"content":"say \"error\""}}]}"#,
            r#"data: {"choices":[{"text":" x","finish_reason":"length"}],"usage":null}"#,
            r#"data: {"choices":[{"delta":{"content":"","reasoning_content":"hm"}}]}"#,
        ] {
            assert_eq!(of(text), Some(Event::Tokens), "{text}");
        }
        for nothing in [
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            r#"data: {"choices":[{"text":"","finish_reason":"stop"}]}"#,
        ] {
            assert_eq!(of(nothing), Some(Event::Nothing), "{nothing}");
        }
        let error = r#"{"error":{"message":"the worker left"}}"#;
        assert_eq!(of(&format!("data: {error}")), Some(Event::Error(error.into())));
    }

    #[test]
    fn usage_is_read_with_what_was_cached() {
        let line = r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}"#;
        let usage = Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: Some(3) };
        assert_eq!(Event::of(line.as_bytes()), Some(Event::Usage(usage, false)));
        let with_text =
            r#"data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"completion_tokens":4}}"#;
        let usage = Usage { cached_tokens: None, ..usage };
        assert_eq!(Event::of(with_text.as_bytes()), Some(Event::Usage(usage, true)));
    }
}
