//! Where an answer stands in its grammar, and in the reasoning before it.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;

use super::compile::GrammarError;
use super::memory::{Meter, Share, bytes_of_answer};
use super::reasoning::{Allows, ReasoningRules, ReasoningState};

/// Most work of one mask, in units of some 70 ns: what its bounds leave to a lexer and a parser, and a walk over all tokens.
pub const MASK_WORK: u64 = 300_000;

/// Work of a mask apart from what is counted.
const WORK_OF_MASK: u64 = 100;

/// Nodes of the trie of tokens that are walked in a unit of work. A guess.
const NODES_OF_WORK: u64 = 16;

/// Tokens that an answer takes at a time where many came at once, and the work of one. The first is a guess, as is the second:
/// a parser goes through some bytes.
const PORTION: usize = 64;
pub(super) const WORK_OF_TOKEN: u64 = 30;

/// Why an answer failed that gave way.
const OVER_MEMORY: &str = "all grammars in use have grown to the memory that they may have, and this one is the largest; use a grammar with fewer and shorter patterns";

/// What became of the masks of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masked {
    /// They are there.
    Filled,
    /// They are not: there was more to do than may be done now. A later step goes on from here.
    PutOff,
}

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
    /// Tokens of the answer that are still to be taken, from `behind_at` on.
    behind: Vec<u32>,
    behind_at: usize,
    /// A bound was met behind a draft: none is looked at any more, so that the way back is gone once at most.
    no_drafts: bool,
    meter: Option<Arc<Meter>>,
    share: Option<Share>,
    /// Items in a row of the parser, of late.
    items_in_row: u64,
    over_memory: bool,
    undecided: Undecided,
}

/// What the grammar knows of an answer that began like the first marker of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undecided {
    /// Nothing of the kind.
    Nothing,
    /// It took all of it, too.
    Follows,
    /// It allows no such answer: this is reasoning.
    Lost,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("failed", &self.failed).finish_non_exhaustive()
    }
}

impl Follower {
    pub(super) fn new(start: Arc<Mutex<Matcher>>, ends: Arc<[u32]>, meter: Arc<Meter>) -> Self {
        let share = Share::new(Arc::clone(meter.memory()));
        share.set(bytes_of_answer(0, 0));
        Self {
            matcher: Some(fresh(&start)),
            start: Some(start),
            ends,
            meter: Some(meter),
            share: Some(share),
            ..Self::free()
        }
    }

    /// Of an answer that follows no grammar.
    #[must_use]
    pub fn free() -> Self {
        Self {
            matcher: None,
            start: None,
            given: Vec::new(),
            ends: Arc::default(),
            gate: None,
            failed: false,
            behind: Vec::new(),
            behind_at: 0,
            no_drafts: false,
            meter: None,
            share: None,
            items_in_row: 0,
            over_memory: false,
            undecided: Undecided::Nothing,
        }
    }

    /// The answer has no token yet, and reasons before it follows its grammar.
    #[must_use]
    pub fn reasoning(self, rules: Arc<ReasoningRules>) -> Self {
        Self { gate: Some(ReasoningState::new(rules)), ..self }
    }

    /// The answer has these tokens more. Returns whether it is complete: nothing but its end may follow.
    ///
    /// A token that the grammar does not allow, or a bound that was passed, leaves an answer that nothing may follow.
    pub fn advance(&mut self, tokens: &[u32]) -> bool {
        if self.is_behind() {
            self.behind.extend_from_slice(tokens); // it takes them in order
            return false;
        }
        self.take(tokens)
    }

    /// The same of tokens that may be many: they are taken in portions, before the next masks are filled.
    pub fn advance_later(&mut self, tokens: Vec<u32>) {
        if self.is_behind() {
            self.behind.extend_from_slice(&tokens);
        } else {
            (self.behind, self.behind_at) = (tokens, 0);
        }
    }

    fn is_behind(&self) -> bool {
        self.behind_at < self.behind.len()
    }

    /// Takes some of the tokens that came at once. Returns the work of that.
    fn catch_up(&mut self) -> u64 {
        let behind = std::mem::take(&mut self.behind);
        let stop = (self.behind_at + PORTION).min(behind.len());
        self.take(&behind[self.behind_at..stop]);
        let work = WORK_OF_TOKEN * (stop - self.behind_at) as u64;
        if stop < behind.len() {
            (self.behind, self.behind_at) = (behind, stop);
        } else {
            self.behind_at = 0;
        }
        work
    }

    fn take(&mut self, tokens: &[u32]) -> bool {
        if self.finished() || self.failed {
            return self.finished();
        }
        let mut reasoned = 0;
        if let Some(mut gate) = self.gate.take() {
            let mut of_answer = |token: &u32| self.is_of_answer(&mut gate, *token);
            reasoned = tokens.iter().position(&mut of_answer).unwrap_or(tokens.len());
            self.gate = Some(gate);
        }
        // a gate that is open stays so
        if let Some(matcher) = &mut self.matcher {
            let lost = self.undecided == Undecided::Lost && reasoned < tokens.len();
            self.failed = lost || matcher.consume_tokens(&tokens[reasoned..]).is_err();
            self.given.extend_from_slice(&tokens[reasoned..]);
        }
        self.finished()
    }

