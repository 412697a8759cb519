//! Fields of every generation: how tokens are chosen, what the answer follows, how it is sent.

use serde_json::Value;

use super::FieldKind::{Above, Array, Boolean, Integer, Number, Object, Open, Other, Text, Words};
use crate::http::ops::openapi::json::json;
use crate::http::parse::nvext::Annotations;

use super::{Field, ObjectShape, U32, field, json_schema, metadata, must, text, token_id};

/// How tokens are chosen, where the answer ends, how it is sent.
pub(super) const GENERATION: &[Field] = &[
    must("model", Text, "A served name, at most 256 bytes; GET /v1/models lists them."),
    field("stream", Boolean, "Send the answer as server-sent events."),
    field("stream_options", Object(&STREAM_OPTIONS), "Only with `stream`."),
    field("n", Integer(1, 128), "Answers; prompts times `n` are at most 1,024."),
    field(
        "seed",
        Integer(i64::MIN, i64::MAX),
        "The same seed gives the same answer, whatever else the server does. Random where left out.",
    ),
    field("temperature", Number(0.0, 2.0), "0 takes the best token. The model's own, else 1."),
    field("top_p", Above(0.0, 1.0), "The model's own, else 1."),
    field(
        "top_k",
        Integer(-1, i32::MAX as i64),
        "-1 and 0 switch it off. The model's own, else off.",
    ),
    field("min_p", Number(0.0, 1.0), "0 switches it off."),
    field("repetition_penalty", Above(0.0, 10.0), "1 switches it off. The model's own, else 1."),
    field("presence_penalty", Number(-2.0, 2.0), "0 switches it off."),
    field("frequency_penalty", Number(-2.0, 2.0), "0 switches it off."),
    field(
        "logit_bias",
        Other(
            || json!({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
        ),
        "At most 1,024 token ids, each with what is added to its logit.",
    ),
    field(
        "stop",
        Other(|| json!({"anyOf": [text(), {"type": "array", "items": text(), "maxItems": 16}]})),
        "A text or at most 16, each of 1 to 1,024 bytes, that end the answer and are no part of it.",
    ),
    field("stop_token_ids", Array(token_id), "At most 128 tokens that end the answer."),
    field("ignore_eos", Boolean, "Go on past the model's end token."),
    field("min_tokens", Integer(0, U32), "No end before so many tokens."),
    field(
        "skip_special_tokens",
        Boolean,
        "Leave special tokens out of the text. True where left out.",
    ),
    field("priority", Integer(-127, 127), "Lower goes first."),
    field("response_format", Object(&RESPONSE_FORMAT), "What the answer has to follow."),
    field("structured_outputs", Object(&STRUCTURED_OUTPUTS), "The same, under vLLM's names."),
    field("guided_json", Other(json_schema), "`structured_outputs.json`."),
    field("guided_regex", Text, "`structured_outputs.regex`."),
    field("guided_choice", Array(text), "`structured_outputs.choice`."),
    field("guided_grammar", Text, "`structured_outputs.grammar`."),
    field("guided_json_object", Boolean, "`structured_outputs.json_object`."),
    field("include_stop_str_in_output", Boolean, "What ends the answer is part of it."),
    field(
        "truncate_prompt_tokens",
        Integer(-1, U32),
        "Keep the last so many tokens of the prompt, at least 1; -1 keeps what fits beside the answer.",
    ),
    field("return_token_ids", Boolean, "Send the ids of the tokens of prompt and answer."),
    field("allowed_token_ids", Array(token_id), "At most 1,024; no other token is chosen."),
    field(
        "bad_words",
        Array(text),
        "At most 128 texts of 256 bytes that the answer must not have; they are banned at their last token.",
    ),
    field(
        "prompt_logprobs",
        Integer(0, 20),
        "Log-probabilities of the prompt, each with so many alternatives; not in streams.",
    ),
    field("nvext", Object(&NVEXT), "What clients of NVIDIA Dynamo send."),
    field("cache_salt", Text, "The prompt is cached for requests with the same salt alone."),
    field("prompt_cache_key", Text, "The session, if no header names it."),
    field("user", Text, "The session, if neither a header nor `prompt_cache_key` names it."),
];

/// Accepted, and nothing changes by it.
pub(super) const HARMLESS: &[Field] = &[
    field("metadata", Other(metadata), "At most 16 texts by name. Changes nothing."),
    field("safety_identifier", Text, "Changes nothing."),
    field("parallel_tool_calls", Boolean, "Of a chat: false ends it after its first call."),
    field("prompt_cache_retention", Text, "Changes nothing."),
    field("prompt_cache_options", Open, "Changes nothing."),
    field("service_tier", Words(&["auto", "default"]), "There is one tier."),
];

const STREAM_OPTIONS: ObjectShape = ObjectShape::new(
    "StreamOptions",
    "What a stream carries beside the answer.",
    &[&[
        field("include_usage", Boolean, "A last event holds the usage."),
        field(
            "continuous_usage_stats",
            Boolean,
            "Every event holds the usage so far; needs `include_usage`.",
        ),
        field("include_obfuscation", Other(|| json!({"const": false})), "Events are not padded."),
    ]],
);

/// Dynamo's own fields.
const NVEXT: ObjectShape = ObjectShape::new(
    "Nvext",
    "Becomes the parameters of the same meaning; hints change nothing.",
    &[&[
        field("greed_sampling", Boolean, "`temperature: 0`."),
        field("ignore_eos", Boolean, "`ignore_eos`."),
        field("top_k", Integer(-1, i32::MAX as i64), "`top_k`."),
        field("repetition_penalty", Number(0.0, 10.0), "`repetition_penalty`."),
        field(
            "max_thinking_tokens",
            Integer(0, u32::MAX as i64),
            "`max_reasoning_tokens`, in chats.",
        ),
        field(
            "use_raw_prompt",
            Other(|| json!({"const": false})),
            "/v1/completions takes raw prompts.",
        ),
        field("cache_salt", Text, "`cache_salt`."),
        field("guided_json", Other(json_schema), "`guided_json`."),
        field("guided_regex", Text, "`guided_regex`."),
        field("guided_choice", Array(text), "`guided_choice`."),
        field("guided_grammar", Text, "`guided_grammar`."),
        field("guided_decoding_backend", Words(&["auto", "guidance"]), "There is one."),
        field(
            "annotations",
            Array(annotation),
            "What a stream of a chat or of one prompt tells in events of these names without data; at most 32.",
        ),
        field(
            "extra_fields",
            Other(|| json!({"type": "array", "maxItems": 0})),
            "Headers of the answer have what is known.",
        ),
        field("agent_context", Open, "Changes nothing."),
        field("request_timestamp_ms", Number(0.0, f64::MAX), "Changes nothing."),
        field("agent_hints", Object(&AGENT_HINTS), "Hints about an agent's request."),
        field("session_control", Object(&SESSION_CONTROL), "The session."),
    ]],
);

fn annotation() -> Value {
    json!({"enum": Annotations::NAMES})
}

const AGENT_HINTS: ObjectShape = ObjectShape::new(
    "AgentHints",
    "Hints, of which the priority counts.",
    &[&[
        field("priority", Integer(i32::MIN as i64, i32::MAX as i64), "Higher goes first."),
        field("osl", Integer(0, U32), "Changes nothing."),
        field("strict_priority", Integer(0, U32), "Changes nothing."),
        field("speculative_prefill", Boolean, "Changes nothing."),
        field("latency_sensitivity", Number(f64::MIN, f64::MAX), "Changes nothing."),
    ]],
);

const SESSION_CONTROL: ObjectShape = ObjectShape::new(
    "SessionControl",
    "The session that a request belongs to.",
    &[&[
        must("session_id", Text, "`prompt_cache_key`."),
        field("action", Text, "Changes nothing."),
        field("timeout", Integer(0, U32), "Changes nothing."),
    ]],
);

const RESPONSE_FORMAT: ObjectShape = ObjectShape::new(
    "ResponseFormat",
    "OpenAI's constraint of an answer.",
    &[&[
        must(
            "type",
            Words(&["text", "json_object", "json_schema"]),
            "Free text, any object, or what a schema allows.",
        ),
        field("json_schema", Object(&JSON_SCHEMA), "Required with the type `json_schema`."),
    ]],
);

const JSON_SCHEMA: ObjectShape = ObjectShape::new(
    "JsonSchemaFormat",
    "A JSON schema with its name.",
    &[&[
        field("name", Text, "Changes nothing."),
        field("description", Text, "Changes nothing."),
        field("strict", Boolean, "Changes nothing: a schema is kept either way."),
        must("schema", Other(json_schema), "The schema, as an object or as text."),
    ]],
);

const STRUCTURED_OUTPUTS: ObjectShape = ObjectShape::new(
    "StructuredOutputs",
    "One constraint of an answer.",
    &[&[
        field("json", Other(json_schema), "Valid under this schema, an object or its text."),
        field("regex", Text, "Matched as a whole by this expression, in Rust's syntax."),
        field("choice", Array(text), "One of at most 1,024 texts."),
        field("grammar", Text, "A word of this grammar, in Lark or GBNF."),
        field("json_object", Boolean, "A JSON object."),
        field(
            "disable_any_whitespace",
            Other(|| json!({"const": false})),
            "White space is bounded.",
        ),
        field(
            "disable_additional_properties",
            Other(|| json!({"const": false})),
            "A schema says itself what it allows.",
        ),
    ]],
);
