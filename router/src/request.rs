//! The life of one request, from checked input to the last token.

mod answer;
mod attempt;
mod choice;
pub mod grammar;
mod request_trace;
mod spans;

use std::sync::Arc;

use crate::core::frame::{Pooling, Ranked, Sampling};
use crate::limits::key_ring::ClientKey;
use crate::limits::memory::MemoryShare;
use crate::limits::shares::{Account, Holder};
use crate::prompt::{Prompt, StopStrings};

pub use answer::{Answer, answer};
pub(crate) use request_trace::Ends;
pub use request_trace::{RequestTrace, Slo, Stages};

/// A checked request: what `http` hands over. One job answers `n` choices of one prompt.
#[derive(Debug, Clone)]
pub struct Job {
    /// For logs and response ids, such as `chatcmpl-...`.
    pub name: String,
    /// What to answer.
    pub prompt: Prompt,
    /// How; `sampling.seed` is that of choice 0, choice `i` gets `seed + i`.
    pub sampling: Sampling,
    /// Strings that end the answer.
    pub stop: StopStrings,
    /// Further tokens that end the answer.
    pub stop_ids: Vec<u32>,
    /// Longest answer; `None` means all that the context leaves.
    pub max_tokens: Option<u32>,
    /// Choices of the answer, at least 1.
    pub n: u32,
    /// Leave special tokens such as `<|im_end|>` out of the text.
    pub skip_special_tokens: bool,
    /// What the text is read for, if it is.
    pub reading: Reading,
    /// Key for `session-hash`.
    pub session: Option<String>,
    /// Higher goes first.
    pub priority: i8,
    /// Whose request it is.
    pub account: Account,
    /// Whose share of the places it takes.
    pub holder: Holder,
    /// By which its client is known; it pays for the tokens.
    pub key: Option<Arc<ClientKey>>,
    /// The HTTP request that it belongs to.
    pub request_trace: Arc<RequestTrace>,
    /// Number of its choice 0 among all choices of that.
    pub first_choice: u32,
    /// Separates prefix caches.
    pub salt: Vec<u8>,
    /// What the prompt was charged; it goes where the prompt goes.
    pub memory: Option<Arc<MemoryShare>>,
    /// A longer prompt loses its beginning.
    pub truncation: Option<Truncation>,
    /// Deltas carry the ids of the prompt and of the answer.
    pub returns_ids: bool,
    /// The log-probabilities of the prompt stand apart from those of the answer.
    pub scores_prompt: bool,
    /// The prompt as a vector is all that is wanted; `max_tokens` is 0 then.
    pub pooling: Option<Pooling>,
}

/// How much of a prompt is kept, of its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truncation {
    /// So many tokens.
    To(u32),
    /// What the context leaves beside the answer.
    ToContext,
}

/// What whoever tells an answer's text apart needs of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// Say where the text of each token ends.
    pub token_ends: bool,
    /// The answer may end with any token, before its worker does: each is a delta of its own.
    pub one_by_one: bool,
    /// Special tokens that are text all the same, in order: markers.
    pub markers: Vec<u32>,
}

/// What one choice got since the last delta.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    /// Which choice, 0 to `n - 1`.
    pub choice: u32,
    /// Text that is certain (never half a character, never the beginning of a possible stop string).
    pub text: String,
    /// Where in `text` each token ends that came since the last delta, where that was asked for.
    pub token_ends: Vec<usize>,
    /// The tokens behind the text, where log-probabilities were asked for; otherwise empty.
    pub tokens: Vec<ScoredToken>,
    /// The prompt's tokens, where their log-probabilities were asked for; on the first delta of a choice.
    pub prompt_tokens: Option<Vec<ScoredToken>>,
    /// Ids of the tokens that are counted as the answer's: with a stop token, and with those of a stop string. `None` where
    /// nobody asked for them.
    pub ids: Option<Vec<u32>>,
    /// Ids of the prompt, where ids were asked for; on the first delta of a choice.
    pub prompt_ids: Option<Arc<Vec<u32>>>,
    /// The prompt as a vector, where that was asked for: f32 little-endian, as wide as the model.
    pub pooled: Option<Vec<u8>>,
    /// Set on the last delta of a choice.
    pub finish: Option<FinishReason>,
    /// The stop string that ended the choice; on the last delta.
    pub stop_string: Option<Box<str>>,
}

/// A token with its log-probability, as the worker gave it. Its text is looked up where it is written: as text, twenty
/// alternatives are ten times as large.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredToken {
    /// The token, in the model's vocabulary.
    pub id: u32,
    /// `None` for the first token of a prompt.
    pub logprob: Option<f64>,
    /// The most probable tokens there, best first.
    pub top: Vec<Ranked>,
}

/// Why a choice ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// Stop token or stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

impl FinishReason {
    /// As OpenAI's answers say it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// Tokens of a job so far; final after the last delta.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, counted once.
    pub prompt_tokens: u32,
    /// Tokens of all choices, stop tokens included.
    pub completion_tokens: u32,
    /// Prompt tokens that the worker took from its cache (of choice 0).
    pub cached_tokens: u32,
    /// Those of `completion_tokens` that a worker had drafted.
    pub accepted_drafts: u32,
    /// Drafted tokens that are no part of the answer.
    pub rejected_drafts: u32,
    /// Those of `completion_tokens` that are reasoning, where answers are read for that.
    pub reasoning_tokens: u32,
}
