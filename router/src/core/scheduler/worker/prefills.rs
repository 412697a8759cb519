//! The prompts that a worker is to compute for this router, in its order. Decisions need sums over all of them, and thousands may
//! wait, so the sums are kept as the prompts change. Who leaves is looked for from the front, where first tokens come; all are
//! walked through once a step.

use std::collections::VecDeque;
use std::ops::{Add, Sub};
use std::sync::Arc;

use crate::core::frame::RequestId;
use crate::core::scheduler::legs::AwaitedLeg;

/// A prompt on its way through a worker.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) request: RequestId,
    pub(super) prompt_tokens: u32,
    /// Tokens still to be computed.
    pub(super) left: u32,
    /// Of them, those that the step that runs computes.
    pub(super) running: u32,
    /// A step that was reported computed some of it: it has all its blocks, and the worker counts them as used.
    pub(super) has_blocks: bool,
    /// The longest that its answer may become here.
    pub(super) max_tokens: f64,
    pub(super) keys: Arc<[u64]>,
    pub(super) awaits: Option<AwaitedLeg>,
    pub(super) yields: bool,
}

/// What some prompts amount to, in tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PrefillSums {
    pub(super) prompt_tokens: u64,
    pub(super) left: u64,
    pub(super) running: u64,
    /// Of `left`, those of prompts that have no blocks yet.
    pub(super) without_blocks: u64,
    /// Of `left`, those of prompts that make way for others.
    pub(super) yielding: u64,
    /// Positions of `left`, summed up.
    positions: u128,
}

impl PrefillSums {
    fn of(prefill: &Prefill) -> Self {
        let only_if = |holds: bool| if holds { prefill.left.into() } else { 0 };
        let left = u128::from(prefill.left);
        let computed = u128::from(prefill.prompt_tokens - prefill.left);
        Self {
            prompt_tokens: prefill.prompt_tokens.into(),
            left: prefill.left.into(),
            running: prefill.running.into(),
            without_blocks: only_if(!prefill.has_blocks),
            yielding: only_if(prefill.yields),
            positions: left * computed + left * left.saturating_sub(1) / 2,
        }
    }

    /// `change` of each and of what `other` has of it.
    fn with(self, other: &Self, change: fn(u64, u64) -> u64, wide: fn(u128, u128) -> u128) -> Self {
        Self {
            prompt_tokens: change(self.prompt_tokens, other.prompt_tokens),
            left: change(self.left, other.left),
            running: change(self.running, other.running),
            without_blocks: change(self.without_blocks, other.without_blocks),
            yielding: change(self.yielding, other.yielding),
            positions: wide(self.positions, other.positions),
        }
    }

