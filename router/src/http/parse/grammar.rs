//! What an answer has to follow: `response_format`, and vLLM's `structured_outputs` and `guided_*`.
//!
//! Read here, with the keywords of schemas; whether a grammar compiles is found out away from the threads that serve the
//! sockets ([`Asked::check`]).

use std::fmt::Write as _;

use serde_json::Value;

use crate::core::frame::{Grammar, GrammarKind, MAX_GRAMMAR_BYTES};
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, unsupported, wrong_type};
use crate::http::parse::json::MAX_DEPTH;
use crate::request::grammar::{GrammarError, check_grammar, check_schema, lark_of_gbnf};

/// Most texts to choose from.
const MAX_CHOICE_TEXTS: usize = 1024;

/// A constraint, and the field that it came in.
#[derive(Debug, Clone)]
pub(in crate::http) struct Asked {
    pub(in crate::http) grammar: Grammar,
    param: String,
}

/// Takes all fields that may constrain the answer.
///
/// # Errors
/// `BadRequest` about a wrong one, or about a second one.
pub(in crate::http) fn take(fields: &mut Fields) -> Result<Option<Asked>, RouteError> {
    let mut found = Vec::new();
    found.extend(response_format(fields)?);
    if let Some(mut outputs) = fields.object("structured_outputs")? {
        let names = ["json", "regex", "choice", "grammar", "json_object"];
        found.extend(named(&mut outputs, names)?);
        for name in ["disable_any_whitespace", "disable_additional_properties"] {
            if outputs.boolean(name)? == Some(true) {
                let why = "white space is bounded, and a schema says itself what it allows";
                return Err(unsupported(outputs.path(name), why));
            }
        }
        for name in ["whitespace_pattern", "structural_tag"] {
            if outputs.has(name) {
                return Err(unsupported(outputs.path(name), "use `grammar`"));
            }
        }
        outputs.finish()?;
        if found.is_empty() {
            let message = "`structured_outputs` must hold one of json, regex, choice, grammar and json_object";
            return Err(bad("structured_outputs", message));
        }
    }
    let names =
        ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"];
    found.extend(named(fields, names)?);
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (Some(first), Some(second)) => {
            let message = format!(
                "`{}` and `{}` both constrain the answer; send one of them",
                first.param, second.param
            );
            Err(bad(second.param, message))
        }
        (first, _) => Ok(first),
    }
}

fn response_format(fields: &mut Fields) -> Result<Option<Asked>, RouteError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let kind = format.string("type")?;
    let kind = format.require("type", kind)?;
    let asked = match kind.as_str() {
        "text" => None,
        "json_object" => Some(any_object("response_format".to_owned())?),
        "json_schema" => {
            let wrapper = format.object("json_schema")?;
            let mut wrapper = format.require("json_schema", wrapper)?;
            wrapper.string("name")?;
            wrapper.string("description")?;
            wrapper.boolean("strict")?; // a schema is kept either way
            let schema = wrapper.take("schema");
            let schema = wrapper.require("schema", schema)?;
            let param = wrapper.path("schema");
            wrapper.finish()?;
            Some(json(schema, param)?)
        }
        _ => {
            let message = "`response_format.type` must be text, json_object or json_schema";
            return Err(bad("response_format.type", message));
        }
    };
    format.finish()?;
    Ok(asked)
}

/// The constraints that stand in `fields` under these names: a JSON schema, a regular expression, texts, a grammar, a flag.
fn named(fields: &mut Fields, names: [&str; 5]) -> Result<Vec<Asked>, RouteError> {
    let [schema, regex, choice, grammar, object] = names;
    let mut found = Vec::new();
    if let Some(value) = fields.take(schema) {
        found.push(json(value, fields.path(schema))?);
    }
    if let Some(source) = fields.string(regex)? {
        found.push(Asked::new(GrammarKind::Regex, source, fields.path(regex))?);
    }
    if let Some(texts) = fields.array(choice)? {
        let param = fields.path(choice);
        found.push(Asked::new(GrammarKind::Lark, choices(&texts, &param)?, param)?);
    }
    if let Some(source) = fields.string(grammar)? {
        let param = fields.path(grammar);
        let source = lark_of_gbnf(&source).map_err(|error| wrong(&param, &error))?;
        found.push(Asked::new(GrammarKind::Lark, source, param)?);
    }
    if fields.boolean(object)? == Some(true) {
        found.push(any_object(fields.path(object))?);
    }
    Ok(found)
}

