//! The response object and its output items, as JSON.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::parse::ids;
use crate::http::reply::blocks::{Block, BlockKind};
use crate::http::reply::events::json;
use crate::http::reply::logprobs::{Vocabulary, chat_token};
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::items::SEALED;
use crate::request::{FinishReason, ScoredToken, Usage};

/// How far a response has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseStatus {
    InProgress,
    Completed,
    /// It is as long as it may be.
    Incomplete,
    Failed,
    Cancelled,
}

impl ResponseStatus {
    pub(super) fn of(finish: FinishReason) -> Self {
        match finish {
            FinishReason::Stop => Self::Completed,
            FinishReason::Length => Self::Incomplete,
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Of the item that was written last.
    pub(super) fn of_item(self) -> Self {
        match self {
            Self::InProgress | Self::Completed => self,
            Self::Incomplete | Self::Failed | Self::Cancelled => Self::Incomplete,
        }
    }
}

/// What stands in a response from its beginning.
#[derive(Debug)]
pub(super) struct ResponseHead<'a> {
    pub(super) id: &'a str,
    pub(super) model: &'a str,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    /// Further fields, as JSON without braces.
    pub(super) echo: &'a str,
}

impl ResponseHead<'_> {
    /// The object up to its output.
    pub(super) fn write(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(self.echo.len() + 512);
        out.extend_from_slice(b"{\"id\":");
        json(&mut out, self.id);
        out.extend_from_slice(b",\"object\":\"response\",\"created_at\":");
        json(&mut out, &ids::unix_seconds());
        out.extend_from_slice(b",\"model\":");
        json(&mut out, self.model);
        out.extend_from_slice(b",\"temperature\":");
        json(&mut out, &self.temperature);
        out.extend_from_slice(b",\"top_p\":");
        json(&mut out, &self.top_p);
        out.extend_from_slice(b",");
        out.extend_from_slice(self.echo.as_bytes());
        out.extend_from_slice(
            b",\"background\":false,\"max_tool_calls\":null,\"service_tier\":\"default\",\
              \"truncation\":\"disabled\",\"output\":",
        );
        out.freeze()
    }
}

/// Tokens of a response.
#[derive(Debug, Serialize)]
struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: Value,
    output_tokens: u32,
    output_tokens_details: Value,
    total_tokens: u32,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: json!({"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}),
            output_tokens: usage.completion_tokens,
            output_tokens_details: json!({"reasoning_tokens": usage.reasoning_tokens}),
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
        }
    }
}

/// The object from its output on. `error`: code and text of what went wrong.
pub(super) fn tail(
    status: ResponseStatus,
    usage: Option<Usage>,
    error: Option<(&str, &str)>,
) -> Bytes {
    let mut out = BytesMut::with_capacity(512);
    out.extend_from_slice(b",\"status\":\"");
    out.extend_from_slice(status.as_str().as_bytes());
    out.extend_from_slice(b"\",\"error\":");
    json(&mut out, &error.map(|(code, message)| json!({"code": code, "message": message})));
    out.extend_from_slice(b",\"incomplete_details\":");
    let reason =
        (status == ResponseStatus::Incomplete).then(|| json!({"reason": "max_output_tokens"}));
    json(&mut out, &reason);
    out.extend_from_slice(b",\"completed_at\":");
    json(&mut out, &(status == ResponseStatus::Completed).then(ids::unix_seconds));
    out.extend_from_slice(b",\"usage\":");
    json(&mut out, &usage.map(ResponseUsage::from));
    out.extend_from_slice(b"}");
    out.freeze()
}

/// What items of this kind are called in ids.
pub(super) fn prefix(kind: &BlockKind) -> &'static str {
    match kind {
        BlockKind::Content => "msg",
        BlockKind::Reasoning => "rs",
        BlockKind::Call { .. } => "fc",
    }
}

/// What the client wants to see of items beside their text.
#[derive(Debug, Clone, Default)]
pub(super) struct ItemExtras {
    /// Reasoning is sealed, too.
    pub(super) seals: bool,
    /// What tokens stand for, where log-probabilities are sent.
    pub(super) vocabulary: Option<Arc<dyn Vocabulary>>,
}

impl ItemExtras {
    /// Appends the log-probabilities of these tokens as a list; an empty one where nobody asked for them.
    pub(super) fn logprobs(&self, tokens: &[ScoredToken], out: &mut BytesMut) {
        out.extend_from_slice(b",\"logprobs\":[");
        if let Some(vocabulary) = &self.vocabulary {
            for (i, token) in tokens.iter().enumerate() {
                if i > 0 {
                    out.extend_from_slice(b",");
                }
                chat_token(vocabulary.as_ref(), token, out);
            }
        }
        out.extend_from_slice(b"]");
    }
}

/// Appends an output item.
pub(super) fn item(
    id: &str,
    block: &Block,
    status: ResponseStatus,
    extras: &ItemExtras,
    out: &mut BytesMut,
) {
    out.extend_from_slice(b"{\"id\":");
    json(out, id);
    match &block.kind {
        BlockKind::Content => {
            out.extend_from_slice(b",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
            if status != ResponseStatus::InProgress {
                part(block, extras, out);
            }
            out.extend_from_slice(b"]");
        }
        BlockKind::Reasoning => {
            out.extend_from_slice(b",\"type\":\"reasoning\",\"summary\":[],\"content\":[");
            if status != ResponseStatus::InProgress {
                part(block, extras, out);
            }
            out.extend_from_slice(b"],\"encrypted_content\":");
            if extras.seals && status != ResponseStatus::InProgress {
                json(out, &format!("{SEALED}{}", block.text));
            } else {
                out.extend_from_slice(b"null");
            }
        }
        BlockKind::Call { id, name } => {
            out.extend_from_slice(b",\"type\":\"function_call\",\"call_id\":");
            json(out, id);
            out.extend_from_slice(b",\"name\":");
            json(out, name);
            out.extend_from_slice(b",\"arguments\":");
            json(out, &block.text);
        }
    }
    out.extend_from_slice(b",\"status\":\"");
    out.extend_from_slice(status.as_str().as_bytes());
    out.extend_from_slice(b"\"}");
}

/// Appends the one part of a message or of reasoning.
pub(super) fn part(block: &Block, extras: &ItemExtras, out: &mut BytesMut) {
    if block.kind == BlockKind::Reasoning {
        out.extend_from_slice(b"{\"type\":\"reasoning_text\",\"text\":");
        json(out, &block.text);
        out.extend_from_slice(b"}");
    } else {
        out.extend_from_slice(b"{\"type\":\"output_text\",\"text\":");
        json(out, &block.text);
        out.extend_from_slice(b",\"annotations\":[]");
        extras.logprobs(&block.tokens, out);
        out.extend_from_slice(b"}");
    }
}

/// The list of all output items of a response that ended so.
pub(super) fn output(
    blocks: &[Block],
    ids: &ResponseIds,
    status: ResponseStatus,
    extras: &ItemExtras,
) -> Bytes {
    let mut out = BytesMut::from(&b"["[..]);
    for (index, block) in blocks.iter().enumerate() {
        if index > 0 {
            out.extend_from_slice(b",");
        }
        let is_last = index + 1 == blocks.len();
        let status = if is_last { status.of_item() } else { ResponseStatus::Completed };
        item(&ids.item(prefix(&block.kind), index), block, status, extras, &mut out);
    }
    out.extend_from_slice(b"]");
    out.freeze()
}
