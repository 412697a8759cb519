//! Which sequences get how much of the next step.

use headrace_router::core::frame::StepCost;

use super::sequence::{Sequence, Stage, Work};
use super::{Engine, Export, Pull};

/// Waiting sequences passed over in one step because their prefix is being computed; as in
/// `headrace.engine.scheduler`.
const LOOK_PAST: usize = 64;

/// What a step does, as its cost and its frame count it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) prefill_tokens: u32,
    pub(super) prefill_context: u64,
    pub(super) decode_rows: u32,
    pub(super) kv_tokens: u64,
    pub(super) drafted: u32,
}

impl Counts {
    pub(super) fn ms(&self, cost: &StepCost) -> f64 {
        cost.fixed_ms
            + cost.prefill_ms * f64::from(self.prefill_tokens)
            + cost.context_ms * self.prefill_context as f64
            + cost.row_ms * f64::from(self.decode_rows)
            + cost.kv_ms * self.kv_tokens as f64
    }

    /// No sequence takes part.
    pub(super) fn is_nothing(&self) -> bool {
        self.prefill_tokens == 0 && self.decode_rows == 0
    }

    fn add(&mut self, sequence: &Sequence, drafts: u32) {
        match sequence.work {
            None => {}
            Some(Work::Prefill(count)) => {
                let (start, n) = (u64::from(sequence.computed), u64::from(count));
                self.prefill_tokens += count;
                self.prefill_context += n * start + n * (n - 1) / 2;
                self.kv_tokens += start + n;
            }
            Some(Work::Decode(new)) => {
                self.decode_rows += 1;
                self.drafted += drafts.max(new.saturating_sub(1));
                self.kv_tokens += u64::from(sequence.total());
            }
        }
    }
}

impl Engine {
    /// Gives every sequence its work and all blocks for it.
    pub(super) fn plan(&mut self) -> Counts {
        let rows = self.plan_decodes();
        let spare = self.config.capacity.batched_tokens.saturating_sub(rows);
        let budget = spare.div_ceil(self.config.token_scale);
        let mut order: Vec<_> = (0..self.running.len()).collect();
        order.retain(|place| self.running[*place].in_prefill);
        let mut left = budget;
        for (behind, place) in (0..order.len()).rev().zip(&order) {
            let contested = behind > 0 || !self.waiting.is_empty();
            let sequence = &mut self.running[*place];
            let count = chunk(sequence.remaining(), left, contested);
            sequence.work = (count > 0).then_some(Work::Prefill(count));
            left -= count;
        }
        let first_new = self.running.len();
        left = self.admit(left);
        order.extend(first_new..self.running.len());
        for place in order {
            // what nobody else wanted
            let sequence = &mut self.running[place];
            if let Some(Work::Prefill(count)) = sequence.work {
                let more = sequence.remaining().min(count + left);
                sequence.work = Some(Work::Prefill(more));
                left -= more - count;
            }
        }
        let drafts = self.drafts();
        let mut counts = Counts::default();
        for sequence in &self.running {
            counts.add(sequence, drafts);
        }
        counts
    }

    /// Tokens that a row drafts in a step.
    pub(super) fn drafts(&self) -> u32 {
        (self.config.accepted.ceil() as u32).saturating_sub(1)
    }

    fn plan_decodes(&mut self) -> u32 {
        let mut rows = 0;
        for sequence in &mut self.running {
            if sequence.in_prefill {
                continue;
            }
            let new = sequence.next_tokens(self.config.accepted);
            let tokens = sequence.computed.max((sequence.total() + new).saturating_sub(1));
            while sequence.blocks.len() < tokens.div_ceil(self.config.block_tokens) as usize {
                let block = self.pool.allocate().expect("admission kept room for it");
                sequence.blocks.push(block);
            }
            sequence.work = Some(Work::Decode(new));
            rows += 1;
        }
        rows
    }