    /// Whether a token is of the answer for certain. As long as that is open, the grammar takes it as well.
    fn is_of_answer(&mut self, gate: &mut ReasoningState, token: u32) -> bool {
        let of_answer = gate.take(token);
        let Some(matcher) = &mut self.matcher else { return of_answer };
        if gate.is_undecided() {
            let follows = self.undecided != Undecided::Lost
                && matches!(matcher.validate_tokens(&[token]), Ok(1))
                && matcher.consume_token(token).is_ok();
            self.undecided = if follows { Undecided::Follows } else { Undecided::Lost };
            self.given.extend(follows.then_some(token));
        } else if !of_answer && self.undecided != Undecided::Nothing {
            // it was reasoning: the grammar begins anew behind it
            self.matcher = self.start.as_ref().map(|start| fresh(start));
            self.given.clear();
            self.undecided = Undecided::Nothing;
        }
        of_answer
    }

    /// Nothing but its end may follow.
    #[must_use]
    pub fn finished(&self) -> bool {
        let stopped = self
            .matcher
            .as_ref()
            .is_some_and(|matcher| !matcher.is_error() && matcher.is_stopped());
        !self.failed && !self.is_behind() && stopped && self.answers()
    }

    /// What its grammar and it hold in memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let grammar = self.meter.as_ref().map_or(0, |meter| meter.bytes());
        grammar + self.share.as_ref().map_or(0, Share::bytes)
    }

    /// All grammars of its vocabulary hold more than they may.
    #[must_use]
    pub fn is_memory_exhausted(&self) -> bool {
        self.meter.as_ref().is_some_and(|meter| meter.memory().is_exhausted())
    }

    /// It gives its memory back, and fails.
    pub fn give_way(&mut self) {
        let (gate, ends) = (self.gate.take(), Arc::clone(&self.ends));
        *self = Self { gate, ends, failed: true, over_memory: true, ..Self::free() };
    }

    /// Any reasoning is over.
    fn answers(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.allows() == Allows::Answer)
    }

    /// Why nothing may follow, where that is not because the answer is complete.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        if self.over_memory {
            return Some(OVER_MEMORY.to_owned());
        }
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
    ///
    /// `spend` is told of work that was done, and says whether more may be. Where not, drafts are not looked at, and an answer
    /// that had to take many tokens first is put off.
    pub fn fill_masks(
        &mut self,
        drafts: &[u32],
        masks: &mut [u32],
        dead: &mut [bool],
        spend: &mut dyn FnMut(u64) -> bool,
    ) -> Masked {
        let words = masks.len() / (drafts.len() + 1);
        debug_assert_eq!(dead.len(), drafts.len() + 1);
        masks.fill(u32::MAX);
        dead.fill(false);
        while self.is_behind() {
            let work = self.catch_up();
            if !spend(work) {
                return self.put_off(dead);
            }
        }
        if self.failed || self.finished() {
            dead.fill(true);
            return Masked::Filled;
        }
        let mut gate = self.gate.clone();
        let (mut taken, mut dead_behind) = (0, None);
        let rows = masks.chunks_exact_mut(words).zip(dead.iter_mut());
        for (place, (row, dead)) in rows.enumerate() {
            let (may_go_on, work) = self.fill(row, gate.as_ref());
            let more = spend(work);
            if !may_go_on {
                *dead = true; // the draft before it ends the answer, or a bound was met
                let complete = |it: &Matcher| it.is_stopped() && !it.is_error();
                if self.matcher.as_ref().is_some_and(complete) {
                    break;
                }
                if place == 0 {
                    self.failed = true;
                    return Masked::Filled;
                }
                dead_behind = Some(0);
                break;
            }
            let Some(draft) = drafts.get(place) else { break };
            if !bit(row, *draft) {
                break;
            }
            // one may be of reasoning and of the grammar
            let opening = gate.as_ref().is_some_and(ReasoningState::is_opening);
            if !more || self.no_drafts || (opening && self.matcher.is_some()) {
                dead_behind = Some(place + 1);
                break;
            }
            let of_answer = gate.as_mut().is_none_or(|gate| gate.take(*draft));
            if let Some(matcher) = self.matcher.as_mut().filter(|_| of_answer) {
                if matcher.consume_token(*draft).is_err() {
                    dead_behind = Some(0);
                    break;
                }
                taken += 1;
            }
        }
        if dead_behind == Some(0) {
            // The way back is that of all its tokens, which a later step begins with.
            self.begin_again();
            return self.put_off(dead);
        }
        if let Some(first) = dead_behind {
            dead[first..].fill(true);
        }
        if self.matcher.as_mut().is_some_and(|matcher| matcher.rollback(taken).is_err()) {
            self.begin_again();
            return self.put_off(dead);
        }
        self.share_memory();
        Masked::Filled
    }

    fn put_off(&mut self, dead: &mut [bool]) -> Masked {
        dead.fill(true);
        self.share_memory();
        Masked::PutOff
    }

    fn share_memory(&self) {
        if let Some(share) = &self.share {
            share.set(bytes_of_answer(self.given.len() + self.behind.len(), self.items_in_row));
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

    /// The answer takes all its tokens again, from its beginning.
    fn begin_again(&mut self) {
        let Some(start) = &self.start else { return };
        debug_assert!(!self.is_behind(), "who is behind looks at no draft");
        self.matcher = Some(fresh(start));
        self.no_drafts = true;
        (self.behind, self.behind_at) = (std::mem::take(&mut self.given), 0);
    }

    /// How many of these tokens may follow, one after the other. They are not taken.
    pub fn count_allowed(&mut self, tokens: &[u32]) -> usize {
        if self.failed || self.finished() || self.is_behind() || self.no_drafts {
            return 0;
        }
        let opening = self.gate.as_ref().is_some_and(ReasoningState::is_opening);
        let most = if opening && self.matcher.is_some() { 1 } else { tokens.len() };
        let tokens = &tokens[..most.min(tokens.len())];
        let mut gate = self.gate.clone();
        for (place, token) in tokens.iter().enumerate() {
            let Some(state) = &mut gate else {
                return place + self.count_of_grammar(&tokens[place..]);
            };
            let free = self.matcher.is_none();
            let may = match state.allows() {
                Allows::Reasoning => {
                    free || !(self.ends.contains(token) || state.is_passing(*token))
                }
                Allows::Only(other) => *token == other,
                Allows::Opening | Allows::AnswerOrOpening
                    if state.opening().contains(token) || (free && !state.is_certain()) =>
                {
                    true
                }
                Allows::Opening if state.is_certain() || self.undecided == Undecided::Lost => false,
                Allows::Opening | Allows::AnswerOrOpening | Allows::Answer => {
                    return place + self.count_of_grammar(&tokens[place..]);
                }
            };
            if !may {
                return place;
            }
            state.take(*token);
        }
        tokens.len()
    }
}

impl Follower {
    /// What may be chosen at one place, in a row that allows everything. False where that is nothing. And the work of it.
    fn fill(&mut self, row: &mut [u32], gate: Option<&ReasoningState>) -> (bool, u64) {
        let allows = gate.map_or(Allows::Answer, ReasoningState::allows);
        let opening = || gate.map(ReasoningState::opening).unwrap_or_default();
        match (allows, self.matcher.as_mut()) {
            (Allows::Reasoning, Some(_)) => {
                let passing = gate.into_iter().flat_map(ReasoningState::passing);
                for token in self.ends.iter().copied().chain(passing) {
                    row[token as usize / 32] &= !(1 << (token % 32));
                }
            }
            (Allows::Only(token), _) => {
                row.fill(0);
                allow(row, &[token]);
            }
            (Allows::Opening, matcher)
                if self.undecided == Undecided::Lost
                    || gate.is_some_and(ReasoningState::is_certain)
                    || matcher.as_ref().is_some_and(|matcher| matcher.is_stopped()) =>
            {
                row.fill(0);
                allow(row, &opening());
            }
            (Allows::Answer | Allows::Opening | Allows::AnswerOrOpening, Some(matcher)) => {
                if matcher.is_stopped() {
                    return (false, WORK_OF_MASK);
                }
                let before = self.meter.as_ref().map_or(0, |meter| meter.note());
                let mask = matcher.compute_mask();
                let after = self.meter.as_ref().map_or(0, |meter| meter.note());
                let Ok(mask) = mask else { return (false, MASK_WORK) };
                let mut work = WORK_OF_MASK + after.saturating_sub(before);
                if let Ok(stats) = matcher.last_step_stats() {
                    let items = stats.all_items as u64;
                    work += items + stats.trie_nodes_walked as u64 / NODES_OF_WORK;
                    self.items_in_row = items.checked_div(stats.rows as u64).unwrap_or(0);
                }
                let words = row.len();
                row.copy_from_slice(&mask.as_slice()[..words]);
                if allows != Allows::Answer {
                    allow(row, &opening());
                }
                return (true, work);
            }
            (
                Allows::Reasoning | Allows::Answer | Allows::Opening | Allows::AnswerOrOpening,
                None,
            ) => {}
        }
        (true, WORK_OF_MASK)
    }
}

fn allow(row: &mut [u32], tokens: &[u32]) {
    for token in tokens {
        row[*token as usize / 32] |= 1 << (token % 32);
    }
}

fn bit(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| (word >> (token % 32)) & 1 == 1)
}

fn fresh(start: &Mutex<Matcher>) -> Matcher {
    start.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
