//! A request of `/v1/responses` as one of `/v1/chat/completions`, which one check then reads.

mod answer;
mod echo;
mod input;
mod tools;

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value};

pub(super) use self::input::reference;

use self::answer::{reasoning, text};
use self::echo::RequestEcho;
use self::input::{input, kept_input, messages, resolve};
use self::tools::tools;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::http::parse::missing::{self, Missing};
use crate::http::parse::params::MAX_TOP_LOGPROBS;
use crate::http::parse::renamed::FieldNames;
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::items::origins::MessageOrigins;
use crate::limits::memory::MemoryShare;
use crate::response_store::StoredResponse;

/// What the fields of a chat are called here.
pub(super) const NAMES: FieldNames = FieldNames {
    beginnings: &[
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("verbosity", "text.verbosity"),
        ("reasoning_effort", "reasoning.effort"),
        ("messages", "input"),
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
        name: "truncation",
        does_nothing: |value| value == "disabled",
        why: "prompts are never cut silently",
    },
];

/// Fields that mean the same in a chat, and vLLM's extras.
pub(in crate::http) const SAME: [&str; 40] = [
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
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "top_k",
    "truncate_prompt_tokens",
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
    /// Where the messages of the chat come from.
    pub(super) origins: MessageOrigins,
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
    let Included { seals, mut logprobs } = include(&mut fields)?;
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?.unwrap_or(0);
    logprobs |= top > 0; // who names a number of alternatives wants to see them
    if logprobs {
        chat.insert("logprobs".into(), true.into());
        chat.insert("top_logprobs".into(), top.into());
    }
    stream_options(&mut fields)?;
    fields.integer("max_tool_calls", 0..=i64::MAX)?; // counts calls of tools that this server has none of

    let mut echo = RequestEcho::new(answer);
    echo.copy("instructions", fields.string("instructions")?.map(Value::String).as_ref())?;
    echo.copy("metadata", Some(&Value::Object(missing::metadata(&mut fields)?)))?;
    echo.copy("previous_response_id", previous.clone().map(Value::String).as_ref())?;
    echo.copy("store", Some(&store.into()))?;
    echo.copy("top_logprobs", Some(&top.into()))?;
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
    let (messages, origins) = messages(instructions, known, input, body)?;
    chat.insert("messages".into(), messages);
    missing::refuse(&mut fields, MISSING)?;
    fields.finish()?;
    let chat = Fields::of_body(Value::Object(chat))?;
    Ok((chat, Wishes { echo, store, previous, seals, input: kept, origins }))
}

/// What is to be in the response beside its text.
#[derive(Debug, Default)]
struct Included {
    seals: bool,
    logprobs: bool,
}

/// Everything else that may be asked for never comes about here.
fn include(fields: &mut Fields) -> Result<Included, RouteError> {
    let mut included = Included::default();
    for (i, name) in fields.array("include")?.unwrap_or_default().into_iter().enumerate() {
        let at = format!("include[{i}]");
        let Value::String(name) = &name else { return Err(wrong_type(at, "a string", &name)) };
        match name.as_str() {
            "reasoning.encrypted_content" => included.seals = true,
            "message.output_text.logprobs" => included.logprobs = true,
            name if KINDS_OF_CALLS.iter().any(|kind| name.starts_with(kind)) => {}
            name => {
                return Err(bad(&at, format!("`{at}` is \"{}\", which is not known", clip(name))));
            }
        }
    }
    Ok(included)
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
    let Some(options) = fields.object("stream_options")? else { return Ok(()) };
    let mut options = options.loose();
    if options.boolean("include_obfuscation")? == Some(true) {
        let why = "this server does not pad its events";
        return Err(unsupported("stream_options.include_obfuscation", why));
    }
    options.finish()
}

/// Reads a body as `/v1/responses` does, for the test of its documentation.
#[cfg(test)]
pub(in crate::http) fn is_checked(
    fields: Fields,
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
    let mut answer = crate::limits::memory::MemoryPool::private(1 << 20).share();
    let ids = ResponseIds::new();
    to_chat(fields, &Known::default(), &ids, true, (memory, &mut answer)).map(drop)
}

#[cfg(test)]
mod tests;
