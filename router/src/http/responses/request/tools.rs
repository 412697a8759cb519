//! The functions that the model may call, and whether it has to.

use serde_json::{Map, Value, json};

use super::echo::RequestEcho;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported};

/// Takes them, as those of a chat.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(super) fn tools(
    fields: &mut Fields,
    chat: &mut Map<String, Value>,
    echo: &mut RequestEcho<'_>,
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
