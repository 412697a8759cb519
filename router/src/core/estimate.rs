//! What a placement would cost, in milliseconds: of a whole request on one worker, and of the two halves of a split one.
//!
//! Every term follows from what the workers measured. One number was chosen by simulation and says so below: the share of the
//! delay of rows that counts.

mod floor;
mod lockstep;
mod queue;

use serde::{Deserialize, Serialize};

pub(super) use self::floor::{
    CostFloors, FloorTable, FloorsAsked, SURE, TokensThere, WorkerStanding,
};
use self::lockstep::{GroupSteps, raised};
use self::queue::behind;
pub use self::queue::{Awaited, PromptQueue, QueuedPrompt};
pub(super) use self::queue::{MOST_QUEUED, delays_ms, share_out};
use crate::core::frame::{Role, StepCost};
use crate::core::transfer::TransferCost;

/// How a worker stands at the moment of a decision. Counts are real numbers, as predictions may be.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WorkerLoad {
    /// Of its steps.
    pub cost: StepCost,
    /// Tokens that one step may take.
    pub step_tokens: f64,
    /// Sequences that may run at once.
    pub slots: f64,
    /// Requests that it has, running or waiting.
    pub occupied: f64,
    /// Sequences that decode.
    pub rows: f64,
    /// KV tokens that they read.
    pub kv_tokens: f64,
    /// Prompt tokens ahead of a new request.
    pub backlog_tokens: f64,
    /// Their positions, summed up.
    pub backlog_context: f64,
    /// Prompt tokens of requests whose KV is on its way to it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub arriving_tokens: f64,
    /// Of the step that runs, ms that are over; 0 when idle.
    pub elapsed_ms: f64,
    /// The step that runs works on the backlog.
    pub backlog_runs: bool,
    /// Blocks that requests hold, or are booked to.
    pub blocks_used: f64,
    /// Blocks of the pool.
    pub blocks: f64,
    /// Blocks of it that only the prefix cache holds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub blocks_cached: f64,
    /// Share of prompts' tokens that is found in caches, of late: what those who come later lose with an evicted block.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reuse: f64,
    /// Tokens that a row gets from a step: 1, more with multi-token prediction.
    pub accepted: f64,
    /// The longest step without prompts among the other ranks of its expert-parallel group, which step in time with it, with all
    /// that they have; 0 without a group.
    pub group_ms: f64,
    /// Requests of the other ranks.
    pub group_rows: f64,
    /// What prompts add to each step of the other rank that has most of them ahead.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group_prompt_ms: f64,
    /// And to how many steps.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group_prompt_steps: f64,
    /// Ms that later requests wait for each ms of prompt that is computed now, at the present load of workers of its role.
    pub pressure: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

/// What a request asks of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    /// Tokens of the prompt.
    pub prompt_tokens: f64,
    /// Those of them that the worker has already.
    pub cached_tokens: f64,
    /// Tokens of the answer, as far as one can tell.
    pub output_tokens: f64,
    /// Tokens in a block.
    pub block_tokens: f64,
}

/// What a placement is predicted to cost, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Estimate {
    /// Until its own prefill begins.
    pub queue_ms: f64,
    /// Its own prefill.
    pub prefill_ms: f64,
    /// From the first token until decoding can go on elsewhere: what is left of moving the KV then. 0 where one worker does
    /// both.
    pub transfer_ms: f64,
    /// All tokens after the first.
    pub decode_ms: f64,
    /// Delay of the rows that are there already, summed over them, and of the requests that are still to come.
    pub interference_ms: f64,
    /// How long requests still to come wait for the blocks that it keeps, summed up.
    pub saturation_ms: f64,
}

impl Estimate {
    /// Placement to first token, which never waits for a transfer.
    #[must_use]
    pub fn ttft_ms(&self) -> f64 {
        self.queue_ms + self.prefill_ms
    }

    /// What is compared.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.ttft_ms()
            + self.transfer_ms
            + self.decode_ms
            + self.interference_ms
            + self.saturation_ms
    }
}

