//! Where an answer stands in its grammar.

use llguidance::Matcher;

/// One answer. What it allows follows from the grammar and from the tokens that it was given, in whatever portions.
pub struct Follower {
    matcher: Matcher,
    failed: bool,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("failed", &self.failed).finish_non_exhaustive()
    }
}

impl Follower {
    pub(super) fn new(matcher: Matcher) -> Self {
        Self { matcher, failed: false }
    }

    /// The answer has these tokens more. Returns whether it is complete: nothing but its end may follow.
    ///
    /// A token that the grammar does not allow, or a bound that was passed, leaves an answer that nothing may follow.
    pub fn advance(&mut self, tokens: &[u32]) -> bool {
        if self.finished() || self.failed {
            return self.finished();
        }
        self.failed = self.matcher.consume_tokens(tokens).is_err();
        self.finished()
    }

    /// Nothing but its end may follow.
    #[must_use]
    pub fn finished(&self) -> bool {
        !self.failed && !self.matcher.is_error() && self.matcher.is_stopped()
    }

    /// Whether the answer might end here.
    pub fn may_end(&mut self) -> bool {
        !self.failed && (self.finished() || self.matcher.is_accepting().unwrap_or(false))
    }

    /// Why nothing may follow, where that is not because the answer is complete.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.matcher.get_error()
    }

    /// Which tokens may follow the answer, and `drafts[..1]`, `drafts[..2]` and so on: one bit a token, lowest first, one row
    /// of `masks` each. `dead` says of which rows nothing may be chosen: those behind the end, and all of a failed answer.
    ///
    /// Rows behind a draft that is not allowed allow everything: no token of theirs counts.
    pub fn fill_masks(&mut self, drafts: &[u32], masks: &mut [u32], dead: &mut [bool]) {
        let words = masks.len() / (drafts.len() + 1);
        debug_assert_eq!(dead.len(), drafts.len() + 1);
        masks.fill(u32::MAX);
        dead.fill(false);
        if self.failed || self.finished() {
            dead.fill(true);
            return;
        }
        let mut taken = 0;
        let rows = masks.chunks_exact_mut(words).zip(dead.iter_mut());
        for (place, (row, dead)) in rows.enumerate() {
            if self.matcher.is_stopped() {
                *dead = true; // the draft before it ends the answer
                break;
            }
            let Ok(mask) = self.matcher.compute_mask() else {
                *dead = true;
                self.failed = true;
                return;
            };
            let allowed = &mask.as_slice()[..words];
            row.copy_from_slice(allowed);
            let Some(draft) = drafts.get(place) else { break };
            let bit =
                allowed.get(*draft as usize / 32).is_some_and(|w| (w >> (draft % 32)) & 1 == 1);
            if !bit {
                break;
            }
            if self.matcher.consume_token(*draft).is_err() {
                self.failed = true;
                return;
            }
            taken += 1;
        }
        self.failed = self.matcher.rollback(taken).is_err();
    }

    /// How many of these tokens the grammar allows, one after the other. They are not taken.
    pub fn count_allowed(&mut self, tokens: &[u32]) -> usize {
        if self.failed || self.finished() {
            return 0;
        }
        self.matcher.validate_tokens(tokens).unwrap_or(0)
    }
}
