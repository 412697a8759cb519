//! A chat before it is tokenised: how many bytes it has, and what it is as a text.

use std::sync::Arc;

use serde_json::Value;

use super::super::Model;
use super::super::pool::{Lane, Turn, Turns};
use super::super::template::ChatPrompt;
use crate::error::RouteError;

/// Bytes of text in a chat, and some for each value around it.
pub(in super::super) fn chat_bytes(chat: &ChatPrompt) -> usize {
    let tools = chat.tools.iter().flatten();
    let values = chat.messages.iter().chain(tools).chain(chat.template_kwargs.values());
    values.map(value_bytes).sum::<usize>() + chat.template.as_ref().map_or(0, String::len)
}

/// As deep as the parser of bodies lets values be.
fn value_bytes(value: &Value) -> usize {
    /// What a value costs a template, whatever it is.
    const VALUE: usize = 16;
    VALUE
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(value_bytes).sum(),
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum()
            }
        }
}

/// A chat that becomes a text and no more.
#[derive(Debug)]
pub(in super::super) struct Rendering {
    model: Arc<Model>,
    chat: Option<ChatPrompt>,
}

impl Rendering {
    pub(in super::super) fn new(model: Arc<Model>, chat: ChatPrompt) -> Self {
        Self { model, chat: Some(chat) }
    }
}

impl Turns for Rendering {
    type Output = Result<String, RouteError>;

    fn turn(&mut self, _lane: Lane) -> Turn<Self::Output> {
        let chat = self.chat.take().expect("a job that is done has no more turns");
        Turn::Done(self.model.render(chat))
    }
}
