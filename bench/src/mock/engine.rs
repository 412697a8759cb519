//! A model worker's engine without a model: paged blocks, prefix cache, continuous batching, and a clock that the
//! caller turns. Pure: no time passes here and nothing is random that the seed does not decide.
//!
//! It schedules as `headrace.engine.scheduler` does: a step gives one row to each sequence that decodes and the rest of
//! its token budget to prompts, first come first served. A sequence is admitted once the pool has room for its prompt beside
//! what the others are expected to write. Where that was too little, the newest gives its blocks back and waits again.
//!
//! A token on the wire may stand for `token_scale` tokens of the modelled machine: a trace of 512-token blocks then
//! replays with blocks of 16 tokens and costs the same time.

mod admission;
mod contents;
mod logprobs;
mod migration;
mod plan;
mod pooled;
mod sequence;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use headrace_router::core::frame::{
    Blocks, Capacity, Failed, FailureKind, Freed, Load, Output, RequestId, Step, StepCost,
};

pub(crate) use self::logprobs::Scores;
pub(crate) use self::migration::{Export, Progress, Pull};
use self::plan::Counts;
pub(crate) use self::pooled::{Pooled, WIDTH as POOLED_WIDTH};
use self::sequence::{Sequence, Stage, Work};
use super::model::script::ScriptedAnswer;
use super::pool::BlockPool;
use crate::random::Random;

/// What an engine models.
#[derive(Debug, Clone)]
pub(crate) struct EngineConfig {
    /// Of the modelled machine's tokens.
    pub(crate) cost: StepCost,
    /// Of one engine. `batched_tokens` are the modelled machine's tokens; [`Engine::capacity`] says what they are on
    /// the wire.
    pub(crate) capacity: Capacity,
    /// Wire tokens of a block.
    pub(crate) block_tokens: u32,
    /// The modelled machine's tokens for each wire token.
    pub(crate) token_scale: u32,
    /// A step takes up to this share longer or shorter than its cost.
    pub(crate) noise: f64,
    /// Mean tokens that a row gets from a step: above 1 with multi-token prediction. Below 1 a wire token takes several
    /// steps, as it does where it stands for several tokens.
    pub(crate) accepted: f64,
    /// Decides noise and tokens.
    pub(crate) seed: u64,
    /// Answers use tokens below this one.
    pub(crate) vocab: u32,
    /// Of its block events.
    pub(crate) epoch: u64,
}

/// Work for an engine.
#[derive(Debug, Clone)]
pub(crate) struct Leg {
    pub(crate) request: RequestId,
    /// Keys of the prompt's full blocks.
    pub(crate) keys: Arc<[u64]>,
    pub(crate) prompt_tokens: u32,
    pub(crate) max_tokens: u32,
    /// It ends by itself after so many tokens.
    pub(crate) ends_after: Option<u32>,
    /// Decides the answer.
    pub(crate) seed: u64,
    /// Tokens of the answer that came from another worker; `prompt_tokens` counts them too.
    pub(crate) resumed: u32,
    /// Only the prompt is wanted and the first token; for so many ms after that the blocks stay for who pulls them.
    pub(crate) kv_transfer: Option<u32>,
    /// The prompt's KV comes from another worker, for which it waits at most so many ms once the answer may go on.
    pub(crate) arrives: Option<u32>,
    pub(crate) scores: Scores,
    /// The answer, where it was written beforehand; `max_tokens` is no more than what is left of it.
    pub(crate) scripted: Option<ScriptedAnswer>,
    /// The prompt as a vector, in place of an answer; `max_tokens` is 1 then.
    pub(crate) pooled: Option<Pooled>,
}

/// What came of a step, in the order in which it is to be sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepResult {
    pub(crate) blocks: Option<Blocks>,
    pub(crate) step: Step,
    pub(crate) freed: Vec<Freed>,
    /// Of prompts that others pull.
    pub(crate) progress: Vec<Progress>,
}

