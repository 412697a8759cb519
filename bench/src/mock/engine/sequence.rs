//! One request inside a mock engine.

use super::{Leg, mix};

/// A request that waits or runs. Counts are in wire tokens; `computed <= total()` always holds.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) leg: Leg,
    /// It ends with this many tokens, prompt and answer together.
    pub(super) limit: u32,
    /// Held, in sequence order.
    pub(super) blocks: Vec<u32>,
    /// Leading blocks that have a key.
    pub(super) published: u32,
    /// Tokens whose KV is in the cache.
    pub(super) computed: u32,
    pub(super) generated: u32,
    /// Prompt tokens that came from the cache.
    pub(super) cached_tokens: u32,
    /// Its part of the step that runs.
    pub(super) work: Option<Work>,
    /// Tokens that its row earned and did not give yet; below 1 between steps.
    pub(super) credit: f64,
    /// Keys of the full blocks that hold tokens of the answer.
    answer_keys: Vec<u64>,
}

/// What a step does for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Computes so many tokens of the prompt.
    Prefill(u32),
    /// Generates so many tokens.
    Decode(u32),
}

impl Sequence {
    /// Nothing of it is computed, and it fits into a pool of `room` tokens.
    pub(super) fn new(leg: Leg, room: u32, block_tokens: u32) -> Self {
        let limit = leg.prompt_tokens.saturating_add(leg.max_tokens).min(room);
        debug_assert_eq!(leg.keys.len(), (leg.prompt_tokens / block_tokens) as usize);
        // Rows that start together do not give their second tokens in the same step.
        let credit = mix(leg.request.0) as f64 / u64::MAX as f64 * 0.999;
        let full = limit.saturating_sub(1) / block_tokens;
        let prompt_keys = leg.keys.len();
        let mut answer_keys = Vec::new();
        let mut last = leg.keys.last().copied().unwrap_or_default();
        for place in prompt_keys..(full as usize) {
            last = mix(last ^ mix(leg.seed ^ mix(leg.request.0 ^ place as u64)));
            answer_keys.push(last);
        }
        Self {
            leg,
            limit,
            blocks: Vec::new(),
            published: 0,
            computed: 0,
            generated: 0,
            cached_tokens: 0,
            work: None,
            credit,
            answer_keys,
        }
    }

    /// Tokens so far, prompt and answer together.
    pub(super) fn total(&self) -> u32 {
        self.leg.prompt_tokens + self.generated
    }

    /// Tokens to compute before the next one can be chosen.
    pub(super) fn remaining(&self) -> u32 {
        self.total() - self.computed
    }

    /// True until its first token.
    pub(super) fn in_prefill(&self) -> bool {
        self.generated == 0
    }

    /// Key of a full block. Those of an answer are made up: nobody else's prompt contains them.
    pub(super) fn key(&self, place: u32) -> u64 {
        let place = place as usize;
        match self.leg.keys.get(place) {
            Some(key) => *key,
            None => self.answer_keys[place - self.leg.keys.len()],
        }
    }

    /// Keys of the prompt's blocks that are not published yet.
    pub(super) fn to_publish(&self) -> &[u64] {
        let published = (self.published as usize).min(self.leg.keys.len());
        if self.blocks.is_empty() { &[] } else { &self.leg.keys[published..] }
    }

    /// The cached tokens that it admits to, `lie` being the share of its prompt that it adds.
    pub(super) fn claim(&self, lie: f64) -> u32 {
        if lie == 0.0 {
            return self.cached_tokens;
        }
        let prompt = f64::from(self.leg.prompt_tokens);
        (f64::from(self.cached_tokens) + prompt * lie).clamp(0.0, prompt - 1.0) as u32
    }

    /// Does the work of a step; says how many tokens are new.
    pub(super) fn advance(&mut self, work: Work) -> u32 {
        let new = match work {
            Work::Prefill(count) => {
                self.computed += count;
                u32::from(self.remaining() == 0)
            }
            Work::Decode(count) => {
                self.computed += count;
                count
            }
        };
        self.generated += new;
        new
    }
}