/// Costs to about a millionth, below: no prediction is better. What is the same then is the same cost to those who only look.
pub(super) fn coarse(ms: f64) -> f64 {
    f64::from_bits(ms.to_bits() & !u64::from(u32::MAX))
}

/// A pool is never taken for fuller than this, so that full ones can still be told apart by their other terms.
const FULL: f64 = 0.99;

/// Share of a row's delay that counts; the delay of those that wait for their first token counts in full. Prompts have to be
/// computed somewhere, and where there are few rows now there may be more when it comes to that. Simulated on the Mooncake
/// conversation trace at 60 % load, two seeds: 0.03, 0.3 and 1 change the mean time to the first token by -1, 4 and 18 % against
/// 0.1, that of a token by -6, 4 and 19 %, that of a whole answer by 2, -0.4 and 3 %. A greater share makes no token sooner, so it
/// does not follow from limits for first tokens and others (`docs/design/placement.md`).
const INTERFERENCE_SHARE: f64 = 0.1;

impl WorkerLoad {
    /// Of the step that began then, ms that are over; 0 when idle.
    pub(super) fn elapsed_ms(&self, began_ms: f64, now_ms: f64) -> f64 {
        if self.occupied > 0.0 { (now_ms - began_ms).max(0.0) } else { 0.0 }
    }
}

/// What a worker of this role costs: one that only computes prompts, that of the prompt, any other, that of the whole request.
#[must_use]
pub(super) fn of_role(
    role: Role,
    worker_load: &WorkerLoad,
    queue: &PromptQueue,
    demand: &Demand,
) -> Estimate {
    match role {
        Role::Prefill => prefill_leg(worker_load, queue, demand),
        Role::Decode => alone(worker_load, queue, demand),
        Role::Both => estimate(worker_load, queue, demand),
    }
}