/// One worker. A caller begins a step, lets its time pass, and ends it; requests come and go at any time.
#[derive(Debug)]
pub(crate) struct Engine {
    config: EngineConfig,
    /// Of wire tokens.
    cost: StepCost,
    pool: BlockPool,
    /// In order of arrival, as are those that wait.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    arrivals: u64,
    /// Mean length of the answers so far, the newest counting most.
    expected_answer: f64,
    preemptions: u64,
    /// Those that are handed over and take no part in steps.
    parked: Vec<Sequence>,
    exports: Vec<Export>,
    pulls: Vec<Pull>,
    known: HashSet<RequestId>,
    /// Keys of blocks that running prompts will publish, and how many of them will.
    computing: HashMap<u64, u32>,
    waiting_tokens: u64,
    steps: u64,
    sequence: u64,
    /// Of the step that runs.
    in_flight: Option<Counts>,
    /// Share of each prompt that it says was cached and was not.
    lie: f64,
}

impl Engine {
    pub(crate) fn new(config: EngineConfig) -> Self {
        assert!(config.block_tokens > 0 && config.token_scale > 0 && config.accepted > 0.0);
        let scale = f64::from(config.token_scale);
        let cost = StepCost {
            prefill_ms: config.cost.prefill_ms * scale,
            context_ms: config.cost.context_ms * scale * scale,
            kv_ms: config.cost.kv_ms * scale,
            ..config.cost
        };
        Self {
            cost,
            pool: BlockPool::new(config.capacity.blocks),
            running: Vec::new(),
            waiting: VecDeque::new(),
            arrivals: 0,
            expected_answer: 0.0,
            preemptions: 0,
            parked: Vec::new(),
            exports: Vec::new(),
            pulls: Vec::new(),
            known: HashSet::new(),
            computing: HashMap::new(),
            waiting_tokens: 0,
            steps: 0,
            sequence: 0,
            in_flight: None,
            lie: 0.0,
            config,
        }
    }

    /// Cost of a step in wire tokens.
    pub(crate) fn cost(&self) -> StepCost {
        self.cost
    }

    /// Bounds in wire tokens.
    pub(crate) fn capacity(&self) -> Capacity {
        let capacity = self.config.capacity.clone();
        let batched_tokens = (capacity.batched_tokens / self.config.token_scale).max(1);
        Capacity { batched_tokens, ..capacity }
    }

    /// Longest sequence that the pool can hold.
    pub(crate) fn context_tokens(&self) -> u32 {
        self.config.capacity.blocks.saturating_mul(self.config.block_tokens)
    }

    /// Takes a request.
    ///
    /// # Errors
    /// It cannot be served here; the engine is as before.
    pub(crate) fn submit(&mut self, leg: Leg) -> Result<(), Failed> {
        let request = leg.request;
        let fail = |kind, message: String| Err(Failed { request, kind, message });
        if self.known.contains(&request) {
            let message = format!("request {} is here already", request.0);
            return fail(FailureKind::DuplicateRequest, message);
        }
        if leg.prompt_tokens == 0 {
            return fail(FailureKind::EmptyPrompt, "the prompt has no token".into());
        }
        if leg.max_tokens == 0 {
            let message = "a worker without a model generates at least one token";
            return fail(FailureKind::BadSampling, message.into());
        }
        let room = self.context_tokens();
        if leg.prompt_tokens >= room {
            let message =
                format!("the prompt is {} tokens, the KV pool holds {room}", leg.prompt_tokens);
            return fail(FailureKind::TooBigForPool, message);
        }
        let limit = self.config.capacity.waiting;
        let waiting = self.waits();
        if waiting >= limit {
            let message = format!("{waiting} requests wait, the limit is {limit}");
            return fail(FailureKind::QueueFull, message);
        }
        self.known.insert(request);
        self.arrivals += 1;
        let sequence = Sequence::new(leg, self.arrivals, room, self.config.block_tokens);
        if sequence.stage == Stage::NoTicket {
            self.parked.push(sequence);
        } else {
            self.wait(sequence);
        }
        Ok(())
    }

    /// Stops a request at any stage; `None` if it is not here.
    pub(crate) fn cancel(&mut self, request: RequestId) -> Option<Freed> {
        if !self.known.remove(&request) {
            return None;
        }
        if let Some(place) = self.waiting.iter().position(|s| s.leg.request == request) {
            let sequence = self.waiting.remove(place).expect("just found");
            self.no_longer_waiting(&sequence);
            return Some(Freed { request, blocks: 0 });
        }
        let at = |sequence: &Sequence| sequence.leg.request == request;
        let sequence = match self.parked.iter().position(at) {
            Some(place) => self.parked.remove(place),
            None => {
                let place = self.running.iter().position(at);
                self.running.remove(place.expect("a known request waits, runs or is handed over"))
            }
        };
        self.exports.retain(|export| export.request != request);
        self.pulls.retain(|pull| pull.request != request);
        Some(self.free(&sequence))
    }

