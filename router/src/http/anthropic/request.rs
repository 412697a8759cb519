//! A request of `/v1/messages` as one of `/v1/chat/completions`, which one check then reads.

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::anthropic::content::{self, ChatMessages};
use crate::http::parse::fields::{Fields, bad, clip, unsupported};
use crate::http::parse::missing::{self, Missing};
use crate::http::parse::renamed::FieldNames;
use crate::limits::memory::MemoryShare;

/// What the fields of a chat are called here.
pub(super) const NAMES: FieldNames = FieldNames {
    beginnings: &[
        ("stop", "stop_sequences"),
        ("user", "metadata.user_id"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
    ],
    of_tools: &[(".function.parameters", ".input_schema"), (".function", "")],
};

/// What Anthropic's API has and this server does not.
const MISSING: &[Missing] = &[
    Missing {
        name: "mcp_servers",
        does_nothing: |value| value.as_array().is_some_and(Vec::is_empty),
        why: "this server calls no tools itself",
    },
    Missing::always("container", "this server runs no code"),
    Missing {
        name: "context_management",
        does_nothing: edits_nothing,
        why: "prompts are never cut; send the messages that the model should see",
    },
    Missing {
        name: "inference_geo",
        does_nothing: |value| value == "global",
        why: "there is one place, this server",
    },
];

/// Thoughts of earlier turns stay as the client sends them.
fn edits_nothing(value: &Value) -> bool {
    let Some(edits) = value.get("edits").and_then(Value::as_array) else {
        return value.as_object().is_some_and(Map::is_empty);
    };
    edits.iter().all(|edit| {
        edit["type"].as_str().is_some_and(|kind| kind.starts_with("clear_thinking_"))
            && edit["keep"] == "all"
    })
}

/// Fields that mean the same in a chat, and vLLM's extras.
pub(in crate::http) const SAME: [&str; 33] = [
    "model",
    "temperature",
    "top_k",
    "top_p",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "max_reasoning_tokens",
    "min_p",
    "min_tokens",
    "nvext",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "stream",
    "truncate_prompt_tokens",
];

/// A conversation as a chat.
#[derive(Debug)]
pub(in crate::http) struct Conversation {
    pub(in crate::http) fields: Fields,
    /// The longest thoughts, where the model can be held to it.
    pub(in crate::http) most_thinking: Option<u32>,
}

/// The fields of a chat that asks the same. `counts`: only its prompt's tokens are asked for.
///
/// # Errors
/// `BadRequest` about the first wrong field; `BodyTooComplex` or `Overloaded` where there is no memory for it.
pub(in crate::http) fn to_chat(
    mut fields: Fields,
    counts: bool,
    memory: &mut MemoryShare,
) -> Result<Conversation, RouteError> {
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = fields.take(name) {
            chat.insert(name.into(), value);
        }
    }
    let max_tokens = fields.count("max_tokens", 1)?;
    if !counts {
        chat.insert("max_tokens".into(), fields.require("max_tokens", max_tokens)?.into());
    }
    if let Some(stops) = fields.array("stop_sequences")? {
        chat.insert("stop".into(), Value::Array(stops));
    }
    if let Some(mut metadata) = fields.object("metadata")? {
        if let Some(user) = metadata.string("user_id")? {
            chat.insert("user".into(), user.into());
        }
        metadata.finish()?;
    }
    service_tier(&mut fields)?;
    let most_thinking = thinking(&mut fields, max_tokens, &mut chat)?;
    if let (Some(_), Some(_)) = (most_thinking, chat.get("max_reasoning_tokens")) {
        let message =
            "`max_reasoning_tokens` and `thinking.budget_tokens` mean the same; send one of them";
        return Err(bad("max_reasoning_tokens", message));
    }
    output_config(&mut fields, &mut chat)?;
    tools(&mut fields, &mut chat)?;
    fields.take("cache_control"); // a hint about caches; ours needs none

    let messages = messages(&mut fields, memory)?;
    if messages.goes_on {
        chat.insert("continue_final_message".into(), true.into());
    }
    chat.insert("messages".into(), Value::Array(messages.messages));
    missing::refuse(&mut fields, MISSING)?;
    fields.finish()?;
    Ok(Conversation { fields: Fields::of_body(Value::Object(chat))?, most_thinking })
}

const MESSAGE_BYTES: usize = 512;

fn messages(fields: &mut Fields, memory: &mut MemoryShare) -> Result<ChatMessages, RouteError> {
    let mut chat = ChatMessages::default();
    if let Some(system) = fields.take("system") {
        let content = content::system(system)?;
        chat.messages.push(json!({"role": "system", "content": content}));
    }
    let messages = fields.array("messages")?;
    let messages = fields.require("messages", messages)?;
    if messages.is_empty() {
        return Err(bad("messages", "`messages` must hold at least one message"));
    }
    // beside what it is made of, a message takes an object with its names: a guess on the high side
    let charged = memory.charge(messages.len().saturating_mul(MESSAGE_BYTES));
    charged.map_err(|refused| refused.body(Some("messages".to_owned())))?;
    for (i, message) in messages.into_iter().enumerate() {
        chat.add(Fields::of(message, format!("messages[{i}]"))?, memory)?;
    }
    Ok(chat)
}

