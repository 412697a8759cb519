//! Checks chat messages and puts them into the form that chat templates read.
//!
//! Templates are written against `transformers`: `content` is text, and empty where tool calls stand in its place, as many
//! templates add to it; tool arguments are objects rather than JSON in a string; and nobody knows the role `developer`,
//! OpenAI's newer name for `system`.

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::chat;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::http::parse::json;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare};

/// Between the text parts of one message, as vLLM does it.
const PART_SEPARATOR: &str = "\n";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
    Tool,
    Function,
}

impl Role {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" => Some(Self::Tool),
            "function" => Some(Self::Function),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Function => "function",
        }
    }
}

/// Checks `messages` and makes them ready for the template.
///
/// # Errors
/// `BadRequest` whose `param` is the path of the first wrong field; `BodyTooComplex` or `Overloaded` if there is no memory
/// for the arguments of a tool call as values.
pub(in crate::http) fn check(
    messages: Vec<Value>,
    memory: &mut MemoryShare,
) -> Result<Vec<Value>, RouteError> {
    if messages.is_empty() {
        return Err(bad("messages", "`messages` must hold at least one message"));
    }
    let checked = messages.into_iter().enumerate();
    let checked = checked
        .map(|(i, message)| check_one(Fields::of(message, format!("messages[{i}]"))?, memory));
    checked.collect()
}

fn check_one(mut fields: Fields, memory: &mut MemoryShare) -> Result<Value, RouteError> {
    let name = fields.string("role")?;
    let name = fields.require("role", name)?;
    let Some(role) = Role::parse(&name) else {
        let path = fields.path("role");
        let message = format!(
            "`{path}` is \"{}\"; it must be one of system, developer, user, assistant, tool, function",
            clip(&name)
        );
        return Err(bad(path, message));
    };

    let mut out = Map::new();
    out.insert("role".into(), role.name().into());
    let content =
        fields.take("content").map(|value| text(value, &fields.path("content"))).transpose()?;
    let content_is_set = content.is_some();
    out.insert("content".into(), Value::String(content.unwrap_or_default()));
    fields.take("cache_control"); // a hint of other vendors' clients about caches; ours needs none

    let mut may_be_empty = role == Role::Function;
    if let Some(name) = fields.string("name")? {
        out.insert("name".into(), name.into());
    } else if role == Role::Function {
        fields.require("name", None::<String>)?;
    }
    if role == Role::Tool {
        let id = fields.string("tool_call_id")?;
        out.insert("tool_call_id".into(), fields.require("tool_call_id", id)?.into());
    }
    if role == Role::Assistant {
        may_be_empty |= assistant_extras(&mut fields, &mut out, memory)?;
    }
    if !content_is_set && !may_be_empty {
        fields.require("content", None::<()>)?;
    }
    fields.finish()?;
    Ok(Value::Object(out))
}

/// The fields of an assistant's message beside its content. True if one of them stands in for the content.
fn assistant_extras(
    fields: &mut Fields,
    out: &mut Map<String, Value>,
    memory: &mut MemoryShare,
) -> Result<bool, RouteError> {
    let mut stands_in = false;
    if let Some(calls) = fields.array("tool_calls")? {
        let at = fields.path("tool_calls");
        let calls = calls.into_iter().enumerate();
        let calls =
            calls.map(|(i, call)| tool_call(Fields::of(call, format!("{at}[{i}]"))?, memory));
        out.insert("tool_calls".into(), Value::Array(calls.collect::<Result<_, _>>()?));
        stands_in = true;
    }
    if let Some(call) = fields.object("function_call")? {
        out.insert("function_call".into(), function_call(call, memory)?);
        stands_in = true;
    }
    if let Some(refusal) = fields.string("refusal")? {
        if out["content"] == "" {
            out.insert("content".into(), refusal.into());
        }
        stands_in = true;
    }
    // answers have the same text under both names, and so do clients that send them back
    let (long, short) = (fields.string("reasoning_content")?, fields.string("reasoning")?);
    if let Some(reasoning) = long.or(short) {
        // templates get it under two names, as text and as a value of theirs
        let copies = memory.charge(2 * (reasoning.len() + ALLOCATION_BYTES));
        copies.map_err(|refused| refused.body(Some(fields.path("reasoning_content"))))?;
        out.insert("reasoning_content".into(), reasoning.into());
        stands_in = true; // of an answer that was cut there is nothing else
    }
    if fields.take_missing("audio").is_some() {
        return Err(unsupported(fields.path("audio"), "this server reads text only"));
    }
    // Citations of an earlier answer, which clients send back with it. No template shows them.
    fields.array("annotations")?;
    Ok(stands_in)
}

fn tool_call(mut fields: Fields, memory: &mut MemoryShare) -> Result<Value, RouteError> {
    let id = fields.string("id")?;
    let id = fields.require("id", id)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "function".into());
    if kind != "function" {
        return Err(unsupported(fields.path("type"), "only calls of type \"function\" are known"));
    }
    fields.integer("index", 0..=i64::MAX)?; // left over by clients that put streamed calls together
    let function = fields.object("function")?;
    let function = function_call(fields.require("function", function)?, memory)?;
    fields.finish()?;
    Ok(json!({"id": id, "type": "function", "function": function}))
}

