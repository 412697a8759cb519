//! Where an answer stands in its grammar, and in the reasoning before it.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;

use super::compile::GrammarError;
use super::reasoning::{Allows, ReasoningState};
use crate::core::frame::Reasoning;

/// One answer. What it allows follows from the grammar and from the tokens that it was given, in whatever portions.
pub struct Follower {
    /// What the answer behind any reasoning follows.
    matcher: Option<Matcher>,
    /// As it was before the first token.
    start: Option<Arc<Mutex<Matcher>>>,
    /// Tokens that the matcher was given.
    given: Vec<u32>,
    /// Tokens that end answers: none where the grammar has yet to be followed.
    ends: Arc<[u32]>,
    gate: Option<ReasoningState>,
    failed: bool,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("failed", &self.failed).finish_non_exhaustive()
    }
}

impl Follower {
    pub(super) fn new(start: Arc<Mutex<Matcher>>, ends: Arc<[u32]>) -> Self {
        let matcher = Some(fresh(&start));
        Self { matcher, start: Some(start), given: Vec::new(), ends, gate: None, failed: false }
    }

    /// Of an answer that follows no grammar.
    #[must_use]
    pub fn free() -> Self {
        let (given, ends) = (Vec::new(), Arc::default());
        Self { matcher: None, start: None, given, ends, gate: None, failed: false }
    }

    /// The answer has no token yet, and reasons before it follows its grammar.
    #[must_use]
    pub fn reasoning(self, reasoning: Arc<Reasoning>) -> Self {
        Self { gate: Some(ReasoningState::new(reasoning)), ..self }
    }

    /// The answer has these tokens more. Returns whether it is complete: nothing but its end may follow.
    ///
    /// A token that the grammar does not allow, or a bound that was passed, leaves an answer that nothing may follow.
    pub fn advance(&mut self, tokens: &[u32]) -> bool {
        if self.finished() || self.failed {
            return self.finished();
        }
        let reasoned = match &mut self.gate {
            Some(gate) => tokens.iter().position(|token| gate.take(*token)).unwrap_or(tokens.len()),
            None => 0,
        };
        // a gate that is open stays so
        if let Some(matcher) = &mut self.matcher {
            self.failed = matcher.consume_tokens(&tokens[reasoned..]).is_err();
            self.given.extend_from_slice(&tokens[reasoned..]);
        }
        self.finished()
    }

    /// Nothing but its end may follow.
    #[must_use]
    pub fn finished(&self) -> bool {
        let stopped = self
            .matcher
            .as_ref()
            .is_some_and(|matcher| !matcher.is_error() && matcher.is_stopped());
        !self.failed && stopped && self.answers()
    }