    /// Stops all requests and the step, and says which they were. The cache stays.
    pub(crate) fn cancel_all(&mut self) -> Vec<RequestId> {
        let parked = std::mem::take(&mut self.parked);
        for sequence in std::mem::take(&mut self.running).into_iter().chain(parked) {
            self.free(&sequence);
        }
        self.waiting.clear();
        self.exports.clear();
        self.pulls.clear();
        self.waiting_tokens = 0;
        self.in_flight = None;
        let mut requests: Vec<_> = self.known.drain().collect();
        requests.sort_unstable();
        requests
    }

    /// Forgets the cache of an engine without requests: its keys mean nothing any more.
    pub(crate) fn clear_cache(&mut self) {
        assert!(self.known.is_empty(), "nothing runs");
        self.pool.clear();
    }

    /// From now on says that this share more of each prompt was cached than there was: for workers that lie.
    pub(crate) fn claim_more(&mut self, share: f64) {
        self.lie = share;
    }

    /// Loses a cached block and tells nobody: for workers that lie.
    pub(crate) fn forget(&mut self, key: u64) -> bool {
        self.pool.forget(key)
    }

    /// Starts a step and says how long it takes, in ms; `None` when there is nothing to do.
    pub(crate) fn begin_step(&mut self) -> Option<f64> {
        assert!(self.in_flight.is_none(), "one step at a time");
        if self.running.is_empty() && self.waiting.is_empty() {
            return None;
        }
        let counts = loop {
            let before = self.preemptions;
            let counts = self.plan();
            if !counts.is_nothing() {
                break counts;
            }
            if before == self.preemptions {
                return None; // all wait for something that no step brings
            }
        };
        self.in_flight = Some(counts);
        self.steps += 1;
        let stretch = 1.0 + self.config.noise * noise(self.config.seed, self.steps);
        Some(counts.ms(&self.cost) * stretch)
    }

    /// A step with nothing in it, for the sake of other ranks; `ms` is what it took, for the frame.
    pub(crate) fn empty_step(&mut self, ms: f64) -> Step {
        self.steps += 1;
        Step { ms, ..self.heartbeat() }
    }

    /// Ends the step that runs. `ms` is what it took, for the frame.
    pub(crate) fn end_step(&mut self, ms: f64) -> StepResult {
        let counts = self.in_flight.take().expect("a step began");
        let mut outputs = Vec::new();
        let mut freed = Vec::new();
        let mut progress = Vec::new();
        let mut accepted = 0;
        for mut sequence in std::mem::take(&mut self.running) {
            let Some(work) = sequence.work.take() else {
                self.running.push(sequence);
                continue;
            };
            let decodes = matches!(work, Work::Decode(_));
            let new = sequence.advance(work);
            self.publish(&mut sequence);
            let lease_ms = sequence.leg.kv_transfer;
            let computed = sequence.computed;
            if lease_ms.is_some() {
                let request = sequence.leg.request;
                let pinned_ms = lease_ms.filter(|_| new > 0);
                progress.push(Progress { request, computed, pinned_ms });
            }
            if new == 0 {
                self.running.push(sequence);
                continue;
            }
            accepted += new - 1;
            let (seed, vocab) = (sequence.leg.seed, self.config.vocab);
            let first = sequence.generated - new + sequence.leg.resumed;
            let pooled = sequence.leg.pooled.as_ref().map(Pooled::bytes);
            let ids = match &sequence.leg.scripted {
                _ if pooled.is_some() => Vec::new(),
                Some(answer) => answer.tokens(first, new),
                None => (first..first + new).map(|at| token(seed, at, vocab)).collect(),
            };
            let scores = &mut sequence.leg.scores;
            let logprobs = scores.answer(seed, first, &ids, vocab);
            let prompt_logprobs = (first == 0).then(|| scores.take_prompt(vocab)).flatten();
            let ended = sequence.total() >= sequence.end();
            outputs.push(Output {
                request: sequence.leg.request,
                ids,
                logprobs,
                finish: ended.then_some(sequence.finish()),
                cached_tokens: (!sequence.has_spoken).then(|| sequence.claim(self.lie)),
                prompt_logprobs,
                drafted: if decodes { self.drafts().max(new - 1) } else { 0 },
                accepted: new - 1,
                pooled,
            });
            sequence.has_spoken = true;
            if ended {
                if lease_ms.is_none() && sequence.leg.pooled.is_none() {
                    self.note_answer(sequence.generated);
                }
                self.known.remove(&sequence.leg.request);
                freed.push(self.free(&sequence));
            } else if lease_ms.is_some() {
                self.pin(sequence);
            } else {
                self.running.push(sequence);
            }
        }
        let blocks = self.take_events();
        let step = Step {
            ms,
            prefill_tokens: counts.prefill_tokens,
            prefill_context: counts.prefill_context,
            decode_rows: counts.decode_rows,
            kv_tokens: counts.kv_tokens,
            drafted: counts.drafted,
            accepted,
            outputs,
            ..self.heartbeat()
        };
        StepResult { blocks, step, freed, progress }
    }

