//! A chat: what its template shows to the model, and how it is answered.

use super::FieldKind::{
    Array, Boolean, Integer, Object, Objects, Open, Other, SomeObjects, Text, TextOr, Words,
};
use super::generation::{GENERATION, HARMLESS};
use super::{Field, ObjectShape, U32, field, must, named};
use crate::http::ops::openapi::json::json;

/// What the chat template gets to see.
pub(super) const CHAT_PROMPT: &[Field] = &[
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

pub(in super::super) const CHAT: ObjectShape = ObjectShape::new(
    "ChatRequest",
    "A chat to answer.",
    &[
        &[must("messages", SomeObjects(&MESSAGE), "The chat so far, at least one message.")],
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
);

pub(super) const MESSAGE: ObjectShape = ObjectShape::new(
    "ChatMessage",
    "A message of a chat. `content` is required but for an assistant's message with calls.",
    &[&[
        must(
            "role",
            Words(&["system", "developer", "user", "assistant", "tool", "function"]),
            "Who speaks; `developer` is `system`.",
        ),
        field("content", TextOr(&PART), "A text, or parts with text."),
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
);

/// A part of a content. The field that holds the text is named like its type.
pub(in super::super) const PART: ObjectShape = ObjectShape::new(
    "ContentPart",
    "A part of a message.",
    &[&[
        must("type", Words(&["text", "refusal"]), "Which field holds the text."),
        field("text", Text, "With the type `text`."),
        field("refusal", Text, "With the type `refusal`."),
        field("cache_control", Other(|| json!({})), "Changes nothing."),
        field("prompt_cache_breakpoint", Other(|| json!({})), "Changes nothing."),
    ]],
);

const TOOL_CALL: ObjectShape = ObjectShape::new(
    "ToolCall",
    "A call of a function.",
    &[&[
        must("id", Text, "Its name in the chat."),
        field("type", Words(&["function"]), "There is one type."),
        field("index", Integer(0, i64::MAX), "Changes nothing."),
        must("function", Object(&FUNCTION_CALL), "What is called."),
    ]],
);

const FUNCTION_CALL: ObjectShape = ObjectShape::new(
    "FunctionCall",
    "A function and what it is given.",
    &[&[must("name", Text, "The function."), must("arguments", Text, "A JSON object, as text.")]],
);