    /// As [`context`](crate::core::cost::context) of all of them.
    pub(super) fn context(&self) -> f64 {
        self.positions as f64
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Prefills {
    prompts: VecDeque<Prefill>,
    sums: PrefillSums,
}

impl Prefills {
    pub(super) fn len(&self) -> usize {
        self.prompts.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Prefill> {
        self.prompts.iter()
    }

    pub(super) fn get(&self, i: usize) -> &Prefill {
        &self.prompts[i]
    }

    pub(super) fn find(&self, request: RequestId) -> Option<usize> {
        self.prompts.iter().position(|prefill| prefill.request == request)
    }

    pub(super) fn sums(&self) -> &PrefillSums {
        &self.sums
    }

    /// One more, behind all others.
    pub(super) fn push(&mut self, prefill: Prefill) {
        self.add(&PrefillSums::of(&prefill));
        self.prompts.push_back(prefill);
    }

    /// It is here no more, if it was.
    pub(super) fn remove(&mut self, request: RequestId) {
        if let Some(prefill) = self.find(request).and_then(|i| self.prompts.remove(i)) {
            self.take(&PrefillSums::of(&prefill));
        }
    }

    /// The step that runs computes so many tokens of this one.
    pub(super) fn run(&mut self, i: usize, tokens: u32) {
        self.change(i, |prefill| prefill.running = tokens);
    }

    /// Nothing is known of the step that runs.
    pub(super) fn step_ends(&mut self) {
        self.prompts.iter_mut().for_each(|prefill| prefill.running = 0);
        self.sums.running = 0;
    }

    /// A step computed so many tokens: those that it was thought to compute, as far as the number is right.
    pub(super) fn computed(&mut self, mut tokens: u32) {
        let planned = |prefill: &Prefill| prefill.running;
        let parts: [fn(&Prefill) -> u32; 2] = [planned, |prefill| prefill.left];
        for part in parts {
            for i in 0..self.prompts.len() {
                let done = part(&self.prompts[i]).min(tokens);
                if done > 0 {
                    self.change(i, |prefill| {
                        prefill.left -= done;
                        prefill.has_blocks = true;
                    });
                    tokens -= done;
                }
            }
        }
    }

    fn change(&mut self, i: usize, change: impl FnOnce(&mut Prefill)) {
        let before = PrefillSums::of(&self.prompts[i]);
        change(&mut self.prompts[i]);
        let after = PrefillSums::of(&self.prompts[i]);
        self.take(&before);
        self.add(&after);
    }

    fn add(&mut self, one: &PrefillSums) {
        self.sums = self.sums.with(one, Add::add, Add::add);
    }

    fn take(&mut self, one: &PrefillSums) {
        self.sums = self.sums.with(one, Sub::sub, Sub::sub);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Event {
        Push { prompt_tokens: u32, left: u32, yields: bool },
        Remove(u64),
        Run(usize, u32),
        Computed(u32),
        StepEnds,
    }

    fn event() -> impl Strategy<Value = Event> {
        let push = (1..5_000_u32, 0..5_000_u32, any::<bool>()).prop_map(
            |(prompt_tokens, left, yields)| Event::Push {
                prompt_tokens,
                left: left.min(prompt_tokens),
                yields,
            },
        );
        prop_oneof![
            3 => push,
            1 => (0..40_u64).prop_map(Event::Remove),
            2 => (0..8_usize, 0..3_000_u32).prop_map(|(i, tokens)| Event::Run(i, tokens)),
            2 => (0..6_000_u32).prop_map(Event::Computed),
            1 => Just(Event::StepEnds),
        ]
    }

    fn walked(prefills: &Prefills) -> PrefillSums {
        let mut sums = PrefillSums::default();
        for one in &prefills.prompts {
            sums.prompt_tokens += u64::from(one.prompt_tokens);
            sums.left += u64::from(one.left);
            sums.running += u64::from(one.running);
            sums.without_blocks += if one.has_blocks { 0 } else { u64::from(one.left) };
            sums.yielding += if one.yields { u64::from(one.left) } else { 0 };
            let computed = one.prompt_tokens - one.left;
            sums.positions += (computed..one.prompt_tokens).map(u128::from).sum::<u128>();
        }
        sums
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn sums_are_those_of_a_walk(events in prop::collection::vec(event(), 1..60)) {
            let mut prefills = Prefills::default();
            let mut pushed = 0;
            for event in events {
                match event {
                    Event::Push { prompt_tokens, left, yields } => {
                        prefills.push(Prefill {
                            request: RequestId(pushed),
                            prompt_tokens,
                            left,
                            running: 0,
                            has_blocks: false,
                            max_tokens: 9.0,
                            keys: Arc::default(),
                            awaits: None,
                            yields,
                        });
                        pushed += 1;
                    }
                    Event::Remove(request) => {
                        prefills.remove(RequestId(request));
                        prop_assert_eq!(prefills.find(RequestId(request)), None);
                    }
                    Event::Run(i, tokens) if i < prefills.len() => {
                        prefills.run(i, tokens.min(prefills.get(i).left));
                    }
                    Event::Run(..) => {}
                    Event::Computed(tokens) => {
                        let before = prefills.sums().left;
                        prefills.computed(tokens);
                        let done = u64::from(tokens).min(before);
                        prop_assert_eq!(prefills.sums().left, before - done);
                        prefills.step_ends();
                    }
                    Event::StepEnds => prefills.step_ends(),
                }
                prop_assert_eq!(*prefills.sums(), walked(&prefills));
            }
            prop_assert_eq!(prefills.sums().context(), walked(&prefills).positions as f64);
        }
    }
}
