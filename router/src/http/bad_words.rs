//! Words that an answer must not have, as tokens that it must not choose.

use crate::core::frame::{Sampling, TokenLimits};
use crate::error::RouteError;
use crate::http::parse::fields::bad;
use crate::prompt::PromptEngine;

/// What a request never wants chosen: what `sampling` has of it already, and what completes a bad word.
///
/// # Errors
/// `BadRequest` if no token is left; `Overloaded` if too many prompts wait to be tokenised.
pub(super) async fn limits(
    engine: &PromptEngine,
    words: Vec<String>,
    sampling: &Sampling,
) -> Result<Option<TokenLimits>, RouteError> {
    if words.is_empty() {
        return Ok(sampling.limits.clone());
    }
    let tokens = engine.banned_words(words).await?;
    let mut limits = sampling.limits.clone().unwrap_or_default();
    let alone: Vec<u32> = tokens
        .iter()
        .filter(|word| word.len() == 1)
        .filter_map(|word| word.first().copied())
        .collect();
    if !limits.allowed.is_empty() && limits.allowed.iter().all(|id| alone.contains(id)) {
        let message = "`bad_words` forbids all of `allowed_token_ids`";
        return Err(bad("bad_words", message));
    }
    for word in tokens {
        limits.lengths.push(u32::try_from(word.len()).unwrap_or(u32::MAX));
        limits.banned.extend(word);
    }
    Ok(Some(limits))
}
