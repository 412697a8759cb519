//! A request of `/v1/responses` as one of `/v1/chat/completions`, which one check then reads.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::http::parse::json::parse;
use crate::http::parse::missing::{self, Missing};
use crate::http::parse::renamed::FieldNames;
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::items::{self, ItemMessages};
use crate::http::responses::store::StoredResponse;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};

/// What the fields of a chat are called here.
pub(super) const NAMES: FieldNames = FieldNames {
    beginnings: &[
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("verbosity", "text.verbosity"),
        ("reasoning_effort", "reasoning.effort"),
    ],
    of_tools: &[(".function", "")],
};

/// What OpenAI's API has and this server does not.
const MISSING: &[Missing] = &[
    Missing {
        name: "background",
        does_nothing: |value| *value == Value::Bool(false),
        why: "a response runs while its client reads it; set `stream` to true",
    },
    Missing::always("conversation", "use `previous_response_id`, or send the items as `input`"),
    Missing::always("prompt", "this server keeps no prompts; send `instructions` and `input`"),
    Missing::always("context_management", "prompts are never cut; send the items to be seen"),
    Missing::always("moderation", "this server does not moderate"),
    Missing {
        name: "top_logprobs",
        does_nothing: |value| value.as_u64() == Some(0),
        why: "use /v1/chat/completions with `logprobs`",
    },
    Missing {
        name: "truncation",
        does_nothing: |value| value == "disabled",
        why: "prompts are never cut silently",
    },
];

/// Fields that mean the same in a chat, and vLLM's extras.
const SAME: [&str; 24] = [
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream",
    "user",
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "top_k",
];

/// What is said again in the response, beside what the chat's check finds.
#[derive(Debug)]
pub(super) struct Wishes {
    /// Fields of the response object, as JSON without braces.
    pub(super) echo: String,
    pub(super) store: bool,
    pub(super) previous: Option<String>,
    /// Reasoning is sealed for clients that keep their items themselves.
    pub(super) seals: bool,
    /// The list of its own input items, as JSON; empty where it is not stored.
    pub(super) input: String,
}

/// What a request refers to.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The responses that it continues, the first one first.
    pub(super) chain: Vec<Arc<StoredResponse>>,
    /// Responses of items that it names, by id.
    pub(super) named: HashMap<String, Arc<StoredResponse>>,
}

/// The fields of a chat that asks the same, and what the response says of the request. `stores`: this server stores
/// responses. `body` pays for values, `answer` for what stays as long as the answer.
///
/// # Errors
/// `BadRequest` about the first wrong field; `BodyTooComplex` or `Overloaded` where there is no memory for it.
pub(super) fn to_chat(
    mut fields: Fields,
    known: &Known,
    ids: &ResponseIds,
    stores: bool,
    (body, answer): (&mut MemoryShare, &mut MemoryShare),
) -> Result<(Fields, Wishes), RouteError> {
    let mut chat = Map::new();
    let store = fields.boolean("store")?;
    if store == Some(true) && !stores {
        let why = "this server stores no responses (--response-store-bytes is 0)";
        return Err(unsupported("store", why));
    }
    let store = store.unwrap_or(stores);
    let previous = fields.string("previous_response_id")?;
    let seals = include(&mut fields)?;
    stream_options(&mut fields)?;
    fields.integer("max_tool_calls", 0..=i64::MAX)?; // counts calls of tools that this server has none of

    let mut echo = Echo::new(answer);
    echo.copy("instructions", fields.string("instructions")?.map(Value::String).as_ref())?;
    echo.copy("metadata", Some(&metadata(&mut fields)?))?;
    echo.copy("previous_response_id", previous.clone().map(Value::String).as_ref())?;
    echo.copy("store", Some(&store.into()))?;
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        echo.copy(name, fields.look(name))?;
    }
    echo.copy("parallel_tool_calls", fields.look("parallel_tool_calls").or(Some(&true.into())))?;
    for name in SAME {
        if let Some(value) = fields.take(name) {
            chat.insert(name.into(), value);
        }
    }
    let instructions = echo.instructions();
    let length = fields.count("max_output_tokens", 1)?;
    echo.copy("max_output_tokens", length.map(Value::from).as_ref())?;
    if let Some(length) = length {
        chat.insert("max_completion_tokens".into(), length.into());
    }
    text(&mut fields, &mut chat, &mut echo)?;
    reasoning(&mut fields, &mut chat, &mut echo)?;
    tools(&mut fields, &mut chat, &mut echo)?;
    let echo = echo.text;

    let mut input = input(&mut fields)?;
    resolve(&mut input, known, body)?;
    let kept = if store { kept_input(&mut input, ids, answer)? } else { String::new() };
    chat.insert("messages".into(), messages(instructions, known, input, body)?);
    missing::refuse(&mut fields, MISSING)?;
    fields.finish()?;
    let chat = Fields::of_body(Value::Object(chat))?;
    Ok((chat, Wishes { echo, store, previous, seals, input: kept }))
}