/// Predicts what placing all of `demand` on a worker that stands like this would cost.
#[must_use]
pub fn estimate(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Estimate {
    whole(worker_load, queue, demand, INTERFERENCE_SHARE)
}

/// The same for a worker that is there to generate: its rows need not wait for a prompt, since others are there to compute it,
/// so their delay counts in full.
#[must_use]
pub fn alone(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Estimate {
    whole(worker_load, queue, demand, 1.0)
}

/// `share`: of the delay of rows by the prompt. The delay of those that wait for their first token counts in full.
fn whole(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand, share: f64) -> Estimate {
    let prompt = Prompt::of(worker_load, queue, demand);
    let answer = Answer::of(worker_load, queue, demand);
    let others = worker_load.occupied + worker_load.group_rows;
    let rows = (others - queue.waiting()).max(0.0);
    let rows_ms = share * rows * prompt.raise_ms + INTERFERENCE_SHARE * others * answer.row_ms;
    let blocks = (prompt.uncached + answer.tokens) / demand.block_tokens.max(1.0);
    let queue_ms = if queue.room_ms.is_some() {
        prompt.wait_ms.max(answer.wait_ms) // the prompts ahead wait for room, too
    } else {
        prompt.wait_ms + answer.wait_ms
    };
    Estimate {
        queue_ms,
        prefill_ms: prompt.ms,
        transfer_ms: 0.0,
        decode_ms: answer.ms,
        interference_ms: rows_ms
            + prompt.delay_ms
            + worker_load.pressure * prompt.own_ms
            + evicted_ms(worker_load, blocks, demand),
        saturation_ms: saturation_ms(worker_load, blocks, prompt.ms + answer.ms),
    }
}

/// Predicts what computing the prompt of `demand` on a worker that does nothing else would cost: the prefill leg of a split
/// request, up to its first token. The interference is with the other ranks of its group, and with the prompts that come later.
#[must_use]
pub fn prefill_leg(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Estimate {
    let prompt = Prompt::of(worker_load, queue, demand);
    // no room: it comes as other prompts are done and fetched, each after about as long as this one takes
    let room_ms = missing_share(worker_load, demand) * prompt.ms;
    let blocks = prompt.uncached / demand.block_tokens.max(1.0);
    Estimate {
        queue_ms: prompt.wait_ms + room_ms,
        prefill_ms: prompt.ms,
        transfer_ms: 0.0,
        decode_ms: 0.0,
        interference_ms: INTERFERENCE_SHARE * worker_load.group_rows * prompt.raise_ms
            + prompt.delay_ms
            + worker_load.pressure * prompt.own_ms,
        saturation_ms: saturation_ms(worker_load, blocks, prompt.ms),
    }
}

/// The decode leg of a split request, as far as it does not depend on who computes the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DecodeLeg {
    /// Until it has room for the KV.
    wait_ms: f64,
    decode_ms: f64,
    interference_ms: f64,
    saturation_ms: f64,
    /// What it lacks of the prompt's KV, in tokens and MiB.
    lacks_tokens: f64,
    lacks_mib: f64,
    /// If nothing comes: what computing the prompt itself would take.
    alone_ms: f64,
}

impl DecodeLeg {
    /// `alone`: what the whole request would cost there.
    pub(super) fn new(
        worker_load: &WorkerLoad,
        queue: &PromptQueue,
        demand: &Demand,
        block_bytes: f64,
        alone: &Estimate,
    ) -> Self {
        let answer = Answer::of(worker_load, queue, demand);
        let block_tokens = demand.block_tokens.max(1.0);
        let lacks_tokens = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
        let blocks = (lacks_tokens + answer.tokens) / block_tokens;
        Self {
            wait_ms: answer.wait_ms,
            decode_ms: answer.ms,
            interference_ms: INTERFERENCE_SHARE
                * (worker_load.occupied + worker_load.group_rows)
                * answer.row_ms,
            saturation_ms: saturation_ms(worker_load, blocks, answer.ms),
            lacks_tokens,
            lacks_mib: (lacks_tokens / block_tokens).ceil() * block_bytes / f64::from(1 << 20),
            alone_ms: alone.ttft_ms(),
        }
    }

    /// What it costs whoever computes the prompt.
    fn base_ms(&self) -> f64 {
        self.decode_ms + self.interference_ms + self.saturation_ms
    }

    /// What a pair with it costs, whose other half costs so much.
    pub(super) fn pair_ms(&self, prefill_ms: f64, source: &Source, cost: &TransferCost) -> f64 {
        self.base_ms() + prefill_ms + self.transfer_ms(source, cost)
    }

    /// From the first token until decoding goes on, if the KV comes from there at such a cost. Blocks move as they are
    /// computed, once both sides have room, so that only what is left after the prompt's end is waited for: at least what
    /// the last step brings, at most everything. A pull that fails is made up for by computing the prompt here.
    pub(super) fn transfer_ms(&self, source: &Source, cost: &TransferCost) -> f64 {
        let last_mib = self.lacks_mib * (source.last_tokens / self.lacks_tokens).min(1.0);
        let begins_ms = source.queue_ms.max(self.wait_ms);
        let behind_ms = begins_ms + cost.mib_ms * self.lacks_mib - source.ttft_ms;
        cost.latency_ms + behind_ms.max(cost.mib_ms * last_mib) + cost.failing * self.alone_ms
    }

    /// The whole pair.
    pub(super) fn with(&self, prefill: &Estimate, transfer_ms: f64) -> Estimate {
        Estimate {
            queue_ms: prefill.queue_ms,
            prefill_ms: prefill.prefill_ms,
            transfer_ms,
            decode_ms: self.decode_ms,
            interference_ms: prefill.interference_ms + self.interference_ms,
            saturation_ms: prefill.saturation_ms + self.saturation_ms,
        }
    }
}

/// Tokens of a prompt that the last step of its prefill computes.
pub(super) fn last_tokens(worker_load: &WorkerLoad, prompt_tokens: f64, cached_tokens: f64) -> f64 {
    let uncached = (prompt_tokens - cached_tokens).max(1.0);
    uncached.min(worker_load.step_tokens.max(1.0))
}

/// The prefill leg of a split request, as far as a transfer depends on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Source {
    queue_ms: f64,
    ttft_ms: f64,
    /// Tokens of the prompt that its last step computes.
    last_tokens: f64,
}

impl Source {
    pub(super) fn new(worker_load: &WorkerLoad, demand: &Demand, leg: &Estimate) -> Self {
        Self {
            queue_ms: leg.queue_ms,
            ttft_ms: leg.ttft_ms(),
            last_tokens: last_tokens(worker_load, demand.prompt_tokens, demand.cached_tokens),
        }
    }
}

/// A prompt on a worker.
struct Prompt {
    uncached: f64,
    /// Until it begins.
    wait_ms: f64,
    /// Its steps, with the rows that they carry.
    ms: f64,
    /// What it alone adds to them.
    own_ms: f64,
    /// Of that, what the steps of all who step with it become longer by.
    raise_ms: f64,
    /// By how much the first tokens of prompts before it come later, summed up.
    delay_ms: f64,
}

impl Prompt {
    fn of(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Self {
        if queue.prompts.is_empty() {
            return Self::in_order(worker_load, demand);
        }
        let uncached = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
        let behind = behind(worker_load, queue, demand);
        Self {
            uncached,
            wait_ms: behind.wait_ms,
            ms: behind.ms,
            own_ms: worker_load.cost.prompt_ms(demand.cached_tokens, uncached),
            raise_ms: behind.raise_ms,
            delay_ms: behind.delay_ms,
        }
    }

    /// Behind a backlog of which only the size is known.
    fn in_order(worker_load: &WorkerLoad, demand: &Demand) -> Self {
        let WorkerLoad { cost, rows, kv_tokens, backlog_tokens, .. } = *worker_load;
        let uncached = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
        let own_ms = cost.prompt_ms(demand.cached_tokens, uncached);
        // Every step that carries a piece of a prompt also carries the rows that decode.
        let around_ms = cost.fixed_ms + cost.row_ms * rows + cost.kv_ms * kv_tokens;
        let group = GroupSteps::of(worker_load);
        let per_step = (worker_load.step_tokens - rows).max(1.0);
        let steps_ahead = backlog_tokens / per_step;
        let steps_in_all = ((backlog_tokens + uncached) / per_step).ceil();
        let busy = worker_load.occupied + worker_load.group_rows > 0.0;
        let works_on_it = backlog_tokens > 0.0 && worker_load.backlog_runs;
        // The step that runs carries nothing of it, unless it works on the prompts ahead.
        let from = if busy && !works_on_it { 1.0 } else { 0.0 };
        let backlog_ms =
            cost.prefill_ms * backlog_tokens + cost.context_ms * worker_load.backlog_context;
        let ahead_ms = group.lockstep_ms(from, steps_ahead, around_ms, backlog_ms);
        let running_ms = around_ms.max(group.step_ms());
        let rest_ms = if busy { (running_ms - worker_load.elapsed_ms).max(0.0) } else { 0.0 };
        let wait_ms = if works_on_it {
            // A step that is overdue does not do the work of the next ones.
            ahead_ms - worker_load.elapsed_ms.min(ahead_ms / steps_ahead.max(1.0))
        } else {
            rest_ms + ahead_ms
        };
        let (from, steps) = (from + steps_ahead, steps_in_all - steps_ahead);
        Self {
            uncached,
            wait_ms,
            ms: group.lockstep_ms(from, steps, around_ms, own_ms),
            own_ms,
            raise_ms: group.raise_ms(from, steps, around_ms, own_ms),
            delay_ms: 0.0,
        }
    }
}

/// An answer on a worker.
struct Answer {
    tokens: f64,
    /// Until there is a slot, and room for the prompt's blocks.
    wait_ms: f64,
    /// All its tokens after the first.
    ms: f64,
    /// What its row adds to the steps that it is in.
    row_ms: f64,
}

impl Answer {
    fn of(worker_load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Self {
        let WorkerLoad { cost, occupied, slots, .. } = *worker_load;
        // With a row more, and with those that are rows once the backlog is done and what is on its way has come.
        let rows_then = (occupied + 1.0).min(slots);
        let to_come = worker_load.backlog_tokens + worker_load.arriving_tokens;
        let kv_then = worker_load.kv_tokens + to_come + demand.prompt_tokens;
        let step_then = cost.fixed_ms + cost.row_ms * rows_then + cost.kv_ms * kv_then;
        let group = GroupSteps::of(worker_load);
        let tpot_ms = step_then.max(worker_load.group_ms) / worker_load.accepted.max(1.0);
        let tokens = demand.output_tokens.max(1.0);
        // Prompts of other ranks that are not done when its own is lengthen the steps that it is in.
        let per_step = (worker_load.step_tokens - worker_load.rows).max(1.0);
        let uncached = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
        let begins = ((worker_load.backlog_tokens + uncached) / per_step).ceil();
        let steps = (tokens - 1.0) / worker_load.accepted.max(1.0);
        let longer_ms = group.prompts_ms(begins, steps, step_then);
        // All slots taken: one becomes free each time that one of them ends.
        let too_many = (occupied + 1.0 - slots).max(0.0);
        let slot_ms = too_many * tokens * tpot_ms / slots.max(1.0);
        // No room: it comes as running requests end, each with its share of the pool; on average they are half way through.
        let half_ms = || missing_share(worker_load, demand) * tokens * tpot_ms / 2.0;
        let room_ms = queue.room_ms.unwrap_or_else(half_ms);
        let more_ms = cost.row_ms + cost.kv_ms * demand.prompt_tokens;
        Self {
            tokens,
            wait_ms: slot_ms.max(room_ms),
            ms: (tokens - 1.0) * tpot_ms + longer_ms,
            row_ms: raised(step_then - more_ms, more_ms, worker_load.group_ms) * tokens
                / worker_load.accepted,
        }
    }
}

/// Of the blocks in use, the share that has to become free before the prompt has room.
fn missing_share(worker_load: &WorkerLoad, demand: &Demand) -> f64 {
    let used = worker_load.blocks_used;
    let needed = demand.prompt_tokens / demand.block_tokens.max(1.0);
    let missing = (used + needed - worker_load.blocks).clamp(0.0, used);
    if missing > 0.0 { missing / used } else { 0.0 }
}

/// What a request that takes so many more blocks costs those who would have found what it evicts: they compute it again.
fn evicted_ms(worker_load: &WorkerLoad, blocks: f64, demand: &Demand) -> f64 {
    let free = worker_load.blocks - worker_load.blocks_used - worker_load.blocks_cached;
    let evicted = (blocks - free.max(0.0)).clamp(0.0, worker_load.blocks_cached);
    worker_load.reuse * evicted * demand.block_tokens * worker_load.cost.prefill_ms
}

/// How long requests still to come wait, summed up, for the blocks that this one keeps: it has its share of the pool for
/// `service_ms`, and a ms of a whole pool delays later ones by `u / (1 - u)` ms, where `u` of it are taken. The same law as
/// that of [`WorkerLoad::pressure`], with a pool in place of the fleet's time.
fn saturation_ms(worker_load: &WorkerLoad, blocks: f64, service_ms: f64) -> f64 {
    let pool = worker_load.blocks.max(1.0);
    let taken = ((worker_load.blocks_used + blocks) / pool).min(FULL);
    service_ms * blocks / pool * taken / (1.0 - taken)
}

#[cfg(test)]
impl WorkerLoad {
    /// A worker with room and nothing to do.
    pub(crate) fn idle(cost: StepCost) -> Self {
        Self {
            cost,
            step_tokens: 4096.0,
            slots: 64.0,
            occupied: 0.0,
            rows: 0.0,
            kv_tokens: 0.0,
            backlog_tokens: 0.0,
            backlog_context: 0.0,
            arriving_tokens: 0.0,
            elapsed_ms: 0.0,
            backlog_runs: false,
            blocks_used: 0.0,
            blocks: 10_000.0,
            blocks_cached: 0.0,
            reuse: 0.0,
            accepted: 1.0,
            group_ms: 0.0,
            group_rows: 0.0,
            group_prompt_ms: 0.0,
            group_prompt_steps: 0.0,
            pressure: 0.0,
        }
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
