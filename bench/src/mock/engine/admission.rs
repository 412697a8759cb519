//! Which waiting sequences get blocks and a batch row, and who gives them back: the rules of `engine/admission.py` and
//! `engine/stages.py`.

use std::borrow::Cow;

use super::sequence::{Sequence, Stage, Work};
use super::{Engine, Export, Pull};

/// Waiting sequences passed over in one step because their prefix is being computed.
const LOOK_PAST: usize = 64;
/// Of the newest answer in the mean length.
const ANSWER_WEIGHT: f64 = 1.0 / 16.0;

impl Engine {
    /// Lets waiting sequences run while batch rows, budget and pool last, and gives those their blocks whose prompts come from
    /// elsewhere; returns the rest of the budget. `prompts` gets those that begin.
    pub(super) fn admit(&mut self, mut budget: u32, prompts: &mut Vec<u64>) -> u32 {
        if self.waiting.is_empty() {
            return budget;
        }
        let block_tokens = self.config.block_tokens;
        let holders = self.running.iter().chain(self.arrivals());
        let mut to_come: u32 = holders.map(|sequence| self.to_come(sequence)).sum();
        let mut rows_free = self.config.capacity.sequences as usize;
        rows_free = rows_free.saturating_sub(self.running.len() + self.arrivals().count());
        let (mut place, mut passed) = (0, 0);
        while rows_free > 0 && place < self.waiting.len().min(LOOK_PAST) {
            let sequence = &self.waiting[place];
            let arrives = sequence.stage == Stage::Reserves;
            let keys = sequence.first_keys(sequence.creditable(block_tokens));
            let shared = self.pool.find(&keys);
            let next = keys.get(shared.len()).filter(|_| !arrives);
            if next.is_some_and(|next| self.computing.contains_key(next)) {
                place += 1; // a running prompt is about to publish the next block: share it then
                continue;
            }
            let held = u32::try_from(shared.len()).expect("at most the pool");
            let tokens = if arrives { sequence.leg.prompt_tokens } else { sequence.total() };
            let needed = tokens.div_ceil(block_tokens) - held + self.pool.unreferenced(&shared);
            if needed + to_come + passed > self.pool.available() {
                break; // a smaller one behind it must not starve it
            }
            if budget == 0 && !arrives {
                passed += needed; // the next step has a budget again
                place += 1;
                continue;
            }
            let mut sequence = self.waiting.remove(place).expect("place is below its length");
            self.start(&mut sequence, &shared);
            to_come += self.to_come(&sequence);
            rows_free -= 1;
            if arrives {
                self.parked.push(sequence);
                continue;
            }
            let count = chunk(sequence.remaining(), budget, place < self.waiting.len());
            budget -= count;
            sequence.work = Some(Work::Prefill(count));
            prompts.push(sequence.arrival);
            self.run(sequence);
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
        sequence.cached_tokens.get_or_insert(sequence.computed.min(sequence.leg.prompt_tokens));
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

    /// Blocks that a sequence is expected to ask for: those of an answer as long as answers were of late, at least one while it
    /// may ask at all.
    fn to_come(&self, sequence: &Sequence) -> u32 {
        if sequence.leg.kv_transfer.is_some() {
            return 0; // it ends with its first token
        }
        let answer = sequence.generated + self.config.block_tokens;
        let expected = answer.max(self.expected_answer as u32);
        let length = sequence.limit.min(sequence.leg.prompt_tokens.saturating_add(expected));
        let held = u32::try_from(sequence.blocks.len()).expect("at most the pool");
        length.div_ceil(self.config.block_tokens).saturating_sub(held)
    }

    /// An answer ended after so many tokens; the next ones are expected to be like it.
    pub(super) fn note_answer(&mut self, tokens: u32) {
        self.expected_answer += (f64::from(tokens) - self.expected_answer) * ANSWER_WEIGHT;
    }

    /// Sees to blocks for so many tokens of a running sequence; where there are none, the newest one gives its own back. False
    /// if that was this one.
    pub(super) fn make_room(&mut self, place: usize, tokens: u32) -> bool {
        let blocks = tokens.div_ceil(self.config.block_tokens) as usize;
        while self.running[place].blocks.len() < blocks {
            if let Some(block) = self.pool.allocate() {
                self.running[place].blocks.push(block);
                continue;
            }
            // one whose KV goes to another worker keeps it; the sequence that asks is none of those
            let last = self.running.iter().rposition(|s| s.leg.kv_transfer.is_none());
            let last = last.expect("the one that asks");
            self.preempt(last);
            if last == place {
                return false;
            }
        }
        true
    }

    /// It gives its blocks back and waits again. Its tokens stay, and are computed again.
    fn preempt(&mut self, place: usize) {
        let mut sequence = self.running.remove(place);
        self.free(&sequence);
        sequence.gave_way();
        self.preemptions += 1;
        self.wait(sequence);
    }

    /// It takes its place among those that wait, by its arrival.
    pub(super) fn wait(&mut self, sequence: Sequence) {
        if sequence.stage == Stage::Own {
            self.waiting_tokens += u64::from(sequence.total());
        }
        let place = self.waiting.partition_point(|other| other.arrival < sequence.arrival);
        self.waiting.insert(place, sequence);
    }

    /// It has its blocks and takes part in steps.
    pub(super) fn run(&mut self, sequence: Sequence) {
        let place = self.running.partition_point(|other| other.arrival < sequence.arrival);
        self.running.insert(place, sequence);
    }

    /// One that runs.
    pub(super) fn running_at(&mut self, arrival: u64) -> &mut Sequence {
        let place = self.running.binary_search_by_key(&arrival, |sequence| sequence.arrival);
        &mut self.running[place.expect("it runs")]
    }
}

impl Sequence {
    /// Keys of its first so many full blocks.
    pub(super) fn first_keys(&self, blocks: usize) -> Cow<'_, [u64]> {
        match self.leg.keys.get(..blocks) {
            Some(keys) => keys.into(),
            None => (0..blocks as u32).map(|place| self.key(place)).collect(),
        }
    }
}

/// A prompt that does not fit takes at most half of the budget while others wait.
pub(super) fn chunk(wanted: u32, budget: u32, contested: bool) -> u32 {
    if wanted <= budget || !contested { wanted.min(budget) } else { budget.div_ceil(2) }
}
