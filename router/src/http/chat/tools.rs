//! The tools of a request: what they are, whether they may, must or must not be called, and how the answer's calls are read.

use std::collections::HashSet;

use serde_json::Value;

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};
use crate::http::parse::params::ModelFacts;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare};
use crate::output::{self, ArgumentKind, Arguments, Tools};

/// Most tools, and bytes of a function's name: OpenAI's own bounds.
const MAX_TOOLS: usize = 128;
const MAX_NAME_BYTES: usize = 64;

/// Takes tool definitions, which the template shows to the model as they are.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(super) fn take(fields: &mut Fields) -> Result<Option<Vec<Value>>, RouteError> {
    let tools = fields.array("tools")?.unwrap_or_default();
    if tools.len() > MAX_TOOLS {
        let message = format!("`tools` holds {}, the limit is {MAX_TOOLS}", tools.len());
        return Err(bad("tools", message));
    }
    let mut names = HashSet::new();
    for (i, tool) in tools.iter().enumerate() {
        let name = check_tool(tool, &format!("tools[{i}]"))?;
        if !names.insert(name) {
            let at = format!("tools[{i}].function.name");
            let message = format!("`{at}`: there are two functions named \"{name}\"");
            return Err(bad(at, message));
        }
    }
    Ok(Some(tools).filter(|tools| !tools.is_empty()))
}

/// By reference: the template gets the definition as it is, and a copy could be as large as the body. Gives the name.
fn check_tool<'a>(tool: &'a Value, at: &str) -> Result<&'a str, RouteError> {
    let inside = |value: &Value, at: &str| {
        value.is_object().then_some(()).ok_or_else(|| wrong_type(at, "an object", value))
    };
    let field = |value: &Value, name: &str, at: &str| match value.get(name) {
        None | Some(Value::Null) => Err(bad(at, format!("`{at}` is required"))),
        Some(_) => Ok(()),
    };
    inside(tool, at)?;
    let (kind_at, function_at) = (format!("{at}.type"), format!("{at}.function"));
    field(tool, "type", &kind_at)?;
    let kind = tool["type"].as_str();
    if kind.ok_or_else(|| wrong_type(&kind_at, "a string", &tool["type"]))? != "function" {
        return Err(unsupported(kind_at, "the only type is \"function\""));
    }
    field(tool, "function", &function_at)?;
    let function = &tool["function"];
    inside(function, &function_at)?;
    let name_at = format!("{function_at}.name");
    field(function, "name", &name_at)?;
    let name = function["name"].as_str();
    let name = name.ok_or_else(|| wrong_type(&name_at, "a string", &function["name"]))?;
    check_name(name, name_at)?;
    for (field, is_right, kind) in [
        ("description", Value::is_string as fn(&Value) -> bool, "a string"),
        ("parameters", Value::is_object, "an object"),
        ("strict", Value::is_boolean, "a boolean"),
    ] {
        let value = function.get(field).filter(|value| !value.is_null());
        if let Some(wrong) = value.filter(|value| !is_right(value)) {
            return Err(wrong_type(format!("{function_at}.{field}"), kind, wrong));
        }
    }
    Ok(name)
}

fn check_name(name: &str, at: String) -> Result<(), RouteError> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(good) {
        let message = format!(
            "`{at}` is \"{}\"; it must be 1 to {MAX_NAME_BYTES} letters, digits, _ and -",
            clip(name)
        );
        return Err(bad(at, message));
    }
    Ok(())
}

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// The answer is text.
    Never,
    /// The model chooses.
    May,
    /// The answer is a call, or several.
    Must,
}

/// What a request says of its calls: the choice, and the functions that it leaves; all where it names none.
#[derive(Debug)]
pub(super) struct CallWish {
    pub(super) choice: ToolChoice,
    pub(super) only: Option<Vec<String>>,
    pub(super) parallel: bool,
}

/// Takes `tool_choice` and `parallel_tool_calls`.
///
/// # Errors
/// `BadRequest` about a wrong one, by its path.
pub(super) fn take_wish(
    fields: &mut Fields,
    tools: Option<&[Value]>,
) -> Result<CallWish, RouteError> {
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let wish = |choice, only| CallWish { choice, only, parallel };
    let by_default = if tools.is_some() { ToolChoice::May } else { ToolChoice::Never };
    let wish = match fields.take("tool_choice") {
        None => wish(by_default, None),
        Some(Value::String(word)) => match word.as_str() {
            "none" => wish(ToolChoice::Never, None),
            "auto" => wish(by_default, None),
            "required" => wish(ToolChoice::Must, None),
            other => {
                let message = format!(
                    "`tool_choice` is \"{}\"; it must be none, auto, required or a function",
                    clip(other)
                );
                return Err(bad("tool_choice", message));
            }
        },
        Some(Value::Object(choice)) => {
            named(Fields::of(Value::Object(choice), "tool_choice".to_owned())?, tools, parallel)?
        }
        Some(other) => return Err(wrong_type("tool_choice", "a string or an object", &other)),
    };
    if wish.choice == ToolChoice::Must && tools.is_none() {
        return Err(bad("tool_choice", "`tool_choice` asks for a call, and `tools` holds none"));
    }
    Ok(wish)
}

