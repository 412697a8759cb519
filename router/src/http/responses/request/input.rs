//! The input of a request: its items, those it refers to, and those of the responses that it continues.

use serde_json::{Value, json};

use super::Known;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, wrong_type};
use crate::http::parse::json::parse;
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::items::origins::MessageOrigins;
use crate::http::responses::items::{self, ItemMessages};
use crate::limits::memory::{MemoryShare, Refused};

/// The items of a request.
pub(super) fn input(fields: &mut Fields) -> Result<Vec<Value>, RouteError> {
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
pub(super) fn resolve(
    input: &mut [Value],
    known: &Known,
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
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
pub(in crate::http::responses) fn reference(item: &Value) -> Option<&str> {
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

/// The items as they are stored, as JSON.
pub(super) fn kept_input(
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

/// The messages of a chat that the items are, after those of the responses that it continues.
pub(super) fn messages(
    instructions: Option<String>,
    known: &Known,
    input: Vec<Value>,
    memory: &mut MemoryShare,
) -> Result<(Value, MessageOrigins), RouteError> {
    let mut messages = ItemMessages::default();
    if let Some(instructions) = instructions {
        messages.instruct(&instructions);
    }
    for stored in &known.chain {
        for items in [&stored.input, &stored.output] {
            let items = stored_items(items, memory)?;
            charge_items(items.len(), memory)?;
            for (i, item) in items.into_iter().enumerate() {
                messages.add(item, &format!("previous_response_id[{i}]"))?;
            }
        }
    }
    charge_items(input.len(), memory)?;
    for (i, item) in input.into_iter().enumerate() {
        messages.add(item, &format!("input[{i}]"))?;
    }
    let (messages, origins) = messages.finish();
    Ok((Value::Array(messages), origins))
}