    /// Lets waiting sequences run while batch rows, budget and pool last, and gives those their blocks whose prompts come from
    /// elsewhere; returns the rest of the budget.
    fn admit(&mut self, mut budget: u32) -> u32 {
        let block_tokens = self.config.block_tokens;
        let holders = self.running.iter().chain(self.arrivals());
        let mut reserved: u32 = holders.map(|sequence| to_come(sequence, block_tokens)).sum();
        let mut rows_free = self.config.capacity.sequences as usize;
        rows_free = rows_free.saturating_sub(self.running.len() + self.arrivals().count());
        let mut place = 0;
        while rows_free > 0 && place < self.waiting.len().min(LOOK_PAST) {
            let sequence = &self.waiting[place];
            let arrives = sequence.stage == Stage::Reserves;
            if budget == 0 && !arrives {
                place += 1; // the next step has a budget again
                continue;
            }
            let keys = &sequence.leg.keys[..sequence.creditable(block_tokens)];
            let shared = self.pool.find(keys);
            let next = keys.get(shared.len()).filter(|_| !arrives);
            if next.is_some_and(|next| self.computing.contains_key(next)) {
                place += 1; // a running prompt is about to publish the next block: share it then
                continue;
            }
            let held = u32::try_from(shared.len()).expect("at most the pool");
            let most = sequence.most_computed().div_ceil(block_tokens);
            let needed = most - held + self.pool.unreferenced(&shared);
            if needed + reserved > self.pool.available() {
                break; // a smaller one behind it must not starve it
            }
            let mut sequence = self.waiting.remove(place).expect("place is below its length");
            self.start(&mut sequence, &shared);
            reserved += to_come(&sequence, block_tokens);
            rows_free -= 1;
            if arrives {
                self.parked.push(sequence);
                continue;
            }
            let count = chunk(sequence.remaining(), budget, place < self.waiting.len());
            budget -= count;
            sequence.work = Some(Work::Prefill(count));
            self.running.push(sequence);
        }
        budget
    }

    /// Takes the shared blocks and new ones for the rest of the prompt.
    fn start(&mut self, sequence: &mut Sequence, shared: &[u32]) {
        self.no_longer_waiting(sequence);
        for block in shared {
            self.pool.share(*block);
        }
        sequence.blocks.extend_from_slice(shared);
        sequence.published = u32::try_from(shared.len()).expect("at most the pool");
        sequence.computed = sequence.published * self.config.block_tokens;
        sequence.cached_tokens = sequence.computed;
        let arrives = sequence.stage == Stage::Reserves;
        let tokens = if arrives { sequence.leg.prompt_tokens } else { sequence.total() };
        for _ in sequence.published..tokens.div_ceil(self.config.block_tokens) {
            sequence.blocks.push(self.pool.allocate().expect("the caller counted"));
        }
        let (request, prompt_tokens) = (sequence.leg.request, sequence.leg.prompt_tokens);
        if arrives {
            sequence.stage = Stage::Arrives;
            let (held, ticket) = (sequence.computed, std::mem::take(&mut sequence.ticket));
            self.pulls.push(Pull { request, prompt_tokens, held, ticket });
            return;
        }
        self.is_awaited_from_now(sequence);
        if let Some(lease_ms) = sequence.leg.kv_transfer {
            let computed = sequence.computed;
            self.exports.push(Export { request, prompt_tokens, computed, lease_ms });
        }
    }
}

/// Blocks that a running sequence may still ask for.
fn to_come(sequence: &Sequence, block_tokens: u32) -> u32 {
    let held = u32::try_from(sequence.blocks.len()).expect("at most the pool");
    sequence.most_computed().div_ceil(block_tokens).saturating_sub(held)
}

/// A prompt that does not fit takes at most half of the budget while others wait.
fn chunk(wanted: u32, budget: u32, contested: bool) -> u32 {
    if wanted <= budget || !contested { wanted.min(budget) } else { budget.div_ceil(2) }
}
