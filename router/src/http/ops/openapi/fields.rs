//! The fields of requests, as the document shows them: names, types, ranges, and what they do.
//!
//! The code that reads a body knows the same names, types and ranges; a test runs it and compares both. A new field of a body
//! is a new row here.

use serde_json::{Map, Value, json};

/// One field of an object that clients send.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: FieldKind,
    pub(super) required: bool,
    about: &'static str,
}

/// What a field may be; `null` counts as absent unless it is required.
#[derive(Debug)]
pub(super) enum FieldKind {
    Boolean,
    Text,
    /// One of these texts.
    Words(&'static [&'static str]),
    Integer(i64, i64),
    Number(f64, f64),
    /// More than the first number, up to the second one.
    Above(f64, f64),
    /// An object with known fields.
    Object(&'static ObjectShape),
    /// An array of such objects.
    Objects(&'static ObjectShape),
    /// An array of what this schema describes.
    Array(fn() -> Value),
    /// An object with any fields.
    Open,
    /// What this schema describes.
    Other(fn() -> Value),
}

/// An object with known fields: a schema of the document.
#[derive(Debug)]
pub(super) struct ObjectShape {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) fields: &'static [&'static [Field]],
}

impl ObjectShape {
    pub(super) fn fields(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().copied().flatten()
    }

    /// Shapes that its fields use, itself first.
    pub(super) fn with_inner(&'static self, found: &mut Vec<&'static Self>) {
        if found.iter().any(|known| known.name == self.name) {
            return;
        }
        found.push(self);
        for field in self.fields() {
            if let Object(inner) | Objects(inner) = field.kind {
                inner.with_inner(found);
            }
        }
    }

    pub(super) fn schema(&self) -> Value {
        let properties: Map<String, Value> =
            self.fields().map(|field| (field.name.to_owned(), field.schema())).collect();
        let required: Vec<_> =
            self.fields().filter(|field| field.required).map(|field| field.name).collect();
        let mut schema = json!({
            "type": "object",
            "description": self.about,
            "properties": properties,
            // names that nobody knows are refused, unless they say nothing
            "additionalProperties": {"type": "null"},
        });
        if !required.is_empty() {
            schema["required"] = required.into();
        }
        schema
    }
}

/// A reference to a schema of the document.
pub(super) fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

impl Field {
    fn schema(&self) -> Value {
        let mut schema = self.kind.schema();
        if !self.required {
            schema = or_null(schema);
        }
        schema["description"] = self.about.into();
        schema
    }
}

