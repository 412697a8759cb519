//! Content blocks of Anthropic's messages as messages of a chat.

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare};

const TEXT_ONLY: &str = "this server reads text only";

/// Messages of a chat.
#[derive(Debug, Default)]
pub(super) struct ChatMessages {
    pub(super) messages: Vec<Value>,
    /// The answer goes on the text of the last one.
    pub(super) goes_on: bool,
}

/// What the field `system` says.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(super) fn system(system: Value) -> Result<Value, RouteError> {
    match system {
        Value::String(text) => Ok(text.into()),
        Value::Array(blocks) => text_parts(blocks, "system"),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            Err(wrong_type("system", "a string or an array of blocks", &system))
        }
    }
}

impl ChatMessages {
    /// Adds a message: as one, or as several where it brings results of tools.
    ///
    /// # Errors
    /// `BadRequest` about the first wrong field; `BodyTooComplex` or `Overloaded` where there is no memory for it.
    pub(super) fn add(
        &mut self,
        mut fields: Fields,
        memory: &mut MemoryShare,
    ) -> Result<(), RouteError> {
        let role = fields.string("role")?;
        let role = fields.require("role", role)?;
        let content = fields.take("content");
        let content = fields.require("content", content)?;
        let at = fields.path("content");
        self.goes_on = false;
        match role.as_str() {
            "user" => self.user(content, &at)?,
            "assistant" => self.assistant(content, &at, memory)?,
            other => {
                let path = fields.path("role");
                let message = format!(
                    "`{path}` is \"{}\"; it must be user or assistant, and instructions go into `system`",
                    clip(other)
                );
                return Err(bad(path, message));
            }
        }
        fields.finish()
    }

    fn user(&mut self, content: Value, at: &str) -> Result<(), RouteError> {
        if content.is_string() {
            self.messages.push(json!({"role": "user", "content": content}));
            return Ok(());
        }
        let blocks = blocks(content, at)?;
        let mut texts = Vec::new();
        for (i, block) in blocks.into_iter().enumerate() {
            let (kind, mut block) = kind_of(block, format!("{at}[{i}]"))?;
            match kind.as_str() {
                "text" => texts.push(text_part(block)?),
                "tool_result" => {
                    self.say("user", &mut texts);
                    let result = tool_result(&mut block)?;
                    block.finish()?;
                    self.messages.push(result);
                }
                other => return Err(not_known(&block, other, "text, tool_result")),
            }
        }
        self.say("user", &mut texts);
        Ok(())
    }

    fn say(&mut self, role: &str, texts: &mut Vec<Value>) {
        if !texts.is_empty() {
            self.messages.push(json!({"role": role, "content": std::mem::take(texts)}));
        }
    }

    fn assistant(
        &mut self,
        content: Value,
        at: &str,
        memory: &mut MemoryShare,
    ) -> Result<(), RouteError> {
        self.goes_on = true;
        if content.is_string() {
            self.messages.push(json!({"role": "assistant", "content": content}));
            return Ok(());
        }
        let blocks = blocks(content, at)?;
        let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for (i, block) in blocks.into_iter().enumerate() {
            let (kind, mut block) = kind_of(block, format!("{at}[{i}]"))?;
            match kind.as_str() {
                "text" => {
                    texts.push(text_part(block)?);
                    continue;
                }
                "thinking" => {
                    let thought = block.string("thinking")?;
                    thoughts.push(block.require("thinking", thought)?);
                    block.string("signature")?; // whoever wrote it, the text is what counts
                }
                "redacted_thinking" => {
                    block.string("data")?; // of a model that this server cannot ask
                }
                "tool_use" => calls.push(tool_use(&mut block, memory)?),
                other => {
                    let known = "text, thinking, redacted_thinking, tool_use";
                    return Err(not_known(&block, other, known));
                }
            }
            block.finish()?;
        }
        self.goes_on = calls.is_empty() && !texts.is_empty();
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let content = if texts.is_empty() { json!("") } else { Value::Array(texts) };
        message.insert("content".into(), content);
        if !thoughts.is_empty() {
            message.insert("reasoning_content".into(), thoughts.join("\n").into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), Value::Array(calls));
        }
        self.messages.push(Value::Object(message));
        Ok(())
    }
}

