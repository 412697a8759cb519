//! Values in Python's notation: `str()`, `repr()` and `json.dumps`.

use super::print;
use super::text::{Text, Writer};
use crate::prompt::jinja::error::Error;
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::Value;

/// `repr(value)`, and nothing for what is undefined.
pub(crate) fn repr<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    out: &mut Writer<'_>,
) -> Result<(), Error> {
    machine.budget.down()?;
    match value {
        Value::Undefined => {}
        Value::None => out.push("None")?,
        Value::Bool(x) => out.push(if *x { "True" } else { "False" })?,
        Value::Int(_) | Value::Float(_) => out.push(&number(value))?,
        Value::Text(text) => repr_str(&text.read(), out)?,
        Value::List(list) => print::write_list(machine, list, out, repr)?,
        Value::Map(_) | Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) => {
            print::write_map(machine, value, out, repr)?;
        }
        Value::Lazy(_) | Value::Function(_) => print::write_display(machine, value, out)?,
    }
    machine.budget.up();
    Ok(())
}

fn repr_str(text: &str, out: &mut Writer<'_>) -> Result<(), Error> {
    out.budget().chars(text.len())?;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.push("\\\\")?,
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            c if c == quote => {
                out.push_char('\\')?;
                out.push_char(c)?;
            }
            c if c == ' ' || c.is_ascii_graphic() || printable(c) => out.push_char(c)?,
            c => {
                let code = c as u32;
                out.push(&match code {
                    ..0x100 => format!("\\x{code:02x}"),
                    0x100..0x1_0000 => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                })?;
            }
        }
    }
    out.push_char(quote)
}

/// Rust and Python leave the same Unicode categories unescaped; after a letter Rust also leaves combining marks.
fn printable(c: char) -> bool {
    let mut pair = [b'a', 0, 0, 0, 0];
    let len = c.encode_utf8(&mut pair[1..]).len();
    std::str::from_utf8(&pair[..=len]).is_ok_and(|pair| pair.escape_debug().nth(1) == Some(c))
}

/// A number as Python's `repr` writes it.
fn number(value: &Value<'_>) -> String {
    match value {
        Value::Float(x) => float(*x),
        other => print::number(other),
    }
}

fn float(x: f64) -> String {
    if !x.is_finite() {
        return match x {
            x if x.is_nan() => "nan",
            x if x > 0.0 => "inf",
            _ => "-inf",
        }
        .to_owned();
    }
    // Both print the shortest digits that read back; only the notation differs.
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let mut plain = format!("{x}");
        if !plain.contains('.') {
            plain.push_str(".0");
        }
        plain
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

/// The options of `json.dumps`.
#[derive(Debug, Default)]
pub(crate) struct Dump<'r> {
    pub(crate) ensure_ascii: bool,
    pub(crate) indent: Option<Text<'r>>,
    pub(crate) separators: Option<(Text<'r>, Text<'r>)>,
    pub(crate) sort_keys: bool,
}

/// Widest indentation by a number.
const MAX_INDENT: usize = 64;

/// What `indent=` of `tojson` stands for.
pub(crate) fn indent<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
) -> Result<Option<Text<'r>>, Error> {
    if value.is_missing() {
        return Ok(None);
    }
    if let Some(text) = value.as_text() {
        return Ok(Some(text.clone()));
    }
    match value.as_i64() {
        Some(n) if n <= MAX_INDENT as i64 => {
            let spaces = " ".repeat(usize::try_from(n).unwrap_or(0));
            Ok(Some(Text::built(spaces, &machine.budget)?))
        }
        _ => Err(Error::invalid("tojson: indent is out of range")),
    }
}

