//! What a worker tells a router of the prompts that it has of others, so that routers see each other's work.

use serde::{Deserialize, Serialize};

/// Longest list of [`OtherPrompts`]: where each prompt takes half of what is left of a step, those behind get nothing of the next
/// ones. The last entry stands for all behind it, too.
pub const MOST_OTHER_PROMPTS: usize = 16;

/// Prompts of other routers that have no first token yet, in the worker's order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherPrompts {
    /// At most [`MOST_OTHER_PROMPTS`].
    pub prompts: Vec<OtherPrompt>,
}

impl OtherPrompts {
    /// One more, behind all others.
    pub fn add(&mut self, prompt: OtherPrompt) {
        if self.prompts.len() < MOST_OTHER_PROMPTS {
            self.prompts.push(prompt);
        } else if let Some(last) = self.prompts.last_mut() {
            last.tokens = last.tokens.saturating_add(prompt.tokens);
            last.left = last.left.saturating_add(prompt.left);
            last.prompts = last.prompts.saturating_add(prompt.prompts);
        }
    }
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherPrompt {
    /// Prompts of the reader's own that stand before it.
    pub behind: u32,
    /// Its tokens.
    pub tokens: u32,
    /// Those that are still to be computed after the last step that ended.
    pub left: u32,
    /// Prompts that stand here: 1 but in the last entry.
    pub prompts: u32,
}
