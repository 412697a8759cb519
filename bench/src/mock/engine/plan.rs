//! Which sequences get how much of the next step.

use headrace_router::core::frame::StepCost;

use super::Engine;
use super::admission::chunk;
use super::sequence::{Sequence, Work};

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
        let preemptions = self.preemptions;
        let rows = self.plan_decodes();
        let spare = self.config.capacity.batched_tokens.saturating_sub(rows);
        let mut left = spare.div_ceil(self.config.token_scale);
        let prefills = self.running.iter().filter(|sequence| sequence.in_prefill);
        let mut prompts: Vec<u64> = prefills.map(|sequence| sequence.arrival).collect();
        for (behind, arrival) in (0..prompts.len()).rev().zip(&prompts) {
            let contested = behind > 0 || !self.waiting.is_empty();
            let sequence = self.running_at(*arrival);
            let count = chunk(sequence.remaining(), left, contested);
            sequence.work = (count > 0).then_some(Work::Prefill(count));
            left -= count;
        }
        if preemptions == self.preemptions {
            left = self.admit(left, &mut prompts); // else what just lost its row would come straight back
        }
        for arrival in prompts {
            // what nobody else wanted
            let sequence = self.running_at(arrival);
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
        let (mut rows, mut place) = (0, 0);
        while let Some(sequence) = self.running.get_mut(place) {
            if sequence.in_prefill {
                place += 1;
                continue;
            }
            let new = sequence.next_tokens(self.config.accepted);
            let tokens = sequence.computed.max((sequence.total() + new).saturating_sub(1));
            if !self.make_room(place, tokens) {
                break; // it was the last one
            }
            self.running[place].work = Some(Work::Decode(new));
            rows += 1;
            place += 1;
        }
        rows
    }
}
