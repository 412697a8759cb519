//! A request of `/v1/messages`: a conversation in blocks, and how it is answered.

use super::FieldKind::{
    Array, Boolean, Integer, Object, Objects, Open, Other, SomeObjects, Text, TextOr, Words,
};
use super::{Field, ObjectShape, U32, field, json_schema, must, text};
use crate::http::anthropic::request::SAME;
use crate::http::ops::openapi::json::json;

pub(in super::super) const MESSAGES: ObjectShape = ObjectShape {
    name: "MessageRequest",
    about: "A conversation to answer.",
    fields: &[&[must("max_tokens", Integer(1, U32), "The longest answer.")], CONVERSATION],
    as_chat: &SAME,
    one_of: &[],
};

pub(in super::super) const COUNT: ObjectShape = ObjectShape {
    name: "MessageCountRequest",
    about: "A conversation whose tokens are counted. Fields that say how it is answered change nothing.",
    fields: &[&[field("max_tokens", Integer(1, U32), "Changes nothing.")], CONVERSATION],
    as_chat: &SAME,
    one_of: &[],
};

const CONVERSATION: &[Field] = &[
    must("messages", SomeObjects(&MESSAGE), "The conversation so far, at least one message."),
    field("system", TextOr(&TEXT), "What comes before it, as a text or as blocks with text."),
    field(
        "stop_sequences",
        Array(text),
        "At most 16 texts of 1 to 1,024 bytes that end the answer.",
    ),
    field("tools", Objects(&TOOL), "Functions that the chat template shows to the model."),
    field("tool_choice", Object(&TOOL_CHOICE), "Whether tools are called, and which."),
    field(
        "thinking",
        Object(&THINKING),
        "Whether the model thinks, where its chat template knows it.",
    ),
    field("output_config", Object(&OUTPUT_CONFIG), "What the answer has to follow."),
    field("output_format", Object(&FORMAT), "`output_config.format`, by its earlier name."),
    field("metadata", Object(&METADATA), "Who asks."),
    field("service_tier", Words(&["auto", "standard_only", "standard"]), "There is one tier."),
    field("cache_control", Other(|| json!({})), "Changes nothing."),
];

const MESSAGE: ObjectShape = ObjectShape::new(
    "MessageTurn",
    "What one side says. Text of the assistant that comes last is gone on with.",
    &[&[
        must("role", Words(&["user", "assistant"]), "Who speaks."),
        must("content", TextOr(&BLOCK), "A text, or blocks."),
    ]],
);

/// All kinds of blocks in one shape: `type` says which fields count.
const BLOCK: ObjectShape = ObjectShape::new(
    "InputBlock",
    "A text, a thought, a call, or what came of a call.",
    &[&[
        must(
            "type",
            Words(&["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]),
            "Which fields count. The user has `text` and `tool_result`, the assistant the others and `text`.",
        ),
        field("text", Text, "Required of a `text`."),
        field("citations", Array(|| json!({})), "Of a `text`: changes nothing."),
        field("thinking", Text, "Required of `thinking`: the thought."),
        field("signature", Text, "Of `thinking`: changes nothing."),
        field("data", Text, "Of `redacted_thinking`: changes nothing."),
        field("id", Text, "Required of a `tool_use`: its name."),
        field("name", Text, "Required of a `tool_use`: the function."),
        field("input", Open, "Required of a `tool_use`: its arguments."),
        field("caller", Other(|| json!({})), "Of a `tool_use`: changes nothing."),
        field("tool_use_id", Text, "Required of a `tool_result`: the call that it answers."),
        field("content", TextOr(&TEXT), "Of a `tool_result`: what came of the call."),
        field("is_error", Boolean, "Of a `tool_result`: the call failed."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
    ]],
);

const TEXT: ObjectShape = ObjectShape::new(
    "TextBlock",
    "A text.",
    &[&[
        must("type", Words(&["text"]), "There is one type."),
        must("text", Text, "The text."),
        field("citations", Array(|| json!({})), "Changes nothing."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
    ]],
);

const TOOL: ObjectShape = ObjectShape::new(
    "MessageTool",
    "A function that the model may call.",
    &[&[
        field("type", Words(&["custom"]), "There is one type."),
        must("name", Text, "1 to 64 letters, digits, _ and -."),
        field("description", Text, "What it does, for the model."),
        must("input_schema", Open, "A JSON schema of its arguments."),
        field("strict", Boolean, "Calls are held to `input_schema`."),
        field(
            "eager_input_streaming",
            Boolean,
            "Changes nothing: arguments are sent as they come.",
        ),
        field("input_examples", Array(|| json!({})), "Changes nothing."),
        field("defer_loading", Other(|| json!({"const": false})), "Every tool is shown."),
        field("allowed_callers", Other(|| json!({"const": ["direct"]})), "There is one caller."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
    ]],
);

const TOOL_CHOICE: ObjectShape = ObjectShape::new(
    "MessageToolChoice",
    "Whether tools are called, and which.",
    &[&[
        must("type", Words(&["auto", "any", "tool", "none"]), "`tool` is the one with the `name`."),
        field("name", Text, "Required with the type `tool`."),
        field("disable_parallel_tool_use", Boolean, "The answer ends after its first call."),
    ]],
);

const THINKING: ObjectShape = ObjectShape::new(
    "MessageThinking",
    "Whether the model thinks.",
    &[&[
        must("type", Words(&["enabled", "adaptive", "disabled"]), "Whether it does."),
        field(
            "budget_tokens",
            Integer(1, U32),
            "Required with the type `enabled`; less than `max_tokens`. Then the model has to answer, where one token ends its \
             thoughts.",
        ),
        field("display", Text, "Changes nothing."),
    ]],
);

const OUTPUT_CONFIG: ObjectShape = ObjectShape::new(
    "MessageOutputConfig",
    "What the answer has to follow.",
    &[&[
        field("format", Object(&FORMAT), "A constraint of the answer."),
        field("effort", Text, "Changes nothing."),
    ]],
);

const FORMAT: ObjectShape = ObjectShape::new(
    "MessageOutputFormat",
    "A constraint of the answer.",
    &[&[
        must("type", Words(&["json_schema"]), "There is one type."),
        must("schema", Other(json_schema), "The schema, as an object or as text."),
    ]],
);

const METADATA: ObjectShape = ObjectShape::new(
    "MessageMetadata",
    "Who asks.",
    &[&[field("user_id", Text, "The session, if no header names it.")]],
);
