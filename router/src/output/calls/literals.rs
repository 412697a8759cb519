//! Calls whose arguments are literals of a programming language: `[f(a=1, b='x')]` of Python, and `call:f{a:1}` of Gemma.

use super::{Announcer, CallStep};
use crate::output::json::{Json, escape};
use crate::output::parts::Out;

/// Longest name of a function, and longest word that is no text, such as a number.
const MAX_WORD: usize = 256;
/// Lists and objects within each other.
const MAX_DEPTH: usize = 64;
/// Gemma's quote.
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";

/// Stands for it where a text has one character as its quote.
const GEMMA_MARK: char = '<';

/// Whose literals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    Python,
    Gemma,
}

#[derive(Debug)]
pub(in crate::output) struct LiteralCalls {
    language: Language,
    state: State,
    /// The function's name, until its call is announced.
    word: String,
    arguments: Literal,
    /// The JSON of the last character; kept for its memory.
    json: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the list of calls.
    Start,
    /// Before a name.
    Before,
    Name,
    Arguments,
    /// After a call.
    After,
}

impl LiteralCalls {
    pub(super) fn new(language: Language) -> Self {
        let state = if language == Language::Python { State::Start } else { State::Before };
        let (word, json) = (String::new(), String::new());
        Self { language, state, word, arguments: Literal::new(language), json }
    }

    pub(super) fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let white = c.is_ascii_whitespace();
        match self.state {
            State::Start if c == '[' => self.state = State::Before,
            State::Before if white => {}
            State::Before if name_part(c) => {
                self.word.push(c);
                self.state = State::Name;
            }
            State::Name => return self.name(c, calls),
            State::Arguments => return self.argument(c, calls, out),
            State::After if white => {}
            State::After if c == ',' => self.state = State::Before,
            State::After if c == ']' => return CallStep::Done,
            State::Start | State::Before | State::After => return CallStep::Not,
        }
        CallStep::More
    }

    pub(super) fn held_bytes(&self) -> usize {
        let open = self.arguments.open.capacity() * size_of::<Open>();
        self.word.capacity() + self.json.capacity() + self.arguments.word.capacity() + open
    }

    fn name(&mut self, c: char, calls: &Announcer) -> CallStep {
        let open = if self.language == Language::Python { '(' } else { '{' };
        if c != open {
            self.word.push(c);
            let part = name_part(c) || (self.language == Language::Gemma && c == ':');
            return if part && self.word.len() <= MAX_WORD {
                CallStep::More
            } else {
                CallStep::Not
            };
        }
        let name = match self.language {
            Language::Python => Some(&*self.word),
            Language::Gemma => self.word.strip_prefix("call:"),
        };
        let Some(name) = name.filter(|name| calls.knows(name)) else { return CallStep::Not };
        self.word = name.to_owned();
        self.arguments = Literal::new(self.language);
        self.state = State::Arguments;
        CallStep::More
    }

    fn argument(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        self.json.clear();
        let step = self.arguments.push(c, &mut self.json);
        if !calls.open && step != CallStep::Not && !self.json.is_empty() {
            // arguments without names are none: only now it is certain that this is a call
            calls.begin(&std::mem::take(&mut self.word), None, out);
            calls.arguments("{", out);
        }
        if calls.open {
            calls.arguments(&self.json, out);
        }
        if step != CallStep::Done || self.language == Language::Gemma {
            return step;
        }
        self.state = State::After;
        if calls.end() { CallStep::Done } else { CallStep::More }
    }
}

fn name_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// The arguments of one call, as an object: from after the bracket that opens them to the one that closes them.
#[derive(Debug)]
struct Literal {
    language: Language,
    open: Vec<Open>,
    want: Want,
    word: String,
    /// A comma that is written before what follows it, if anything does.
    comma: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    /// The arguments themselves.
    Call,
    Object,
    /// With the bracket that closes it.
    List(char),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    /// A name of an argument, or the end.
    Name,
    /// The rest of a name without quotes.
    NameRest,
    /// What stands between a name and its value.
    Sign,
    /// A key in quotes, or the end of an object.
    Key,
    /// A value, or the end of a list.
    Value,
    /// A number, or the name of a constant.
    Word,
    Text(Quote),
    /// A comma, or an end.
    After,
}

