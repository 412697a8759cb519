//! OpenAI's chunks with choices: those of chats and of plain completions.
//!
//! The bytes of an event that stay the same through a stream (id, model, time) are made once; each event then is that
//! prefix, the text as a JSON string, and a suffix, appended to a buffer that the stream keeps.

use bytes::BytesMut;
use serde::Serialize;

use super::annotations::{Opening, metrics};
use super::{EventWriter, comment, event, json};
use crate::error::RouteError;
use crate::http::parse::params::Delivery;
use crate::http::reply::reject::Reject;
use crate::http::reply::{AnswerHead, FINGERPRINT, UsageBody, token_ids};
use crate::request::{Delta, Usage};

/// How a delta of a choice looks as OpenAI's chunks.
pub(in crate::http) trait Events: Send + 'static {
    /// Appends the events of one delta, each between `envelope.open` and `envelope.close`.
    ///
    /// # Errors
    /// The answer fails with it.
    fn delta(
        &mut self,
        delta: &Delta,
        usage: Usage,
        envelope: &Envelope,
        out: &mut BytesMut,
    ) -> Result<(), RouteError>;

    /// The usage with the tokens of reasoning, where they are known.
    fn with_reasoning(&self, usage: Usage) -> Usage {
        usage
    }

    /// Whether the choice of the last delta is over before its worker is.
    fn ends_early(&mut self) -> bool {
        false
    }

    /// The constant part.
    fn envelope(&self, delivery: Delivery) -> Envelope;
}

/// The part that all events of a stream share.
#[derive(Debug)]
pub(in crate::http) struct Envelope {
    prefix: Vec<u8>,
    delivery: Delivery,
}

impl Envelope {
    pub(in crate::http) fn new(head: &AnswerHead, object: &str, delivery: Delivery) -> Self {
        #[derive(Serialize)]
        struct Fields<'a> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
            service_tier: &'a str,
            system_fingerprint: &'a str,
        }
        let mut prefix = BytesMut::from(&b"data: "[..]);
        let fields = Fields {
            id: &head.id,
            object,
            created: head.created,
            model: &head.model,
            service_tier: "default",
            system_fingerprint: FINGERPRINT,
        };
        json(&mut prefix, &fields);
        prefix.truncate(prefix.len() - 1); // its closing brace
        prefix.extend_from_slice(b",\"choices\":[");
        Self { prefix: prefix.to_vec(), delivery }
    }

    /// Up to the choice.
    pub(in crate::http) fn open(&self, out: &mut BytesMut) {
        out.extend_from_slice(&self.prefix);
    }

    /// From the choice on.
    pub(in crate::http) fn close(&self, usage: Usage, out: &mut BytesMut) {
        self.close_with(None, usage, out);
    }

    /// The same, with the ids of the prompt.
    pub(in crate::http) fn close_with(
        &self,
        prompt_ids: Option<&[u32]>,
        usage: Usage,
        out: &mut BytesMut,
    ) {
        out.extend_from_slice(b"]");
        token_ids::field(token_ids::OF_PROMPT, prompt_ids, out);
        if self.delivery.running_usage {
            out.extend_from_slice(b",\"usage\":");
            json(out, &UsageBody::from(usage));
        } else if self.delivery.include_usage {
            out.extend_from_slice(b",\"usage\":null");
        }
        out.extend_from_slice(b"}\n\n");
    }

    /// The event with the final usage, without choices.
    fn usage(&self, usage: Usage, out: &mut BytesMut) {
        self.open(out);
        out.extend_from_slice(b"],\"usage\":");
        json(out, &UsageBody::from(usage));
        out.extend_from_slice(b"}\n\n");
    }
}

/// Chunks with choices, which end with `[DONE]`: those of chats and of plain completions.
#[derive(Debug)]
pub(in crate::http) struct ChoiceChunks<S> {
    shape: S,
    envelope: Envelope,
    /// What is told before the first event.
    opening: Option<Box<Opening>>,
}

impl<S: Events> ChoiceChunks<S> {
    pub(in crate::http) fn new(shape: S, delivery: Delivery) -> Self {
        Self { envelope: shape.envelope(delivery), shape, opening: None }
    }

    /// This is told before the first event.
    pub(in crate::http) fn after(mut self, opening: Option<Box<Opening>>) -> Self {
        self.opening = opening;
        self
    }
}

impl<S: Events> EventWriter for ChoiceChunks<S> {
    fn delta(&mut self, delta: &Delta, usage: Usage, out: &mut BytesMut) -> Result<(), RouteError> {
        if let Some(opening) = self.opening.take() {
            out.extend_from_slice(&opening.events);
        }
        self.shape.delta(delta, usage, &self.envelope, out)
    }

    fn with_reasoning(&self, usage: Usage) -> Usage {
        self.shape.with_reasoning(usage)
    }

    fn ends_early(&mut self) -> bool {
        self.shape.ends_early()
    }

    fn end(&mut self, usage: Usage, remark: Option<String>, out: &mut BytesMut) {
        if self.envelope.delivery.include_usage {
            self.envelope.usage(usage, out);
        }
        if self.envelope.delivery.annotations.llm_metrics {
            metrics(usage, out);
        }
        comment(remark, out);
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn failed(&mut self, error: RouteError, out: &mut BytesMut) {
        // and no [DONE]: the answer is not whole
        event(out, "error", &Reject::from(error).body());
    }
}
