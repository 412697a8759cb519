//! The markers of a format, and which of them a reader looks for.

use crate::prompt::ReasoningParser;

/// What a marker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Only where an answer begins.
    ReasoningBegins,
    ReasoningEnds,
}

/// A text that stands for something else than itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) text: &'static str,
    pub(super) action: Action,
}

/// The markers that one state of a reader looks for.
#[derive(Debug)]
pub(super) struct Marks {
    list: Vec<Mark>,
    /// Bytes that markers begin with.
    first: [bool; 256],
}

/// What a text is to a list of markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Whole(Action),
    /// More of it may come.
    Begun,
    Nothing,
}

impl Marks {
    pub(super) fn new(list: Vec<Mark>) -> Self {
        let mut first = [false; 256];
        for mark in &list {
            first[usize::from(mark.text.as_bytes()[0])] = true;
        }
        Self { list, first }
    }

    pub(super) fn look(&self, held: &str) -> Look {
        let mut begun = Look::Nothing;
        for mark in &self.list {
            if mark.text == held {
                return Look::Whole(mark.action);
            }
            if mark.text.starts_with(held) {
                begun = Look::Begun;
            }
        }
        begun
    }

    /// Bytes of `text` before a place where a marker may begin.
    pub(super) fn free(&self, text: &str) -> usize {
        text.bytes().position(|byte| self.first[usize::from(byte)]).unwrap_or(text.len())
    }
}

/// The markers around reasoning.
#[derive(Debug, Clone, Copy)]
struct ReasoningMarks {
    begin: &'static str,
    end: &'static str,
}

/// What all readers of a format share.
#[derive(Debug)]
pub(super) struct Rules {
    reasoning: Option<ReasoningMarks>,
    pub(super) in_content: Marks,
    pub(super) in_reasoning: Marks,
}

impl Rules {
    /// `None` where nothing is marked.
    pub(super) fn new(reasoning: Option<ReasoningParser>) -> Option<Self> {
        let reasoning = match reasoning? {
            ReasoningParser::Think => ReasoningMarks { begin: "<think>", end: "</think>" },
            ReasoningParser::Mistral => ReasoningMarks { begin: "[THINK]", end: "[/THINK]" },
            ReasoningParser::Gemma => {
                ReasoningMarks { begin: "<|channel>thought", end: "<channel|>" }
            }
            ReasoningParser::Harmony => return None,
        };
        let begin = Mark { text: reasoning.begin, action: Action::ReasoningBegins };
        let end = Mark { text: reasoning.end, action: Action::ReasoningEnds };
        Some(Self {
            reasoning: Some(reasoning),
            in_content: Marks::new(vec![begin]),
            in_reasoning: Marks::new(vec![end]),
        })
    }

    /// After a prompt that ends in this text an answer goes on with its reasoning.
    pub(super) fn opens_reasoning(&self, prompt: &str) -> bool {
        self.reasoning.is_some_and(|marks| prompt.trim_end().ends_with(marks.begin))
    }

    pub(super) fn reasoning_end(&self) -> Option<&'static str> {
        self.reasoning.map(|marks| marks.end)
    }

    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        self.in_content.list.iter().chain(&self.in_reasoning.list).map(|mark| mark.text)
    }
}