/// One function, or some with a mode: OpenAI's `allowed_tools`.
fn named(
    mut choice: Fields,
    tools: Option<&[Value]>,
    parallel: bool,
) -> Result<CallWish, RouteError> {
    let kind = choice.string("type")?;
    let kind = choice.require("type", kind)?;
    match kind.as_str() {
        "function" => {
            let name = function_name(&mut choice, tools)?;
            choice.finish()?;
            // one function is one call
            Ok(CallWish { choice: ToolChoice::Must, only: Some(vec![name]), parallel: false })
        }
        "allowed_tools" => {
            let allowed = choice.object("allowed_tools")?;
            let mut allowed = choice.require("allowed_tools", allowed)?;
            choice.finish()?;
            let mode = allowed.string("mode")?;
            let mode = match allowed.require("mode", mode)?.as_str() {
                "auto" => ToolChoice::May,
                "required" => ToolChoice::Must,
                _ => {
                    let at = allowed.path("mode");
                    let message = format!("`{at}` must be auto or required");
                    return Err(bad(at, message));
                }
            };
            let at = allowed.path("tools");
            let list = allowed.array("tools")?;
            let list = allowed.require("tools", list)?;
            let names = list.into_iter().enumerate().map(|(i, tool)| {
                let mut tool = Fields::of(tool, format!("{at}[{i}]"))?;
                if tool.string("type")?.is_some_and(|kind| kind != "function") {
                    return Err(unsupported(tool.path("type"), "the only type is \"function\""));
                }
                let name = function_name(&mut tool, tools)?;
                tool.finish()?;
                Ok(name)
            });
            let names = names.collect::<Result<Vec<_>, RouteError>>()?;
            allowed.finish()?;
            if names.is_empty() {
                return Err(bad(&at, format!("`{at}` must name at least one function")));
            }
            Ok(CallWish { choice: mode, only: Some(names), parallel })
        }
        other => {
            let message = format!(
                "`tool_choice.type` is \"{}\"; it must be function or allowed_tools",
                clip(other)
            );
            Err(bad("tool_choice.type", message))
        }
    }
}

fn function_name(of: &mut Fields, tools: Option<&[Value]>) -> Result<String, RouteError> {
    let function = of.object("function")?;
    let mut function = of.require("function", function)?;
    let name = function.string("name")?;
    let name = function.require("name", name)?;
    let at = function.path("name");
    function.finish()?;
    let known = tools.unwrap_or_default().iter().any(|tool| tool["function"]["name"] == *name);
    if !known {
        let message = format!("`{at}` is \"{}\", which is none of `tools`", clip(&name));
        return Err(bad(at, message));
    }
    Ok(name)
}

/// How this model writes calls of these tools; `None` where it is to write none.
///
/// # Errors
/// `BadRequest` where that is not known; `BodyTooComplex` or `Overloaded` if there is no memory for it.
pub(super) fn reading(
    wish: &CallWish,
    tools: &[Value],
    model: &ModelFacts,
    memory: &mut MemoryShare,
) -> Result<Option<Tools>, RouteError> {
    if wish.choice == ToolChoice::Never {
        return Ok(None);
    }
    let Some(parser) = model.conventions.call_parser() else {
        let why = "it is not known how this model writes calls; name a way by --tool-parser";
        return Err(unsupported("tools", why));
    };
    let mut read = Tools {
        parser,
        functions: std::collections::HashMap::new(),
        parallel: wish.parallel,
        // a grammar that begins behind reasoning leaves the reasoning alone
        forced: wish.choice == ToolChoice::Must && model.reasoning.is_none(),
    };
    for function in tools.iter().map(|tool| &tool["function"]) {
        let name = function["name"].as_str().unwrap_or_default();
        if wish.only.as_ref().is_some_and(|only| !only.iter().any(|one| one == name)) {
            continue;
        }
        let arguments = arguments(&function["parameters"]);
        let texts: usize = arguments.keys().map(|key| key.len() + 2 * ALLOCATION_BYTES).sum();
        let bytes = 2 * (name.len() + texts + 8 * ALLOCATION_BYTES);
        memory.charge(bytes).map_err(|refused| refused.body(Some("tools".to_owned())))?;
        read.functions.insert(name.to_owned(), arguments);
    }
    Ok(Some(read))
}

/// The arguments of a function that are no strings.
fn arguments(parameters: &Value) -> Arguments {
    let resolved =
        if parameters.get("$ref").is_some() { output::resolved(parameters) } else { None };
    let all = output::arguments(resolved.as_ref().unwrap_or(parameters));
    all.iter().filter_map(|one| Some((one.name.to_owned(), kind(one.schema)?))).collect()
}

/// `None` for strings alone.
fn kind(schema: &Value) -> Option<ArgumentKind> {
    let mut types: Vec<Option<&str>> = Vec::new();
    let named = &schema["type"];
    types.extend(named.as_array().into_iter().flatten().map(Value::as_str));
    types.extend(named.as_str().map(Some));
    for key in ["anyOf", "oneOf"] {
        let cases = schema[key].as_array().into_iter().flatten();
        types.extend(cases.map(|case| case["type"].as_str()));
    }
    if types.is_empty() {
        let texts = |values: &Vec<Value>| values.iter().all(Value::is_string);
        let text = schema["enum"].as_array().is_some_and(texts) || schema["const"].is_string();
        types.push(text.then_some("string"));
    }
    let text = types.contains(&Some("string"));
    match types.iter().all(|name| matches!(name, Some("string" | "null"))) {
        true if text && types.contains(&Some("null")) => Some(ArgumentKind::OptionalText),
        true if text => None,
        true | false => Some(ArgumentKind::Json),
    }
}

#[cfg(test)]
mod tests;
