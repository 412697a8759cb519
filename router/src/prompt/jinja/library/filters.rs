//! Filters, those of lists apart.

use super::args::{self, Args};
use super::functions::flag_named;
use super::lists;
use super::methods;
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::compare::as_float;
use crate::prompt::jinja::value::pieces::{self, PIECE, pieces};
use crate::prompt::jinja::value::print;
use crate::prompt::jinja::value::python::{self, Dump};
use crate::prompt::jinja::value::text::{Text, Writer};
use crate::prompt::jinja::value::{self, Map, Value};

/// A filter, as in `value | trim`.
pub(crate) type Filter =
    for<'m, 'r> fn(&'m mut Machine<'r>, Value<'r>, Args<'r>) -> Result<Value<'r>, Error>;

/// Filters and tests of minijinja that chat templates do not need: escapes for HTML, which is not written here, notations
/// without bound, and what Jinja does not have.
pub(crate) const REFUSED: [&str; 9] =
    ["escape", "e", "safe", "escaped", "pprint", "urlencode", "format", "chain", "zip"];

/// The filter of that name.
pub(crate) fn by_name(name: &str) -> Option<Filter> {
    Some(match name {
        "upper" => |m, v, args| args.none().and_then(|()| upper_text(m, &args::text(m, &v)?)),
        "lower" => |m, v, args| args.none().and_then(|()| lower_text(m, &args::text(m, &v)?)),
        "title" => |m, v, args| args.none().and_then(|()| title_text(m, &args::text(m, &v)?)),
        "capitalize" => {
            |m, v, args| args.none().and_then(|()| capital_text(m, &args::text(m, &v)?))
        }
        "safe" => |m, v, args| args.none().and_then(|()| Ok(Value::Text(args::text(m, &v)?))),
        "string" => |m, v, args| args.none().and_then(|()| Ok(Value::Text(print::python(m, &v)?))),
        "replace" => replace,
        "trim" => trim,
        "split" => |m, v, args| methods::split(m, args::string(&v)?, args),
        "lines" => {
            |m, v, args| args.none().and_then(|()| methods::lines(m, args::string(&v)?, false))
        }
        "indent" => indent,
        "length" | "count" => length,
        "default" | "d" => default,
        "bool" => |m, v, args| args.none().map(|()| Value::Bool(m.truth(&v))),
        "abs" => abs,
        "round" => round,
        "int" => int,
        "float" => float,
        "attr" => |m, v, args| {
            let name = args.one()?;
            match m.item(&v, &name)? {
                Some(value) => Ok(value),
                None if v.is_undefined() => Err(ErrorKind::Undefined.into()),
                None => Ok(Value::Undefined),
            }
        },
        "items" => items,
        "tojson" => tojson,
        _ => return lists::by_name(name),
    })
}

/// Makes a string out of another one, character by character; `change` charges what it looks at.
fn letters<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    change: impl FnOnce(&str, &mut Writer<'_>) -> Result<(), Error>,
) -> Result<Value<'r>, Error> {
    let mut out = Writer::with_room(text.len(), &machine.budget)?;
    change(&text.read(), &mut out)?;
    Ok(Value::Text(out.finish()?))
}

/// In pieces that end where the next character begins a new word, as a sigma at the end of a word has a form of its own.
fn in_pieces(text: &str, out: &mut Writer<'_>, change: fn(&str) -> String) -> Result<(), Error> {
    let mut rest = text;
    while !rest.is_empty() {
        let at = (PIECE.min(rest.len())..rest.len()).find(|at| rest.as_bytes()[*at] == b' ');
        let (piece, after) = rest.split_at(at.unwrap_or(rest.len()));
        out.budget().chars(piece.len())?;
        out.budget().memory(4 * piece.len())?; // what is made of it is pushed, and charged, afterwards
        out.push(&change(piece))?;
        rest = after;
    }
    Ok(())
}

