//! Reasoning before an answer: where it is, and when it has to end. A state that follows from the tokens alone.

use std::sync::Arc;

use super::marker::{Marker, MarkerSymbols, Symbol};
use super::vocabulary::GrammarTokens;
use crate::core::frame::Reasoning;

/// Which tokens reasoning leaves to come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allows {
    /// All; where a grammar has yet to be followed, no end of the answer and none that ends the reasoning in its middle.
    Reasoning,
    /// This one: a part of a marker.
    Only(u32),
    /// What goes on with the marker of reasoning, which has begun; and, as long as that is not certain, those of the answer.
    Opening,
    /// Those of the answer, or what begins the marker of reasoning.
    AnswerOrOpening,
    /// Those of the answer.
    Answer,
}

/// What holds for the reasoning of an answer.
#[derive(Debug)]
pub struct ReasoningRules {
    begin: Marker,
    end: Marker,
    /// Ends it, too, though it is never forced.
    ends_too: Marker,
    /// So much of `end` stands at the end of the prompt.
    begun: usize,
    max_tokens: Option<u32>,
    symbols: MarkerSymbols,
}

impl ReasoningRules {
    /// With `tokens` the markers are found by what they write, else by their tokens alone. `None` where they cannot be forced:
    /// no tokens write them.
    #[must_use]
    pub fn new(reasoning: &Reasoning, tokens: Option<Arc<GrammarTokens>>) -> Option<Self> {
        let symbols = MarkerSymbols::new(tokens);
        let marker = |tokens: &[u32]| Marker::new(tokens, &symbols);
        let begun = reasoning.end.iter().take(reasoning.begun as usize);
        let rules = Self {
            begin: marker(&reasoning.begin),
            end: marker(&reasoning.end),
            ends_too: marker(&reasoning.ends_too),
            begun: begun.map(|token| symbols.of(*token).len()).sum(),
            max_tokens: reasoning.max_tokens,
            symbols: symbols.clone(),
        };
        let whole = rules.begin.can_be_written(&symbols) && rules.end.can_be_written(&symbols);
        whole.then_some(rules)
    }
}

/// Where reasoning is.
#[derive(Debug, Clone)]
pub(super) struct ReasoningState {
    rules: Arc<ReasoningRules>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// So much of the first marker is all there is.
    Opening(usize),
    Inside(Inside),
    Answer,
}

#[derive(Debug, Clone, Copy)]
struct Inside {
    /// Tokens since the first marker.
    used: u32,
    /// So much of the beginning of the last marker stands at the end.
    matched: usize,
    /// The same of what ends it, too.
    matched_too: usize,
    /// So much of the first marker is all that there is, behind a prompt that has begun the last one: it counts for nothing.
    lead: Option<usize>,
}

impl ReasoningState {
    pub(super) fn new(rules: Arc<ReasoningRules>) -> Self {
        let inside = |matched, lead| {
            let symbols = rules.end.rest(0)[..matched].iter();
            let too = symbols.fold(0, |matched, symbol| rules.ends_too.after(matched, *symbol));
            Phase::Inside(Inside { used: 0, matched, matched_too: too, lead })
        };
        let phase = match (rules.begin.len(), rules.end.len()) {
            (_, 0) => Phase::Answer,
            (begin, end) if rules.begun > 0 && rules.begun < end => {
                inside(rules.begun, (begin > 0).then_some(0))
            }
            (0, _) => inside(0, None),
            (_, _) => Phase::Opening(0),
        };
        Self { rules, phase }
    }

    pub(super) fn allows(&self) -> Allows {
        let ReasoningRules { end, max_tokens, symbols, .. } = &*self.rules;
        let next = |matched| match end.next(matched, symbols) {
            Some(token) => Allows::Only(token),
            None => Allows::Reasoning, // which was checked
        };
        match self.phase {
            Phase::Opening(0) => Allows::AnswerOrOpening,
            Phase::Opening(_) => Allows::Opening,
            Phase::Inside(Inside { used, matched, .. })
                if max_tokens.is_some_and(|most| used >= most) || end.is_certain(matched) =>
            {
                next(matched)
            }
            Phase::Inside(_) => Allows::Reasoning,
            Phase::Answer => Allows::Answer,
        }
    }

    /// Tokens that go on with the first marker.
    pub(super) fn opening(&self) -> Vec<u32> {
        match self.phase {
            Phase::Opening(matched) => self.rules.symbols.beginning(self.rules.begin.rest(matched)),
            Phase::Inside(_) | Phase::Answer => Vec::new(),
        }
    }

