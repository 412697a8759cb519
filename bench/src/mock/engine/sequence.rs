//! One request inside a mock engine.

use headrace_router::core::frame::Finish;

use super::{Leg, mix};

/// A request that waits, runs or is handed over. Counts are in wire tokens; `computed <= total()` always holds.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) leg: Leg,
    /// Counts up; it orders all of them.
    pub(super) arrival: u64,
    pub(super) stage: Stage,
    /// The most tokens that it may become, prompt and answer together.
    pub(super) limit: u32,
    /// Held, in sequence order.
    pub(super) blocks: Vec<u32>,
    /// Leading blocks that have a key.
    pub(super) published: u32,
    /// Tokens whose KV is in the cache.
    pub(super) computed: u32,
    pub(super) generated: u32,
    /// Prompt tokens that came from the cache, once it was admitted.
    pub(super) cached_tokens: Option<u32>,
    /// Its part of the step that runs.
    pub(super) work: Option<Work>,
    /// Tokens that its row earned and did not give yet; below 1 between steps.
    pub(super) credit: f64,
    /// Some of its tokens have to be computed before the next one can be chosen.
    pub(super) in_prefill: bool,
    /// Its first output was sent.
    pub(super) has_spoken: bool,
    /// Those who ask for the same prompt may wait for its blocks.
    pub(super) is_awaited: bool,
    /// The other worker's part is over and the answer may go on.
    pub(super) continues: bool,
    /// With which its prompt is pulled.
    pub(super) ticket: Vec<u8>,
    /// Steps in which it waited for the first token of a scripted answer.
    pub(super) waited: u32,
    /// Keys of the full blocks that hold tokens of the answer.
    answer_keys: Vec<u64>,
}

/// Where a request stands that is served by two workers; one that is not is always in the first stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It waits or runs here.
    Own,
    /// Its prompt is computed elsewhere, where it was not admitted yet. Holds nothing.
    NoTicket,
    /// It waits for room for its prompt, which will come from elsewhere.
    Reserves,
    /// Its prompt is on its way into its blocks.
    Arrives,
    /// Its prompt is there.
    Arrived,
    /// Its prompt will not come.
    Lost,
    /// Its first token is out, and its blocks wait to be pulled.
    Pinned,
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
    pub(super) fn new(leg: Leg, arrival: u64, room: u32, block_tokens: u32) -> Self {
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
            stage: if leg.arrives.is_some() { Stage::NoTicket } else { Stage::Own },
            leg,
            arrival,
            limit,
            blocks: Vec::new(),
            published: 0,
            computed: 0,
            generated: 0,
            cached_tokens: None,
            work: None,
            credit,
            in_prefill: true,
            has_spoken: false,
            is_awaited: false,
            continues: false,
            ticket: Vec::new(),
            waited: 0,
            answer_keys,
        }
    }

    /// Tokens so far, prompt and answer together.
    pub(super) fn total(&self) -> u32 {
        self.leg.prompt_tokens + self.generated
    }

    /// It ends with this many tokens, by itself or at its limit.
    pub(super) fn end(&self) -> u32 {
        let answer = self.leg.ends_after.unwrap_or(u32::MAX);
        self.limit.min(self.leg.prompt_tokens.saturating_add(answer))
    }

    /// Why it ends there.
    pub(super) fn finish(&self) -> Finish {
        if self.end() < self.limit { Finish::Stop } else { Finish::Length }
    }

    /// Tokens to compute before the next one can be chosen.
    pub(super) fn remaining(&self) -> u32 {
        self.total() - self.computed
    }

    /// It gave its blocks back: its tokens, those of the answer too, are a prompt now.
    pub(super) fn gave_way(&mut self) {
        self.blocks.clear();
        (self.published, self.computed) = (0, 0);
        (self.in_prefill, self.is_awaited, self.work) = (true, false, None);
    }

    /// Leading blocks that the cache may give: where it has to choose a token from its prompt, the block of the last one
    /// is computed always. One whose prompt arrives chooses nothing from it. A prompt that is scored is computed whole.
    pub(super) fn creditable(&self, block_tokens: u32) -> usize {
        let pools_all = self.leg.pooled.as_ref().is_some_and(|pooled| pooled.wants_all);
        if pools_all {
            return 0;
        }
        if self.leg.scores.needs_prompt() && self.leg.resumed == 0 && self.stage == Stage::Own {
            return 0;
        }
        let tokens = match self.stage {
            Stage::Reserves => self.leg.prompt_tokens,
            Stage::Own
            | Stage::NoTicket
            | Stage::Arrives
            | Stage::Arrived
            | Stage::Lost
            | Stage::Pinned => self.total() - 1,
        };
        (tokens / block_tokens) as usize
    }

    /// Key of a full block. Those of an answer are made up: nobody else's prompt contains them.
    pub(super) fn key(&self, place: u32) -> u64 {
        let place = place as usize;
        match self.leg.keys.get(place) {
            Some(key) => *key,
            None => self.answer_keys[place - self.leg.keys.len()],
        }
    }

    /// Keys of the prompt's blocks that others wait for.
    pub(super) fn to_publish(&self) -> &[u64] {
        let published = (self.published as usize).min(self.leg.keys.len());
        if self.is_awaited { &self.leg.keys[published..] } else { &[] }
    }

    /// The cached tokens that it admits to, `lie` being the share of its prompt that it adds.
    pub(super) fn claim(&self, lie: f64) -> u32 {
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        if lie == 0.0 {
            return cached_tokens;
        }
        let prompt = f64::from(self.leg.prompt_tokens);
        (f64::from(cached_tokens) + prompt * lie).clamp(0.0, prompt - 1.0) as u32
    }

    /// Tokens that it gets from the next step, where a row has `accepted` of them in the mean.
    pub(super) fn next_tokens(&mut self, accepted: f64) -> u32 {
        let whole = if let Some(answer) = &self.leg.scripted {
            let given = self.generated + self.leg.resumed;
            answer.portion(self.leg.seed, given, self.waited)
        } else {
            self.credit += accepted;
            let whole = self.credit.floor();
            self.credit -= whole;
            whole as u32
        };
        whole.min(self.end() - self.total())
    }

    /// Does the work of a step; says how many tokens are new.
    pub(super) fn advance(&mut self, work: Work) -> u32 {
        let new = match work {
            Work::Prefill(count) => {
                self.computed += count;
                self.in_prefill = self.remaining() > 0;
                // a scripted answer begins with the next step, however many tokens that gives
                u32::from(!self.in_prefill && self.leg.scripted.is_none())
            }
            Work::Decode(count) => {
                self.waited += u32::from(count == 0);
                self.computed = self.computed.max((self.total() + count).saturating_sub(1));
                count
            }
        };
        self.generated += new;
        new
    }
}