impl<'r> Dump<'r> {
    /// Writes a value as Python's `json.dumps(value)` does.
    pub(crate) fn dumps(
        &self,
        machine: &Machine<'r>,
        value: &Value<'r>,
    ) -> Result<Value<'r>, Error> {
        let mut out = Writer::new(&machine.budget);
        self.value(machine, value, &mut out, 0)?;
        Ok(Value::Text(out.finish()?))
    }

    fn value(
        &self,
        machine: &Machine<'r>,
        value: &Value<'r>,
        out: &mut Writer<'_>,
        depth: usize,
    ) -> Result<(), Error> {
        machine.budget.down()?;
        match value {
            Value::None => out.push("null")?,
            Value::Bool(x) => out.push(if *x { "true" } else { "false" })?,
            Value::Int(_) | Value::Float(_) => out.push(&json_number(value))?,
            Value::Text(text) => self.string(&text.read(), out)?,
            Value::List(list) | Value::Lazy(list) => {
                out.push("[")?;
                for (i, item) in list.read().iter().enumerate() {
                    self.separate(out, depth, i == 0)?;
                    self.value(machine, item, out, depth + 1)?;
                }
                self.close(out, depth, list.len() == 0)?;
                out.push("]")?;
            }
            Value::Map(_) | Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) => {
                self.map(machine, value, out, depth)?;
            }
            Value::Undefined | Value::Function(_) => {
                return Err(Error::invalid(format!("tojson: {} is not JSON", value.kind())));
            }
        }
        machine.budget.up();
        Ok(())
    }

    fn map(
        &self,
        machine: &Machine<'r>,
        value: &Value<'r>,
        out: &mut Writer<'_>,
        depth: usize,
    ) -> Result<(), Error> {
        let Some(map) = machine.as_map(value)? else { return Ok(()) };
        let mut order = None;
        if self.sort_keys {
            order = Some(machine.sorted(map.len(), |a, b| match (map.entry(a), map.entry(b)) {
                (Some((a, _)), Some((b, _))) => machine.order(a, b),
                _ => Ok(std::cmp::Ordering::Equal),
            })?);
        }
        out.push("{")?;
        for i in 0..map.len() {
            let place = order.as_ref().map_or(i, |order| order[i]);
            let Some((key, value)) = map.entry(place) else { break };
            self.separate(out, depth, i == 0)?;
            self.key(machine, key, out)?;
            match &self.separators {
                Some((_, colon)) => out.push(&colon.read())?,
                None => out.push(": ")?,
            }
            self.value(machine, value, out, depth + 1)?;
        }
        self.close(out, depth, map.len() == 0)?;
        out.push("}")
    }

    fn separate(&self, out: &mut Writer<'_>, depth: usize, first: bool) -> Result<(), Error> {
        if !first {
            match &self.separators {
                Some((comma, _)) => out.push(&comma.read())?,
                None => out.push(if self.indent.is_some() { "," } else { ", " })?,
            }
        }
        self.new_line(out, depth + 1)
    }

    fn close(&self, out: &mut Writer<'_>, depth: usize, empty: bool) -> Result<(), Error> {
        if empty { Ok(()) } else { self.new_line(out, depth) }
    }

    fn new_line(&self, out: &mut Writer<'_>, depth: usize) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            out.push("\n")?;
            for _ in 0..depth {
                out.push(&indent.read())?;
            }
        }
        Ok(())
    }

    fn key(
        &self,
        machine: &Machine<'r>,
        key: &Value<'r>,
        out: &mut Writer<'_>,
    ) -> Result<(), Error> {
        if let Some(text) = key.as_text() {
            return self.string(&text.read(), out);
        }
        let mut text = Writer::new(&machine.budget);
        self.value(machine, key, &mut text, 0)?;
        self.string(text.text(), out)
    }

    fn string(&self, text: &str, out: &mut Writer<'_>) -> Result<(), Error> {
        out.budget().chars(text.len())?;
        out.push("\"")?;
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            let escaped = match c {
                '"' => "\\\"",
                '\\' => "\\\\",
                '\n' => "\\n",
                '\r' => "\\r",
                '\t' => "\\t",
                '\u{8}' => "\\b",
                '\u{c}' => "\\f",
                c if (c as u32) < 0x20 || (self.ensure_ascii && (c as u32) > 0x7e) => "",
                _ => continue,
            };
            out.push(&text[plain..at])?;
            plain = at + c.len_utf8();
            out.push(escaped)?;
            if escaped.is_empty() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push(&format!("\\u{unit:04x}"))?;
                }
            }
        }
        out.push(&text[plain..])?;
        out.push("\"")
    }
}

fn json_number(value: &Value<'_>) -> String {
    let text = number(value);
    match &*text {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_does() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345.6, "123456789012345.6"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1.5e300, "1.5e+300"),
            (-0.0, "-0.0"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
    }
}
