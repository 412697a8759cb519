//! What the answer has to follow, and how much the model reasons before it.

use serde_json::{Map, Value, json};

use super::echo::RequestEcho;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip};
use crate::limits::memory::{ALLOCATION_BYTES, Refused};

/// `text`: what the answer has to follow.
pub(super) fn text(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut RequestEcho<'_>,
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
pub(super) fn reasoning(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut RequestEcho<'_>,
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
