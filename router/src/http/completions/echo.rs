//! The prompt's text, where an answer is to begin with it.

use crate::error::RouteError;
use crate::limits::memory::{MemoryShare, Refused};
use crate::prompt::{Prompt, PromptEngine};

/// The text that an answer with `echo` begins with.
pub(in crate::http) fn echo_text(
    engine: &PromptEngine,
    prompt: &Prompt,
    memory: &mut MemoryShare,
) -> Result<String, RouteError> {
    match prompt {
        Prompt::Text(text) | Prompt::Bare(text) => {
            memory.charge(text.len()).map_err(echo_refused)?;
            Ok(text.clone())
        }
        Prompt::Tokens(ids) => {
            let limit = engine.doc().context_tokens as usize;
            if ids.len() > limit {
                let (prompt, answer) = (ids.len(), 0);
                return Err(RouteError::ContextLength { got: prompt, prompt, answer, limit });
            }
            let mut decoder = engine.decoder(&[], false);
            let mut text = String::new();
            for ids in ids.chunks(ECHO_STEP) {
                let part = decoder.push(ids).text;
                memory.charge(2 * part.len()).map_err(echo_refused)?; // a string doubles
                text.push_str(&part);
            }
            Ok(text + &decoder.finish())
        }
        Prompt::Chat(_) => Ok(String::new()), // completions have none
    }
}

/// Tokens that are decoded before what they became is charged.
const ECHO_STEP: usize = 1024;

fn echo_refused(refused: Refused) -> RouteError {
    refused.body(Some("echo".to_owned()))
}
