//! What an answer has to follow, how long it may reason before, and what that costs a worker.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::words::words;

words! {
    /// In what a grammar is written.
    GrammarKind {
        /// A JSON schema.
        Json = "json",
        /// A regular expression, which the whole answer matches.
        Regex = "regex",
        /// A Lark grammar, as `llguidance` reads it.
        Lark = "lark",
    }
}

/// A constraint of an answer. Its state follows from the tokens of the answer alone, so nothing else of it travels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grammar {
    /// In what `source` is written.
    pub kind: GrammarKind,
    /// The text, at most [`MAX_GRAMMAR_BYTES`].
    pub source: Arc<str>,
}

/// Longest source of a grammar: a schema of hundreds of fields has some 30 KB. A guess.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;

/// Reasoning before an answer. Where it is follows from the tokens of the answer alone: a grammar begins behind it.
///
/// Markers are lists of tokens that stand for what they write: special tokens are found by their id, all others by their text,
/// however a model cuts it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasoning {
    /// Tokens that open it, if they are the first of the answer; none where the prompt has opened it.
    pub begin: Vec<u32>,
    /// Tokens that end it, at least one.
    pub end: Vec<u32>,
    /// After so many tokens of reasoning those of `end` are forced; `None` is as many as the model likes.
    pub max_tokens: Option<u32>,
    /// So many tokens of `end` stand at the end of the prompt: the answer is reasoning unless it goes on with them. `begin`
    /// then counts for nothing where the answer begins with it.
    pub begun: u32,
    /// Tokens that end it as well, though they are never forced: those that begin a call.
    pub ends_too: Vec<u32>,
}

/// Most tokens of `Reasoning.begin`, and of `end`. A guess: the markers of models are single tokens or texts of some 50 characters, which a model may have to write one by one.
pub const MAX_MARKER_TOKENS: usize = 64;

/// What a worker spent on grammars since its start, sent where it has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrammarTotals {
    /// Masks that were filled.
    pub masks: u64,
    /// The time it took, in us.
    pub mask_us: u64,
    /// Steps that had to wait for their masks.
    pub late: u64,
    /// How long they waited, in us.
    pub wait_us: u64,
    /// Grammars that were compiled.
    pub compiled: u64,
    /// The time it took, in us.
    pub compile_us: u64,
    /// Requests whose grammar was compiled before.
    pub known: u64,
    /// Answers that got no token in a step because their masks were too much work for it, once for each such step.
    pub put_off: u64,
    /// Grammars that were not compiled because those in use hold too much memory.
    pub refused: u64,
    /// What grammars and the answers that follow them hold now.
    pub memory_bytes: u64,
}