fn any_object(param: String) -> Result<Asked, RouteError> {
    Asked::new(GrammarKind::Json, r#"{"type":"object"}"#.to_owned(), param)
}

/// A schema, or the text of one.
///
/// # Errors
/// `BadRequest` about what is no schema, or too long.
pub(in crate::http) fn json(value: Value, param: String) -> Result<Asked, RouteError> {
    let value = if let Value::String(text) = &value {
        check_length(text.len(), &param)?;
        let broken =
            |error: serde_json::Error| bad(&param, format!("`{param}` is not valid JSON: {error}"));
        serde_json::from_str(text).map_err(broken)?
    } else {
        value
    };
    if !value.is_object() && !value.is_boolean() {
        return Err(wrong_type(param, "a JSON schema", &value));
    }
    if depth(&value) > MAX_DEPTH {
        let message = format!("`{param}` is nested deeper than {MAX_DEPTH} levels");
        return Err(bad(param, message));
    }
    let source = value.to_string();
    Asked::new(GrammarKind::Json, source, param)
}

/// `serde_json` itself goes no deeper than 128.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// One of these texts, as Lark.
fn choices(texts: &[Value], param: &str) -> Result<String, RouteError> {
    if texts.is_empty() || texts.len() > MAX_CHOICE_TEXTS {
        let message =
            format!("`{param}` must hold 1 to {MAX_CHOICE_TEXTS} texts, not {}", texts.len());
        return Err(bad(param, message));
    }
    let mut lark = String::from("start:");
    for (place, text) in texts.iter().enumerate() {
        let at = format!("{param}[{place}]");
        let Value::String(text) = text else {
            return Err(wrong_type(at, "a string", text));
        };
        if text.is_empty() {
            return Err(bad(at, format!("`{param}` must not hold an empty text")));
        }
        check_length(lark.len() + text.len(), param)?;
        let sign = if place == 0 { "" } else { " |" };
        write!(lark, "{sign} {}", Value::from(text.as_str()))
            .map_err(|error| RouteError::internal("writing a grammar", error))?;
    }
    Ok(lark)
}

/// A grammar that was made here of what stands in a field.
///
/// # Errors
/// `BadRequest` if it is too long.
pub(in crate::http) fn made(source: String, param: &str) -> Result<Grammar, RouteError> {
    check_length(source.len(), param)?;
    Ok(Grammar { kind: GrammarKind::Lark, source: source.into() })
}

/// The same, to be checked.
///
/// # Errors
/// `BadRequest` if it is too long.
pub(in crate::http) fn lark(source: String, param: String) -> Result<Asked, RouteError> {
    Asked::new(GrammarKind::Lark, source, param)
}

fn check_length(bytes: usize, param: &str) -> Result<(), RouteError> {
    if bytes > MAX_GRAMMAR_BYTES {
        let message = format!("`{param}` is {bytes} bytes long, the limit is {MAX_GRAMMAR_BYTES}");
        return Err(bad(param, message));
    }
    Ok(())
}

fn wrong(param: &str, error: &GrammarError) -> RouteError {
    bad(param, format!("`{param}` cannot be followed: {error}"))
}

impl Asked {
    fn new(kind: GrammarKind, source: String, param: String) -> Result<Self, RouteError> {
        check_length(source.len(), &param)?;
        if source.trim().is_empty() {
            return Err(bad(&param, format!("`{param}` must not be empty")));
        }
        Ok(Self { grammar: Grammar { kind, source: source.into() }, param })
    }

    /// The schema, where it is JSON that is asked for.
    ///
    /// # Errors
    /// `Internal` if it was not written as JSON.
    pub(in crate::http) fn schema(&self) -> Result<Option<Value>, RouteError> {
        match self.grammar.kind {
            GrammarKind::Json => {
                let schema = serde_json::from_str(&self.grammar.source);
                schema.map(Some).map_err(|error| RouteError::internal("a schema", error))
            }
            GrammarKind::Regex | GrammarKind::Lark => Ok(None),
        }
    }

    /// Whether answers can follow it. Takes milliseconds, and at the bounds some hundred.
    ///
    /// # Errors
    /// `BadRequest` whose `param` is the place in a schema.
    pub(in crate::http) fn check(&self) -> Result<(), RouteError> {
        let Self { grammar, param } = self;
        match grammar.kind {
            GrammarKind::Json => {
                let broken = |error: serde_json::Error| {
                    RouteError::internal("a schema that was written here", error)
                };
                let schema = serde_json::from_str(&grammar.source).map_err(broken)?;
                check_schema(&schema).map_err(|error| {
                    let place = format!("{param}{}", error.path);
                    let message = format!("`{place}` cannot be followed: {}", error.message);
                    bad(place, message)
                })
            }
            GrammarKind::Regex | GrammarKind::Lark => {
                check_grammar(grammar).map_err(|error| wrong(param, &error))
            }
        }
    }
}

#[cfg(test)]
mod tests;
