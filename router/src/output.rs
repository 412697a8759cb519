//! What a model wrote, told apart: reasoning, calls of tools, and the text for the user.
//!
//! A [`Format`] is made with the request; each choice has a [`Reader`] of it. A reader takes the text as it comes, in whatever
//! pieces, and gives the same [`Part`]s for the same text. It holds back what may be the beginning of a marker, and of a call
//! its head up to the name; so its memory is bounded and no text is looked at twice. What turns out to be no call is text.

mod arguments;
mod calls;
mod forced;
mod harmony;
mod json;
mod marks;
mod parts;
mod reader;
mod tagged;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::prompt::ReasoningParser;
use marks::Rules;

pub use arguments::{Argument, arguments, resolved};
pub use calls::{ArgumentKind, Arguments, Tools};
pub use forced::{CallForm, ForcedFunction, Otherwise, ReasoningFirst, call_grammar};
pub use parts::Part;
pub use reader::Reader;

/// The texts that begin and end reasoning; `None` where channels do.
#[must_use]
pub fn reasoning_texts(parser: ReasoningParser) -> Option<(&'static str, &'static str)> {
    marks::reasoning_marks(parser).map(|marks| (marks.begin, marks.end))
}

/// How the answers to one request are read.
#[derive(Debug, Clone)]
pub struct Format {
    rules: Arc<Rules>,
    /// The prompt has opened the reasoning already.
    opened: bool,
    /// A grammar ends the answer behind its calls.
    ends_by_grammar: bool,
}

impl Format {
    /// `None` where an answer has no parts: its text costs nothing then.
    #[must_use]
    pub fn new(reasoning: Option<ReasoningParser>, tools: Option<Tools>) -> Option<Self> {
        let rules = Rules::new(reasoning, tools)?;
        Some(Self { rules: Arc::new(rules), opened: false, ends_by_grammar: false })
    }

    /// The answer is a call, and ends where the call's grammar does.
    #[must_use]
    pub fn is_forced_call(&self) -> bool {
        self.ends_by_grammar || self.rules.tools.as_ref().is_some_and(|tools| tools.forced)
    }

    /// The answer is calls that have to be, and their grammar ends it, also where it begins behind reasoning.
    #[must_use]
    pub fn ended_by_grammar(self, ends_by_grammar: bool) -> Self {
        Self { ends_by_grammar, ..self }
    }

    /// A reader may say that an answer is over while its worker goes on: behind its one call.
    #[must_use]
    pub fn ends_early(&self) -> bool {
        self.rules.tools.as_ref().is_some_and(|tools| !tools.parallel && !tools.forced)
    }

    /// These of its markers are special tokens of the model: where they mark nothing, they are not shown.
    #[must_use]
    pub fn hiding(mut self, is_special: impl Fn(&str) -> bool) -> Self {
        let hidden = self.markers().filter(|marker| is_special(marker)).collect();
        if let Some(rules) = Arc::get_mut(&mut self.rules) {
            rules.hidden = hidden;
        }
        self
    }

    /// How the prompt ends, as text: many templates open the reasoning themselves.
    pub fn after_prompt(&mut self, end: &str) {
        self.opened = self.rules.opens_reasoning(end);
    }

    /// Texts that are markers. Where one is a special token of the model, it has to stay in the text.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        self.rules.markers()
    }

    /// Special tokens that end an answer of this form, whether or not the checkpoint says so.
    #[must_use]
    pub fn stops(&self) -> &'static [&'static str] {
        self.rules.stops()
    }

    /// For a new choice.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::new(Arc::clone(&self.rules), self.opened)
    }
}
