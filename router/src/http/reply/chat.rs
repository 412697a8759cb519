//! The answer of `/v1/chat/completions`: `chat.completion`, and `chat.completion.chunk` in a stream.

use std::sync::Arc;

use bytes::BytesMut;

use crate::http::parse::params::Delivery;
use crate::http::reply::AnswerHead;
use crate::http::reply::events::{Envelope, Events, json, number};
use crate::http::reply::logprobs::{self, Vocabulary};
use crate::http::reply::whole::Shape;
use crate::request::{Delta, ScoredToken, Usage};

/// How one chat answer looks.
#[derive(Debug)]
pub(in crate::http) struct ChatReply {
    head: AnswerHead,
    /// What its tokens stand for, if they are sent with their log-probabilities.
    logprobs: Option<Arc<dyn Vocabulary>>,
    /// Choices whose first chunk, the one with the role, was sent.
    begun: Vec<bool>,
}

impl ChatReply {
    pub(in crate::http) fn new(
        head: AnswerHead,
        n: u32,
        logprobs: Option<Arc<dyn Vocabulary>>,
    ) -> Self {
        Self { head, logprobs, begun: vec![false; n as usize] }
    }
}

impl Shape for ChatReply {
    const OBJECT: &'static str = "chat.completion";

    fn head(&self) -> &AnswerHead {
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
                json(out, finish.as_str());
            });
        }
    }
}

#[cfg(test)]
mod tests;