pub(crate) fn upper_text<'r>(m: &Machine<'r>, text: &Text<'r>) -> Result<Value<'r>, Error> {
    letters(m, text, |text, out| in_pieces(text, out, str::to_uppercase))
}

pub(crate) fn lower_text<'r>(m: &Machine<'r>, text: &Text<'r>) -> Result<Value<'r>, Error> {
    letters(m, text, |text, out| in_pieces(text, out, str::to_lowercase))
}

pub(crate) fn capital_text<'r>(m: &Machine<'r>, text: &Text<'r>) -> Result<Value<'r>, Error> {
    letters(m, text, |text, out| {
        let mut chars = text.chars();
        if let Some(first) = chars.next() {
            first.to_uppercase().try_for_each(|c| out.push_char(c))?;
        }
        in_pieces(chars.as_str(), out, str::to_lowercase)
    })
}

pub(crate) fn title_text<'r>(m: &Machine<'r>, text: &Text<'r>) -> Result<Value<'r>, Error> {
    letters(m, text, |text, out| {
        let mut first = true;
        for piece in pieces(text) {
            out.budget().chars(2 * piece.len())?; // twice: no character is copied with the next one
            for c in piece.chars() {
                if c.is_ascii_punctuation() || c.is_whitespace() {
                    out.push_char(c)?;
                    first = true;
                } else if std::mem::take(&mut first) {
                    c.to_uppercase().try_for_each(|c| out.push_char(c))?;
                } else {
                    c.to_lowercase().try_for_each(|c| out.push_char(c))?;
                }
            }
        }
        Ok(())
    })
}

fn replace<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let (old, new) = (args.required()?, args.required()?);
    args.finish()?;
    let text = args::text(machine, &value)?;
    let (old, new) = (args::text(machine, &old)?, args::text(machine, &new)?);
    methods::replaced(machine, &text, &old, &new, usize::MAX)
}

fn trim<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let chars = args.optional();
    args.finish()?;
    let text = args::text(machine, &value)?;
    let chars = chars.map(|chars| args::text(machine, &chars)).transpose()?;
    methods::trim(machine, &text, chars.as_ref(), true, true)
}

fn indent<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let text = args::text(machine, &value)?;
    let mut args = args.reader();
    let width = args.optional_or_named("width").map(|width| args::count(&width)).transpose()?;
    let first = args.optional_or_named("first").map(|x| args::flag(&x)).transpose()?;
    let blank = args.optional_or_named("blank").map(|x| args::flag(&x)).transpose()?;
    args.finish()?;
    let width = width.unwrap_or(4);
    machine.budget.memory(width)?;
    let space = " ".repeat(width);
    let read = text.read();
    let ended = |text: &str| {
        let text = text.strip_suffix('\n').unwrap_or(text);
        text.strip_suffix('\r').unwrap_or(text).len()
    };
    let mut out = Writer::new(&machine.budget);
    for (i, line) in read[..ended(&read)].split('\n').enumerate() {
        let inner = i > 0 || first.unwrap_or(false);
        if inner && (!line.is_empty() || blank.unwrap_or(false)) {
            out.push(&space)?;
        }
        out.push(line)?;
        out.push("\n")?;
    }
    let len = ended(out.text());
    out.truncate(len);
    Ok(Value::Text(out.finish()?))
}

fn length<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    args.none()?;
    Ok(Value::count(match &value {
        Value::Text(text) => pieces::count(&text.read(), &machine.budget)?,
        Value::List(list) | Value::Lazy(list) => list.len(),
        other => match machine.as_map(other)? {
            Some(map) => map.len(),
            None => {
                let kind = other.kind();
                let why = format!("cannot calculate length of value of type {kind}");
                return Err(Error::invalid(why));
            }
        },
    }))
}

fn default<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let args = args.all()?;
    if args.len() > 2 {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let lax = args.get(1).is_some_and(|lax| machine.truth(lax));
    if value.is_undefined() || (lax && !machine.truth(&value)) {
        return Ok(args.into_iter().next().unwrap_or(Value::text("")));
    }
    Ok(value)
}