/// A text within quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Quote {
    /// What ends it.
    mark: char,
    /// It is a key.
    key: bool,
    /// After a backslash.
    escaped: bool,
    /// So many digits of a code are still to come.
    digits: u8,
}

impl Literal {
    fn new(language: Language) -> Self {
        let (open, word) = (vec![Open::Call], String::new());
        Self { language, open, want: Want::Name, word, comma: false }
    }

    /// Appends the JSON that is certain. `Done` for the bracket that closes the arguments.
    fn push(&mut self, c: char, json: &mut String) -> CallStep {
        let white = c.is_ascii_whitespace();
        match self.want {
            Want::Text(quote) => self.text(quote, c, json),
            Want::Word if is_word(c) => self.word_goes_on(c),
            Want::Word => {
                self.word_ends(json);
                self.push(c, json)
            }
            Want::NameRest if name_part(c) => self.word_goes_on(c),
            Want::NameRest => {
                self.before(json);
                json.push('"');
                self.word.drain(..).for_each(|c| escape(c, json));
                json.push_str("\": ");
                self.want = Want::Sign;
                self.push(c, json)
            }
            _ if white && self.word.is_empty() => CallStep::More,
            Want::Sign if c == self.sign() => {
                self.want = Want::Value;
                CallStep::More
            }
            Want::Sign => CallStep::Not,
            Want::After if c == ',' => {
                self.comma = true;
                self.want = match self.open.last() {
                    Some(Open::Call) => Want::Name,
                    Some(Open::Object) => Want::Key,
                    Some(Open::List(_)) | None => Want::Value,
                };
                CallStep::More
            }
            Want::Name | Want::Key | Want::Value | Want::After if self.closes(c) => {
                self.close(json)
            }
            Want::After => CallStep::Not,
            Want::Name if name_part(c) => self.word_begins(c, Want::NameRest),
            Want::Name => CallStep::Not,
            Want::Key | Want::Value => self.value(c, json),
        }
    }

    fn sign(&self) -> char {
        match (self.open.last(), self.language) {
            (Some(Open::Call), Language::Python) => '=',
            _ => ':',
        }
    }

    fn word_begins(&mut self, c: char, want: Want) -> CallStep {
        self.word.clear();
        self.word.push(c);
        self.want = want;
        CallStep::More
    }

    fn word_goes_on(&mut self, c: char) -> CallStep {
        self.word.push(c);
        if self.word.len() > MAX_WORD { CallStep::Not } else { CallStep::More }
    }

    /// Writes what separates a value from the one before.
    fn before(&mut self, json: &mut String) {
        if std::mem::take(&mut self.comma) {
            json.push_str(", ");
        }
    }

    fn closes(&self, c: char) -> bool {
        let inner = match self.open.last() {
            Some(Open::Call) if self.language == Language::Python => c == ')',
            Some(Open::Call | Open::Object) => c == '}',
            Some(Open::List(end)) => c == *end,
            None => false,
        };
        // a value has to follow a name
        let in_list = matches!(self.open.last(), Some(Open::List(_)));
        inner && (in_list || self.want != Want::Value)
    }

    fn close(&mut self, json: &mut String) -> CallStep {
        self.comma = false;
        json.push(if matches!(self.open.pop(), Some(Open::List(_))) { ']' } else { '}' });
        self.want = Want::After;
        if self.open.is_empty() { CallStep::Done } else { CallStep::More }
    }