    /// The first marker has begun with what is no text: it is one.
    pub(super) fn is_certain(&self) -> bool {
        let begun = match self.phase {
            Phase::Opening(matched) => &self.rules.begin.rest(0)[..matched],
            Phase::Inside(_) | Phase::Answer => return false,
        };
        begun.iter().any(|symbol| matches!(symbol, Symbol::Token(_)))
    }

    /// Nothing was said, or what may be the first marker.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.phase, Phase::Opening(_))
    }

    /// What was said may be the first marker, or an answer.
    pub(super) fn is_undecided(&self) -> bool {
        matches!(self.phase, Phase::Opening(matched) if matched > 0) && !self.is_certain()
    }

    /// Tokens that would end the reasoning and begin the answer at once.
    pub(super) fn passing(&self) -> impl Iterator<Item = u32> + '_ {
        let matched = match self.phase {
            Phase::Inside(inside) => Some(inside.matched),
            Phase::Opening(_) | Phase::Answer => None,
        };
        let ReasoningRules { end, symbols, .. } = &*self.rules;
        matched.into_iter().flat_map(|matched| end.passed_by(matched, symbols))
    }

    pub(super) fn is_passing(&self, token: u32) -> bool {
        let ReasoningRules { end, symbols, .. } = &*self.rules;
        match self.phase {
            Phase::Inside(inside) => end.is_passed_by(token, inside.matched, symbols),
            Phase::Opening(_) | Phase::Answer => false,
        }
    }

    /// The answer has this token more. Returns whether the token is of the answer itself, and so for its grammar.
    pub(super) fn take(&mut self, token: u32) -> bool {
        let rules = Arc::clone(&self.rules);
        let mut text = rules.symbols.of(token);
        match self.phase {
            Phase::Opening(mut matched) => {
                for symbol in text.by_ref() {
                    if rules.begin.rest(matched).first() != Some(&symbol) {
                        self.phase = Phase::Answer;
                        return true;
                    }
                    matched += 1;
                    if matched == rules.begin.len() {
                        break;
                    }
                }
                self.phase = Phase::Opening(matched);
                if matched == rules.begin.len() {
                    let inside = Inside { used: 0, matched: 0, matched_too: 0, lead: None };
                    self.phase = rules.inside(inside, text);
                }
                false
            }
            Phase::Inside(inside) => {
                let lead = inside.lead.and_then(|lead| rules.leads(lead, token));
                let counts = u32::from(lead.is_none());
                let inside = Inside {
                    used: inside.used.saturating_add(counts),
                    lead: lead.filter(|lead| *lead < rules.begin.len()),
                    ..inside
                };
                self.phase = rules.inside(inside, text);
                false
            }
            Phase::Answer => true,
        }
    }
}

impl ReasoningRules {
    /// Behind these symbols more.
    fn inside(&self, mut inside: Inside, text: impl Iterator<Item = Symbol>) -> Phase {
        for symbol in text {
            inside.matched = self.end.after(inside.matched, symbol);
            inside.matched_too = self.ends_too.after(inside.matched_too, symbol);
            let too = self.ends_too.len() > 0 && inside.matched_too == self.ends_too.len();
            if too || inside.matched == self.end.len() {
                return Phase::Answer;
            }
        }
        Phase::Inside(inside)
    }

    /// How much of the first marker there is with this token more, if it goes on with it.
    fn leads(&self, lead: usize, token: u32) -> Option<usize> {
        let text: Vec<Symbol> = self.symbols.of(token).collect();
        self.begin.rest(lead).starts_with(&text).then_some(lead + text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(begin: &[u32], end: &[u32], max_tokens: Option<u32>) -> ReasoningState {
        let reasoning =
            Reasoning { begin: begin.into(), end: end.into(), max_tokens, ..Reasoning::default() };
        ReasoningState::new(Arc::new(ReasoningRules::new(&reasoning, None).unwrap()))
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
        assert_eq!((before.allows(), before.opening()), (Allows::AnswerOrOpening, vec![5]));
        let mut begun = before.clone();
        assert!(!begun.take(5) && begun.is_certain());
        assert_eq!((begun.allows(), begun.opening()), (Allows::Opening, vec![6]));
        assert_eq!(after(before.clone(), &[5, 6]), Allows::Reasoning);
        assert_eq!(after(before.clone(), &[5, 6, 1]), Allows::Only(7));
        assert_eq!(after(before, &[1, 5, 6]), Allows::Answer);
    }
}
