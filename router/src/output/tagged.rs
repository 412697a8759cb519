//! Answers that markers stand in: text, with reasoning before it.

use std::sync::Arc;

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
    /// White space that may stand before a marker.
    gap: String,
    /// A marker stands right before: white space is no text.
    after_marker: bool,
    /// There was reasoning, or text for the user.
    begun: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Content,
    Reasoning,
}

impl Tagged {
    pub(super) fn new(rules: Arc<Rules>, in_reasoning: bool) -> Self {
        let state = if in_reasoning { State::Reasoning } else { State::Content };
        Self {
            rules,
            state,
            held: String::new(),
            gap: String::new(),
            after_marker: in_reasoning,
            begun: in_reasoning,
        }
    }

    pub(super) fn called(&self) -> bool {
        false
    }

    pub(super) fn in_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    pub(super) fn push(&mut self, text: &str, out: &mut Out<'_>) {
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let free = if self.held.is_empty() { self.marks().free(rest) } else { 0 };
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
        self.text(&held, out);
        self.release_gap(out);
    }

    fn marks(&self) -> &Marks {
        match self.state {
            State::Content => &self.rules.in_content,
            State::Reasoning => &self.rules.in_reasoning,
        }
    }

    fn character(&mut self, c: char, out: &mut Out<'_>) {
        self.held.push(c);
        match self.marks().look(&self.held) {
            Look::Begun => {}
            Look::Whole(action) => {
                let text = std::mem::take(&mut self.held);
                self.marker(action, &text, out);
            }
            Look::Nothing => {
                // its first character is text; a marker may begin after that
                let held = std::mem::take(&mut self.held);
                let first = held.chars().next().map_or(0, char::len_utf8);
                self.text(&held[..first], out);
                held[first..].chars().for_each(|c| self.character(c, out));
            }
        }
    }

    fn marker(&mut self, action: Action, text: &str, out: &mut Out<'_>) {
        match action {
            Action::ReasoningBegins if self.begun => self.text(text, out),
            Action::ReasoningBegins => self.enter(State::Reasoning),
            Action::ReasoningEnds => self.enter(State::Content),
        }
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.gap.clear();
        self.after_marker = true;
        self.begun = true;
    }

    /// No part of a marker.
    fn text(&mut self, text: &str, out: &mut Out<'_>) {
        let white = |c: char| c.is_ascii_whitespace();
        let solid = text.trim_end_matches(white);
        let end = solid.len();
        if !solid.is_empty() {
            let solid = if self.after_marker { solid.trim_start_matches(white) } else { solid };
            self.release_gap(out);
            self.emit(solid, out);
            self.after_marker = false;
            self.begun = true;
        }
        if self.after_marker {
            return;
        }
        self.gap.push_str(&text[end..]);
        if self.gap.len() > MAX_GAP {
            let excess = self.gap.len() - MAX_GAP; // it is ASCII
            let gap = std::mem::take(&mut self.gap);
            self.emit(&gap[..excess], out);
            self.gap = gap;
            self.gap.drain(..excess);
        }
    }

    fn release_gap(&mut self, out: &mut Out<'_>) {
        let gap = std::mem::take(&mut self.gap);
        self.emit(&gap, out);
    }

    fn emit(&self, text: &str, out: &mut Out<'_>) {
        match self.state {
            State::Content => out.content(text),
            State::Reasoning => out.reasoning(text),
        }
    }
}
