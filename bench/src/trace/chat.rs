//! Conversations with their text: each answer of the assistant is one request, with all that was said before it.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::Lines;
use crate::BadInput;

/// Bytes of text that stand for a token in lengths of answers.
const BYTES_PER_TOKEN: usize = 4;

/// The turns of one conversation, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Conversation {
    pub(crate) session: String,
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Value>,
    pub(crate) turns: Vec<Turn>,
}

/// One request of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Turn {
    /// It holds this many of the conversation's messages.
    pub(crate) messages: usize,
    /// Length of the recorded answer.
    pub(crate) output_tokens: u32,
    /// From the previous answer on: what the user or a tool took.
    pub(crate) delay_s: f64,
}

impl Conversation {
    fn push(&mut self, message: Value, delay_s: f64) {
        let is_answer = message["role"] == "assistant";
        if is_answer && !self.messages.is_empty() {
            let said = ["reasoning_content", "content", "tool_calls"];
            let bytes = said.iter().filter_map(|name| message.get(*name)).map(text_bytes);
            let output_tokens = u32::try_from(bytes.sum::<usize>() / BYTES_PER_TOKEN);
            self.turns.push(Turn {
                messages: self.messages.len(),
                output_tokens: output_tokens.unwrap_or(u32::MAX).max(1),
                delay_s: 0.0,
            });
        }
        // Delays are noted on what comes before an answer, or on the answer itself.
        self.messages.push(message);
        if let Some(turn) = self.turns.last_mut().filter(|_| is_answer) {
            turn.delay_s += delay_s;
        }
    }
}

fn text_bytes(value: &Value) -> usize {
    match value {
        Value::Null => 0,
        Value::String(text) => text.len(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string().len()
        }
    }
}

/// Whether a line is of this format rather than of the one with block ids.
pub(super) fn looks_like(line: &str) -> bool {
    let fields: Map<String, Value> = serde_json::from_str(line).unwrap_or_default();
    fields.contains_key("messages") || fields.contains_key("conversation_id")
}

pub(super) fn parse(lines: &Lines) -> Result<Vec<Conversation>, BadInput> {
    let mut reader = Reader::default();
    for (number, line) in &lines.rows {
        reader.line(*number, line).map_err(|why| lines.bad(*number, why))?;
    }
    let mut conversations = reader.conversations;
    conversations.retain(|conversation| !conversation.turns.is_empty());
    if conversations.is_empty() {
        return Err(BadInput(format!("{}: no conversation has an answer", lines.file)));
    }
    Ok(conversations)
}

#[derive(Default)]
struct Reader {
    conversations: Vec<Conversation>,
    /// By `conversation_id`: where it is, and the delay noted since its last answer.
    open: HashMap<String, (usize, f64)>,
}

impl Reader {
    fn line(&mut self, number: usize, line: &str) -> Result<(), String> {
        let fields: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
        match (fields.get("messages"), fields.get("conversation_id")) {
            (Some(Value::Array(messages)), _) => self.whole(number, messages, &fields),
            (Some(_), _) => Err("`messages` must be an array".into()),
            (None, Some(Value::String(id))) => self.one(id, &fields),
            (None, Some(_)) => Err("`conversation_id` must be text".into()),
            (None, None) => Err("neither `messages` nor `conversation_id` is there".into()),
        }
    }

    /// A conversation a line. One that ends without an answer still asks for one.
    fn whole(
        &mut self,
        number: usize,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<(), String> {
        let named = fields.get("session").and_then(Value::as_str).map(str::to_owned);
        let session = named.unwrap_or_else(|| format!("line-{number}"));
        let tools = tools(fields)?;
        let mut conversation = Conversation { session, tools, ..Conversation::default() };
        let mut waited_s = 0.0;
        for (i, message) in messages.iter().enumerate() {
            let message = message
                .as_object()
                .filter(|fields| fields.get("role").is_some_and(Value::is_string));
            let message = message.ok_or_else(|| format!("`messages[{i}]` has no role"))?;
            waited_s += delay_s(message)?;
            let mut message = message.clone();
            message.shift_remove("delay_seconds");
            let answers = message["role"] == "assistant";
            conversation.push(Value::Object(message), if answers { waited_s } else { 0.0 });
            if answers {
                waited_s = 0.0;
            }
        }
        if messages.last().is_some_and(|last| last["role"] != "assistant") {
            let messages = conversation.messages.len();
            conversation.turns.push(Turn { messages, output_tokens: 1, delay_s: waited_s });
        }
        self.conversations.push(conversation);
        Ok(())
    }

    /// A message a line; the lines of one conversation come in order, with those of others in between.
    fn one(&mut self, id: &str, fields: &Map<String, Value>) -> Result<(), String> {
        let role = fields.get("role").and_then(Value::as_str).ok_or("`role` is missing")?;
        let fresh = self.conversations.len();
        let (at, waited_s) = *self.open.entry(id.to_owned()).or_insert((fresh, 0.0));
        if at == fresh {
            self.conversations.push(Conversation { session: id.to_owned(), ..Default::default() });
        }
        let conversation = &mut self.conversations[at];
        if let Some(system) = fields.get("system").and_then(Value::as_str) {
            conversation.push(json!({"role": "system", "content": system}), 0.0);
        }
        if let Some(tools) = tools(fields)? {
            conversation.tools = Some(tools);
        }
        let waited_s = waited_s + delay_s(fields)?;
        let answers = role == "assistant";
        for message in messages(role, fields)? {
            conversation.push(message, if answers { waited_s } else { 0.0 });
        }
        self.open.insert(id.to_owned(), (at, if answers { 0.0 } else { waited_s }));
        Ok(())
    }
}

/// The messages of one line: several where it carries the results of several tools.
fn messages(role: &str, fields: &Map<String, Value>) -> Result<Vec<Value>, String> {
    if role == "tool"
        && let Some(results) = fields.get("tool_results")
    {
        let results = results.as_array().ok_or("`tool_results` must be an array")?;
        let message = |result: &Value| json!({"role": "tool", "tool_call_id": result["tool_call_id"], "content": result["content"]});
        return Ok(results.iter().map(message).collect());
    }
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), fields.get("content").cloned().unwrap_or(Value::Null));
    for name in ["reasoning_content", "tool_calls", "tool_call_id", "name"] {
        if let Some(value) = fields.get(name).filter(|value| !value.is_null()) {
            message.insert(name.into(), value.clone());
        }
    }
    Ok(vec![Value::Object(message)])
}

fn tools(fields: &Map<String, Value>) -> Result<Option<Value>, String> {
    match fields.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(tools @ Value::Array(list)) => Ok((!list.is_empty()).then(|| tools.clone())),
        Some(_) => Err("`tools` must be an array".into()),
    }
}

fn delay_s(fields: &Map<String, Value>) -> Result<f64, String> {
    match fields.get("delay_seconds") {
        None | Some(Value::Null) => Ok(0.0),
        Some(value) => value
            .as_f64()
            .filter(|delay| *delay >= 0.0)
            .ok_or_else(|| format!("`delay_seconds` is {value}, not a number from 0 on")),
    }
}
