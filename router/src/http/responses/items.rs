//! Items of `/v1/responses` as messages of a chat, and as they are stored.
//!
//! What the assistant thought, said and called between two messages of others is one message of a chat.

pub(super) mod origins;

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::http::responses::items::origins::{MessageOrigin, MessageOrigins};

/// In front of reasoning that travels as `encrypted_content`. It is no secret: it is the client's own answer.
pub(super) const SEALED: &str = "headrace:";

const TEXT_ONLY: &str = "this server reads text only";

/// Messages of a chat, made from items one by one.
#[derive(Debug, Default)]
pub(super) struct ItemMessages {
    messages: Vec<Value>,
    origins: MessageOrigins,
    /// What the assistant did since the last message of others.
    turn: AssistantTurn,
}

#[derive(Debug, Default)]
struct AssistantTurn {
    texts: Vec<Value>,
    reasoning: Vec<String>,
    calls: Vec<Value>,
    origin: MessageOrigin,
}

impl AssistantTurn {
    fn message(self) -> Option<(Value, MessageOrigin)> {
        let Self { texts, reasoning, calls, origin } = self;
        if texts.is_empty() && reasoning.is_empty() && calls.is_empty() {
            return None;
        }
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let content = if texts.is_empty() { json!("") } else { Value::Array(texts) };
        message.insert("content".into(), content);
        if !reasoning.is_empty() {
            message.insert("reasoning_content".into(), reasoning.join("\n").into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), Value::Array(calls));
        }
        Some((Value::Object(message), origin))
    }
}

impl ItemMessages {
    /// Instructions, before everything.
    pub(super) fn instruct(&mut self, text: &str) {
        let mut origin = MessageOrigin::default();
        origin.note("instructions");
        self.push(json!({"role": "system", "content": text}), origin);
    }

    /// Adds an item.
    ///
    /// # Errors
    /// `BadRequest` about the first wrong field.
    pub(super) fn add(&mut self, item: Value, at: &str) -> Result<(), RouteError> {
        let mut item = Fields::of(item, at.to_owned())?;
        let kind = item.string("type")?;
        item.string("id")?;
        item.string("status")?;
        match kind.as_deref() {
            None | Some("message") => self.message(&mut item, at)?,
            Some("function_call") => {
                self.turn.calls.push(function_call(&mut item)?);
                self.turn.origin.note_call(at);
            }
            Some("function_call_output") => {
                let output = function_call_output(&mut item)?;
                self.other(output, at);
            }
            Some("reasoning") => {
                self.turn.reasoning.extend(reasoning(&mut item)?);
                self.turn.origin.note(at);
            }
            Some(other) => return Err(not_known(&item, other)),
        }
        item.finish()
    }

    fn message(&mut self, item: &mut Fields, at: &str) -> Result<(), RouteError> {
        let role = item.string("role")?;
        let role = item.require("role", role)?;
        let content = item.take("content");
        let content = item.require("content", content)?;
        item.string("phase")?; // which part of an answer it was
        let parts = parts(content, &item.path("content"))?;
        match role.as_str() {
            "user" | "system" | "developer" => {
                self.other(json!({"role": role, "content": parts}), at);
            }
            "assistant" => {
                self.turn.texts.extend(parts);
                self.turn.origin.note(at);
            }
            other => {
                let path = item.path("role");
                let message = format!(
                    "`{path}` is \"{}\"; it must be one of user, system, developer, assistant",
                    clip(other)
                );
                return Err(bad(path, message));
            }
        }
        Ok(())
    }

    fn other(&mut self, message: Value, at: &str) {
        self.end_turn();
        let mut origin = MessageOrigin::default();
        origin.note(at);
        self.push(message, origin);
    }

    fn end_turn(&mut self) {
        if let Some((message, origin)) = std::mem::take(&mut self.turn).message() {
            self.push(message, origin);
        }
    }

    fn push(&mut self, message: Value, origin: MessageOrigin) {
        self.messages.push(message);
        self.origins.push(origin);
    }

    /// All messages, and where they come from.
    pub(super) fn finish(mut self) -> (Vec<Value>, MessageOrigins) {
        self.end_turn();
        (self.messages, self.origins)
    }
}

fn not_known(item: &Fields, kind: &str) -> RouteError {
    let path = item.path("type");
    let message = format!(
        "`{path}` is \"{}\"; items may be message, function_call, function_call_output, reasoning and \
         item_reference: this server has no tools of its own",
        clip(kind)
    );
    bad(path, message)
}

