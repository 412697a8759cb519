//! The text of one choice to its parts.

use std::sync::Arc;

use super::harmony::Harmony;
use super::marks::Rules;
use super::parts::{Out, Part};
use super::tagged::Tagged;

/// Reads one choice's text.
#[derive(Debug)]
pub struct Reader(Way);

#[derive(Debug)]
enum Way {
    Tagged(Tagged),
    Harmony(Box<Harmony>),
}

impl Reader {
    pub(super) fn new(rules: Arc<Rules>, in_reasoning: bool) -> Self {
        Self(match rules.harmony {
            true => Way::Harmony(Box::new(Harmony::new(rules))),
            false => Way::Tagged(Tagged::new(rules, in_reasoning)),
        })
    }

    /// Takes the next piece of the text; appends what is certain of it.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.0 {
            Way::Tagged(tagged) => tagged.push(text, &mut Out(parts)),
            Way::Harmony(harmony) => harmony.push(text, &mut Out(parts)),
        }
    }

    /// The text has ended: appends what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        match &mut self.0 {
            Way::Tagged(tagged) => tagged.finish(&mut Out(parts)),
            Way::Harmony(harmony) => harmony.finish(&mut Out(parts)),
        }
    }

    /// Memory of what is held back, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        match &self.0 {
            Way::Tagged(tagged) => tagged.held_bytes(),
            Way::Harmony(harmony) => harmony.held_bytes(),
        }
    }

    /// Some call began.
    #[must_use]
    pub fn called(&self) -> bool {
        match &self.0 {
            Way::Tagged(tagged) => tagged.called(),
            Way::Harmony(harmony) => harmony.called(),
        }
    }

    /// One call was asked for, and it has ended: what follows is no part of the answer.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.0 {
            Way::Tagged(tagged) => tagged.is_over(),
            Way::Harmony(harmony) => harmony.is_over(),
        }
    }

    /// What comes next is of a call that began.
    #[must_use]
    pub fn in_call(&self) -> bool {
        match &self.0 {
            Way::Tagged(tagged) => tagged.in_call(),
            Way::Harmony(harmony) => harmony.in_call(),
        }
    }

    /// What comes next is reasoning.
    #[must_use]
    pub fn in_reasoning(&self) -> bool {
        match &self.0 {
            Way::Tagged(tagged) => tagged.in_reasoning(),
            Way::Harmony(harmony) => harmony.in_reasoning(),
        }
    }
}
