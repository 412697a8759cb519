//! Answers of gpt-oss: messages in channels. `analysis` is reasoning, what is said to a function is a call, the rest is text.
//!
//! The prompt ends in `<|start|>assistant`; then come a channel and perhaps a recipient, `<|message|>`, the text, and `<|end|>`,
//! `<|call|>` or `<|return|>`. All of these are special tokens, which no text can hold.

use std::sync::Arc;

use super::calls::Announcer;
use super::json::Json;
use super::marks::{Action, Look, Mark, Marks, Rules};
use super::parts::Out;

pub(super) const MARKERS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

/// Longest head of a message. Real ones have some tens of bytes.
const MAX_HEAD: usize = 512;

/// A reader of messages.
#[derive(Debug)]
pub(super) struct Harmony {
    rules: Arc<Rules>,
    marks: Marks,
    held: String,
    state: State,
    calls: Announcer,
    over: bool,
    /// A message began that said nothing yet: a line break parts it from others of its kind.
    fresh: bool,
    /// There was content, and reasoning.
    said: [bool; 2],
}

#[derive(Debug)]
enum State {
    /// Before `<|message|>`: what was said of the message so far, its markers included.
    Head(String),
    Reasoning,
    Content,
    /// Its arguments, as long as they are JSON, and whether there are any.
    Call(Option<Json>, bool),
}

impl Harmony {
    pub(super) fn new(rules: Arc<Rules>) -> Self {
        let marks = MARKERS.map(|text| Mark { text, action: Action::Opens });
        let calls = Announcer::new(rules.tools.clone());
        let state = State::Head(String::new());
        let marks = Marks::new(marks.to_vec());
        Self {
            rules,
            marks,
            held: String::new(),
            state,
            calls,
            over: false,
            fresh: false,
            said: [false; 2],
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        let head = if let State::Head(head) = &self.state { head.capacity() } else { 0 };
        self.held.capacity() + head
    }

    pub(super) fn called(&self) -> bool {
        self.calls.begun() > 0
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    pub(super) fn in_call(&self) -> bool {
        matches!(self.state, State::Call(..))
    }

    pub(super) fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    pub(super) fn push(&mut self, text: &str, out: &mut Out<'_>) {
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let free = if self.held.is_empty() { self.marks.free(rest, None) } else { 0 };
            if free > 0 {
                self.text(&rest[..free], out);
                rest = &rest[free..];
            } else {
                self.character(next, out);
                rest = &rest[next.len_utf8()..];
            }
        }
    }

    pub(super) fn finish(&mut self, out: &mut Out<'_>) {
        let held = std::mem::take(&mut self.held);
        if !self.in_call() {
            self.text(&held, out); // but not what may end a call
        }
        self.arguments_end(out);
        // a head without a message says nothing, unless it is all that there is
        if let State::Head(head) = &mut self.state {
            let head = std::mem::take(head);
            if !head.starts_with('<') {
                self.say(&head, out);
            }
        }
    }

    fn character(&mut self, c: char, out: &mut Out<'_>) {
        let mut held = std::mem::take(&mut self.held);
        held.push(c);
        match self.marks.look(&held) {
            Look::Begun => self.held = held,
            Look::Whole(_) => self.marker(&held, out),
            Look::Nothing => {
                let first = held.chars().next().map_or(0, char::len_utf8);
                self.text(&held[..first], out);
                held[first..].chars().for_each(|c| self.character(c, out));
            }
        }
    }

    fn marker(&mut self, text: &str, out: &mut Out<'_>) {
        match (&mut self.state, text) {
            (State::Head(_), "<|message|>") => self.message_begins(out),
            (State::Head(head), "<|channel|>" | "<|constrain|>" | "<|start|>") => {
                head.push_str(text);
            }
            (State::Head(_), _) => {} // an end without a message
            (_, "<|end|>" | "<|call|>" | "<|return|>") => self.message_ends(String::new(), out),
            (_, "<|start|>" | "<|channel|>") => self.message_ends(text.to_owned(), out),
            _ => {}
        }
    }

    /// A call without arguments has an empty object of them.
    fn arguments_end(&mut self, out: &mut Out<'_>) {
        if let State::Call(_, false) = self.state {
            self.calls.arguments("{}", out);
        }
    }

    fn message_ends(&mut self, head: String, out: &mut Out<'_>) {
        self.arguments_end(out);
        self.over |= self.calls.end();
        self.state = State::Head(head);
    }

    fn message_begins(&mut self, out: &mut Out<'_>) {
        let State::Head(head) = &mut self.state else { return };
        let head = std::mem::take(head);
        let recipient = head.split("to=").nth(1).map(|rest| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            &rest[..end]
        });
        let channel = head.split("<|channel|>").nth(1).unwrap_or_default();
        let function = recipient.map(|to| to.strip_prefix("functions.").unwrap_or(to));
        self.state = match function.filter(|name| self.calls.knows(name)) {
            Some(name) if !self.over => {
                self.calls.begin(name, None, out);
                State::Call(Some(Json::new()), false)
            }
            _ if channel.trim_start().starts_with("analysis") && !self.rules.shows_analysis => {
                State::Reasoning
            }
            _ => State::Content,
        };
        self.fresh = true;
    }

    fn text(&mut self, text: &str, out: &mut Out<'_>) {
        match &mut self.state {
            State::Head(head) => {
                head.push_str(text);
                if head.len() > MAX_HEAD {
                    let head = std::mem::take(head);
                    self.state = State::Content;
                    self.say(&head, out);
                }
            }
            State::Call(json, some) => {
                for c in text.chars() {
                    // after its closing bracket the arguments are over, whatever is said there
                    if json.as_ref().is_some_and(Json::is_complete)
                        || (!*some && c.is_ascii_whitespace())
                    {
                        continue;
                    }
                    // what is no JSON is passed on as it is
                    if json.as_mut().is_some_and(|json| json.push(c).is_err()) {
                        *json = None;
                    }
                    *some = true;
                    self.calls.argument(c, out);
                }
            }
            State::Content | State::Reasoning => self.say(text, out),
        }
    }

    /// Content or reasoning, as the state says.
    fn say(&mut self, text: &str, out: &mut Out<'_>) {
        if self.over || text.is_empty() {
            return;
        }
        let reasons = self.in_reasoning();
        let parts = std::mem::take(&mut self.fresh) && self.said[usize::from(reasons)];
        self.said[usize::from(reasons)] = true;
        for text in [if parts { "\n" } else { "" }, text] {
            if reasons { out.reasoning(text) } else { out.content(text) }
        }
    }
}
