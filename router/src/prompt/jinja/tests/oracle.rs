//! What `minijinja` itself makes of a template, with Python's notation and methods: what the engine is compared with.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind, Output};
use serde_json::{Map, Value as Json};

/// Renders `source`, or says why not, in the words of the engine.
pub(super) fn render(source: &str, given: &Map<String, Json>) -> Result<String, String> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(1_000_000));
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| write_str(out, value));
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", to_str);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    environment.add_template("chat_template", source).map_err(|e| describe(&e))?;
    let template = environment.get_template("chat_template").map_err(|e| describe(&e))?;
    template.render(Value::from_serialize(given)).map_err(|e| describe(&e))
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn describe(error: &Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(at) = cause {
        if let Some(Raised(words)) = at.downcast_ref() {
            return format!("raised: {words}");
        }
        cause = at.source();
    }
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    if let Some(line) = error.line() {
        text = format!("{text} (line {line} of the template)");
    }
    text
}

fn write_str(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&to_str(value)?),
    }
    .map_err(|_| Error::new(ErrorKind::WriteFailure, "the rendered prompt is too long"))
}

fn to_str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => repr(value, &mut out, 0)?,
    }
    Ok(out)
}

/// `tojson` of transformers: `json.dumps` without HTML escapes.
#[allow(clippy::needless_pass_by_value, reason = "minijinja passes Kwargs by value")]
fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let separators: Option<ViaDeserialize<(String, String)>> = options.get("separators")?;
    let dump = Dump {
        ensure_ascii: match ensure_ascii {
            Some(given) => given,
            None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        },
        indent: match options.get::<Option<Value>>("indent")? {
            Some(width) => indent(&width)?,
            None => None,
        },
        separators: separators.map(|s| s.0),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    dump.dumps(value).map(Value::from)
}

/// Lists and objects nested deeper than this are refused rather than walked.
const MAX_DEPTH: usize = 200;

#[allow(clippy::wildcard_enum_match_arm, reason = "the enum is non-exhaustive")]
fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(value, out),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, out, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        _ => {
            write!(out, "{value}").map_err(|_| too_deep())?; // a macro, a loop: nothing in a message
        }
    }
    Ok(())
}

fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c == ' ' || c.is_ascii_graphic() || printable(c) => out.push(c),
            c => {
                let code = c as u32;
                out.push_str(&match code {
                    ..0x100 => format!("\\x{code:02x}"),
                    0x100..0x1_0000 => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
            }
        }
    }
    out.push(quote);
}

/// Rust and Python leave the same Unicode categories unescaped; after a letter Rust also leaves combining marks.
fn printable(c: char) -> bool {
    format!("a{c}").escape_debug().nth(1) == Some(c)
}

/// A number as Python's `repr` writes it.
fn number(value: &Value, out: &mut String) {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float(x, out),
        Err(_) => out.push_str(&value.to_string()),
    }
}

fn float(x: f64, out: &mut String) {
    if !x.is_finite() {
        out.push_str(match x {
            x if x.is_nan() => "nan",
            x if x > 0.0 => "inf",
            _ => "-inf",
        });
        return;
    }
    // Both print the shortest digits that read back; only the notation differs.
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(&format!("{digits}e{sign}{:02}", exponent.abs()));
    }
}

/// The options of `json.dumps`.
#[derive(Debug, Default)]
struct Dump {
    ensure_ascii: bool,
    indent: Option<String>,
    separators: Option<(String, String)>,
    sort_keys: bool,
}

/// `indent` of `json.dumps`: a number of spaces or the text itself.
fn indent(value: &Value) -> Result<Option<String>, Error> {
    if value.is_none() || value.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = value.as_str() {
        return Ok(Some(text.to_owned()));
    }
    match value.as_i64() {
        Some(n @ ..=64) => Ok(Some(" ".repeat(usize::try_from(n).unwrap_or(0)))),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is out of range")),
    }
}

impl Dump {
    /// Python's `json.dumps(value)`.
    fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.value(value, &mut out, 0)?;
        Ok(out)
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the enum is non-exhaustive")]
    fn value(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => json_number(value, out),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.separate(out, depth, &mut empty);
                    self.value(&item, out, depth + 1)?;
                }
                self.close(out, depth, empty);
                out.push(']');
            }
            ValueKind::Map => {
                out.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let mut empty = true;
                for key in keys {
                    self.separate(out, depth, &mut empty);
                    self.key(&key, out)?;
                    out.push_str(self.separators.as_ref().map_or(": ", |s| &s.1));
                    self.value(&value.get_item(&key)?, out, depth + 1)?;
                }
                self.close(out, depth, empty);
                out.push('}');
            }
            kind => {
                let message = format!("tojson: {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn separate(&self, out: &mut String, depth: usize, empty: &mut bool) {
        if !std::mem::take(empty) {
            let default = if self.indent.is_some() { "," } else { ", " };
            out.push_str(self.separators.as_ref().map_or(default, |s| &s.0));
        }
        self.new_line(out, depth + 1);
    }

    fn close(&self, out: &mut String, depth: usize, empty: bool) {
        if !empty {
            self.new_line(out, depth);
        }
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.as_str() {
            Some(text) => self.string(text, out),
            None => {
                let mut text = String::new();
                self.value(key, &mut text, MAX_DEPTH)?;
                self.string(&text, out);
            }
        }
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && (c as u32) > 0x7e) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn json_number(value: &Value, out: &mut String) {
    let start = out.len();
    number(value, out);
    let json = match &out[start..] {
        "nan" => "NaN",
        "inf" => "Infinity",
        "-inf" => "-Infinity",
        _ => return,
    };
    out.replace_range(start.., json);
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH { Err(too_deep()) } else { Ok(()) }
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, "values are nested too deeply")
}