/// Fields of the response, as far as they are known.
struct Echo<'m> {
    text: String,
    instructions: Option<String>,
    memory: &'m mut MemoryShare,
}

impl<'m> Echo<'m> {
    fn new(memory: &'m mut MemoryShare) -> Self {
        Self { text: String::new(), instructions: None, memory }
    }

    fn copy(&mut self, name: &str, value: Option<&Value>) -> Result<(), RouteError> {
        let text = value.map_or_else(|| "null".to_owned(), Value::to_string);
        // a string doubles, and it is said in the first two events and in the last
        self.memory.charge(4 * (text.len() + name.len() + 4)).map_err(Refused::answer)?;
        if name == "instructions" {
            self.instructions = value.and_then(Value::as_str).map(str::to_owned);
        }
        if !self.text.is_empty() {
            self.text.push(',');
        }
        self.text.push('"');
        self.text.push_str(name);
        self.text.push_str("\":");
        self.text.push_str(&text);
        Ok(())
    }

    fn instructions(&mut self) -> Option<String> {
        self.instructions.take()
    }
}

/// Whether reasoning is to be sealed. Everything else that may be asked for never comes about here.
fn include(fields: &mut Fields) -> Result<bool, RouteError> {
    let mut seals = false;
    for (i, name) in fields.array("include")?.unwrap_or_default().into_iter().enumerate() {
        let at = format!("include[{i}]");
        let Value::String(name) = &name else { return Err(wrong_type(at, "a string", &name)) };
        match name.as_str() {
            "reasoning.encrypted_content" => seals = true,
            "message.output_text.logprobs" => {
                let why = "use /v1/chat/completions with `logprobs`";
                return Err(unsupported(at, why));
            }
            name if KINDS_OF_CALLS.iter().any(|kind| name.starts_with(kind)) => {}
            name => {
                return Err(bad(&at, format!("`{at}` is \"{}\", which is not known", clip(name))));
            }
        }
    }
    Ok(seals)
}

/// What may be included of calls of tools that this server does not have.
const KINDS_OF_CALLS: [&str; 5] = [
    "code_interpreter_call.",
    "computer_call_output.",
    "file_search_call.",
    "message.input_image.",
    "web_search_call.",
];

fn stream_options(fields: &mut Fields) -> Result<(), RouteError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(()) };
    if options.boolean("include_obfuscation")? == Some(true) {
        let why = "this server does not pad its events";
        return Err(unsupported("stream_options.include_obfuscation", why));
    }
    options.finish()
}

fn metadata(fields: &mut Fields) -> Result<Value, RouteError> {
    Ok(fields.object("metadata")?.map_or_else(|| json!({}), |all| Value::Object(all.into_rest())))
}

/// `text`: what the answer has to follow.
fn text(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut Echo<'_>,
) -> Result<(), RouteError> {
    let Some(mut text) = fields.object("text")? else {
        return echo
            .copy("text", Some(&json!({"format": {"type": "text"}, "verbosity": "medium"})));
    };
    let verbosity = text.string("verbosity")?;
    let said_verbosity = verbosity.clone().unwrap_or_else(|| "medium".to_owned());
    if let Some(verbosity) = verbosity {
        chat.insert("verbosity".into(), verbosity.into());
    }
    let Some(mut format) = text.object("format")? else {
        text.finish()?;
        let said = json!({"format": {"type": "text"}, "verbosity": said_verbosity});
        return echo.copy("text", Some(&said));
    };
    text.finish()?;
    let kind = format.string("type")?;
    let kind = format.require("type", kind)?;
    let mut said = Map::new();
    said.insert("type".into(), kind.as_str().into());
    let ours = match kind.as_str() {
        "text" | "json_object" => json!({"type": kind}),
        "json_schema" => {
            let name = format.string("name")?;
            format.require("name", name.as_ref())?;
            let mut wrapper = Map::new();
            for name in ["description", "schema", "strict"] {
                if let Some(value) = format.take(name) {
                    wrapper.insert(name.into(), value);
                }
            }
            if let Some(name) = name {
                wrapper.insert("name".into(), name.into());
            }
            echo.memory.charge(size_of_schema(&wrapper)).map_err(Refused::answer)?;
            said.extend(wrapper.clone());
            json!({"type": kind, "json_schema": wrapper})
        }
        other => {
            let path = format.path("type");
            let message = format!(
                "`{path}` is \"{}\"; it must be text, json_object or json_schema",
                clip(other)
            );
            return Err(bad(path, message));
        }
    };
    format.finish()?;
    chat.insert("response_format".into(), ours);
    echo.copy("text", Some(&json!({"format": said, "verbosity": said_verbosity})))
}