    /// The load as it is now, with the number of the last step that ended.
    pub(crate) fn heartbeat(&self) -> Step {
        let prompts = self.running.iter().filter(|sequence| sequence.in_prefill);
        let in_flight: u64 = prompts.map(|sequence| u64::from(sequence.remaining())).sum();
        Step {
            step: self.steps - u64::from(self.in_flight.is_some()),
            ms: 0.0,
            waited_us: 0,
            prefill_tokens: 0,
            prefill_context: 0,
            decode_rows: 0,
            kv_tokens: 0,
            waiting_tokens: self.waiting_tokens + in_flight,
            drafted: 0,
            accepted: 0,
            load: Load {
                blocks_used: self.pool.used(),
                blocks_cached: self.pool.cached(),
                running: u32::try_from(self.running.len()).unwrap_or(u32::MAX),
                waiting: self.waits(),
                preemptions: self.preemptions,
            },
            outputs: Vec::new(),
        }
    }

    /// Prompts without a first token, in the engine's order: whose, how long, and what is left.
    pub(crate) fn prompts(&self) -> Vec<(RequestId, u32, u32)> {
        let running = self.running.iter().filter(|sequence| sequence.in_prefill);
        let own = |sequence: &&Sequence| sequence.stage == Stage::Own;
        let tokens = |s: &Sequence| (s.leg.request, s.total(), s.remaining());
        let waiting = self.waiting.iter().filter(own).map(|s| {
            let keys = s.first_keys(s.creditable(self.config.block_tokens));
            let found = u32::try_from(self.pool.find(&keys).len()).expect("at most the pool");
            (s.leg.request, s.total(), s.total() - found * self.config.block_tokens)
        });
        running.map(tokens).chain(waiting).collect()
    }

    /// Requests whose turn has not come: for a batch row, for room, or for what another worker does first.
    fn waits(&self) -> u32 {
        let parked = self.parked.iter().filter(|sequence| sequence.stage != Stage::Pinned);
        u32::try_from(self.waiting.len() + parked.count()).unwrap_or(u32::MAX)
    }

    /// All cached keys, parents before children, and the number of the last event that they contain. Events that were
    /// not taken yet are among them and will not come again.
    pub(crate) fn snapshot(&mut self) -> (u64, Vec<u64>) {
        self.pool.take_changes();
        (self.sequence, self.pool.keys())
    }

    /// Sequences that had to give their blocks back, since the start.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// True when no request is here.
    pub(crate) fn is_idle(&self) -> bool {
        self.known.is_empty()
    }
}

/// Spreads the bits of `x`; 0 is no special case.
pub(crate) fn mix(x: u64) -> u64 {
    Random::new(x).next()
}

/// A number in 0..1 that `seed` and `number` decide.
pub(crate) fn share(seed: u64, number: u64) -> f64 {
    (mix(mix(seed) ^ number) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number in -1..1.
fn noise(seed: u64, step: u64) -> f64 {
    2.0 * share(seed, step) - 1.0
}

/// An ordinary token (special ones and single bytes come first in the tokenizers in use), the same for the same seed and position.
pub(crate) fn token(seed: u64, position: u32, vocab: u32) -> u32 {
    let low = vocab / 8;
    let place = mix(seed ^ mix(u64::from(position))) % u64::from((vocab / 2).max(1));
    low + u32::try_from(place).expect("less than a vocabulary")
}
