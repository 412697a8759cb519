//! Answers of `/v1/responses`, as OpenAI has them.

use serde_json::{Map, Value};

use super::{named, object, or_null};
use crate::http::ops::openapi::json::json;

pub(super) fn schemas() -> Map<String, Value> {
    let text = json!({"type": "string"});
    let count = json!({"type": "integer", "minimum": 0});
    let list = |items: &Value| json!({"type": "array", "items": items});
    let typed = |kind: &str, mut fields: Value| {
        fields["type"] = json!({"const": kind});
        object(&fields)
    };
    let logprobs = list(&json!({"type": "object"}));
    let said = typed(
        "output_text",
        json!({"text": text, "annotations": {"type": "array"}, "logprobs": logprobs}),
    );
    let thought = typed("reasoning_text", json!({"text": text}));
    let status = json!({"enum": ["in_progress", "completed", "incomplete"]});
    let item = json!({"oneOf": [
        typed("message", json!({
            "id": text, "role": {"const": "assistant"}, "content": list(&said), "status": status,
        })),
        typed("reasoning", json!({
            "id": text, "summary": {"type": "array"}, "content": list(&thought),
            "encrypted_content": or_null(&text), "status": status,
        })),
        typed("function_call", json!({
            "id": text, "call_id": text, "name": text, "arguments": text, "status": status,
        })),
    ]});
    let error = object(&json!({"code": text, "message": text}));
    let response = response(&text, &count, &error);
    let usage = object(&json!({
        "input_tokens": count, "input_tokens_details": object(&json!({"cached_tokens": count, "cache_write_tokens": count})),
        "output_tokens": count, "output_tokens_details": object(&json!({"reasoning_tokens": count})),
        "total_tokens": count,
    }));
    let deleted =
        object(&json!({"id": text, "object": {"const": "response"}, "deleted": {"const": true}}));
    let items = object(&json!({
        "object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
        "first_id": or_null(&text), "last_id": or_null(&text), "has_more": {"type": "boolean"},
    }));
    let mut schemas = Map::new();
    for (name, about, mut schema) in [
        ("Response", "A response.", response),
        ("ResponseItem", "A message, reasoning, or a call of a function.", item),
        ("ResponseUsage", "Tokens of the prompt and of the answer.", usage),
        ("ResponseEvent", "An event of a streamed response.", event(&text, &count, &logprobs)),
        ("Deleted", "A response that is gone.", deleted),
        ("ItemList", "Items of a request, page by page.", items),
    ] {
        schema["description"] = about.into();
        schemas.insert(name.to_owned(), schema);
    }
    schemas
}

fn response(text: &Value, count: &Value, error: &Value) -> Value {
    let statuses = ["in_progress", "completed", "incomplete", "failed", "cancelled"];
    let number = json!({"type": "number"});
    let flag = json!({"type": "boolean"});
    object(&json!({
        "id": text, "object": {"const": "response"}, "created_at": count, "completed_at": or_null(count),
        "model": text, "status": {"enum": statuses}, "output": {"type": "array", "items": named("ResponseItem")},
        "usage": or_null(&named("ResponseUsage")), "error": or_null(error),
        "incomplete_details": or_null(&object(&json!({"reason": {"const": "max_output_tokens"}}))),
        "instructions": or_null(text), "metadata": {"type": "object"}, "previous_response_id": or_null(text),
        "store": flag, "parallel_tool_calls": flag, "max_output_tokens": or_null(count),
        "text": {"type": "object"}, "reasoning": {"type": "object"}, "tools": {"type": "array"},
        "tool_choice": {"type": ["string", "object"]}, "temperature": number, "top_p": number, "top_logprobs": count,
        "background": {"const": false}, "truncation": {"const": "disabled"}, "service_tier": {"const": "default"},
        "max_tool_calls": {"type": "null"}, "user": or_null(text), "safety_identifier": or_null(text),
        "prompt_cache_key": or_null(text),
    }))
}

/// Where in the response an event is.
const IN_ITEM: [&str; 2] = ["item_id", "output_index"];
const IN_CONTENT: [&str; 3] = ["item_id", "output_index", "content_index"];

fn event(text: &Value, count: &Value, logprobs: &Value) -> Value {
    let part = json!({"type": "object", "required": ["type", "text"]});
    let of = |kind: &str, place: &[&str], more: Value| {
        let mut fields = more;
        fields["type"] = json!({"const": kind});
        fields["sequence_number"] = count.clone();
        for name in place {
            fields[*name] = if *name == "item_id" { text.clone() } else { count.clone() };
        }
        object(&fields)
    };
    let whole = |kind: &str| of(kind, &[], json!({"response": named("Response")}));
    let item = |kind: &str| of(kind, &IN_ITEM, json!({"item": named("ResponseItem")}));
    let part = |kind: &str| of(kind, &IN_CONTENT, json!({"part": part}));
    json!({"oneOf": [
        whole("response.created"),
        whole("response.in_progress"),
        item("response.output_item.added"),
        part("response.content_part.added"),
        of("response.output_text.delta", &IN_CONTENT, json!({"delta": text, "logprobs": logprobs})),
        of("response.output_text.done", &IN_CONTENT, json!({"text": text, "logprobs": logprobs})),
        of("response.reasoning_text.delta", &IN_CONTENT, json!({"delta": text})),
        of("response.reasoning_text.done", &IN_CONTENT, json!({"text": text})),
        of("response.function_call_arguments.delta", &IN_ITEM, json!({"delta": text})),
        of("response.function_call_arguments.done", &IN_ITEM, json!({"arguments": text, "name": text})),
        part("response.content_part.done"),
        item("response.output_item.done"),
        whole("response.completed"),
        whole("response.incomplete"),
        whole("response.failed"),
        of("error", &[], json!({
            "code": or_null(text), "message": text, "param": {"type": "null"},
        })),
    ]})
}