fn or_null(schema: Value) -> Value {
    match schema.get("type").and_then(Value::as_str) {
        Some(kind) if schema.get("enum").is_none() => {
            let kinds = json!([kind, "null"]);
            let Value::Object(mut fields) = schema else { return schema };
            fields.insert("type".into(), kinds);
            fields.into()
        }
        Some(_) | None => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

impl FieldKind {
    fn schema(&self) -> Value {
        match *self {
            Self::Boolean => json!({"type": "boolean"}),
            Self::Text => json!({"type": "string"}),
            Self::Words(words) => json!({"type": "string", "enum": words}),
            Self::Integer(from, to) => json!({"type": "integer", "minimum": from, "maximum": to}),
            Self::Number(from, to) => json!({"type": "number", "minimum": from, "maximum": to}),
            Self::Above(from, to) => {
                json!({"type": "number", "exclusiveMinimum": from, "maximum": to})
            }
            Self::Object(shape) => named(shape.name),
            Self::Objects(shape) => json!({"type": "array", "items": named(shape.name)}),
            Self::Array(items) => json!({"type": "array", "items": items()}),
            Self::Open => json!({"type": "object"}),
            Self::Other(schema) => schema(),
        }
    }
}

const fn field(name: &'static str, kind: FieldKind, about: &'static str) -> Field {
    Field { name, kind, required: false, about }
}

const fn must(name: &'static str, kind: FieldKind, about: &'static str) -> Field {
    Field { name, kind, required: true, about }
}

use FieldKind::{
    Above, Array, Boolean, Integer, Number, Object, Objects, Open, Other, Text, Words,
};

const U32: i64 = u32::MAX as i64;

fn text() -> Value {
    json!({"type": "string"})
}

fn token_id() -> Value {
    json!({"type": "integer", "minimum": 0})
}

/// A schema, or its text.
fn json_schema() -> Value {
    json!({"type": ["object", "boolean", "string"]})
}

/// How tokens are chosen, where the answer ends, how it is sent.
const GENERATION: &[Field] = &[
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
const HARMLESS: &[Field] = &[
    field("metadata", Open, "Changes nothing."),
    field("safety_identifier", Text, "Changes nothing."),
    field("parallel_tool_calls", Boolean, "Of a chat: false ends it after its first call."),
    field("prompt_cache_retention", Text, "Changes nothing."),
    field("prompt_cache_options", Open, "Changes nothing."),
    field("service_tier", Words(&["auto", "default"]), "There is one tier."),
];

/// What the chat template gets to see.
const CHAT_PROMPT: &[Field] = &[
    field("tools", Array(|| named("Tool")), "Functions that the chat template shows to the model."),
    field("continue_final_message", Boolean, "The last message is the beginning of the answer."),
    field(
        "add_generation_prompt",
        Boolean,
        "Begin a message of the assistant. True where left out.",
    ),
    field(
        "documents",
        Array(|| json!({"type": "object"})),
        "At most 1,024, for the chat template.",
    ),
    field("verbosity", Words(&["low", "medium", "high"]), "For the chat template."),
    field(
        "add_special_tokens",
        Boolean,
        "With what the tokenizer puts around a text. False where left out; for the `prompt` of /tokenize, true.",
    ),
    field(
        "chat_template",
        Text,
        "A template of the request's own, under --allow-request-templates.",
    ),
    field("chat_template_kwargs", Open, "Variables for the chat template."),
];

pub(super) const CHAT: ObjectShape = ObjectShape {
    name: "ChatRequest",
    about: "A chat to answer.",
    fields: &[
        &[must("messages", Objects(&MESSAGE), "The chat so far, at least one message.")],
        GENERATION,
        CHAT_PROMPT,
        &[
            field(
                "tool_choice",
                Other(|| {
                    json!({"anyOf": [
                        {"enum": ["none", "auto", "required"]},
                        {"type": "object", "required": ["type"], "properties": {
                            "type": {"enum": ["function", "allowed_tools"]},
                            "function": {"type": "object", "required": ["name"]},
                            "allowed_tools": {"type": "object", "required": ["mode", "tools"]},
                        }},
                    ]})
                }),
                "Whether tools are called, and which. \"auto\" where left out.",
            ),
            field(
                "reasoning_effort",
                Words(&["none", "minimal", "low", "medium", "high", "xhigh"]),
                "How much the model reasons, where its chat template knows it.",
            ),
            field("include_reasoning", Boolean, "Send the reasoning. True where left out."),
            field(
                "max_reasoning_tokens",
                Integer(0, U32),
                "The longest reasoning; then the model has to answer.",
            ),
            field("max_completion_tokens", Integer(1, U32), "The longest answer."),
            field("max_tokens", Integer(1, U32), "The older name of `max_completion_tokens`."),
            field("logprobs", Boolean, "Send the log-probability of each token."),
            field("top_logprobs", Integer(0, 20), "Alternatives of each token; needs `logprobs`."),
        ],
        HARMLESS,
    ],
};

pub(super) const COMPLETION: ObjectShape = ObjectShape {
    name: "CompletionRequest",
    about: "Texts to continue.",
    fields: &[
        &[must(
            "prompt",
            Other(|| {
                let ids = json!({"type": "array", "items": token_id(), "minItems": 1});
                json!({"anyOf": [
                    text(),
                    {"type": "array", "items": text(), "minItems": 1},
                    ids,
                    {"type": "array", "items": ids, "minItems": 1},
                ]})
            }),
            "A text or an array of token ids, or an array of either.",
        )],
        GENERATION,
        &[
            field(
                "max_tokens",
                Integer(0, U32),
                "The longest answer, 16 where left out. 0 only with `echo`.",
            ),
            field("echo", Boolean, "The answer begins with the prompt."),
            field(
                "logprobs",
                Integer(0, 20),
                "Alternatives of each token, whose log-probabilities are sent.",
            ),
            field(
                "add_special_tokens",
                Boolean,
                "With what the tokenizer puts around a text. True where left out.",
            ),
            field("best_of", Integer(0, U32), "As many as `n`."),
        ],
        HARMLESS,
    ],
};

pub(super) const TOKENIZE: ObjectShape = ObjectShape {
    name: "TokenizeRequest",
    about: "A text or a chat to cut into tokens: `prompt` or `messages`.",
    fields: &[
        MODEL_IF_SEVERAL,
        &[
            field("prompt", Text, "A text."),
            field("messages", Objects(&MESSAGE), "A chat."),
            field("return_token_strs", Boolean, "Send the text of each token, too."),
        ],
        CHAT_PROMPT,
    ],
};

pub(super) const DETOKENIZE: ObjectShape = ObjectShape {
    name: "DetokenizeRequest",
    about: "Tokens whose text is asked for.",
    fields: &[MODEL_IF_SEVERAL, &[must("tokens", Array(token_id), "Token ids.")]],
};

const MODEL_IF_SEVERAL: &[Field] =
    &[field("model", Text, "A served name; may be left out where there is only one.")];

pub(super) const DRAIN: ObjectShape = ObjectShape {
    name: "DrainRequest",
    about: "How a worker leaves.",
    fields: &[&[
        field(
            "budget_ms",
            Integer(0, 3_600_000),
            "Running answers may go on so long; 30,000 where left out.",
        ),
        field(
            "hand_over",
            Integer(0, 65_536),
            "Hot blocks that go to other workers; 4,096 where left out.",
        ),
    ]],
};

const STREAM_OPTIONS: ObjectShape = ObjectShape {
    name: "StreamOptions",
    about: "What a stream carries beside the answer.",
    fields: &[&[
        field("include_usage", Boolean, "A last event holds the usage."),
        field(
            "continuous_usage_stats",
            Boolean,
            "Every event holds the usage so far; needs `include_usage`.",
        ),
        field("include_obfuscation", Other(|| json!({"const": false})), "Events are not padded."),
    ]],
};

/// Dynamo's own fields.
const NVEXT: ObjectShape = ObjectShape {
    name: "Nvext",
    about: "Becomes the parameters of the same meaning; hints change nothing.",
    fields: &[&[
        field("greed_sampling", Boolean, "`temperature: 0`."),
        field("ignore_eos", Boolean, "`ignore_eos`."),
        field("top_k", Integer(-1, i32::MAX as i64), "`top_k`."),
        field("repetition_penalty", Number(0.0, 10.0), "`repetition_penalty`."),
        field(
            "use_raw_prompt",
            Other(|| json!({"const": false})),
            "/v1/completions takes raw prompts.",
        ),
        field("annotations", Array(text), "Changes nothing; at most 32."),
        field("extra_fields", Array(text), "Changes nothing; at most 32."),
        field("request_timestamp_ms", Number(0.0, f64::MAX), "Changes nothing."),
        field("agent_hints", Object(&AGENT_HINTS), "Hints about an agent's request."),
        field("session_control", Object(&SESSION_CONTROL), "The session."),
    ]],
};

const AGENT_HINTS: ObjectShape = ObjectShape {
    name: "AgentHints",
    about: "Hints, of which the priority counts.",
    fields: &[&[
        field("priority", Integer(i32::MIN as i64, i32::MAX as i64), "Higher goes first."),
        field("osl", Integer(0, U32), "Changes nothing."),
        field("speculative_prefill", Boolean, "Changes nothing."),
        field("latency_sensitivity", Number(f64::MIN, f64::MAX), "Changes nothing."),
    ]],
};

const SESSION_CONTROL: ObjectShape = ObjectShape {
    name: "SessionControl",
    about: "The session that a request belongs to.",
    fields: &[&[
        must("session_id", Text, "`prompt_cache_key`."),
        field("action", Text, "Changes nothing."),
        field("timeout", Integer(0, U32), "Changes nothing."),
    ]],
};

const RESPONSE_FORMAT: ObjectShape = ObjectShape {
    name: "ResponseFormat",
    about: "OpenAI's constraint of an answer.",
    fields: &[&[
        must(
            "type",
            Words(&["text", "json_object", "json_schema"]),
            "Free text, any object, or what a schema allows.",
        ),
        field("json_schema", Object(&JSON_SCHEMA), "Required with the type `json_schema`."),
    ]],
};

const JSON_SCHEMA: ObjectShape = ObjectShape {
    name: "JsonSchemaFormat",
    about: "A JSON schema with its name.",
    fields: &[&[
        field("name", Text, "Changes nothing."),
        field("description", Text, "Changes nothing."),
        field("strict", Boolean, "Changes nothing: a schema is kept either way."),
        must("schema", Other(json_schema), "The schema, as an object or as text."),
    ]],
};

const STRUCTURED_OUTPUTS: ObjectShape = ObjectShape {
    name: "StructuredOutputs",
    about: "One constraint of an answer.",
    fields: &[&[
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
};

const MESSAGE: ObjectShape = ObjectShape {
    name: "ChatMessage",
    about: "A message of a chat. `content` is required but for an assistant's message with calls.",
    fields: &[&[
        must(
            "role",
            Words(&["system", "developer", "user", "assistant", "tool", "function"]),
            "Who speaks; `developer` is `system`.",
        ),
        field(
            "content",
            Other(
                || json!({"anyOf": [text(), {"type": "array", "items": named("ContentPart"), "minItems": 1}]}),
            ),
            "A text, or parts with text.",
        ),
        field("name", Text, "Who speaks, more exactly; required of a `function`."),
        field("tool_call_id", Text, "Required of a `tool`: the call that it answers."),
        field("tool_calls", Objects(&TOOL_CALL), "Of an assistant: what it called."),
        field(
            "function_call",
            Object(&FUNCTION_CALL),
            "Of an assistant: the older form of `tool_calls`.",
        ),
        field("refusal", Text, "Of an assistant: stands in for an empty `content`."),
        field(
            "reasoning_content",
            Text,
            "Of an assistant: its thoughts, for templates that show them.",
        ),
        field("reasoning", Text, "The same, where `reasoning_content` is left out."),
        field("annotations", Array(|| json!({})), "Of an assistant: changes nothing."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
    ]],
};

/// A part of a content. The field that holds the text is named like its type.
pub(super) const PART: ObjectShape = ObjectShape {
    name: "ContentPart",
    about: "A part of a message.",
    fields: &[&[
        must("type", Words(&["text", "refusal"]), "Which field holds the text."),
        field("text", Text, "With the type `text`."),
        field("refusal", Text, "With the type `refusal`."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
        field("prompt_cache_breakpoint", Other(|| json!({})), "Changes nothing."),
    ]],
};

const TOOL_CALL: ObjectShape = ObjectShape {
    name: "ToolCall",
    about: "A call of a function.",
    fields: &[&[
        must("id", Text, "Its name in the chat."),
        field("type", Words(&["function"]), "There is one type."),
        field("index", Integer(0, i64::MAX), "Changes nothing."),
        must("function", Object(&FUNCTION_CALL), "What is called."),
    ]],
};

const FUNCTION_CALL: ObjectShape = ObjectShape {
    name: "FunctionCall",
    about: "A function and what it is given.",
    fields: &[&[
        must("name", Text, "The function."),
        must("arguments", Text, "A JSON object, as text."),
    ]],
};
