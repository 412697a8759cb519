//! A request of `/v1/responses`: its input as items, and what the answer is to be.

use super::FieldKind::{
    Array, Boolean, Integer, Object, Objects, Open, Other, Text, TextOr, Words, WordsOr,
};
use super::{ObjectShape, U32, field, json_schema, metadata, must, text};
use crate::http::ops::openapi::json::json;
use crate::http::responses::request::SAME;

pub(in super::super) const RESPONSES: ObjectShape = ObjectShape {
    name: "ResponseRequest",
    about: "A text or items to answer.",
    fields: &[&[
        must("input", TextOr(&ITEM), "A text of the user, or items; at least one."),
        field("instructions", Text, "What comes first, as a system message."),
        field("max_output_tokens", Integer(1, U32), "The longest answer."),
        field("text", Object(&TEXT), "What the answer has to follow."),
        field("reasoning", Object(&REASONING), "How much the model reasons."),
        field("tools", Objects(&TOOL), "Functions that the chat template shows to the model."),
        field(
            "tool_choice",
            WordsOr(&["none", "auto", "required"], &TOOL_CHOICE),
            "Whether tools are called, and which. \"auto\" where left out.",
        ),
        field("previous_response_id", Text, "A stored response to go on with."),
        field("store", Boolean, "Keep the response for later requests. True where left out."),
        field(
            "include",
            Array(text),
            "`message.output_text.logprobs`: log-probabilities of the tokens of texts. `reasoning.encrypted_content`: reasoning \
             comes in that field, too. What can be included of tools of OpenAI's own changes nothing.",
        ),
        field(
            "top_logprobs",
            Integer(0, 20),
            "Alternatives of each token, with log-probabilities.",
        ),
        field("metadata", Other(metadata), "At most 16 texts by name, said again in the response."),
        field("stream_options", Object(&STREAM_OPTIONS), "Only with `stream`."),
        field(
            "max_tool_calls",
            Integer(0, i64::MAX),
            "Changes nothing: there are no tools to count.",
        ),
    ]],
    as_chat: &SAME,
    one_of: &[],
};

/// All kinds of items in one shape: `type` says which fields count.
const ITEM: ObjectShape = ObjectShape::new(
    "InputItem",
    "A message, a call, what came of it, reasoning, or a reference to an item of a stored response.",
    &[&[
        field(
            "type",
            Words(&[
                "message",
                "function_call",
                "function_call_output",
                "reasoning",
                "item_reference",
            ]),
            "`message` where left out; `item_reference` where there is an `id` alone.",
        ),
        field("id", Text, "Required of an `item_reference`: the item that it stands for."),
        field("status", Text, "Changes nothing."),
        field(
            "role",
            Words(&["user", "system", "developer", "assistant"]),
            "Required of a `message`: who speaks.",
        ),
        field(
            "content",
            TextOr(&PART),
            "Required of a `message`: what is said. Of `reasoning`: parts with the text.",
        ),
        field("phase", Text, "Changes nothing."),
        field("call_id", Text, "Required of a call and of what came of it: its name."),
        field("name", Text, "Required of a call: the function."),
        field("arguments", Text, "Required of a call: a JSON object, as text."),
        field("output", TextOr(&PART), "Required of a `function_call_output`: what came of it."),
        field("summary", Array(|| json!({})), "Of `reasoning`: changes nothing."),
        field(
            "encrypted_content",
            Text,
            "Of `reasoning`: counts where `content` is left out and this server wrote it.",
        ),
        field("caller", Other(|| json!({})), "Changes nothing."),
    ]],
);

const PART: ObjectShape = ObjectShape::new(
    "InputPart",
    "A part of a content. The field that holds the text is `refusal` for that type, else `text`.",
    &[&[
        field(
            "type",
            Words(&["input_text", "output_text", "text", "refusal", "reasoning_text"]),
            "Which field holds the text; required but in reasoning.",
        ),
        field("text", Text, "The text."),
        field("refusal", Text, "With the type `refusal`."),
        field("annotations", Array(|| json!({})), "Changes nothing."),
        field("logprobs", Array(|| json!({})), "Changes nothing."),
        field("prompt_cache_breakpoint", Other(|| json!({})), "Changes nothing."),
    ]],
);

const TEXT: ObjectShape = ObjectShape::new(
    "ResponseText",
    "The text of the answer.",
    &[&[
        field("format", Object(&FORMAT), "What the answer has to follow."),
        field("verbosity", Words(&["low", "medium", "high"]), "For the chat template."),
    ]],
);

const FORMAT: ObjectShape = ObjectShape::new(
    "ResponseTextFormat",
    "A constraint of the answer.",
    &[&[
        must(
            "type",
            Words(&["text", "json_object", "json_schema"]),
            "Free text, any object, or what a schema allows.",
        ),
        field("name", Text, "Required with the type `json_schema`; changes nothing."),
        field("schema", Other(json_schema), "Required with the type `json_schema`."),
        field("description", Text, "Changes nothing."),
        field("strict", Boolean, "Changes nothing: a schema is kept either way."),
    ]],
);

const REASONING: ObjectShape = ObjectShape::new(
    "ResponseReasoning",
    "How much the model reasons. No summaries are written.",
    &[&[
        field(
            "effort",
            Words(&["none", "minimal", "low", "medium", "high", "xhigh"]),
            "Where the chat template of the model knows it.",
        ),
        field("summary", Text, "Changes nothing."),
        field("generate_summary", Text, "Changes nothing."),
        field("context", Text, "Changes nothing."),
    ]],
);

const TOOL: ObjectShape = ObjectShape::new(
    "ResponseTool",
    "A function that the model may call.",
    &[&[
        must("type", Words(&["function"]), "There is one type."),
        must("name", Text, "1 to 64 letters, digits, _ and -."),
        field("description", Text, "What it does, for the model."),
        field("parameters", Open, "A JSON schema of its arguments."),
        field("strict", Boolean, "Calls are held to `parameters`."),
        field("defer_loading", Other(|| json!({"const": false})), "Every tool is shown."),
    ]],
);

const TOOL_CHOICE: ObjectShape = ObjectShape::new(
    "ResponseToolChoice",
    "One function that is called, or those that may be.",
    &[&[
        must("type", Words(&["function", "allowed_tools"]), "Which fields count."),
        field("name", Text, "Required with the type `function`."),
        field("mode", Words(&["auto", "required"]), "Required with the type `allowed_tools`."),
        field("tools", Objects(&NAMED_TOOL), "Required with the type `allowed_tools`."),
    ]],
);

const NAMED_TOOL: ObjectShape = ObjectShape::new(
    "ResponseToolName",
    "One of the request's functions.",
    &[&[
        must("type", Words(&["function"]), "There is one type."),
        must("name", Text, "The function."),
    ]],
);

const STREAM_OPTIONS: ObjectShape = ObjectShape::new(
    "ResponseStreamOptions",
    "How a stream is sent.",
    &[&[field("include_obfuscation", Other(|| json!({"const": false})), "Events are not padded.")]],
);