/// Content that is no text.
fn blocks(content: Value, at: &str) -> Result<Vec<Value>, RouteError> {
    let Value::Array(blocks) = content else {
        return Err(wrong_type(at, "a string or an array of blocks", &content));
    };
    if blocks.is_empty() {
        return Err(bad(at, format!("`{at}` must hold at least one block")));
    }
    Ok(blocks)
}

fn kind_of(block: Value, at: String) -> Result<(String, Fields), RouteError> {
    let mut block = Fields::of(block, at)?;
    let kind = block.string("type")?;
    let kind = block.require("type", kind)?;
    block.take("cache_control"); // a hint about caches; ours needs none
    Ok((kind, block))
}

fn not_known(block: &Fields, kind: &str, known: &str) -> RouteError {
    let path = block.path("type");
    match kind {
        "image" | "document" | "search_result" => {
            unsupported(path, &format!("\"{kind}\" is not read, {TEXT_ONLY}"))
        }
        "server_tool_use"
        | "web_search_tool_result"
        | "web_fetch_tool_result"
        | "code_execution_tool_result"
        | "mcp_tool_use"
        | "mcp_tool_result" => {
            unsupported(path, &format!("\"{kind}\" is not read, this server has no tools"))
        }
        other => {
            let message = format!("`{path}` is \"{}\"; it must be one of {known}", clip(other));
            bad(path, message)
        }
    }
}

/// A part as chats have it.
fn text_part(mut block: Fields) -> Result<Value, RouteError> {
    let text = block.string("text")?;
    let text = block.require("text", text)?;
    block.array("citations")?; // of an earlier answer; no template shows them
    block.finish()?;
    Ok(json!({"type": "text", "text": text}))
}

fn text_parts(blocks: Vec<Value>, at: &str) -> Result<Value, RouteError> {
    if blocks.is_empty() {
        return Ok(json!(""));
    }
    let parts = blocks.into_iter().enumerate().map(|(i, block)| {
        let (kind, block) = kind_of(block, format!("{at}[{i}]"))?;
        if kind == "text" { text_part(block) } else { Err(not_known(&block, &kind, "text")) }
    });
    Ok(Value::Array(parts.collect::<Result<_, _>>()?))
}

fn tool_result(block: &mut Fields) -> Result<Value, RouteError> {
    let id = block.string("tool_use_id")?;
    let id = block.require("tool_use_id", id)?;
    let at = block.path("content");
    let mut content = match block.take("content") {
        None => json!(""),
        Some(Value::String(text)) => text.into(),
        Some(Value::Array(blocks)) => text_parts(blocks, &at)?,
        Some(other) => return Err(wrong_type(at, "a string or an array of blocks", &other)),
    };
    if block.boolean("is_error")? == Some(true) {
        // a chat has no other way to tell the model
        if let Value::String(text) = &mut content {
            text.insert_str(0, "Error: ");
        } else if let Value::Array(parts) = &mut content {
            parts.insert(0, json!({"type": "text", "text": "Error:"}));
        }
    }
    Ok(json!({"role": "tool", "tool_call_id": id, "content": content}))
}

fn tool_use(block: &mut Fields, memory: &mut MemoryShare) -> Result<Value, RouteError> {
    let id = block.string("id")?;
    let id = block.require("id", id)?;
    let name = block.string("name")?;
    let name = block.require("name", name)?;
    let input = block.object("input")?;
    let input = block.require("input", input)?.into_rest();
    block.take("caller"); // always the model itself
    // a chat has them as text; its check makes them values again
    let arguments = Value::Object(input).to_string();
    let charged = memory.charge(arguments.len() + ALLOCATION_BYTES);
    charged.map_err(|refused| refused.body(Some(block.path("input"))))?;
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}

#[cfg(test)]
mod tests;
