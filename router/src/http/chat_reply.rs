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