fn service_tier(fields: &mut Fields) -> Result<(), RouteError> {
    match fields.string("service_tier")?.as_deref() {
        None | Some("auto" | "standard_only" | "standard") => Ok(()),
        Some(_) => Err(unsupported("service_tier", "there is one tier, \"standard\"")),
    }
}

/// Whether the model thinks, for templates that let that be said: Qwen's call it `enable_thinking`, DeepSeek's `thinking`.
/// Gives the budget.
fn thinking(
    fields: &mut Fields,
    max_tokens: Option<u32>,
    chat: &mut Map<String, Value>,
) -> Result<Option<u32>, RouteError> {
    let (mut thinks, mut most) = (false, None);
    if let Some(mut thinking) = fields.object("thinking")? {
        let kind = thinking.string("type")?;
        let kind = thinking.require("type", kind)?;
        thinks = match kind.as_str() {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            other => {
                let path = thinking.path("type");
                let message = format!(
                    "`{path}` is \"{}\"; it must be one of enabled, adaptive, disabled",
                    clip(other)
                );
                return Err(bad(path, message));
            }
        };
        let budget = thinking.count("budget_tokens", 1)?;
        if kind == "enabled" {
            let budget = thinking.require("budget_tokens", budget)?;
            most = Some(budget);
            if let Some(max_tokens) = max_tokens.filter(|max_tokens| budget >= *max_tokens) {
                let path = thinking.path("budget_tokens");
                let message = format!(
                    "`{path}` is {budget}, but `max_tokens` is {max_tokens}; it must be less"
                );
                return Err(bad(path, message));
            }
        }
        thinking.string("display")?;
        thinking.finish()?;
    }
    let kwargs = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
    if let Value::Object(kwargs) = kwargs {
        for name in ["enable_thinking", "thinking"] {
            kwargs.entry(name).or_insert(thinks.into());
        }
    }
    Ok(most)
}

/// What the answer has to follow, under its present name and under that of the beta.
fn output_config(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), RouteError> {
    let mut format = fields.object("output_format")?;
    if let Some(mut config) = fields.object("output_config")? {
        config.string("effort")?; // as `budget_tokens`
        format = config.object("format")?.or(format);
        config.finish()?;
    }
    let Some(mut format) = format else { return Ok(()) };
    let kind = format.string("type")?;
    let kind = format.require("type", kind)?;
    if kind != "json_schema" {
        return Err(unsupported(format.path("type"), "the only type is \"json_schema\""));
    }
    let schema = format.take("schema");
    let schema = format.require("schema", schema)?;
    format.finish()?;
    let schema = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    chat.insert("response_format".into(), schema);
    Ok(())
}

fn tools(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), RouteError> {
    if let Some(tools) = fields.array("tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.into_iter().enumerate();
        let tools = tools.map(|(i, value)| tool(Fields::of(value, format!("tools[{i}]"))?));
        chat.insert("tools".into(), Value::Array(tools.collect::<Result<_, _>>()?));
    }
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok(()) };
    let kind = choice.string("type")?;
    let kind = choice.require("type", kind)?;
    let ours = match kind.as_str() {
        "auto" => json!("auto"),
        "any" => json!("required"),
        "none" => json!("none"),
        "tool" => {
            let name = choice.string("name")?;
            json!({"type": "function", "function": {"name": choice.require("name", name)?}})
        }
        other => {
            let path = choice.path("type");
            let message =
                format!("`{path}` is \"{}\"; it must be one of auto, any, tool, none", clip(other));
            return Err(bad(path, message));
        }
    };
    chat.insert("tool_choice".into(), ours);
    if choice.boolean("disable_parallel_tool_use")? == Some(true) {
        chat.insert("parallel_tool_calls".into(), false.into());
    }
    choice.finish()
}

/// A tool of the client's own. Those of Anthropic have a type with a date, and a definition that this server lacks.
fn tool(mut fields: Fields) -> Result<Value, RouteError> {
    if fields.string("type")?.is_some_and(|kind| kind != "custom") {
        let why = "only tools of the client's own, with an `input_schema`, are known";
        return Err(unsupported(fields.path("type"), why));
    }
    let mut function = Map::new();
    let name = fields.string("name")?;
    function.insert("name".into(), fields.require("name", name)?.into());
    if let Some(description) = fields.string("description")? {
        function.insert("description".into(), description.into());
    }
    let schema = fields.object("input_schema")?;
    let schema = fields.require("input_schema", schema)?.into_rest();
    function.insert("parameters".into(), Value::Object(schema));
    if let Some(strict) = fields.boolean("strict")? {
        function.insert("strict".into(), strict.into());
    }
    fields.take("cache_control");
    fields.boolean("eager_input_streaming")?; // arguments are always sent as they come
    fields.array("input_examples")?;
    if fields.boolean("defer_loading")? == Some(true) {
        return Err(unsupported(fields.path("defer_loading"), "every tool is shown to the model"));
    }
    if let Some(callers) = fields.array("allowed_callers")?
        && callers != ["direct"]
    {
        return Err(unsupported(fields.path("allowed_callers"), "the only caller is \"direct\""));
    }
    fields.finish()?;
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
mod tests;
