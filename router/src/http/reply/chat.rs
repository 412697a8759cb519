//! The answer of `/v1/chat/completions`: `chat.completion`, and `chat.completion.chunk` in a stream.

use std::sync::Arc;

use bytes::BytesMut;

use crate::http::parse::params::Delivery;
use crate::http::reply::events::{Envelope, Events, json, number};
use crate::http::reply::logprobs::{self, Vocabulary};
use crate::http::reply::whole::Shape;
use crate::http::reply::{Head, finish_reason};
use crate::request::{Delta, ScoredToken, Usage};

/// How one chat answer looks.
#[derive(Debug)]
pub(in crate::http) struct ChatReply {
    head: Head,
    /// What its tokens stand for, if they are sent with their log-probabilities.
    logprobs: Option<Arc<dyn Vocabulary>>,
    /// Choices whose first chunk, the one with the role, was sent.
    begun: Vec<bool>,
}

impl ChatReply {
    pub(in crate::http) fn new(head: Head, n: u32, logprobs: Option<Arc<dyn Vocabulary>>) -> Self {
        Self { head, logprobs, begun: vec![false; n as usize] }
    }
}

impl Shape for ChatReply {
    const OBJECT: &'static str = "chat.completion";

    fn head(&self) -> &Head {
        &self.head
    }

    fn text(&mut self, _index: usize, text: &str, out: &mut BytesMut) {
        out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
        json(out, text);
        out.extend_from_slice(b",\"refusal\":null},");
    }

    fn columns(&self) -> usize {
        usize::from(self.logprobs.is_some())
    }

    fn open(&self, column: usize, out: &mut BytesMut) {
        out.extend_from_slice(if column == 0 { logprobs::CHAT_OPEN } else { logprobs::CHAT_CLOSE });
    }

    fn token(&mut self, _column: usize, token: &ScoredToken, out: &mut BytesMut) {
        if let Some(vocabulary) = &self.logprobs {
            logprobs::chat_token(vocabulary.as_ref(), token, out);
        }
    }
}

impl Events for ChatReply {
    fn envelope(&self, delivery: Delivery) -> Envelope {
        Envelope::new(&self.head, "chat.completion.chunk", delivery)
    }

    fn delta(&mut self, delta: &Delta, usage: Usage, envelope: &Envelope, out: &mut BytesMut) {
        let mut event = |fields: &dyn Fn(&mut BytesMut)| {
            envelope.open(out);
            out.extend_from_slice(b"{\"index\":");
            number(out, delta.choice);
            out.extend_from_slice(b",\"delta\":");
            fields(out);
            out.extend_from_slice(b"}");
            envelope.close(usage, out);
        };
        if let Some(begun) = self.begun.get_mut(delta.choice as usize)
            && !std::mem::replace(begun, true)
        {
            event(&|out| {
                out.extend_from_slice(
                    b"{\"role\":\"assistant\",\"content\":\"\",\"refusal\":null},\
                      \"logprobs\":null,\"finish_reason\":null",
                );
            });
        }
        if !delta.text.is_empty() || !delta.tokens.is_empty() {
            event(&|out| {
                out.extend_from_slice(b"{\"content\":");
                json(out, &delta.text);
                out.extend_from_slice(b"},\"logprobs\":");
                match &self.logprobs {
                    Some(vocabulary) => logprobs::chat(vocabulary.as_ref(), &delta.tokens, out),
                    None => out.extend_from_slice(b"null"),
                }
                out.extend_from_slice(b",\"finish_reason\":null");
            });
        }
        if let Some(finish) = delta.finish {
            event(&|out| {
                out.extend_from_slice(b"{},\"logprobs\":null,\"finish_reason\":");
                json(out, finish_reason(finish));
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::reply::FINGERPRINT;
    use crate::request::FinishReason;

    fn events(deltas: &[Delta], delivery: Delivery) -> String {
        let head = Head { id: "chatcmpl-1".into(), created: 7, model: "m\"x".into() };
        let mut reply = ChatReply::new(head, 2, None);
        let envelope = reply.envelope(delivery);
        let mut out = BytesMut::new();
        let usage = Usage {
            prompt_tokens: 3,
            completion_tokens: 1,
            cached_tokens: 2,
            accepted_drafts: 1,
            rejected_drafts: 4,
        };
        for delta in deltas {
            reply.delta(delta, usage, &envelope, &mut out);
        }
        String::from_utf8(out.to_vec()).unwrap().replace(FINGERPRINT, "FP")
    }

    fn delta(choice: u32, text: &str, finish: Option<FinishReason>) -> Delta {
        Delta { choice, text: text.into(), finish, ..Delta::default() }
    }

    const PREFIX: &str = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"x","service_tier":"default","system_fingerprint":"FP","choices":["#;

    #[test]
    fn a_choice_is_its_role_its_text_and_its_end() {
        let end = delta(0, "b\n", Some(FinishReason::Length));
        let got = events(&[delta(0, "a", None), delta(0, "", None), end], Delivery::default());
        let want = [
            r#"{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}"#,
            r#"{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}"#,
            r#"{"index":0,"delta":{"content":"b\n"},"logprobs":null,"finish_reason":null}"#,
            r#"{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}"#,
        ];
        let want = want.map(|choice| format!("{PREFIX}{choice}]}}\n\n"));
        assert_eq!(got, want.concat());
    }

    #[test]
    fn every_choice_begins_with_its_role() {
        let got = events(&[delta(1, "a", None), delta(0, "b", None)], Delivery::default());
        assert_eq!(got.matches("\"role\":\"assistant\"").count(), 2);
        assert!(got.find("\"index\":1").unwrap() < got.find("\"index\":0").unwrap());
    }

    #[test]
    fn usage_is_null_until_the_end_or_runs_along() {
        let with_usage = Delivery { stream: true, include_usage: true, running_usage: false };
        assert_eq!(
            events(&[delta(0, "a", None)], with_usage).matches("],\"usage\":null}").count(),
            2
        );
        let running = Delivery { running_usage: true, ..with_usage };
        let want = r#"],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"accepted_prediction_tokens":1,"rejected_prediction_tokens":4}}}"#;
        assert_eq!(events(&[delta(0, "a", None)], running).matches(want).count(), 2);
    }
}
