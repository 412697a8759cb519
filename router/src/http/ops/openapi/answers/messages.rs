//! Answers of `/v1/messages`, as Anthropic has them.

use serde_json::{Map, Value};

use super::{named, object, or_null};
use crate::http::ops::openapi::json::json;

pub(super) fn schemas() -> Map<String, Value> {
    let text = json!({"type": "string"});
    let count = json!({"type": "integer", "minimum": 0});
    let typed = |kind: &str, mut fields: Value| {
        fields["type"] = json!({"const": kind});
        object(&fields)
    };
    let block = json!({"oneOf": [
        typed("text", json!({"text": text})),
        typed("thinking", json!({"thinking": text, "signature": text})),
        typed("tool_use", json!({"id": text, "name": text, "input": {"type": "object"}})),
    ]});
    let reason = json!({"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]});
    let message = typed(
        "message",
        json!({
            "id": text, "role": {"const": "assistant"}, "model": text,
            "content": {"type": "array", "items": named("MessageBlock")},
            "stop_reason": or_null(&reason), "stop_sequence": or_null(&text), "usage": named("MessageUsage"),
        }),
    );
    let usage = object(&json!({
        "input_tokens": count, "cache_creation_input_tokens": count, "cache_read_input_tokens": count,
        "output_tokens": count, "service_tier": {"const": "standard"},
    }));
    let delta = json!({"oneOf": [
        typed("text_delta", json!({"text": text})),
        typed("thinking_delta", json!({"thinking": text})),
        typed("signature_delta", json!({"signature": text})),
        typed("input_json_delta", json!({"partial_json": text})),
    ]});
    let ended = object(&json!({"stop_reason": reason, "stop_sequence": or_null(&text)}));
    let event = json!({"oneOf": [
        typed("message_start", json!({"message": named("Message")})),
        typed("ping", json!({})),
        typed("content_block_start", json!({"index": count, "content_block": named("MessageBlock")})),
        typed("content_block_delta", json!({"index": count, "delta": delta})),
        typed("content_block_stop", json!({"index": count})),
        typed("message_delta", json!({"delta": ended, "usage": named("MessageUsage")})),
        typed("message_stop", json!({})),
        named("MessageError"),
    ]});
    let kinds = json!({"enum": [
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
        "rate_limit_error", "timeout_error", "overloaded_error", "api_error",
    ]});
    let error = object(&json!({"type": kinds, "message": text}));
    let error = typed("error", json!({"error": error, "request_id": text}));
    let mut schemas = Map::new();
    for (name, about, mut schema) in [
        ("Message", "An answer to a conversation.", message),
        ("MessageBlock", "A text, a thought, or a call of a function.", block),
        ("MessageUsage", "Tokens; those of the cache are no part of `input_tokens`.", usage),
        ("MessageEvent", "An event of a streamed answer to a conversation.", event),
        ("MessageError", "What went wrong.", error),
        ("MessageTokens", "Tokens of a prompt.", object(&json!({"input_tokens": count}))),
    ] {
        schema["description"] = about.into();
        schemas.insert(name.to_owned(), schema);
    }
    schemas
}
