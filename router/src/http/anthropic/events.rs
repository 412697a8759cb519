//! An answer of `/v1/messages` as events: `message_start`, blocks one after the other, `message_delta`, `message_stop`.

use std::sync::Arc;

use bytes::BytesMut;
use serde::Serialize;
use serde_json::json;

use crate::error::RouteError;
use crate::http::anthropic::reply::{MessageEnd, MessageHead, Signature};
use crate::http::reply::blocks::{BlockKind, BlockOrder, BlockStep};
use crate::http::reply::events::{EventWriter, comment, event, json, number};
use crate::http::reply::parts::PartReader;
use crate::http::reply::reject::Reject;
use crate::http::reply::reject::anthropic::AnthropicError;
use crate::request::{Delta, Usage};

/// The events of one answer.
#[derive(Debug)]
pub(super) struct MessageEvents {
    head: MessageHead,
    request_id: Arc<str>,
    reader: PartReader,
    order: BlockOrder,
    begun: bool,
    blocks: BlockEvents,
    end: MessageEnd,
}

/// Those of its blocks.
#[derive(Debug, Default)]
struct BlockEvents {
    /// Number of the block that is open, or of the next one.
    index: u32,
    /// How the text of the block that is open is sent.
    delta: Option<(&'static str, &'static str)>,
    signature: Signature,
}

impl MessageEvents {
    pub(super) fn new(head: MessageHead, request_id: Arc<str>, reader: PartReader) -> Self {
        Self {
            head,
            request_id,
            reader,
            order: BlockOrder::default(),
            begun: false,
            blocks: BlockEvents::default(),
            end: MessageEnd::default(),
        }
    }
}

impl EventWriter for MessageEvents {
    fn delta(&mut self, delta: &Delta, usage: Usage, out: &mut BytesMut) -> Result<(), RouteError> {
        if !std::mem::replace(&mut self.begun, true) {
            event(out, "message_start", &self.head.start(usage));
            event(out, "ping", &json!({"type": "ping"}));
        }
        let blocks = &mut self.blocks;
        let mut step = |step| {
            blocks.step(step, out);
            Ok::<_, RouteError>(())
        };
        let (parts, end) = self.reader.read(delta)?;
        for part in parts {
            self.order.take(part, &mut step)?;
        }
        if let Some(end) = end {
            self.order.finish(&mut step)?;
            self.end.note(delta, end);
        }
        Ok(())
    }

    fn ends_early(&mut self) -> bool {
        self.reader.ends_early()
    }

    fn with_reasoning(&self, usage: Usage) -> Usage {
        self.reader.with_reasoning(usage)
    }

    fn end(&mut self, usage: Usage, remark: Option<String>, out: &mut BytesMut) {
        event(out, "message_delta", &self.end.delta(usage));
        comment(remark, out);
        event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, error: RouteError, out: &mut BytesMut) {
        event(out, "error", &AnthropicError::of(&Reject::from(error), &self.request_id));
    }
}

impl BlockEvents {
    fn step(&mut self, step: BlockStep, out: &mut BytesMut) {
        match step {
            BlockStep::Begins(kind) => self.begin(kind, out),
            BlockStep::Text(text) => {
                if self.delta.is_some_and(|(kind, _)| kind == "thinking_delta") {
                    self.signature.update(&text);
                }
                self.delta(&text, out);
            }
            BlockStep::Ends => {
                if self.delta.is_some_and(|(kind, _)| kind == "thinking_delta") {
                    self.delta = Some(("signature_delta", "signature"));
                    let signature = std::mem::take(&mut self.signature).sign();
                    self.delta(&signature, out);
                }
                let stop = json!({"type": "content_block_stop", "index": self.index});
                event(out, "content_block_stop", &stop);
                self.index += 1;
            }
        }
    }

    fn begin(&mut self, kind: BlockKind, out: &mut BytesMut) {
        #[derive(Serialize)]
        struct Start {
            r#type: &'static str,
            index: u32,
            content_block: serde_json::Value,
        }
        let (delta, content_block) = match kind {
            BlockKind::Content => (("text_delta", "text"), json!({"type": "text", "text": ""})),
            BlockKind::Reasoning => (
                ("thinking_delta", "thinking"),
                json!({"type": "thinking", "thinking": "", "signature": ""}),
            ),
            BlockKind::Call { id, name } => (
                ("input_json_delta", "partial_json"),
                json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
            ),
        };
        self.delta = Some(delta);
        let start = Start { r#type: "content_block_start", index: self.index, content_block };
        event(out, "content_block_start", &start);
    }

    /// One per token: written by hand.
    fn delta(&mut self, text: &str, out: &mut BytesMut) {
        let Some((kind, field)) = self.delta else { return };
        out.extend_from_slice(
            b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":",
        );
        number(out, self.index);
        out.extend_from_slice(b",\"delta\":{\"type\":\"");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\",\"");
        out.extend_from_slice(field.as_bytes());
        out.extend_from_slice(b"\":");
        json(out, text);
        out.extend_from_slice(b"}}\n\n");
    }
}

#[cfg(test)]
mod tests;