fn function_call(mut fields: Fields, memory: &mut MemoryShare) -> Result<Value, RouteError> {
    let name = fields.string("name")?;
    let name = fields.require("name", name)?;
    let arguments = fields.string("arguments")?;
    let arguments = fields.require("arguments", arguments)?;
    let path = fields.path("arguments");
    fields.finish()?;
    // A model may have written arguments that are no JSON; the template then gets them as they are.
    let before = memory.used();
    let arguments = match json::parse_inner(&arguments, &path, memory)? {
        Some(arguments) => Value::Object(arguments),
        None => Value::String(arguments),
    };
    let copies = (memory.used() - before).saturating_mul(chat::COPIES);
    memory.charge(copies).map_err(|refused| refused.body(Some(path)))?;
    Ok(json!({"name": name, "arguments": arguments}))
}

/// Content as text: a string, or an array of text parts.
fn text(value: Value, path: &str) -> Result<String, RouteError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            return Err(wrong_type(path, "a string or an array of parts", &value));
        }
    };
    if parts.is_empty() {
        return Err(bad(path, format!("`{path}` must hold at least one part")));
    }
    let parts = parts.into_iter().enumerate();
    let texts: Vec<String> = parts
        .map(|(i, part)| part_text(Fields::of(part, format!("{path}[{i}]"))?))
        .collect::<Result<_, _>>()?;
    Ok(texts.join(PART_SEPARATOR))
}

fn part_text(mut part: Fields) -> Result<String, RouteError> {
    let kind = part.string("type")?;
    let kind = part.require("type", kind)?;
    let field = match kind.as_str() {
        "text" => "text",
        "refusal" => "refusal",
        "image_url" | "input_audio" | "file" | "video_url" => {
            return Err(unsupported(part.path("type"), "this server reads text only"));
        }
        other => {
            let path = part.path("type");
            let message = format!("`{path}` is \"{}\"; it must be \"text\"", clip(other));
            return Err(bad(path, message));
        }
    };
    let text = part.string(field)?;
    let text = part.require(field, text)?;
    part.take("cache_control");
    part.take("prompt_cache_breakpoint");
    part.finish()?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;

    fn param(messages: Value) -> String {
        let Value::Array(messages) = messages else { panic!("tests pass arrays") };
        match check(messages, &mut MemoryPool::private(1 << 20).share()) {
            Err(RouteError::BadRequest { param: Some(param), .. }) => param,
            other => panic!("expected BadRequest, got {other:?}"),
        }
    }

    fn checked(message: Value) -> Value {
        check(vec![message], &mut MemoryPool::private(1 << 20).share()).unwrap().remove(0)
    }

    #[test]
    fn each_wrong_field_is_named_by_its_path() {
        let user = json!({"role": "user", "content": "hi"});
        for (message, want) in [
            (json!("hi"), "messages[1]"),
            (json!({"content": "hi"}), "messages[1].role"),
            (json!({"role": "robot", "content": "hi"}), "messages[1].role"),
            (json!({"role": "user"}), "messages[1].content"),
            (json!({"role": "user", "content": null}), "messages[1].content"),
            (json!({"role": "user", "content": 5}), "messages[1].content"),
            (json!({"role": "user", "content": []}), "messages[1].content"),
            (json!({"role": "user", "content": ["x"]}), "messages[1].content[0]"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
                "messages[1].content[0].type",
            ),
            (json!({"role": "user", "content": "x", "mood": 1}), "messages[1].mood"),
            (json!({"role": "user", "content": "x", "tool_calls": []}), "messages[1].tool_calls"),
            (json!({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
            (json!({"role": "assistant", "content": null}), "messages[1].content"),
            (
                json!({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}),
                "messages[1].tool_calls[0].function.arguments",
            ),
            (json!({"role": "assistant", "audio": {"id": "x"}}), "messages[1].audio"),
            (json!({"role": "function", "content": "x"}), "messages[1].name"),
        ] {
            assert_eq!(param(json!([user, message])), want);
        }
        assert_eq!(param(json!([])), "messages");
    }

    #[test]
    fn text_parts_are_joined() {
        let content = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let got = checked(json!({"role": "developer", "content": content}));
        assert_eq!(got, json!({"role": "system", "content": "a\nb"}));
    }

    #[test]
    fn tool_arguments_become_objects() {
        let call = |arguments: &str| {
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
        };
        let got = checked(call(r#"{"x": 1}"#));
        assert_eq!(got["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(got["content"], "", "templates add to it");
        assert_eq!(checked(call("{x"))["tool_calls"][0]["function"]["arguments"], json!("{x"));
    }

    #[test]
    fn reasoning_can_be_sent_back_under_both_names() {
        for names in
            [&["reasoning"][..], &["reasoning_content"], &["reasoning_content", "reasoning"]]
        {
            let mut message = json!({"role": "assistant", "content": null});
            names.iter().for_each(|name| message[*name] = json!("hm"));
            let want = json!({"role": "assistant", "content": "", "reasoning_content": "hm"});
            assert_eq!(checked(message), want);
        }
    }

    #[test]
    fn an_answer_can_be_sent_back_as_the_client_library_dumps_it() {
        let got =
            checked(json!({"role": "assistant", "content": "hi", "refusal": null, "audio": null,
            "function_call": null, "tool_calls": null, "annotations": []}));
        assert_eq!(got, json!({"role": "assistant", "content": "hi"}));
    }
}
