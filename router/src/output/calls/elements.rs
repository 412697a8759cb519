//! Calls whose arguments stand between tags, one by one: those of Qwen3-Coder and of GLM.
//!
//! A text is written as JSON while it comes. Of any other kind the value is held until it is known to be JSON.

use super::{Announcer, ArgumentKind, Arguments, CallStep, MAX_HELD};
use crate::output::json::{Json, escape};
use crate::output::parts::Out;

/// Longest name of a function or of an argument, with the tag after it.
const MAX_NAME: usize = 256;

/// The tags of one form.
#[derive(Debug)]
pub(super) struct Tags {
    /// After the function's name; `None` where the next tag ends it.
    name_end: Option<&'static str>,
    key_begin: &'static str,
    key_end: &'static str,
    value_begin: Option<&'static str>,
    value_end: &'static str,
    end: &'static str,
    /// A value stands on lines of its own.
    lines: bool,
}

/// `f><parameter=key>value</parameter></function>`, after `<function=`.
pub(super) const QWEN: Tags = Tags {
    name_end: Some(">"),
    key_begin: "<parameter=",
    key_end: ">",
    value_begin: None,
    value_end: "</parameter>",
    end: "</function>",
    lines: true,
};

/// `f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, after `<tool_call>`.
pub(super) const GLM: Tags = Tags {
    name_end: None,
    key_begin: "<arg_key>",
    key_end: "</arg_key>",
    value_begin: Some("<arg_value>"),
    value_end: "</arg_value>",
    end: "</tool_call>",
    lines: false,
};

impl Tags {
    pub(super) const MARKERS: [&str; 5] =
        ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"];
}

#[derive(Debug)]
pub(in crate::output) struct ElementCall {
    tags: &'static Tags,
    state: State,
    /// The function's name, then the key, with the beginning of the tag after it; or the beginning of a tag.
    held: String,
    arguments: Arguments,
    some: bool,
}

#[derive(Debug)]
enum State {
    Name,
    /// Between two arguments.
    Between,
    Key,
    /// Before the tag that a value begins with.
    Before(Value),
    Value(Value),
}

/// A value, as it comes.
#[derive(Debug)]
struct Value {
    kind: Kind,
    /// No character came yet of a value on lines of its own.
    first: bool,
    /// It stands on lines of its own.
    lines: bool,
    /// A line break that is text unless the tag follows.
    line_break: bool,
}

#[derive(Debug)]
enum Kind {
    Text,
    /// Held until it ends.
    Held(ArgumentKind, String),
    /// Too long to be held, and the beginning of an object or a list: it is written as it is.
    Plain,
}

impl ElementCall {
    pub(super) fn new(tags: &'static Tags) -> Self {
        let (held, arguments) = (String::new(), Arguments::new());
        Self { tags, state: State::Name, held, arguments, some: false }
    }

    pub(super) fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        match &mut self.state {
            State::Name => self.name(c, calls, out),
            State::Between => self.between(c, calls, out),
            State::Key => self.key(c, calls, out),
            State::Before(_) => self.before(c, calls, out),
            State::Value(_) => self.value(c, calls, out),
        }
    }

    /// The text has ended in the middle of the call.
    pub(super) fn finish(&mut self, calls: &mut Announcer, out: &mut Out<'_>) {
        match &mut self.state {
            State::Name => {}
            State::Between if self.held.is_empty() => self.close(calls, out),
            State::Between | State::Key | State::Before(_) => {}
            // what is held of a value that has no end is its beginning all the same
            State::Value(value) => {
                if let Kind::Held(kind, text) = &value.kind {
                    calls.arguments(&beginning(*kind, text), out);
                }
            }
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        let value = match &self.state {
            State::Value(Value { kind: Kind::Held(_, text), .. }) => text.capacity(),
            State::Name | State::Between | State::Key | State::Before(_) | State::Value(_) => 0,
        };
        let kinds: usize = self.arguments.keys().map(String::capacity).sum();
        self.held.capacity() + value + kinds
    }

    /// The characters after a call that did not go on as one.
    pub(super) fn take_rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn name(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        self.held.push(c);
        let tags = self.tags;
        let ends = match tags.name_end {
            Some(end) => [end, end],
            None => [tags.key_begin, tags.end],
        };
        let Some(name) = ends.iter().find_map(|end| self.held.strip_suffix(end)) else {
            return if self.held.len() > MAX_NAME { CallStep::Not } else { CallStep::More };
        };
        let Some(arguments) = calls.arguments_of(name.trim()) else { return CallStep::Not };
        self.arguments = arguments.clone();
        let ended = tags.name_end.is_none() && self.held.ends_with(tags.end);
        let at_key = tags.name_end.is_none() && !ended;
        calls.begin(name.trim(), None, out);
        self.held.clear();
        self.state = if at_key { State::Key } else { State::Between };
        if ended {
            self.close(calls, out);
            return CallStep::Done;
        }
        CallStep::More
    }

    fn between(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        if self.held.is_empty() && c.is_ascii_whitespace() {
            return CallStep::More;
        }
        self.held.push(c);
        let Tags { key_begin, end, .. } = self.tags;
        if self.held == *key_begin {
            self.held.clear();
            self.state = State::Key;
        } else if self.held == *end {
            self.close(calls, out);
            return CallStep::Done;
        } else if !key_begin.starts_with(&*self.held) && !end.starts_with(&*self.held) {
            return self.give_up(calls, out);
        }
        CallStep::More
    }

    fn key(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        self.held.push(c);
        let Some(key) = self.held.strip_suffix(self.tags.key_end) else {
            return match self.held.len() {
                0..=MAX_NAME => CallStep::More,
                _ => self.give_up(calls, out),
            };
        };
        let key = key.trim();
        let kind = self.arguments.get(key).copied();
        let mut json = if self.some { ", \"" } else { "{\"" }.to_owned();
        key.chars().for_each(|c| escape(c, &mut json));
        json.push_str(if kind.is_some() { "\": " } else { "\": \"" });
        calls.arguments(&json, out);
        self.some = true;
        self.held.clear();
        let kind = kind.map_or(Kind::Text, |kind| Kind::Held(kind, String::new()));
        let lines = self.tags.lines;
        let value = Value { kind, first: lines, lines, line_break: false };
        self.state = match self.tags.value_begin {
            Some(_) => State::Before(value),
            None => State::Value(value),
        };
        CallStep::More
    }

    fn before(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let begin = self.tags.value_begin.unwrap_or_default();
        if self.held.is_empty() && c.is_ascii_whitespace() {
            return CallStep::More;
        }
        self.held.push(c);
        if self.held == begin {
            self.held.clear();
            if let State::Before(value) = std::mem::replace(&mut self.state, State::Between) {
                self.state = State::Value(value);
            }
        } else if !begin.starts_with(&*self.held) {
            return self.give_up(calls, out);
        }
        CallStep::More
    }

    fn value(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let State::Value(value) = &mut self.state else { return CallStep::Not };
        let end = self.tags.value_end;
        if self.held.is_empty() && !end.starts_with(c) {
            value.push(c, calls, out);
            return CallStep::More;
        }
        self.held.push(c);
        if self.held == end {
            value.end(calls, out);
            self.held.clear();
            self.state = State::Between;
            return CallStep::More;
        }
        // what cannot be the beginning of the tag is part of the value
        while !self.held.is_empty() && !end.starts_with(&*self.held) {
            value.push(self.held.remove(0), calls, out);
        }
        CallStep::More
    }

    /// No such call goes on like this: what is said of it is whole, and what is held is text. The last character is the caller's.
    fn give_up(&mut self, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        self.held.pop();
        self.close(calls, out);
        CallStep::Not
    }

    fn close(&mut self, calls: &mut Announcer, out: &mut Out<'_>) {
        if let State::Before(value) = &mut self.state {
            value.end(calls, out);
        }
        calls.arguments(if self.some { "}" } else { "{}" }, out);
    }
}

