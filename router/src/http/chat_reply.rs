//! The answer of `/v1/chat/completions`: `chat.completion`, and `chat.completion.chunk` in a stream.

use bytes::BytesMut;
use serde::Serialize;

use crate::http::events::{Envelope, Events, json, number};
use crate::http::logprobs::ChatLogprobs;
use crate::http::params::Delivery;
use crate::http::reply::{Choice, FINGERPRINT, Head, UsageBody, Whole, finish_reason};
use crate::request::{Delta, Usage};

/// How one chat answer looks.
#[derive(Debug)]
pub(super) struct ChatReply {
    head: Head,
    logprobs: bool,
    /// Choices whose first chunk, the one with the role, was sent.
    begun: Vec<bool>,
}

impl ChatReply {
    pub(super) fn new(head: Head, n: u32, logprobs: bool) -> Self {
        Self { head, logprobs, begun: vec![false; n as usize] }
    }
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceBody<'a>>,
    usage: UsageBody,
    service_tier: &'static str,
    system_fingerprint: &'static str,
}

#[derive(Serialize)]
struct ChoiceBody<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

impl Whole for ChatReply {
    fn whole(self, choices: Vec<Choice>, usage: Usage) -> serde_json::Result<Vec<u8>> {
        let choices = choices.iter().enumerate().map(|(index, choice)| ChoiceBody {
            index,
            message: Message { role: "assistant", content: &choice.text, refusal: None },
            logprobs: self.logprobs.then(|| ChatLogprobs::of(&choice.tokens)),
            finish_reason: choice.finish.map(finish_reason),
        });
        serde_json::to_vec(&Body {
            id: &self.head.id,
            object: "chat.completion",
            created: self.head.created,
            model: &self.head.model,
            choices: choices.collect(),
            usage: usage.into(),
            service_tier: "default",
            system_fingerprint: FINGERPRINT,
        })
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
                if self.logprobs {
                    json(out, &ChatLogprobs::of(&delta.tokens));
                } else {
                    out.extend_from_slice(b"null");
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
    use crate::request::FinishReason;

    fn events(deltas: &[Delta], delivery: Delivery) -> String {
        let head = Head { id: "chatcmpl-1".into(), created: 7, model: "m\"x".into() };
        let mut reply = ChatReply::new(head, 2, false);
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
