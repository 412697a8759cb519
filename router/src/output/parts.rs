//! What an answer is made of, and where readers put it.

/// What a piece of an answer's text is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text for the user.
    Content(String),
    /// What the model thought before.
    Reasoning(String),
    /// A call begins; `index` counts the calls of this choice from 0.
    CallBegins {
        /// Which call.
        index: u32,
        /// What its result refers to.
        id: String,
        /// Of the function.
        name: String,
    },
    /// More of the JSON text of a call's arguments.
    CallArguments {
        /// Which call.
        index: u32,
        /// Text that goes on the text before.
        text: String,
    },
}

/// Parts in order; pieces of the same part become one.
#[derive(Debug)]
pub(super) struct Out<'a>(pub(super) &'a mut Vec<Part>);

impl Out<'_> {
    pub(super) fn content(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Content(text)) => text.push_str(more),
            _ => self.0.push(Part::Content(more.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Reasoning(text)) => text.push_str(more),
            _ => self.0.push(Part::Reasoning(more.to_owned())),
        }
    }
}
