//! Calls that are JSON objects: `{"name": .., "arguments": {..}}`, one or several.

use super::{Announcer, CallStep};
use crate::output::json::{Json, Unescape, Want};
use crate::output::parts::Out;

/// Longest name that is looked up, and longest key that means something.
const MAX_NAME: usize = 64;

/// One object, or a list of them.
#[derive(Debug)]
pub(in crate::output) struct ObjectCalls {
    object: Option<Box<ObjectCall>>,
    /// What may stand between two of them.
    between: Option<char>,
    /// An object has ended.
    some: bool,
}

impl ObjectCalls {
    /// A marker ends it.
    pub(super) fn one() -> Self {
        Self { object: Some(Box::default()), between: None, some: false }
    }

    /// They stand side by side; with `,` up to a bracket.
    pub(super) fn listed(between: char) -> Self {
        Self { object: None, between: Some(between), some: false }
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.object.as_ref().map_or(0, |object| {
            let names = object.key.capacity() + object.name.capacity();
            size_of::<ObjectCall>() + names + object.early.capacity()
        })
    }

    pub(super) fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        if let Some(object) = &mut self.object {
            let step = object.push(c, calls, out);
            if step != CallStep::Done || self.between.is_none() {
                return step;
            }
            self.object = None;
            self.some = true;
            return if calls.end() { CallStep::Done } else { CallStep::More };
        }
        match c {
            '{' => {
                let object = self.object.insert(Box::default());
                object.push(c, calls, out)
            }
            ']' if self.some && self.between == Some(',') => CallStep::Done,
            c if c.is_ascii_whitespace() => CallStep::More,
            c if self.some && self.between == Some(c) => CallStep::More,
            _ => CallStep::Not,
        }
    }
}

/// One object. Its arguments go on as they come, once its name is known.
#[derive(Debug)]
struct ObjectCall {
    json: Json,
    key: String,
    field: Field,
    name: String,
    name_ended: bool,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
    unescape: Unescape,
}

/// Which value of the object this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Other,
    Name,
    Arguments,
    /// Arguments as JSON within a text, which may yet be empty.
    Quote,
    /// The same, after the bracket that they begin with.
    QuotedArguments,
}

impl Default for ObjectCall {
    fn default() -> Self {
        Self {
            json: Json::new(),
            key: String::new(),
            field: Field::Other,
            name: String::new(),
            name_ended: false,
            early: String::new(),
            has_arguments: false,
            unescape: Unescape::default(),
        }
    }
}

impl ObjectCall {
    fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let (depth, want) = (self.json.depth(), self.json.want());
        if depth == 0 && want == Want::Value && c != '{' && !c.is_ascii_whitespace() {
            return CallStep::Not;
        }
        if self.json.push(c).is_err() {
            return CallStep::Not;
        }
        let step = match (depth, want) {
            (1, Want::FirstKey | Want::Key) => {
                self.key.clear();
                CallStep::More
            }
            (1, Want::Text { key: true }) => {
                if c != '"' && self.key.len() < MAX_NAME {
                    self.key.push(c);
                }
                CallStep::More
            }
            (1, Want::Value) if !c.is_ascii_whitespace() => self.value_begins(c, calls, out),
            _ if self.field == Field::Other => CallStep::More,
            _ => self.value_goes_on(c, want, calls, out),
        };
        if step == CallStep::Not {
            return step;
        }
        if self.json.depth() == 1 && self.json.want() == Want::After && self.field != Field::Other {
            let field = std::mem::replace(&mut self.field, Field::Other);
            if field == Field::Name && !self.name_ends(calls, out) {
                return CallStep::Not;
            }
        }
        if !self.json.is_complete() {
            return CallStep::More;
        }
        if !self.name_ended {
            return CallStep::Not;
        }
        if !calls.open {
            calls.begin(&self.name, None, out);
        }
        if !self.has_arguments {
            calls.arguments("{}", out);
        }
        CallStep::Done
    }

    fn value_begins(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        self.field = match (self.key.as_str(), c) {
            ("name", '"') if !self.name_ended => Field::Name,
            ("name", _) => return CallStep::Not,
            ("arguments" | "parameters", '{') if !self.has_arguments => Field::Arguments,
            ("arguments" | "parameters", '"') if !self.has_arguments => Field::Quote,
            ("arguments" | "parameters", 'n') => Field::Other, // null
            ("arguments" | "parameters", _) => return CallStep::Not,
            _ => Field::Other,
        };
        if self.field == Field::Arguments {
            self.arguments_begin(c, calls, out);
        }
        CallStep::More
    }

    fn arguments_begin(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) {
        self.has_arguments = true;
        if self.name_ended {
            calls.begin(&self.name, None, out);
        }
        self.argument(c, calls, out);
    }

    fn value_goes_on(
        &mut self,
        c: char,
        want: Want,
        calls: &mut Announcer,
        out: &mut Out<'_>,
    ) -> CallStep {
        match self.field {
            Field::Other => {}
            Field::Name => match (want, c) {
                (Want::Text { .. }, '"') => {}
                (Want::Text { .. }, c) if c != '\\' && self.name.len() < MAX_NAME => {
                    self.name.push(c);
                }
                _ => return CallStep::Not,
            },
            Field::Arguments => self.argument(c, calls, out),
            Field::Quote | Field::QuotedArguments => {
                let mut plain = String::new();
                match (want, c) {
                    (Want::Text { .. }, '"') => self.unescape.finish(&mut plain),
                    _ => self.unescape.push(c, &mut plain),
                }
                return plain.chars().fold(CallStep::More, |step, c| match self.field {
                    _ if step == CallStep::Not => step,
                    Field::Quote if c.is_ascii_whitespace() => CallStep::More,
                    Field::Quote if c == '{' => {
                        self.field = Field::QuotedArguments;
                        self.arguments_begin(c, calls, out);
                        CallStep::More
                    }
                    Field::QuotedArguments => {
                        self.argument(c, calls, out);
                        CallStep::More
                    }
                    Field::Quote | Field::Other | Field::Name | Field::Arguments => CallStep::Not,
                });
            }
        }
        CallStep::More
    }

    fn argument(&mut self, c: char, calls: &Announcer, out: &mut Out<'_>) {
        if calls.open {
            calls.argument(c, out);
        } else {
            self.early.push(c);
        }
    }

    /// False for a function that nobody offers.
    fn name_ends(&mut self, calls: &mut Announcer, out: &mut Out<'_>) -> bool {
        self.name_ended = true;
        if !calls.knows(&self.name) {
            return false;
        }
        if self.has_arguments {
            calls.begin(&self.name, None, out);
            calls.arguments(&std::mem::take(&mut self.early), out);
        }
        true
    }
}
