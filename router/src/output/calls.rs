//! Calls of tools within a text: what a request says of them, and how one is read.

mod elements;
mod headed;
mod literals;
mod object;

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use super::json::escape;
use super::parts::{Out, Part};
use crate::prompt::ToolParser;
use elements::{ElementCall, Tags};
use headed::{Head, HeadedCall};
use literals::{Language, LiteralCalls};
use object::ObjectCalls;

/// The tools of a request, and how the model writes calls of them.
#[derive(Debug, Clone)]
pub struct Tools {
    /// How calls are written.
    pub parser: ToolParser,
    /// What may be called, with the arguments that have a type.
    pub functions: HashMap<String, Arguments>,
    /// False where nothing comes after the first call.
    pub parallel: bool,
    /// The answer is a call, and its grammar does not wait for the end of reasoning: the beginning of the call ends that.
    pub forced: bool,
}

/// The kinds of a function's arguments by their names. One that is not listed is a text.
pub type Arguments = HashMap<String, ArgumentKind>;

/// What an argument is in JSON, where the model writes it without quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentKind {
    /// A string, or null.
    OptionalText,
    /// Anything but a string.
    Json,
}

/// Bytes that are held back at most until it is known whether they are a call.
pub(super) const MAX_HELD: usize = 16 << 10;

/// What a character is to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallStep {
    /// Part of it.
    More,
    /// Its last one.
    Done,
    /// No part of it. If the call was announced before, it ends here; otherwise it is none.
    Not,
}

/// Announces calls, and counts them.
#[derive(Debug)]
pub(super) struct Announcer {
    tools: Option<Arc<Tools>>,
    begun: u32,
    /// The present call was announced.
    pub(super) open: bool,
    /// Nothing more is wanted.
    over: bool,
}

impl Announcer {
    pub(super) fn new(tools: Option<Arc<Tools>>) -> Self {
        Self { tools, begun: 0, open: false, over: false }
    }

    pub(super) fn begun(&self) -> u32 {
        self.begun
    }

    pub(super) fn knows(&self, name: &str) -> bool {
        self.tools.as_ref().is_some_and(|tools| tools.functions.contains_key(name))
    }

    /// The kinds of the arguments of a function that is known.
    pub(super) fn arguments_of(&self, name: &str) -> Option<&Arguments> {
        self.tools.as_ref()?.functions.get(name)
    }

    /// Ends the present call, if there is one; true if nothing more is wanted.
    pub(super) fn end(&mut self) -> bool {
        let ended = std::mem::replace(&mut self.open, false);
        self.over |= ended && self.tools.as_ref().is_some_and(|tools| !tools.parallel);
        self.over
    }

    /// Announces a call of a function that is known; with the id that the model gave it, or else one of ours.
    pub(super) fn begin(&mut self, name: &str, id: Option<&str>, out: &mut Out<'_>) {
        let nine = self.tools.as_ref().is_some_and(|tools| tools.parser == ToolParser::Mistral);
        let id = id.map_or_else(|| new_id(nine), str::to_owned);
        out.0.push(Part::CallBegins { index: self.begun, id, name: name.to_owned() });
        self.begun += 1;
        self.open = true;
    }

    /// More of the arguments of the call that was announced last.
    pub(super) fn arguments(&self, more: &str, out: &mut Out<'_>) {
        if !more.is_empty() {
            self.text(out).push_str(more);
        }
    }

    pub(super) fn argument(&self, c: char, out: &mut Out<'_>) {
        self.text(out).push(c);
    }

    /// A character between the quotes of an argument.
    pub(super) fn quoted(&self, c: char, out: &mut Out<'_>) {
        escape(c, self.text(out));
    }

