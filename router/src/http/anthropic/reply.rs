//! What answers of `/v1/messages` say, whole and in a stream, and the whole ones.

use bytes::BytesMut;
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::http::reply::blocks::{Block, BlockKind, KeptBlocks};
use crate::http::reply::events::json;
use crate::http::reply::parts::AnswerEnd;
use crate::http::reply::pieces::Parts;
use crate::request::{Delta, FinishReason, Usage};

/// What stands in every answer.
#[derive(Debug)]
pub(super) struct MessageHead {
    pub(super) id: String,
    pub(super) model: String,
}

/// Tokens as Anthropic counts them: what came from the cache is no part of `input_tokens`.
#[derive(Debug, Serialize)]
struct MessageUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
    service_tier: &'static str,
}

impl From<Usage> for MessageUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
            service_tier: "standard",
        }
    }
}

impl MessageHead {
    /// The data of `message_start`.
    pub(super) fn start(&self, usage: Usage) -> Value {
        let message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [], "stop_reason": null, "stop_sequence": null,
            "usage": MessageUsage::from(usage),
        });
        json!({"type": "message_start", "message": message})
    }
}

/// Why an answer ended.
#[derive(Debug, Default)]
pub(super) struct MessageEnd {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<Box<str>>,
}

impl MessageEnd {
    /// With the last delta.
    pub(super) fn note(&mut self, delta: &Delta, end: AnswerEnd) {
        self.stop_sequence.clone_from(&delta.stop_string);
        self.stop_reason = Some(match end.finish {
            FinishReason::Length => "max_tokens",
            FinishReason::Stop if end.called => "tool_use",
            FinishReason::Stop if self.stop_sequence.is_some() => "stop_sequence",
            FinishReason::Stop => "end_turn",
        });
    }

    /// The data of `message_delta`.
    pub(super) fn delta(&self, usage: Usage) -> Value {
        json!({
            "type": "message_delta",
            "delta": {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence},
            "usage": MessageUsage::from(usage),
        })
    }
}

/// What clients keep with a thought and send back. Here it only says which thought it is of: thoughts are no secrets, so
/// any is taken.
#[derive(Debug, Default)]
pub(super) struct Signature(blake3::Hasher);

impl Signature {
    pub(super) fn update(&mut self, text: &str) {
        self.0.update(text.as_bytes());
    }

    pub(super) fn sign(self) -> String {
        format!("headrace-{}", self.0.finalize().to_hex())
    }
}

/// An answer as a whole, written block by block as the client takes it.
#[derive(Debug)]
pub(super) struct WholeMessage {
    pub(super) head: MessageHead,
    pub(super) kept: KeptBlocks,
    pub(super) end: MessageEnd,
    pub(super) usage: Usage,
    /// The block that is written next; `None` before the first one.
    pub(super) next: Option<usize>,
}

impl Parts for WholeMessage {
    fn write(&mut self, out: &mut BytesMut) -> bool {
        let Some(next) = self.next else {
            out.extend_from_slice(b"{\"id\":");
            json(out, &self.head.id);
            out.extend_from_slice(b",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
            json(out, &self.head.model);
            out.extend_from_slice(b",\"content\":[");
            self.next = Some(0);
            return true;
        };
        if let Some(block) = self.kept.blocks.get_mut(next) {
            if next > 0 {
                out.extend_from_slice(b",");
            }
            write_block(block, out);
            block.text = String::new(); // what was written needs no memory any more
            self.next = Some(next + 1);
            return true;
        }
        out.extend_from_slice(b"],\"stop_reason\":");
        json(out, &self.end.stop_reason);
        out.extend_from_slice(b",\"stop_sequence\":");
        json(out, &self.end.stop_sequence);
        out.extend_from_slice(b",\"usage\":");
        json(out, &MessageUsage::from(self.usage));
        out.extend_from_slice(b"}");
        false
    }
}

fn write_block(block: &Block, out: &mut BytesMut) {
    match &block.kind {
        BlockKind::Content => {
            out.extend_from_slice(b"{\"type\":\"text\",\"text\":");
            json(out, &block.text);
        }
        BlockKind::Reasoning => {
            out.extend_from_slice(b"{\"type\":\"thinking\",\"thinking\":");
            json(out, &block.text);
            let mut signature = Signature::default();
            signature.update(&block.text);
            out.extend_from_slice(b",\"signature\":");
            json(out, &signature.sign());
        }
        BlockKind::Call { id, name } => {
            out.extend_from_slice(b"{\"type\":\"tool_use\",\"id\":");
            json(out, id);
            out.extend_from_slice(b",\"name\":");
            json(out, name);
            out.extend_from_slice(b",\"input\":");
            input(&block.text, out);
        }
    }
    out.extend_from_slice(b"}");
}

/// Arguments as the object that they are. What was cut off in the middle is none, and comes as Anthropic advises for such.
fn input(arguments: &str, out: &mut BytesMut) {
    let arguments = arguments.trim();
    let whole = serde_json::from_str::<IgnoredAny>(arguments).is_ok();
    if arguments.is_empty() {
        out.extend_from_slice(b"{}");
    } else if whole && arguments.starts_with('{') {
        out.extend_from_slice(arguments.as_bytes());
    } else {
        out.extend_from_slice(b"{\"INVALID_JSON\":");
        json(out, arguments);
        out.extend_from_slice(b"}");
    }
}
