//! The bits of Python that chat templates lean on: `str()`, `json.dumps` and `strftime`.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output};

/// Lists and objects nested deeper than this are refused rather than walked.
const MAX_DEPTH: usize = 200;

/// `{{ value }}` as Python prints it: `True`, `None`, `['a']`.
pub(crate) fn write_str(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&to_str(value)?),
    }
    .map_err(|_| Error::new(ErrorKind::WriteFailure, "the rendered prompt is too long"))
}

/// Python's `str(value)`.
pub(crate) fn to_str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => repr(value, &mut out, 0)?,
    }
    Ok(out)
}

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
pub(crate) struct Dump {
    pub(crate) ensure_ascii: bool,
    pub(crate) indent: Option<String>,
    pub(crate) separators: Option<(String, String)>,
    pub(crate) sort_keys: bool,
}

/// `indent` of `json.dumps`: a number of spaces or the text itself.
pub(crate) fn indent(value: &Value) -> Result<Option<String>, Error> {
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
    pub(crate) fn dumps(&self, value: &Value) -> Result<String, Error> {
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

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `datetime.strftime` in the C locale, in UTC: routers in different time zones must render the same prompt.
/// Directives that templates do not use stay as they are.
pub(crate) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((days + 4) % 7) as usize]; // 1970-01-01 was a Thursday
    let day_of_year = days - days_before(year) + 1;
    let twelve = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let (pad, directive) = match directive {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        let two = |n: u64| if pad { format!("{n:02}") } else { n.to_string() };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') if pad => format!("{day_of_year:03}"),
            Some('j') => day_of_year.to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T' | 'X') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('s') => seconds.to_string(),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if pad { "" } else { "-" }),
            None => "%".to_owned(),
        });
    }
    out
}

/// Year, month and day of the day that many days after 1970-01-01 (Gregorian calendar).
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366; // never too late, and at most one in 1,461 days too early per year
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut day = days - days_before(year);
    let leap = u64::from(days_before(year + 1) - days_before(year) == 366);
    let lengths = [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if day < length {
            return (year, month, day + 1);
        }
        day -= length;
    }
    unreachable!("the day is inside its year")
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let y = year - 1;
    y * 365 + y / 4 - y / 100 + y / 400 - 719_162
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |s: u64, f: &str| strftime(f, UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0, "%A %d %b %Y %j %H:%M:%S %p"), "Thursday 01 Jan 1970 001 00:00:00 AM");
        assert_eq!(at(1_709_210_096, "%d %B %Y, %I:%M %p, %a"), "29 February 2024, 12:34 PM, Thu");
        assert_eq!(
            at(1_735_689_599, "%-d %-m %y %j %F %T %% %q"),
            "31 12 24 366 2024-12-31 23:59:59 % %q"
        );
        assert_eq!(at(4_107_542_400, "%F"), "2100-03-01");
    }

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
            assert_eq!(to_str(&Value::from(x)).unwrap(), text);
        }
    }
}