    /// Any reasoning is over.
    fn answers(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.allows() == Allows::Answer)
    }

    /// Why nothing may follow, where that is not because the answer is complete.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        let error = self.matcher.as_ref()?.get_error()?;
        if error.contains("NoExtensionBias") {
            return Some("no token has the bytes that come next".to_owned());
        }
        Some(GrammarError::new(error).to_string())
    }

    /// Which tokens may follow the answer, and `drafts[..1]`, `drafts[..2]` and so on: one bit a token, lowest first, one row
    /// of `masks` each. `dead` says of which rows nothing may be chosen: those behind the end, and all of a failed answer.
    ///
    /// Rows behind a draft that is not allowed allow everything: no token of theirs counts. A bound that is met behind a draft
    /// ends nothing but the look at the drafts, which may never be tokens of the answer.
    pub fn fill_masks(&mut self, drafts: &[u32], masks: &mut [u32], dead: &mut [bool]) {
        let words = masks.len() / (drafts.len() + 1);
        debug_assert_eq!(dead.len(), drafts.len() + 1);
        masks.fill(u32::MAX);
        dead.fill(false);
        if self.failed || self.finished() {
            dead.fill(true);
            return;
        }
        let mut gate = self.gate.clone();
        let (mut taken, mut dead_behind) = (0, None);
        let rows = masks.chunks_exact_mut(words).zip(dead.iter_mut());
        for (place, (row, dead)) in rows.enumerate() {
            let allows = gate.as_ref().map_or(Allows::Answer, ReasoningState::allows);
            let may_go_on = fill(row, allows, self.matcher.as_mut(), &self.ends);
            if !may_go_on {
                *dead = true; // the draft before it ends the answer, or a bound was met
                let complete = |it: &Matcher| it.is_stopped() && !it.is_error();
                if self.matcher.as_ref().is_some_and(complete) {
                    break;
                }
                self.failed = place == 0;
                if place > 0 {
                    self.begin_again();
                }
                return;
            }
            let Some(draft) = drafts.get(place) else { break };
            if !bit(row, *draft) {
                break;
            }
            let of_answer = gate.as_mut().is_none_or(|gate| gate.take(*draft));
            if let Some(matcher) = self.matcher.as_mut().filter(|_| of_answer) {
                if matcher.consume_token(*draft).is_err() {
                    dead_behind = Some(place + 1);
                    break;
                }
                taken += 1;
            }
        }
        if let Some(first) = dead_behind {
            dead[first..].fill(true);
            return self.begin_again();
        }
        if self.matcher.as_mut().is_some_and(|matcher| matcher.rollback(taken).is_err()) {
            self.begin_again();
        }
    }

    /// One by one, as `llguidance` has no bound for several.
    fn count_of_grammar(&mut self, tokens: &[u32]) -> usize {
        let Some(matcher) = &mut self.matcher else { return tokens.len() };
        let mut count = 0;
        for token in tokens {
            let may = matches!(matcher.validate_tokens(&[*token]), Ok(1));
            if !may || matcher.consume_token(*token).is_err() {
                break;
            }
            count += 1;
        }
        if matcher.is_error() || matcher.rollback(count).is_err() {
            self.begin_again();
        }
        count
    }

    /// Brings the answer back to where its tokens leave it.
    fn begin_again(&mut self) {
        let Some(start) = &self.start else { return };
        let mut matcher = fresh(start);
        self.failed = matcher.consume_tokens(&self.given).is_err();
        self.matcher = Some(matcher);
    }

    /// How many of these tokens may follow, one after the other. They are not taken.
    pub fn count_allowed(&mut self, tokens: &[u32]) -> usize {
        if self.failed || self.finished() {
            return 0;
        }
        let mut gate = self.gate.clone();
        for (place, token) in tokens.iter().enumerate() {
            let may = match gate.as_ref().map_or(Allows::Answer, ReasoningState::allows) {
                Allows::Reasoning => self.matcher.is_none() || !self.ends.contains(token),
                Allows::Only(other) => *token == other,
                Allows::AnswerOr(other) if *token == other => true,
                Allows::AnswerOr(_) | Allows::Answer => {
                    return place + self.count_of_grammar(&tokens[place..]);
                }
            };
            if !may {
                return place;
            }
            if let Some(gate) = &mut gate {
                gate.take(*token);
            }
        }
        tokens.len()
    }
}

/// What may be chosen at one place, in a row that allows everything. False where that is nothing.
fn fill(row: &mut [u32], allows: Allows, matcher: Option<&mut Matcher>, ends: &[u32]) -> bool {
    match (allows, matcher) {
        (Allows::Reasoning, Some(_)) => {
            for end in ends {
                row[*end as usize / 32] &= !(1 << (end % 32));
            }
        }
        (Allows::Only(token), _) => {
            row.fill(0);
            row[token as usize / 32] |= 1 << (token % 32);
        }
        (Allows::Answer | Allows::AnswerOr(_), Some(matcher)) => {
            if matcher.is_stopped() {
                return false;
            }
            let Ok(mask) = matcher.compute_mask() else { return false };
            let words = row.len();
            row.copy_from_slice(&mask.as_slice()[..words]);
            if let Allows::AnswerOr(token) = allows {
                row[token as usize / 32] |= 1 << (token % 32);
            }
        }
        (Allows::Reasoning | Allows::Answer | Allows::AnswerOr(_), None) => {}
    }
    true
}

fn bit(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| (word >> (token % 32)) & 1 == 1)
}

fn fresh(start: &Mutex<Matcher>) -> Matcher {
    start.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