    /// Where the arguments of the call that was announced last go on. Whoever asks for it writes something.
    fn text<'out>(&self, out: &'out mut Out<'_>) -> &'out mut String {
        let index = self.begun.saturating_sub(1);
        let goes_on =
            matches!(out.0.last(), Some(Part::CallArguments { index: last, .. }) if *last == index);
        if !goes_on {
            out.0.push(Part::CallArguments { index, text: String::new() });
        }
        match out.0.last_mut() {
            Some(Part::CallArguments { text, .. }) => text,
            _ => unreachable!("it is the last part"),
        }
    }
}

/// As OpenAI's, or of the nine letters and digits that Mistral's templates insist on.
fn new_id(nine: bool) -> String {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let random = || KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed));
    if nine {
        return format!("{:09x}", random() >> 28);
    }
    format!("call_{:016x}{:08x}", random(), random() >> 32)
}

/// What reads one call from after its marker, or several where they stand in one list.
#[derive(Debug)]
pub(super) enum CallReader {
    Objects(ObjectCalls),
    Headed(HeadedCall),
    Elements(ElementCall),
    Literals(LiteralCalls),
}

impl CallReader {
    pub(super) fn new(parser: ToolParser) -> Self {
        match parser {
            ToolParser::Hermes => Self::Objects(ObjectCalls::one()),
            ToolParser::Llama => Self::Objects(ObjectCalls::listed(';')),
            ToolParser::Mistral => Self::Headed(HeadedCall::new(Head::Mistral)),
            ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => {
                Self::Headed(HeadedCall::new(Head::Deepseek))
            }
            ToolParser::Kimi => Self::Headed(HeadedCall::new(Head::Kimi)),
            ToolParser::QwenCoder => Self::Elements(ElementCall::new(&elements::QWEN)),
            ToolParser::Glm => Self::Elements(ElementCall::new(&elements::GLM)),
            ToolParser::Gemma => Self::Literals(LiteralCalls::new(Language::Gemma)),
            // harmony has a reader of its own
            ToolParser::Pythonic | ToolParser::Harmony => {
                Self::Literals(LiteralCalls::new(Language::Python))
            }
        }
    }

    /// Markers within calls.
    pub(super) fn markers(parser: ToolParser) -> &'static [&'static str] {
        match parser {
            ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => &[headed::DEEPSEEK_SEP],
            ToolParser::Kimi => &[headed::KIMI_SEP],
            ToolParser::Mistral => &headed::MISTRAL_MARKERS,
            ToolParser::Glm => &Tags::MARKERS,
            ToolParser::Gemma => &[literals::GEMMA_QUOTE],
            ToolParser::Hermes
            | ToolParser::QwenCoder
            | ToolParser::Llama
            | ToolParser::Pythonic
            | ToolParser::Harmony => &[],
        }
    }

    pub(super) fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        match self {
            Self::Objects(call) => call.push(c, calls, out),
            Self::Headed(call) => call.push(c, calls, out),
            Self::Elements(call) => call.push(c, calls, out),
            Self::Literals(call) => call.push(c, calls, out),
        }
    }

    /// Memory of what is held back, in bytes.
    pub(super) fn held_bytes(&self) -> usize {
        match self {
            Self::Objects(call) => call.held_bytes(),
            Self::Headed(call) => call.held_bytes(),
            Self::Elements(call) => call.held_bytes(),
            Self::Literals(call) => call.held_bytes(),
        }
    }

    /// What came after a call and was no part of it.
    pub(super) fn take_rest(&mut self) -> String {
        match self {
            Self::Headed(call) => call.take_rest(),
            Self::Elements(call) => call.take_rest(),
            Self::Objects(_) | Self::Literals(_) => String::new(),
        }
    }

    /// The text has ended within a call that was announced. What is certain of its arguments is appended.
    pub(super) fn finish(&mut self, calls: &mut Announcer, out: &mut Out<'_>) {
        match self {
            Self::Elements(call) => call.finish(calls, out),
            Self::Headed(_) | Self::Objects(_) | Self::Literals(_) => {}
        }
    }
}