    fn value(&mut self, c: char, json: &mut String) -> CallStep {
        let key = self.want == Want::Key;
        if self.language == Language::Gemma {
            let mut quote = std::mem::take(&mut self.word);
            quote.push(c);
            if quote == GEMMA_QUOTE {
                self.quote_begins(GEMMA_MARK, key, json);
                return CallStep::More;
            }
            if quote == "\"" {
                self.quote_begins('"', key, json);
                return CallStep::More;
            }
            if GEMMA_QUOTE.starts_with(&*quote) {
                self.word = quote;
                return CallStep::More;
            }
            if quote.chars().count() > 1 {
                return CallStep::Not;
            }
            if key && name_part(c) {
                return self.word_begins(c, Want::NameRest);
            }
        } else if matches!(c, '\'' | '"') {
            self.quote_begins(c, key, json);
            return CallStep::More;
        }
        match c {
            _ if key => CallStep::Not,
            '[' | '(' | '{' => {
                if self.open.len() == MAX_DEPTH {
                    return CallStep::Not;
                }
                self.before(json);
                json.push(if c == '{' { '{' } else { '[' });
                self.want = if c == '{' { Want::Key } else { Want::Value };
                self.open.push(match c {
                    '{' => Open::Object,
                    '[' => Open::List(']'),
                    _ => Open::List(')'),
                });
                CallStep::More
            }
            c if is_word(c) => self.word_begins(c, Want::Word),
            _ => CallStep::Not,
        }
    }

    fn quote_begins(&mut self, mark: char, key: bool, json: &mut String) {
        self.before(json);
        json.push('"');
        self.want = Want::Text(Quote { mark, key, escaped: false, digits: 0 });
    }

    fn text(&mut self, quote: Quote, c: char, json: &mut String) -> CallStep {
        if quote.mark == GEMMA_MARK {
            self.word.push(c);
            if self.word == GEMMA_QUOTE {
                self.word.clear();
                self.quote_ends(quote, json);
            }
            while !self.word.is_empty() && !GEMMA_QUOTE.starts_with(&*self.word) {
                escape(self.word.remove(0), json);
            }
        } else if quote.digits > 0 {
            return self.code(quote, c, json);
        } else if quote.escaped {
            self.escaped(quote, c, json);
        } else if c == '\\' {
            self.want = Want::Text(Quote { escaped: true, ..quote });
        } else if c == quote.mark {
            self.quote_ends(quote, json);
        } else {
            escape(c, json);
        }
        CallStep::More
    }

    fn quote_ends(&mut self, quote: Quote, json: &mut String) {
        json.push('"');
        self.want = Want::After;
        if quote.key {
            json.push_str(": ");
            self.want = Want::Sign;
        }
    }

    /// The character after a backslash.
    fn escaped(&mut self, quote: Quote, c: char, json: &mut String) {
        let mut digits = 0;
        match c {
            '\n' => {} // a line that goes on
            'n' => json.push_str("\\n"),
            't' => json.push_str("\\t"),
            'r' => json.push_str("\\r"),
            'b' => json.push_str("\\b"),
            'f' => json.push_str("\\f"),
            '\\' | '\'' | '"' | '/' => escape(c, json),
            'x' => digits = 2,
            'u' => digits = 4,
            // as Python has it, the backslash stays
            other => {
                json.push_str("\\\\");
                escape(other, json);
            }
        }
        self.word.clear();
        self.want = Want::Text(Quote { escaped: false, digits, ..quote });
    }

    /// A digit of a character's code; halves of pairs are JSON as they are.
    fn code(&mut self, quote: Quote, c: char, json: &mut String) -> CallStep {
        if !c.is_ascii_hexdigit() {
            return CallStep::Not;
        }
        self.word.push(c);
        if quote.digits == 1 {
            json.push_str("\\u");
            json.push_str(&"00"[..4 - self.word.len()]);
            json.push_str(&std::mem::take(&mut self.word));
        }
        self.want = Want::Text(Quote { digits: quote.digits - 1, ..quote });
        CallStep::More
    }

    fn word_ends(&mut self, json: &mut String) {
        self.before(json);
        let word = std::mem::take(&mut self.word);
        match word.as_str() {
            "True" | "true" => json.push_str("true"),
            "False" | "false" => json.push_str("false"),
            "None" | "null" => json.push_str("null"),
            number if Json::is_number(number) => json.push_str(number),
            other => json.push_str(&serde_json::Value::from(other).to_string()),
        }
        self.want = Want::After;
    }
}

/// Part of a number or of a constant's name.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '.')
}