fn abs<'r>(_: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    match value {
        Value::Int(x) => {
            x.get().checked_abs().map(Value::int).ok_or_else(|| Error::invalid("overflow on abs"))
        }
        Value::Float(x) => Ok(Value::Float(x.abs())),
        _ => Err(Error::invalid("cannot get absolute value")),
    }
}

fn round<'r>(_: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let precision = args.optional();
    args.finish()?;
    match value {
        Value::Int(_) => Ok(value),
        Value::Float(x) => {
            let precision = precision.map_or(Some(0), |p| p.as_i64()?.try_into().ok());
            let precision = precision.ok_or_else(|| Error::invalid("cannot convert to i32"))?;
            let scale = 10_f64.powi(precision);
            Ok(Value::Float((scale * x).round() / scale))
        }
        other => Err(Error::invalid(format!("cannot round value ({})", other.kind()))),
    }
}

fn int<'r>(_: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    match &value {
        Value::Undefined | Value::None => Ok(Value::int(0)),
        Value::Bool(x) => Ok(Value::int(i128::from(*x))),
        Value::Int(_) => Ok(value),
        Value::Float(x) => Ok(Value::int(*x as i128)),
        Value::Text(text) => match text.read().parse::<i128>() {
            Ok(x) => Ok(Value::int(x)),
            Err(_) => parse_float(text).map(|x| Value::int(x as i128)),
        },
        other => Err(Error::invalid(format!("cannot convert {} to integer", other.kind()))),
    }
}

fn float<'r>(_: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    match &value {
        Value::Undefined | Value::None => Ok(Value::Float(0.0)),
        Value::Text(text) => parse_float(text).map(Value::Float),
        other => as_float(other, false)
            .map(Value::Float)
            .ok_or_else(|| Error::invalid(format!("cannot convert {} to float", other.kind()))),
    }
}

fn parse_float(text: &Text<'_>) -> Result<f64, Error> {
    text.read().parse().map_err(|e: std::num::ParseFloatError| Error::invalid(e.to_string()))
}

fn items<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    args.none()?;
    match machine.as_map(&value)? {
        Some(map) => pairs(machine, &map),
        None => Err(Error::invalid("cannot convert value into pairs")),
    }
}

/// The entries of a map as pairs.
pub(crate) fn pairs<'r>(machine: &Machine<'r>, map: &Map<'r>) -> Result<Value<'r>, Error> {
    let mut pairs = value::collect(std::iter::empty(), map.len(), &machine.budget)?;
    for (key, value) in map.iter() {
        let pair = value::collect([key.clone(), value.clone()].into_iter(), 2, &machine.budget)?;
        pairs.push(Value::list(pair, &machine.budget)?);
    }
    Value::lazy(pairs, &machine.budget)
}

/// `tojson` of transformers: `json.dumps` without HTML escapes.
fn tojson<'r>(
    machine: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let ensure_ascii = args.optional().map(|given| args::flag(&given)).transpose()?;
    let ensure_ascii = match ensure_ascii {
        Some(given) => given,
        None => flag_named(&mut args, "ensure_ascii")?,
    };
    let indent = match args.named("indent") {
        Some(indent) => python::indent(machine, &indent)?,
        None => None,
    };
    let mut separators = None;
    if let Some(given) = args.named_optional("separators") {
        let parts = given.as_list().map(|list| [list.get(0), list.get(1), list.get(2)]);
        separators = match parts {
            Some([Some(Value::Text(comma)), Some(Value::Text(colon)), None]) => {
                Some((comma, colon))
            }
            _ => return Err(Error::invalid("tojson: separators are two strings")),
        };
    }
    let sort_keys = flag_named(&mut args, "sort_keys")?;
    args.finish()?;
    Dump { ensure_ascii, indent, separators, sort_keys }.dumps(machine, &value)
}
