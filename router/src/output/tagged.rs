//! Answers that markers stand in: text, with reasoning before it and calls of tools within.

use std::sync::Arc;

use super::calls::{Announcer, CallReader, CallStep, MAX_HELD};
use super::marks::{Action, Look, Marks, Rules};
use super::parts::Out;

/// White space that is held back at most: it is no text where a marker follows.
const MAX_GAP: usize = 256;

/// A reader of texts with markers. Everything is decided character by character, so that the cuts of a text do not matter.
#[derive(Debug)]
pub(super) struct Tagged {
    rules: Arc<Rules>,
    state: State,
    /// May be the beginning of a marker.
    held: String,
    /// White space and openers that may stand before a marker.
    gap: String,
    /// White space around calls since the last text, which more text would stand behind.
    between: String,
    /// What of it stands before the end of the last call.
    before_end: usize,
    /// There was text for the user.
    said: bool,
    /// A marker stands right before: white space is no text.
    after_marker: bool,
    /// There was reasoning, a call, or text for the user.
    begun: bool,
    calls: Announcer,
}

#[derive(Debug)]
enum State {
    Content,
    Reasoning,
    /// The text of a call from its marker on is held until the call is announced.
    Call(Box<CallReader>, String),
    /// The one call that was asked for has ended.
    Over,
}

