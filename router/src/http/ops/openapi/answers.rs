//! What comes back: schemas of answers, and of errors with their codes.

mod messages;
mod responses;
mod vectors;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::fields::named;
use crate::http::ops::openapi::json::json;
use crate::http::reply::reject::anthropic::status_of;

/// Statuses of errors, with what they mean for a client and the `code`s that come with them.
pub(super) const ERRORS: [(u16, &str, &[&str]); 14] = [
    (
        400,
        "The request is wrong; `param` names the field or header.",
        &[
            "bad_framing",
            "body_broken",
            "body_too_complex",
            "answer_too_large",
            "context_length_exceeded",
            "text_without_breaks",
            "bad_sampling",
            "previous_response_not_found",
        ],
    ),
    (401, "A key is asked for, or this one is not known.", &["invalid_api_key"]),
    (403, "This caller may not do it.", &["foreign_origin", "operators_only"]),
    (
        404,
        "It does not exist.",
        &[
            "unknown_url",
            "model_not_found",
            "response_not_found",
            "unknown_request",
            "unknown_worker",
            "unknown_drain",
        ],
    ),
    (405, "The `Allow` header names the methods of this path.", &["method_not_allowed"]),
    (408, "The body did not arrive in time.", &["body_too_slow"]),
    (409, "The worker leaves already.", &["already_draining"]),
    (413, "The body is too long.", &["body_too_long"]),
    (
        415,
        "The body is not JSON, or it is compressed.",
        &["unsupported_media_type", "unsupported_content_encoding"],
    ),
    (421, "`Host` is no name of this server.", &["unknown_host"]),
    (
        429,
        "Too much is asked for at once; `Retry-After` says when to come again.",
        &["overloaded", "rate_limit_exceeded", "deadline_impossible"],
    ),
    (500, "A mistake of the server.", &["internal", "worker_failed"]),
    (
        503,
        "No worker can answer now; `Retry-After` says when to come again.",
        &["no_worker", "worker_lost", "worker_failed", "shutting_down"],
    ),
    (504, "A deadline passed.", &["deadline_exceeded"]),
];

/// Whose form an error has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorForm {
    OpenAi,
    Anthropic,
}

impl ErrorForm {
    /// The status that stands for one of [`ERRORS`], and the name of its response.
    pub(super) fn response(self, status: u16) -> (u16, String) {
        match self {
            Self::OpenAi => (status, format!("Error{status}")),
            Self::Anthropic => {
                let theirs = StatusCode::from_u16(status).map(status_of);
                let status = theirs.map_or(status, |theirs| theirs.as_u16());
                (status, format!("MessageError{status}"))
            }
        }
    }

    fn schema(self) -> &'static str {
        match self {
            Self::OpenAi => "Error",
            Self::Anthropic => "MessageError",
        }
    }
}

/// A header that an answer always has.
fn header(schema: &Value, about: &str) -> Value {
    json!({"required": true, "schema": schema, "description": about})
}

/// Headers of every answer.
pub(super) fn headers() -> Map<String, Value> {
    let name = header(&json!({"type": "string", "minLength": 1, "maxLength": 128}), "Its name.");
    [("X-Request-ID".to_owned(), name)].into_iter().collect()
}

/// Headers of answers that a worker generated.
pub(super) fn headers_of_generations() -> [(String, Value); 2] {
    let text = json!({"type": "string", "minLength": 1});
    let mut stages = header(&text, "Milliseconds of its stages, where they are known.");
    stages["required"] = false.into();
    let worker = header(&text, "The worker that generates.");
    [("X-Headrace-Worker".to_owned(), worker), ("Server-Timing".to_owned(), stages)]
}

