//! Values in minijinja's own notation, which is Rust's: what `~`, `join` and string arguments see.

use std::fmt::Write as _;

use super::python;
use super::text::{Text, Writer};
use crate::prompt::jinja::error::Error;
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::{List, Value};

/// A value as a string: itself, if it is one.
pub(crate) fn display<'r>(machine: &Machine<'r>, value: &Value<'r>) -> Result<Text<'r>, Error> {
    if let Some(text) = value.as_text() {
        return Ok(text.clone());
    }
    let mut out = Writer::new(&machine.budget);
    write_display(machine, value, &mut out)?;
    out.finish()
}

/// A value as Python prints it.
pub(crate) fn python<'r>(machine: &Machine<'r>, value: &Value<'r>) -> Result<Text<'r>, Error> {
    if let Some(text) = value.as_text() {
        return Ok(text.clone());
    }
    let mut out = Writer::new(&machine.budget);
    python::repr(machine, value, &mut out)?;
    out.finish()
}

pub(crate) fn write_display<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    out: &mut Writer<'_>,
) -> Result<(), Error> {
    match value {
        Value::Undefined => Ok(()),
        Value::Text(text) => out.push(&text.read()),
        Value::Int(_) | Value::Float(_) => out.push(&number(value)),
        other => write_debug(machine, other, out),
    }
}

fn write_debug<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    out: &mut Writer<'_>,
) -> Result<(), Error> {
    machine.budget.down()?;
    match value {
        Value::Undefined => out.push("undefined")?,
        Value::None => out.push("None")?,
        Value::Bool(x) => out.push(if *x { "True" } else { "False" })?,
        Value::Int(x) => out.push(&x.get().to_string())?,
        Value::Float(x) => out.push(&format!("{x:?}"))?,
        Value::Text(text) => quoted(&text.read(), out)?,
        Value::List(list) | Value::Lazy(list) => write_list(machine, list, out, write_debug)?,
        Value::Macro(decl, _) => {
            out.push("<macro ")?;
            out.push(&machine.program.names[decl.name])?;
            out.push(">")?;
        }
        Value::Loop(id) => {
            let state = &machine.loops[*id];
            let length = state.length.map_or("?".to_owned(), |len| len.to_string());
            out.push(&format!("<loop {}/{length}>", state.index.unwrap_or_default()))?;
        }
        Value::Function(_) => out.push("<function>")?,
        Value::Map(_) | Value::Namespace(_) => write_map(machine, value, out, write_debug)?,
    }
    machine.budget.up();
    Ok(())
}

/// How one value is written; its own lists and maps call it again.
type Write<'r> = fn(&Machine<'r>, &Value<'r>, &mut Writer<'_>) -> Result<(), Error>;

pub(super) fn write_list<'r>(
    machine: &Machine<'r>,
    list: &List<'r>,
    out: &mut Writer<'_>,
    write: Write<'r>,
) -> Result<(), Error> {
    out.push("[")?;
    for (i, item) in list.read().iter().enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        write(machine, item, out)?;
    }
    out.push("]")
}

/// What can be read as a map.
pub(super) fn write_map<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    out: &mut Writer<'_>,
    write: Write<'r>,
) -> Result<(), Error> {
    let map = machine.as_map(value)?;
    out.push("{")?;
    for (i, (key, value)) in map.iter().flat_map(|map| map.iter()).enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        write(machine, key, out)?;
        out.push(": ")?;
        write(machine, value, out)?;
    }
    out.push("}")
}

/// A string as Rust's `{:?}` writes it.
fn quoted(text: &str, out: &mut Writer<'_>) -> Result<(), Error> {
    out.budget().chars(text.len())?;
    out.push("\"")?;
    let mut piece = String::new();
    // In pieces, so that no more is made at once than was charged.
    let mut rest = text;
    while !rest.is_empty() {
        let mut end = rest.len().min(1 << 12);
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        piece.clear();
        write!(piece, "{:?}", &rest[..end]).ok();
        out.push(&piece[1..piece.len() - 1])?;
        rest = &rest[end..];
    }
    out.push("\"")
}

/// A number as minijinja prints it.
pub(crate) fn number(value: &Value<'_>) -> String {
    match value {
        Value::Int(x) => x.get().to_string(),
        Value::Float(x) if x.is_nan() => "NaN".to_owned(),
        Value::Float(x) if x.is_infinite() => if *x > 0.0 { "inf" } else { "-inf" }.to_owned(),
        Value::Float(x) => {
            let mut text = x.to_string();
            if !text.contains('.') {
                text.push_str(".0");
            }
            text
        }
        Value::Bool(x) => if *x { "True" } else { "False" }.to_owned(),
        _ => String::new(),
    }
}