impl Value {
    fn push(&mut self, c: char, calls: &Announcer, out: &mut Out<'_>) {
        if std::mem::take(&mut self.first) && c == '\n' {
            return;
        }
        if std::mem::take(&mut self.line_break) {
            self.write('\n', calls, out);
        }
        if c == '\n' && self.lines {
            self.line_break = true;
        } else {
            self.write(c, calls, out);
        }
    }

    fn write(&mut self, c: char, calls: &Announcer, out: &mut Out<'_>) {
        match &mut self.kind {
            Kind::Text => calls.quoted(c, out),
            Kind::Held(kind, text) => {
                text.push(c);
                if text.len() > MAX_HELD {
                    self.kind = too_long(*kind, text, calls, out);
                }
            }
            Kind::Plain => calls.argument(c, out),
        }
    }

    fn end(&self, calls: &Announcer, out: &mut Out<'_>) {
        match &self.kind {
            Kind::Text => calls.arguments("\"", out),
            Kind::Held(kind, text) => calls.arguments(&as_json(*kind, text), out),
            Kind::Plain => {}
        }
    }
}

/// What is certain of a value whose end is cut off, so that it is the beginning of what the whole value would be.
fn beginning(kind: ArgumentKind, text: &str) -> String {
    let plain = text.trim();
    let names: &[&str] = match kind {
        ArgumentKind::OptionalText => &["null", "None"],
        ArgumentKind::Json => &["None", "True", "False"],
    };
    if names.iter().any(|name| name.starts_with(plain)) {
        return String::new();
    }
    let mut json = Json::new();
    if kind == ArgumentKind::Json && plain.chars().all(|c| json.push(c).is_ok()) {
        return plain.to_owned();
    }
    let mut escaped = "\"".to_owned();
    text.chars().for_each(|c| escape(c, &mut escaped));
    escaped
}

/// Writes the beginning of a value that is too long to be held. One that cannot be JSON of its kind is a text.
fn too_long(kind: ArgumentKind, text: &str, calls: &Announcer, out: &mut Out<'_>) -> Kind {
    let mut json = Json::new();
    let open = text.chars().all(|c| json.push(c).is_ok()) && json.depth() > 0;
    if kind == ArgumentKind::Json && open {
        calls.arguments(text, out);
        return Kind::Plain;
    }
    let mut escaped = "\"".to_owned();
    text.chars().for_each(|c| escape(c, &mut escaped));
    calls.arguments(&escaped, out);
    Kind::Text
}

/// A value as JSON: itself, where it is JSON of its kind; the names of Python; or else a text.
fn as_json(kind: ArgumentKind, text: &str) -> String {
    let plain = text.trim();
    let python = match plain {
        "None" => Some("null"),
        "True" => Some("true"),
        "False" => Some("false"),
        _ => None,
    };
    let is_json = match kind {
        ArgumentKind::OptionalText => plain == "null",
        ArgumentKind::Json => serde_json::from_str::<serde::de::IgnoredAny>(plain).is_ok(),
    };
    match (is_json, python, kind) {
        (true, ..) => plain.to_owned(),
        (false, Some(name), ArgumentKind::Json) => name.to_owned(),
        (false, Some("null"), ArgumentKind::OptionalText) => "null".to_owned(),
        (false, ..) => serde_json::Value::from(text).to_string(),
    }
}