/// A response for each status of [`ERRORS`] in each form.
pub(super) fn responses() -> Map<String, Value> {
    let response = |form: ErrorForm, (status, about, codes): (u16, &str, &[&str])| {
        let description = match form {
            ErrorForm::OpenAi => format!("{about} Codes: {}.", codes.join(", ")),
            ErrorForm::Anthropic => about.replace("; `param` names the field or header", ""),
        };
        let mut response = json!({
            "description": description,
            "content": {"application/json": {"schema": named(form.schema())}},
        });
        let mut headers = headers();
        if status == 429 || status == 503 {
            let seconds = json!({"type": "integer", "minimum": 1});
            headers.insert("Retry-After".into(), header(&seconds, "Seconds."));
        }
        response["headers"] = headers.into();
        (form.response(status).1, response)
    };
    let forms = [ErrorForm::OpenAi, ErrorForm::Anthropic];
    forms.into_iter().flat_map(|form| ERRORS.map(|error| response(form, error))).collect()
}

/// An object that has all these fields; later versions may add more.
fn object(properties: &Value) -> Value {
    let fields = properties.as_object().into_iter().flatten();
    let required: Vec<String> = fields.map(|(name, _)| name.clone()).collect();
    json!({"type": "object", "properties": properties, "required": required})
}