/// Text parts as chats have them; never empty.
fn parts(content: Value, at: &str) -> Result<Vec<Value>, RouteError> {
    if content.is_string() {
        return Ok(vec![json!({"type": "text", "text": content})]);
    }
    let Value::Array(parts) = content else {
        return Err(wrong_type(at, "a string or an array of parts", &content));
    };
    if parts.is_empty() {
        return Err(bad(at, format!("`{at}` must hold at least one part")));
    }
    let parts = parts.into_iter().enumerate();
    parts.map(|(i, part)| text_part(Fields::of(part, format!("{at}[{i}]"))?)).collect()
}

fn text_part(mut part: Fields) -> Result<Value, RouteError> {
    let kind = part.string("type")?;
    let kind = part.require("type", kind)?;
    let field = match kind.as_str() {
        "input_text" | "output_text" | "text" => "text",
        "refusal" => "refusal",
        "input_image" | "input_file" | "input_audio" | "computer_screenshot" => {
            return Err(unsupported(part.path("type"), TEXT_ONLY));
        }
        other => {
            let path = part.path("type");
            let message =
                format!("`{path}` is \"{}\"; it must be input_text or output_text", clip(other));
            return Err(bad(path, message));
        }
    };
    let text = part.string(field)?;
    let text = part.require(field, text)?;
    part.array("annotations")?; // of an earlier answer; no template shows them
    part.array("logprobs")?;
    part.take("prompt_cache_breakpoint");
    part.finish()?;
    Ok(json!({"type": "text", "text": text}))
}

fn function_call(item: &mut Fields) -> Result<Value, RouteError> {
    let id = item.string("call_id")?;
    let id = item.require("call_id", id)?;
    let name = item.string("name")?;
    let name = item.require("name", name)?;
    let arguments = item.string("arguments")?;
    let arguments = item.require("arguments", arguments)?;
    item.take("caller"); // always the model itself
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}

fn function_call_output(item: &mut Fields) -> Result<Value, RouteError> {
    let id = item.string("call_id")?;
    let id = item.require("call_id", id)?;
    let output = item.take("output");
    let output = item.require("output", output)?;
    let content = if output.as_array().is_some_and(Vec::is_empty) {
        json!("")
    } else {
        Value::Array(parts(output, &item.path("output"))?)
    };
    item.take("caller");
    Ok(json!({"role": "tool", "tool_call_id": id, "content": content}))
}

/// The text of reasoning: as it was sent, or as it was sealed here. What another server sealed nobody here can read.
fn reasoning(item: &mut Fields) -> Result<Option<String>, RouteError> {
    item.array("summary")?;
    let sealed = item.string("encrypted_content")?;
    let at = item.path("content");
    let mut texts = Vec::new();
    for (i, part) in item.array("content")?.unwrap_or_default().into_iter().enumerate() {
        let mut part = Fields::of(part, format!("{at}[{i}]"))?;
        if part.string("type")?.is_some_and(|kind| kind != "reasoning_text") {
            return Err(unsupported(part.path("type"), "the only type is \"reasoning_text\""));
        }
        let text = part.string("text")?;
        texts.push(part.require("text", text)?);
        part.finish()?;
    }
    if texts.is_empty() {
        return Ok(sealed.and_then(|text| text.strip_prefix(SEALED).map(str::to_owned)));
    }
    Ok(Some(texts.join("\n")))
}

/// Input items as they are stored and listed: each with an id, a type, and its content as parts.
///
/// # Errors
/// `BadRequest` if an item is no object.
pub(super) fn normalised(
    items: &mut [Value],
    mut id: impl FnMut(&str) -> String,
) -> Result<(), RouteError> {
    for (i, item) in items.iter_mut().enumerate() {
        let Value::Object(item) = item else {
            return Err(wrong_type(format!("input[{i}]"), "an object", item));
        };
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message").to_owned();
        let prefix = match kind.as_str() {
            "function_call" => "fc",
            "function_call_output" => "fco",
            "reasoning" => "rs",
            _ => "msg",
        };
        item.entry("type").or_insert_with(|| kind.as_str().into());
        if !item.get("id").is_some_and(Value::is_string) {
            item.insert("id".into(), id(prefix).into());
        }
        if kind == "message" {
            item.entry("status").or_insert("completed".into());
            let part = if item.get("role").is_some_and(|role| role == "assistant") {
                "output_text"
            } else {
                "input_text"
            };
            if let Some(content) = item.get_mut("content")
                && content.is_string()
            {
                let text = content.take();
                let annotations = (part == "output_text").then(|| json!([]));
                let mut whole = json!({"type": part, "text": text});
                if let (Some(whole), Some(annotations)) = (whole.as_object_mut(), annotations) {
                    whole.insert("annotations".into(), annotations);
                }
                *content = Value::Array(vec![whole]);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