/// What a copy of it takes, at most.
fn size_of_schema(wrapper: &Map<String, Value>) -> usize {
    fn size(value: &Value) -> usize {
        let inside = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len() + ALLOCATION_BYTES,
            Value::Array(items) => items.iter().map(size).sum::<usize>() + ALLOCATION_BYTES,
            Value::Object(fields) => fields
                .iter()
                .map(|(name, value)| 2 * (name.len() + ALLOCATION_BYTES + 64) + size(value))
                .sum::<usize>(),
        };
        size_of::<Value>() + inside
    }
    wrapper.values().map(size).sum()
}

/// How much the model thinks. Summaries of it are not written: the reasoning itself is in the response.
fn reasoning(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut Echo<'_>,
) -> Result<(), RouteError> {
    let mut effort = None;
    if let Some(mut reasoning) = fields.object("reasoning")? {
        effort = reasoning.string("effort")?;
        for name in ["summary", "generate_summary", "context"] {
            reasoning.string(name)?;
        }
        reasoning.finish()?;
    }
    echo.copy("reasoning", Some(&json!({"effort": effort, "summary": null})))?;
    if let Some(effort) = effort {
        chat.insert("reasoning_effort".into(), effort.into());
    }
    Ok(())
}

fn tools(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut Echo<'_>,
) -> Result<(), RouteError> {
    echo.copy("tools", fields.look("tools").or(Some(&json!([]))))?;
    echo.copy("tool_choice", fields.look("tool_choice").or(Some(&"auto".into())))?;
    if let Some(tools) = fields.array("tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.into_iter().enumerate();
        let tools = tools.map(|(i, value)| tool(Fields::of(value, format!("tools[{i}]"))?));
        chat.insert("tools".into(), Value::Array(tools.collect::<Result<_, _>>()?));
    }
    match fields.take("tool_choice") {
        None => {}
        Some(Value::Object(choice)) => {
            let choice = named_choice(Fields::of(Value::Object(choice), "tool_choice".into())?)?;
            chat.insert("tool_choice".into(), choice);
        }
        Some(choice) => {
            chat.insert("tool_choice".into(), choice);
        }
    }
    Ok(())
}

/// Of the client's own. What OpenAI's servers do themselves is not done here.
fn tool(mut tool: Fields) -> Result<Value, RouteError> {
    let kind = tool.string("type")?;
    let kind = tool.require("type", kind)?;
    if kind != "function" {
        let path = tool.path("type");
        let message = format!(
            "`{path}` is \"{}\", which is not supported: the only type is \"function\", this server has no tools of its \
             own",
            clip(&kind)
        );
        return Err(bad(path, message));
    }
    let mut function = Map::new();
    let name = tool.string("name")?;
    function.insert("name".into(), tool.require("name", name)?.into());
    for name in ["description", "parameters", "strict"] {
        if let Some(value) = tool.take(name) {
            function.insert(name.into(), value);
        }
    }
    if tool.boolean("defer_loading")? == Some(true) {
        return Err(unsupported(tool.path("defer_loading"), "every tool is shown to the model"));
    }
    tool.finish()?;
    Ok(json!({"type": "function", "function": function}))
}

