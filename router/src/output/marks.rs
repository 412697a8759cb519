//! The markers of a format, and which of them a reader looks for.

use std::sync::Arc;

use super::calls::{CallReader, Tools};
use crate::prompt::{ReasoningParser, ToolParser};

/// What a marker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Only where an answer begins.
    ReasoningBegins,
    ReasoningEnds,
    /// A call follows.
    Call,
    /// Stands before calls. It is text unless one follows.
    Opens,
    /// Stands after calls. It is text unless one came right before.
    Closes,
    /// Stands within calls, and is text anywhere else.
    Inner,
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
    /// Bytes that markers begin with, a bit each: these stay as long as the answer.
    first: [u64; 4],
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
        let mut first = [0; 4];
        for mark in &list {
            let byte = mark.text.as_bytes()[0];
            first[usize::from(byte / 64)] |= 1 << (byte % 64);
        }
        Self { list, first }
    }

    fn may_begin_with(&self, byte: u8) -> bool {
        self.first[usize::from(byte / 64)] >> (byte % 64) & 1 == 1
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

    /// A marker of this kind begins so.
    pub(super) fn begins(&self, action: Action, held: &str) -> bool {
        !held.is_empty()
            && self.list.iter().any(|mark| mark.action == action && mark.text.starts_with(held))
    }

    /// Bytes of `text` before a place where a marker may begin, or this character stands.
    pub(super) fn free(&self, text: &str, also: Option<char>) -> usize {
        let also = also.map(|c| c as u32);
        let stops = |byte: u8| self.may_begin_with(byte) || also == Some(u32::from(byte));
        text.bytes().position(stops).unwrap_or(text.len())
    }
}

/// The markers around reasoning.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReasoningMarks {
    pub(super) begin: &'static str,
    pub(super) end: &'static str,
}

/// The markers around calls.
#[derive(Debug, Clone, Copy, Default)]
struct CallMarks {
    opens: &'static [&'static str],
    begin: &'static [&'static str],
    closes: &'static [&'static str],
    /// Calls begin without a marker where the answer begins, with this character.
    leads: Option<char>,
}

pub(super) fn reasoning_marks(parser: ReasoningParser) -> Option<ReasoningMarks> {
    Some(match parser {
        ReasoningParser::Think => ReasoningMarks { begin: "<think>", end: "</think>" },
        ReasoningParser::Mistral => ReasoningMarks { begin: "[THINK]", end: "[/THINK]" },
        ReasoningParser::Gemma => ReasoningMarks { begin: "<|channel>thought", end: "<channel|>" },
        ReasoningParser::Harmony => return None, // it has a reader of its own
    })
}

fn call_marks(parser: ToolParser) -> CallMarks {
    let none = CallMarks::default();
    match parser {
        ToolParser::Hermes | ToolParser::Glm => {
            CallMarks { begin: &["<tool_call>"], closes: &["</tool_call>"], ..none }
        }
        // some answers leave the outer pair out
        ToolParser::QwenCoder => CallMarks {
            opens: &["<tool_call>"],
            begin: &["<function="],
            closes: &["</tool_call>"],
            ..none
        },
        ToolParser::Llama => CallMarks { begin: &["<|python_tag|>"], leads: Some('{'), ..none },
        ToolParser::Pythonic => CallMarks {
            opens: &["<|python_start|>"],
            closes: &["<|python_end|>"],
            leads: Some('['),
            ..none
        },
        ToolParser::Mistral => CallMarks { begin: &["[TOOL_CALLS]"], ..none },
        ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => CallMarks {
            opens: &["<｜tool▁calls▁begin｜>"],
            begin: &["<｜tool▁call▁begin｜>"],
            closes: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
            ..none
        },
        ToolParser::Kimi => CallMarks {
            opens: &["<|tool_calls_section_begin|>"],
            begin: &["<|tool_call_begin|>"],
            closes: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
            ..none
        },
        ToolParser::Gemma => {
            CallMarks { begin: &["<|tool_call>"], closes: &["<tool_call|>"], ..none }
        }
        ToolParser::Harmony => none,
    }
}

/// What all readers of a format share.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) reasoning: Option<ReasoningMarks>,
    pub(super) tools: Option<Arc<Tools>>,
    pub(super) in_content: Marks,
    pub(super) in_reasoning: Marks,
    /// Where an answer begins, this character may begin calls.
    pub(super) leads: Option<char>,
    /// Markers that are special tokens of the model: they are never shown.
    pub(super) hidden: Vec<&'static str>,
    /// Messages in channels, rather than one text.
    pub(super) harmony: bool,
    pub(super) shows_analysis: bool,
}

impl Rules {
    /// `None` where nothing is marked.
    pub(super) fn new(reasoning: Option<ReasoningParser>, tools: Option<Tools>) -> Option<Self> {
        if reasoning.is_none() && tools.is_none() {
            return None;
        }
        let tools = tools.map(Arc::new);
        let parser = tools.as_ref().map(|tools| tools.parser);
        let calls = parser.map(call_marks).unwrap_or_default();
        let marks = reasoning.and_then(reasoning_marks);
        let mut in_content: Vec<Mark> = Vec::new();
        let mut in_reasoning: Vec<Mark> = Vec::new();
        let mut add = |action, texts: &[&'static str]| {
            in_content.extend(texts.iter().map(|text| Mark { text, action }));
        };
        add(Action::Call, calls.begin);
        add(Action::Opens, calls.opens);
        add(Action::Closes, calls.closes);
        let inner = parser.map_or(&[][..], CallReader::markers).iter().copied();
        let inner: Vec<&str> = inner.filter(|one| !calls.closes.contains(one)).collect();
        add(Action::Inner, &inner);
        if let Some(marks) = marks {
            add(Action::ReasoningBegins, &[marks.begin]);
            in_reasoning.push(Mark { text: marks.end, action: Action::ReasoningEnds });
        }
        if tools.as_ref().is_some_and(|tools| tools.forced) {
            let begins = |mark: &&Mark| matches!(mark.action, Action::Call | Action::Opens);
            in_reasoning.extend(in_content.iter().filter(begins));
            // its grammar takes the end of a reasoning that nothing opened
            in_content
                .extend(marks.map(|marks| Mark { text: marks.end, action: Action::ReasoningEnds }));
        }
        Some(Self {
            reasoning: marks,
            tools,
            in_content: Marks::new(in_content),
            in_reasoning: Marks::new(in_reasoning),
            leads: calls.leads,
            hidden: Vec::new(),
            harmony: reasoning == Some(ReasoningParser::Harmony)
                || parser == Some(ToolParser::Harmony),
            shows_analysis: reasoning.is_none(),
        })
    }

    /// After a prompt that ends in this text an answer goes on with its reasoning.
    pub(super) fn opens_reasoning(&self, prompt: &str) -> bool {
        self.reasoning.is_some_and(|marks| prompt.trim_end().ends_with(marks.begin))
    }

    pub(super) fn stops(&self) -> &'static [&'static str] {
        match self.tools.as_ref().map(|tools| tools.parser) {
            _ if self.harmony => &["<|call|>", "<|return|>"],
            Some(ToolParser::Llama) => &["<|eom_id|>"],
            Some(ToolParser::Gemma) => &["<|tool_response>"],
            Some(_) | None => &[],
        }
    }

    /// All texts that are not to be taken out of an answer before it is read.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let channels: &[&str] = if self.harmony { &super::harmony::MARKERS } else { &[] };
        let tagged = self.in_content.list.iter().chain(&self.in_reasoning.list);
        tagged.map(|mark| mark.text).chain(channels.iter().copied())
    }
}
