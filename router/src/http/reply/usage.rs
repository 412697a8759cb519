//! The tokens of an answer, as OpenAI counts them.

use serde::Serialize;

use crate::request::Usage;

/// The object `usage` of OpenAI's answers.
#[derive(Debug, Serialize)]
pub(in crate::http) struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

/// What became of the worker's own drafts, and how much is reasoning. Other than OpenAI's, rejected ones are no part of `completion_tokens`.
#[derive(Debug, Serialize)]
struct CompletionDetails {
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
    reasoning_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails {
                accepted_prediction_tokens: usage.accepted_drafts,
                rejected_prediction_tokens: usage.rejected_drafts,
                reasoning_tokens: usage.reasoning_tokens,
            },
        }
    }
}