fn or_null(schema: &Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// All schemas of answers, by name.
pub(super) fn schemas() -> Map<String, Value> {
    let text = json!({"type": "string"});
    let count = json!({"type": "integer", "minimum": 0});
    let number = json!({"type": "number"});
    let bytes =
        json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}});
    let index = json!({"index": count});
    let with = |mut fields: Value, more: &Value| {
        for (name, schema) in more.as_object().into_iter().flatten() {
            fields[name] = schema.clone();
        }
        fields
    };
    let head = |kind: &str| {
        json!({
            "id": text, "object": {"const": kind}, "created": count, "model": text,
            "service_tier": {"const": "default"}, "system_fingerprint": text,
        })
    };
    let finish = json!({"enum": ["stop", "length"]});
    let alternative = object(&json!({"token": text, "logprob": number, "bytes": bytes}));
    let scored = object(&json!({
        "token": text, "logprob": number, "bytes": bytes,
        "top_logprobs": {"type": "array", "items": alternative},
    }));
    let chat_logprobs = or_null(&object(
        &json!({"content": {"type": "array", "items": scored}, "refusal": {"type": "null"}}),
    ));
    let list = |items: &Value| json!({"type": "array", "items": items});
    let top = json!({"type": ["object", "null"], "additionalProperties": number});
    let columns = or_null(&object(&json!({
        "tokens": list(&text), "token_logprobs": list(&json!({"type": ["number", "null"]})),
        "top_logprobs": list(&top), "text_offset": list(&count),
    })));
    let choice = |more: &Value| object(&with(index.clone(), more));
    let nullable = json!({"type": ["string", "null"]});
    let calls = |about: &str| {
        json!({"type": "array", "description": about, "items": {"type": "object", "properties": {
            "index": count, "id": text, "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": text, "arguments": text}},
        }}})
    };
    let thoughts = json!({
        "type": "string",
        "description": "Where the model reasons, and `include_reasoning` is not false.",
    });
    let mut message = object(&json!({
        "role": {"const": "assistant"}, "content": nullable, "refusal": nullable,
    }));
    message["properties"]["reasoning_content"] = thoughts.clone();
    message["properties"]["reasoning"] = thoughts.clone();
    message["properties"]["tool_calls"] = calls("What the model calls.");
    let delta = json!({"type": "object", "properties": {
        "role": {"const": "assistant"}, "content": nullable, "refusal": nullable,
        "reasoning_content": thoughts, "reasoning": thoughts,
        "tool_calls": calls("Parts of calls, told apart by `index`; `arguments` comes in pieces."),
    }});
    let chat_finish = json!({"enum": ["stop", "length", "tool_calls"]});
    let maybe_chat_finish = or_null(&chat_finish);
    let maybe_finish = or_null(&finish);
    let chat_choice = choice(
        &json!({"message": message, "logprobs": chat_logprobs, "finish_reason": chat_finish}),
    );
    let chunk_choice = choice(
        &json!({"delta": delta, "logprobs": chat_logprobs, "finish_reason": maybe_chat_finish}),
    );
    let text_choice = choice(&json!({"text": text, "logprobs": columns, "finish_reason": finish}));
    let text_chunk =
        choice(&json!({"text": text, "logprobs": columns, "finish_reason": maybe_finish}));
    let whole = |kind: &str, choice: &Value| {
        object(&with(head(kind), &json!({"choices": list(choice), "usage": named("Usage")})))
    };
    let event = |kind: &str, choice: &Value| {
        let mut event = object(&with(head(kind), &json!({"choices": list(choice)})));
        event["properties"]["usage"] = or_null(&named("Usage"));
        event
    };
    let model = object(&json!({
        "id": text, "object": {"const": "model"}, "created": count, "owned_by": text, "root": text,
        "max_model_len": count, "dtypes": list(&text), "reasoning_parser": or_null(&text),
        "tool_parser": or_null(&text), "template_knows_tools": {"type": "boolean"},
    }));
    let about = |mut schema: Value, about: &str| {
        schema["description"] = about.into();
        schema
    };
    let mut schemas = Map::new();
    for (name, schema) in [
        ("ChatCompletion", about(whole("chat.completion", &chat_choice), "An answer to a chat.")),
        (
            "ChatCompletionChunk",
            about(
                event("chat.completion.chunk", &chunk_choice),
                "An event of a streamed answer to a chat.",
            ),
        ),
        ("Completion", about(whole("text_completion", &text_choice), "Continued texts.")),
        (
            "CompletionChunk",
            about(event("text_completion", &text_chunk), "An event of streamed continued texts."),
        ),
        ("Usage", usage(&count)),
        ("Model", about(model, "A model that is served.")),
        ("ModelList", object(&json!({"object": {"const": "list"}, "data": list(&named("Model"))}))),
        (
            "Tokens",
            object(&json!({
                "count": count, "max_model_len": count, "tokens": list(&count),
                "token_strs": or_null(&list(&text)),
            })),
        ),
        (
            "TokenizerInfo",
            object(&json!({
                "tokenizer_class": text, "bos_token": nullable, "eos_token": nullable, "pad_token": nullable,
                "unk_token": nullable, "eos_token_ids": list(&count), "model_max_length": count,
                "vocab_size": count, "chat_template": nullable, "encoder": text, "encoder_reason": nullable,
            })),
        ),
        ("Text", object(&json!({"prompt": text}))),
        ("Status", object(&json!({"status": text}))),
        ("Version", object(&json!({"version": text}))),
        (
            "Scale",
            json!({"type": "object", "description": "How many workers each model needs; fields may be added.", "properties": {"models": {"type": "array", "items": {"type": "object"}}, "slo": {"type": "object"}}}),
        ),
        (
            "Workers",
            json!({"type": "object", "description": "Workers, groups and models, for people and dashboards; fields may be added.", "properties": {"workers": {"type": "array", "items": {"type": "object"}}}}),
        ),
        (
            "Drain",
            json!({"type": "object", "description": "How a drain goes; done when `phase` is `done`.", "properties": {"worker": text, "phase": text}, "required": ["worker", "phase"]}),
        ),
        (
            "Decisions",
            json!({"type": "object", "description": "Why a request went where it went: each worker, and what it was predicted to cost."}),
        ),
        (
            "Error",
            object(&json!({"error": object(&json!({
                "message": text, "type": text, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            }))})),
        ),
        (
            "Tool",
            json!({
                "type": "object", "description": "A function that a model may call. The chat template gets it as it is.",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object", "required": ["name"],
                        "properties": {"name": text, "description": {"type": ["string", "null"]}, "parameters": {"type": ["object", "null"]}},
                    },
                },
                "required": ["type", "function"],
            }),
        ),
    ] {
        schemas.insert(name.to_owned(), schema);
    }
    schemas.extend(responses::schemas());
    schemas.extend(messages::schemas());
    schemas.extend(vectors::schemas());
    schemas
}

fn usage(count: &Value) -> Value {
    json!({
        "type": "object",
        "description": "Tokens of the prompt and of the answer.",
        "properties": {
            "prompt_tokens": count, "completion_tokens": count, "total_tokens": count,
            "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": count}},
            "completion_tokens_details": {"type": "object", "properties": {
                "accepted_prediction_tokens": count, "rejected_prediction_tokens": count, "reasoning_tokens": count,
            }},
        },
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    })
}
