//! Reasoning before an answer: where it is, and when it has to end. A state that follows from the tokens alone.

use std::sync::Arc;

use crate::core::frame::Reasoning;

/// Which tokens reasoning leaves to come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allows {
    /// All, but no end of the answer where a grammar has yet to be followed.
    Reasoning,
    /// This one: a part of a marker.
    Only(u32),
    /// Those of the answer, or this one, which begins the marker of reasoning.
    AnswerOr(u32),
    /// Those of the answer.
    Answer,
}

/// Where reasoning is.
#[derive(Debug, Clone)]
pub(super) struct ReasoningState {
    reasoning: Arc<Reasoning>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// So many tokens of the first marker are all there is.
    Opening(usize),
    /// `used` tokens since the first marker; the last `matched` of them are the beginning of the last one.
    Inside {
        used: u32,
        matched: usize,
    },
    Answer,
}

impl ReasoningState {
    pub(super) fn new(reasoning: Arc<Reasoning>) -> Self {
        let phase = match (reasoning.begin.is_empty(), reasoning.end.is_empty()) {
            (_, true) => Phase::Answer,
            (true, false) => Phase::Inside { used: 0, matched: 0 },
            (false, false) => Phase::Opening(0),
        };
        Self { reasoning, phase }
    }

    pub(super) fn allows(&self) -> Allows {
        let Reasoning { begin, end, max_tokens } = &*self.reasoning;
        match self.phase {
            Phase::Opening(0) => Allows::AnswerOr(begin[0]),
            Phase::Opening(matched) => Allows::Only(begin[matched]),
            Phase::Inside { used, matched } if max_tokens.is_some_and(|most| used >= most) => {
                Allows::Only(end[matched])
            }
            Phase::Inside { .. } => Allows::Reasoning,
            Phase::Answer => Allows::Answer,
        }
    }

    /// The answer has this token more. Returns whether the token is of the answer itself, and so for its grammar.
    pub(super) fn take(&mut self, token: u32) -> bool {
        let Reasoning { begin, end, .. } = &*self.reasoning;
        let (phase, of_answer) = match self.phase {
            Phase::Opening(matched) if begin[matched] != token => (Phase::Answer, true),
            Phase::Opening(matched) if matched + 1 < begin.len() => {
                (Phase::Opening(matched + 1), false)
            }
            Phase::Opening(_) => (Phase::Inside { used: 0, matched: 0 }, false),
            Phase::Inside { used, matched } => {
                let matched = matched_after(end, matched, token);
                let inside = Phase::Inside { used: used.saturating_add(1), matched };
                (if matched == end.len() { Phase::Answer } else { inside }, false)
            }
            Phase::Answer => (Phase::Answer, true),
        };
        self.phase = phase;
        of_answer
    }
}

/// How much of the beginning of `marker` stands at the end, if so much did before this token.
fn matched_after(marker: &[u32], matched: usize, token: u32) -> usize {
    (1..=matched + 1)
        .rev()
        .find(|&len| {
            marker[len - 1] == token && marker[..len - 1] == marker[matched + 1 - len..matched]
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(begin: &[u32], end: &[u32], max_tokens: Option<u32>) -> ReasoningState {
        ReasoningState::new(Arc::new(Reasoning {
            begin: begin.into(),
            end: end.into(),
            max_tokens,
        }))
    }

    fn after(mut gate: ReasoningState, tokens: &[u32]) -> Allows {
        for token in tokens {
            gate.take(*token);
        }
        gate.allows()
    }

    #[test]
    fn a_marker_is_found_wherever_it_stands_and_however_it_began() {
        let inside = gate(&[], &[7, 7, 8], None);
        for tokens in [&[7, 7, 8][..], &[1, 7, 7, 7, 8], &[7, 1, 7, 7, 8], &[8, 7, 8, 7, 7, 8]] {
            assert_eq!(after(inside.clone(), tokens), Allows::Answer, "{tokens:?}");
            let short = &tokens[..tokens.len() - 1];
            assert_eq!(after(inside.clone(), short), Allows::Reasoning, "{short:?}");
        }
    }

    #[test]
    fn a_used_up_budget_forces_what_the_marker_lacks() {
        let inside = gate(&[], &[7, 8], Some(2));
        assert_eq!(after(inside.clone(), &[1]), Allows::Reasoning);
        assert_eq!(after(inside.clone(), &[1, 2]), Allows::Only(7));
        assert_eq!(after(inside.clone(), &[1, 2, 7]), Allows::Only(8));
        assert_eq!(after(inside.clone(), &[1, 7]), Allows::Only(8));
        assert_eq!(after(inside, &[1, 2, 7, 8]), Allows::Answer);
        assert_eq!(gate(&[], &[7], Some(0)).allows(), Allows::Only(7));
    }

    #[test]
    fn reasoning_that_nothing_opened_is_opened_by_the_first_tokens_or_not_at_all() {
        let before = gate(&[5, 6], &[7], Some(1));
        assert_eq!(before.allows(), Allows::AnswerOr(5));
        assert_eq!(after(before.clone(), &[5]), Allows::Only(6));
        assert_eq!(after(before.clone(), &[5, 6]), Allows::Reasoning);
        assert_eq!(after(before.clone(), &[5, 6, 1]), Allows::Only(7));
        assert_eq!(after(before, &[1, 5, 6]), Allows::Answer);
    }
}