impl Tagged {
    pub(super) fn new(rules: Arc<Rules>, in_reasoning: bool) -> Self {
        let state = if in_reasoning { State::Reasoning } else { State::Content };
        let calls = Announcer::new(rules.tools.clone());
        Self {
            rules,
            state,
            held: String::new(),
            gap: String::new(),
            between: String::new(),
            before_end: 0,
            said: false,
            after_marker: in_reasoning,
            begun: in_reasoning,
            calls,
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        let call = match &self.state {
            State::Call(call, raw) => raw.capacity() + call.held_bytes(),
            State::Content | State::Reasoning | State::Over => 0,
        };
        self.held.capacity() + self.gap.capacity() + self.between.capacity() + call
    }

    pub(super) fn called(&self) -> bool {
        self.calls.begun() > 0
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
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
            let free = match self.marks() {
                Some(marks) if self.held.is_empty() => {
                    marks.free(rest, self.rules.leads.filter(|_| self.may_lead()))
                }
                Some(_) | None => 0,
            };
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
        // a marker after a call that the end of the answer has cut says as little as a whole one
        if !(self.ends_call() && self.rules.in_content.begins(Action::Closes, &held)) {
            self.text(&held, out);
        }
        if let State::Call(call, raw) = &mut self.state {
            if self.calls.open {
                call.finish(&mut self.calls, out);
            } else {
                let raw = std::mem::take(raw);
                self.state = State::Content;
                self.no_call(&raw, out);
            }
        }
        self.release_gap(out);
    }

    /// What this state looks for; `None` where it does not.
    fn marks(&self) -> Option<&Marks> {
        match self.state {
            State::Content => Some(&self.rules.in_content),
            State::Reasoning => Some(&self.rules.in_reasoning),
            State::Call(..) | State::Over => None,
        }
    }

    fn character(&mut self, c: char, out: &mut Out<'_>) {
        if self.marks().is_none() {
            return self.of_call(c, out);
        }
        let mut held = std::mem::take(&mut self.held);
        held.push(c);
        match self.marks().map_or(Look::Nothing, |marks| marks.look(&held)) {
            Look::Begun => self.held = held,
            Look::Whole(action) => self.marker(action, &held, out),
            Look::Nothing => {
                // its first character is text, or leads a call; a marker may begin after that
                let mut chars = held.chars();
                let Some(first) = chars.next() else { return };
                if self.leads(first) {
                    self.call_begins("", out);
                    self.of_call(first, out);
                } else {
                    self.text(&held[..first.len_utf8()], out);
                }
                chars.for_each(|c| self.character(c, out));
            }
        }
    }

    /// Calls begin here without a marker.
    fn leads(&self, c: char) -> bool {
        self.rules.leads == Some(c) && self.held.is_empty() && self.may_lead()
    }

    /// Nothing was said but reasoning. A forced call stands in the place of reasoning, too, if the prompt opened that.
    fn may_lead(&self) -> bool {
        let forced = || self.rules.tools.as_ref().is_some_and(|tools| tools.forced);
        let nothing_said = !self.begun || (self.after_marker && !self.called());
        match self.state {
            State::Content => nothing_said,
            State::Reasoning => nothing_said && forced(),
            State::Call(..) | State::Over => false,
        }
    }

    fn marker(&mut self, action: Action, text: &str, out: &mut Out<'_>) {
        match action {
            Action::ReasoningBegins if self.begun => self.marks_nothing(text, out),
            Action::ReasoningBegins => self.enter(State::Reasoning),
            Action::ReasoningEnds if !self.begun || self.in_reasoning() => {
                self.enter(State::Content);
            }
            Action::Call => self.call_begins(text, out),
            Action::Opens => {
                self.gap.push_str(text);
                self.bound_gap(out);
            }
            Action::Closes if self.ends_call() => self.between.truncate(self.before_end),
            Action::ReasoningEnds | Action::Closes | Action::Inner => {
                self.marks_nothing(text, out);
            }
        }
    }

    /// A marker where it means nothing is text, if it is text of the model's.
    fn marks_nothing(&mut self, marker: &str, out: &mut Out<'_>) {
        if !self.rules.hidden.contains(&marker) {
            self.text(marker, out);
        }
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.gap.clear();
        self.after_marker = true;
        self.begun = true;
    }

    fn call_begins(&mut self, marker: &str, out: &mut Out<'_>) {
        let Some(tools) = &self.rules.tools else { return self.text(marker, out) };
        let call = Box::new(CallReader::new(tools.parser));
        self.state = State::Call(call, marker.to_owned());
    }

    /// A character after the marker of a call.
    fn of_call(&mut self, c: char, out: &mut Out<'_>) {
        let State::Call(call, raw) = &mut self.state else { return };
        let before = (self.calls.open, self.calls.begun());
        let step = call.push(c, &mut self.calls, out);
        let announced = before.0 || before.1 != self.calls.begun();
        match step {
            CallStep::More if !announced => {
                raw.push(c);
                if raw.len() > MAX_HELD {
                    let raw = std::mem::take(raw);
                    self.state = State::Content;
                    self.no_call(&raw, out);
                }
            }
            CallStep::More => {
                if !before.0 {
                    self.call_announced();
                }
            }
            CallStep::Done => {
                self.call_announced();
                self.call_ended();
            }
            CallStep::Not if announced => {
                let rest = call.take_rest();
                self.call_announced();
                self.call_ended();
                rest.chars().chain([c]).for_each(|c| self.character(c, out));
            }
            CallStep::Not => {
                let raw = std::mem::take(raw);
                self.state = State::Content;
                self.no_call(&raw, out);
                self.character(c, out);
            }
        }
    }

    /// What was held for it is part of a call; the white space before it is text if more text follows.
    fn call_announced(&mut self) {
        if let State::Call(_, raw) = &mut self.state {
            *raw = String::new();
        }
        let gap = std::mem::take(&mut self.gap);
        self.keep_white(&gap[..gap.len() - gap.trim_start_matches(is_white).len()]);
        self.before_end = self.between.len();
    }

    fn call_ended(&mut self) {
        let over = self.calls.end();
        self.enter(if over { State::Over } else { State::Content });
    }

    /// What was held for a call is text, but for a marker that is no text of the model's.
    fn no_call(&mut self, raw: &str, out: &mut Out<'_>) {
        self.begun = true; // or a lone bracket would be tried again
        self.text(&self.without_hidden(raw.to_owned()), out);
    }

    /// A call stands right before, but for white space.
    fn ends_call(&self) -> bool {
        self.called() && matches!(self.state, State::Content) && self.drops_white()
    }

    /// White space is no text here: it stands right after a marker, and no opener is held that may yet be text.
    fn drops_white(&self) -> bool {
        self.after_marker && self.gap.is_empty()
    }

    /// White space beside calls. It stands between two texts, or else is no text; so much of it that nobody means it is none.
    fn keep_white(&mut self, white: &str) {
        if self.said {
            let room = MAX_GAP - self.between.len();
            self.between.push_str(&white[..white.len().min(room)]);
        }
    }

    /// No part of a marker.
    fn text(&mut self, text: &str, out: &mut Out<'_>) {
        let solid = text.trim_end_matches(is_white);
        let (mut solid, white) = (solid, &text[solid.len()..]);
        if !solid.is_empty() {
            if self.drops_white() {
                let rest = solid.trim_start_matches(is_white);
                self.keep_white(&solid[..solid.len() - rest.len()]);
                solid = rest;
            }
            self.release_gap(out);
            self.emit(solid, out);
            self.after_marker = false;
            self.begun = true;
        }
        if self.drops_white() {
            self.keep_white(white);
        } else if !white.is_empty() {
            self.gap.push_str(white);
            self.bound_gap(out);
        }
    }

    /// Openers are cut as a whole, and those that are special tokens are never shown.
    fn bound_gap(&mut self, out: &mut Out<'_>) {
        if self.gap.len() <= MAX_GAP {
            return;
        }
        let begins = |rest: &str| rest.starts_with(|c| is_white(c) || c == '<');
        let excess = self.gap.len() - MAX_GAP;
        let places = self.gap.char_indices().map(|(at, _)| at).filter(|at| *at >= excess);
        let cut = { places }.find(|at| begins(&self.gap[*at..])).unwrap_or(self.gap.len());
        let rest = self.gap.split_off(cut);
        let gap = std::mem::replace(&mut self.gap, rest);
        let gap = self.without_hidden(gap);
        self.emit(&gap, out);
    }

    fn release_gap(&mut self, out: &mut Out<'_>) {
        if self.gap.is_empty() {
            return;
        }
        let gap = std::mem::take(&mut self.gap);
        let gap = self.without_hidden(gap);
        self.emit(&gap, out);
    }

    fn without_hidden(&self, mut text: String) -> String {
        for marker in &self.rules.hidden {
            if text.contains(marker) {
                text = text.replace(marker, "");
            }
        }
        text
    }

    fn emit(&mut self, text: &str, out: &mut Out<'_>) {
        match self.state {
            State::Reasoning => out.reasoning(text),
            State::Content | State::Call(..) if !text.is_empty() => {
                out.content(&self.between);
                self.between.clear();
                out.content(text);
                self.said = true;
            }
            State::Content | State::Call(..) | State::Over => {}
        }
    }
}

fn is_white(c: char) -> bool {
    c.is_ascii_whitespace()
}
