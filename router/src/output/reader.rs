//! The text of one choice to its parts.

use std::sync::Arc;

use super::marks::Rules;
use super::parts::{Out, Part};
use super::tagged::Tagged;

/// Reads one choice's text.
#[derive(Debug)]
pub struct Reader(Tagged);

impl Reader {
    pub(super) fn new(rules: Arc<Rules>, in_reasoning: bool) -> Self {
        Self(Tagged::new(rules, in_reasoning))
    }

    /// Takes the next piece of the text; appends what is certain of it.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.0.push(text, &mut Out(parts));
    }

    /// The text has ended: appends what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        self.0.finish(&mut Out(parts));
    }

    /// Some call began.
    #[must_use]
    pub fn called(&self) -> bool {
        self.0.called()
    }

    /// What comes next is reasoning.
    #[must_use]
    pub fn in_reasoning(&self) -> bool {
        self.0.in_reasoning()
    }
}