fn named_choice(mut choice: Fields) -> Result<Value, RouteError> {
    let kind = choice.string("type")?;
    let kind = choice.require("type", kind)?;
    let ours = match kind.as_str() {
        "function" => {
            let name = choice.string("name")?;
            json!({"type": "function", "function": {"name": choice.require("name", name)?}})
        }
        "allowed_tools" => {
            let mode = choice.take("mode");
            let tools = choice.array("tools")?;
            let tools = choice.require("tools", tools)?.into_iter().enumerate();
            let tools = tools.map(|(i, tool)| {
                let tool = Fields::of(tool, format!("tool_choice.tools[{i}]"))?;
                named_choice(tool)
            });
            let tools = Value::Array(tools.collect::<Result<_, _>>()?);
            json!({"type": kind, "allowed_tools": {"mode": mode, "tools": tools}})
        }
        other => {
            let path = choice.path("type");
            let message = format!(
                "`{path}` is \"{}\", which is not supported: it may be function, this server has no tools of its own",
                clip(other)
            );
            return Err(bad(path, message));
        }
    };
    choice.finish()?;
    Ok(ours)
}

/// The items of a request.
fn input(fields: &mut Fields) -> Result<Vec<Value>, RouteError> {
    match fields.take("input") {
        None => Err(bad("input", "`input` is required")),
        Some(Value::String(text)) => {
            Ok(vec![json!({"type": "message", "role": "user", "content": text})])
        }
        Some(Value::Array(items)) if items.is_empty() => {
            Err(bad("input", "`input` must hold at least one item"))
        }
        Some(Value::Array(items)) => Ok(items),
        Some(other) => Err(wrong_type("input", "a string or an array of items", &other)),
    }
}

/// Puts items in the place of references to them.
fn resolve(input: &mut [Value], known: &Known, memory: &mut MemoryShare) -> Result<(), RouteError> {
    for (i, item) in input.iter_mut().enumerate() {
        let Some(id) = reference(item) else { continue };
        let at = format!("input[{i}].id");
        let found = ResponseIds::response_of(id).and_then(|response| known.named.get(&response));
        let items = found.map(|stored| stored_items(&stored.output, memory)).transpose()?;
        let mut items = items.unwrap_or_default().into_iter();
        let Some(found) = items.find(|item| item["id"] == id) else {
            let message = format!("`{at}` is \"{}\", which is no stored item", clip(id));
            return Err(bad(at, message));
        };
        *item = found;
    }
    Ok(())
}

/// The id of the item that this one refers to.
pub(super) fn reference(item: &Value) -> Option<&str> {
    let kind = item.get("type").and_then(Value::as_str);
    let bare = kind.is_none() && item.get("role").is_none();
    (kind == Some("item_reference") || bare).then(|| item.get("id")?.as_str()).flatten()
}

fn stored_items(json: &[u8], memory: &mut MemoryShare) -> Result<Vec<Value>, RouteError> {
    let Value::Array(items) = parse(json, None, memory)?.value else {
        return Err(RouteError::mistake("stored items are no list"));
    };
    Ok(items)
}

fn kept_input(
    input: &mut [Value],
    ids: &ResponseIds,
    memory: &mut MemoryShare,
) -> Result<String, RouteError> {
    let mut count = 0;
    items::normalised(input, |prefix| {
        count += 1;
        ids.input_item(prefix, count)
    })?;
    let mut text = String::from("[");
    for (i, item) in input.iter().enumerate() {
        let item = item.to_string();
        memory.charge(2 * item.len() + 2).map_err(Refused::answer)?; // a string doubles
        if i > 0 {
            text.push(',');
        }
        text.push_str(&item);
    }
    text.push(']');
    Ok(text)
}

/// What the message of a chat takes beside the item that it is made of: an object, a part and their names. Measured by
/// nobody, and on the high side.
const ITEM_BYTES: usize = 768;

fn charge_items(items: usize, memory: &mut MemoryShare) -> Result<(), RouteError> {
    let charged = memory.charge(items.saturating_mul(ITEM_BYTES));
    charged.map_err(|refused| refused.body(Some("input".to_owned())))
}

fn messages(
    instructions: Option<String>,
    known: &Known,
    input: Vec<Value>,
    memory: &mut MemoryShare,
) -> Result<Value, RouteError> {
    let mut messages = ItemMessages::default();
    if let Some(instructions) = instructions {
        messages.instruct(&instructions);
    }
    for stored in &known.chain {
        for items in [&stored.input, &stored.output] {
            let items = stored_items(items, memory)?;
            charge_items(items.len(), memory)?;
            for (i, item) in items.into_iter().enumerate() {
                messages.add(item, format!("previous_response_id[{i}]"))?;
            }
        }
    }
    charge_items(input.len(), memory)?;
    for (i, item) in input.into_iter().enumerate() {
        messages.add(item, format!("input[{i}]"))?;
    }
    Ok(Value::Array(messages.finish()))
}

#[cfg(test)]
mod tests;
