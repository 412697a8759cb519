//! What placing a request costs at least, for all workers of a model in one pass. A choice among many workers looks closely
//! only at those whose floor is not above what another one costs.
//!
//! A floor has all terms of the estimate that follow from a few numbers of a worker, which are kept until the worker changes. It
//! leaves out what takes longer to find out: prompts that wait there, and room in a full pool. Both only add. Where neither is,
//! the floor is the estimate but for rounding.

use super::{Estimate, FULL, INTERFERENCE_SHARE, WorkerLoad};
use crate::core::frame::Role;

/// A sum of the same terms in another order may differ by some 1e-13 of it; this much is taken off, so that no floor is above its
/// estimate.
pub(in crate::core) const SURE: f64 = 1.0 - 1e-9;
/// With more tokens ahead than this a replay may give up before the end. Nobody has as many who counts right.
const ENDLESS_TOKENS: f64 = 500_000.0;

/// Workers that are looked at side by side: what is done to each of them becomes vector instructions.
const LANES: usize = 8;
const TERMS: usize = 17;

/// The same number of some workers.
type TermLane = [f64; LANES];

/// A worker as its floor depends on it.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct WorkerStanding<'a> {
    pub(in crate::core) role: Role,
    /// As it stands, but for the moment: `elapsed_ms` is not read.
    pub(in crate::core) worker_load: &'a WorkerLoad,
    /// When the step that runs began.
    pub(in crate::core) began_ms: f64,
    /// Prompts wait there, and how many, or more.
    pub(in crate::core) has_queue: bool,
    pub(in crate::core) waiting: f64,
    /// A rank of a group, whose steps others make longer and whose delays they hide.
    pub(in crate::core) in_group: bool,
}

impl WorkerStanding<'_> {
    /// The numbers that a floor is made of, in the order in which [`FloorsAsked::fill`] reads them. All 0, which makes the floor 0, where
    /// no estimate is known to be above it.
    fn terms(&self) -> [f64; TERMS] {
        let load = self.worker_load;
        let cost = load.cost;
        let counts = cost.is_sane() && load.accepted > 0.0;
        if self.in_group || !counts || load.backlog_tokens > ENDLESS_TOKENS {
            return [0.0; TERMS];
        }
        let around_ms = if self.has_queue || load.backlog_tokens == 0.0 {
            cost.fixed_ms + cost.row_ms * load.rows + cost.kv_ms * load.kv_tokens
        } else {
            0.0 // it may share the steps of a backlog of which only the size is known
        };
        let pool = load.blocks.max(1.0);
        let prompt = [
            if load.occupied > 0.0 { around_ms } else { 0.0 },
            self.began_ms,
            around_ms,
            1.0 / (load.step_tokens - load.rows).max(1.0),
            cost.prefill_ms,
            cost.context_ms,
            load.blocks_used / pool,
            1.0 / pool,
        ];
        let rows = (load.occupied - self.waiting).max(0.0);
        let share = match self.role {
            Role::Prefill => {
                let mut terms = [0.0; TERMS];
                terms[..prompt.len()].copy_from_slice(&prompt);
                return terms;
            }
            Role::Decode => 1.0,
            Role::Both => INTERFERENCE_SHARE,
        };
        let to_come = load.backlog_tokens + load.arriving_tokens;
        let rows_then = (load.occupied + 1.0).min(load.slots);
        let step_ms =
            cost.fixed_ms + cost.row_ms * rows_then + cost.kv_ms * (load.kv_tokens + to_come);
        let free = load.blocks - load.blocks_used - load.blocks_cached;
        let answer = [
            share * rows,
            step_ms / load.accepted.max(1.0),
            cost.kv_ms / load.accepted.max(1.0),
            (load.occupied + 1.0 - load.slots).max(0.0) / load.slots.max(1.0),
            INTERFERENCE_SHARE * load.occupied * cost.row_ms / load.accepted,
            INTERFERENCE_SHARE * load.occupied * cost.kv_ms / load.accepted,
            free.max(0.0),
            load.blocks_cached,
            1.0,
        ];
        let mut terms = [0.0; TERMS];
        terms[..prompt.len()].copy_from_slice(&prompt);
        terms[prompt.len()..].copy_from_slice(&answer);
        terms
    }
}

/// What a request asks of every worker, at one moment.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct FloorsAsked {
    pub(in crate::core) prompt_tokens: f64,
    pub(in crate::core) output_tokens: f64,
    pub(in crate::core) block_tokens: f64,
    /// See [`WorkerLoad::pressure`]; of workers that only compute prompts, and of the others.
    pub(in crate::core) pressure: [f64; 2],
    /// See [`WorkerLoad::reuse`].
    pub(in crate::core) reuse: f64,
    pub(in crate::core) now_ms: f64,
    /// Others may compute its prompt: floors of decode legs are wanted, too.
    pub(in crate::core) splits: bool,
}

/// What a placement costs each worker at least, in ms, by place.
#[derive(Debug, Default)]
pub(in crate::core) struct CostFloors {
    total_ms: Vec<f64>,
    ttft_ms: Vec<f64>,
    decode_leg_ms: Vec<f64>,
    /// Of some of the totals: no number if one of those is none.
    sum_ms: f64,
}

impl CostFloors {
    /// Of [`Estimate::total_ms`].
    pub(in crate::core) fn total_ms(&self, place: usize) -> f64 {
        self.total_ms[place]
    }

    /// Of [`Estimate::ttft_ms`].
    pub(in crate::core) fn ttft_ms(&self, place: usize) -> f64 {
        self.ttft_ms[place]
    }

    /// Of what a decode leg costs whoever computes the prompt.
    pub(in crate::core) fn decode_leg_ms(&self, place: usize) -> f64 {
        self.decode_leg_ms[place]
    }

    /// Some totals are no numbers.
    pub(in crate::core) fn has_nonsense(&self) -> bool {
        self.sum_ms.is_nan()
    }

    /// The estimate is known.
    pub(in crate::core) fn raise(&mut self, place: usize, estimate: &Estimate) {
        self.total_ms[place] = estimate.total_ms();
        self.sum_ms += self.total_ms[place];
        self.ttft_ms[place] = estimate.ttft_ms();
    }
}

#[cfg(test)]
impl CostFloors {
    /// These, of totals and first tokens.
    pub(in crate::core) fn with(floors: impl Iterator<Item = [f64; 2]>) -> Self {
        let (total_ms, ttft_ms) = floors.map(|[total_ms, ttft_ms]| (total_ms, ttft_ms)).unzip();
        Self { total_ms, ttft_ms, ..Self::default() }
    }
}

/// Unlike those of `f64`, one instruction.
fn max(one: f64, other: f64) -> f64 {
    if one > other { one } else { other }
}

fn min(one: f64, other: f64) -> f64 {
    if one < other { one } else { other }
}

impl FloorsAsked {
    /// Fills the floors of some workers, those of decode legs if `LEGS`. `has`: tokens of the prompt that each of them has, and
    /// those with what comes.
    #[inline(never)] // a call for itself, so that the compiler knows that nothing here is the same memory
    fn fill<const LEGS: bool>(
        &self,
        terms: &[TermLane; TERMS],
        [has, with_coming]: [&TermLane; 2],
        floors: &mut [TermLane; 4],
    ) {
        let [total, ttft, decode_leg, sums] = floors;
        let [busy_ms, began_ms, around_ms, of_step, prefill_ms, context_ms, used, of_pool, ..] =
            terms;
        let [.., rows, tpot, tpot_kv, slots, row, row_kv, free, cached_blocks, answers] = terms;
        let [prompt, output] = [self.prompt_tokens, self.output_tokens.max(1.0)];
        let [of_prompts, of_others] = self.pressure;
        for i in 0..LANES {
            let uncached = max(prompt - has[i], 1.0);
            // until the step that runs ends, and its own steps
            let rest_ms = max(busy_ms[i] - max(self.now_ms - began_ms[i], 0.0), 0.0);
            let positions = uncached * (prompt - uncached + (uncached - 1.0) * 0.5);
            let own_ms = prefill_ms[i] * uncached + context_ms[i] * positions;
            let prompt_ms = max(uncached * of_step[i], 1.0) * around_ms[i] + own_ms;
            // the answer
            let tpot_ms = tpot[i] + tpot_kv[i] * prompt;
            let answer_ms = (output - 1.0) * tpot_ms;
            let queue_ms = max(rest_ms, slots[i] * output * tpot_ms);
            let rows_ms = output * (row[i] + row_kv[i] * prompt);
            // what it costs others
            let pressure = answers[i] * of_others + (1.0 - answers[i]) * of_prompts;
            let blocks = (uncached + answers[i] * output) / self.block_tokens;
            let evicted = min(max(blocks - free[i], 0.0), cached_blocks[i]);
            let evicted_ms = self.reuse * self.block_tokens * prefill_ms[i] * evicted;
            let saturation_ms = |blocks: f64, service_ms: f64| {
                let share = blocks * of_pool[i];
                let taken = min(used[i] + share, FULL);
                service_ms * share * taken / (1.0 - taken)
            };
            let ttft_ms = queue_ms + prompt_ms;
            let others_ms = (rows[i] + pressure) * own_ms
                + rows_ms
                + evicted_ms
                + saturation_ms(blocks, prompt_ms + answer_ms);
            ttft[i] = SURE * ttft_ms;
            total[i] = SURE * (ttft_ms + answer_ms + others_ms);
            sums[i] += total[i];
            if LEGS {
                let lacks = max(prompt - with_coming[i], 1.0);
                let blocks = (lacks + answers[i] * output) / self.block_tokens;
                let leg_ms = answer_ms + rows_ms + saturation_ms(blocks, answer_ms);
                decode_leg[i] = SURE * leg_ms;
            }
        }
    }
}

/// Leading tokens of a prompt that each worker counts on, by place.
#[derive(Debug, Default)]
pub(in crate::core) struct TokensThere {
    cached: Vec<f64>,
    with_coming: Vec<f64>,
}

impl TokensThere {
    /// Of so many workers, to be set: what each has, and what it has with what comes.
    pub(in crate::core) fn of_all(
        &mut self,
        workers: usize,
    ) -> impl Iterator<Item = (&mut f64, &mut f64)> {
        for list in [&mut self.cached, &mut self.with_coming] {
            list.resize(workers.next_multiple_of(LANES), 0.0);
        }
        self.cached.iter_mut().zip(&mut self.with_coming)
    }

    /// What a worker that computes the prompt counts on.
    pub(in crate::core) fn cached(&self, place: usize) -> f64 {
        self.cached[place]
    }

    /// What one that takes the KV of the rest counts on.
    pub(in crate::core) fn with_coming(&self, place: usize) -> f64 {
        self.with_coming[place]
    }
}

/// The terms of all workers, by their places.
#[derive(Debug, Default)]
pub(in crate::core) struct FloorTable {
    terms: Vec<[TermLane; TERMS]>,
}

impl FloorTable {
    /// How the worker at a place stands now. Places before it are there.
    pub(in crate::core) fn set(&mut self, place: usize, standing: &WorkerStanding<'_>) {
        let (group, lane) = (place / LANES, place % LANES);
        if group == self.terms.len() {
            self.terms.push([[0.0; LANES]; TERMS]);
        }
        for (lanes, term) in self.terms[group].iter_mut().zip(standing.terms()) {
            lanes[lane] = term;
        }
    }

    /// Fills `floors` for all workers.
    pub(in crate::core) fn floors(
        &self,
        asked: &FloorsAsked,
        has: &TokensThere,
        floors: &mut CostFloors,
    ) {
        let CostFloors { total_ms, ttft_ms, decode_leg_ms, sum_ms } = floors;
        for list in [&mut *total_ms, ttft_ms, decode_leg_ms] {
            list.resize(self.terms.len() * LANES, 0.0);
        }
        let cached = has.cached.as_chunks().0.iter().zip(has.with_coming.as_chunks().0);
        let floors = total_ms.as_chunks_mut().0.iter_mut().zip(ttft_ms.as_chunks_mut().0);
        let floors = floors.zip(decode_leg_ms.as_chunks_mut().0);
        let mut lanes = [[0.0; LANES]; 4];
        for ((terms, (cached, with_coming)), ((total, ttft), decode_leg)) in
            self.terms.iter().zip(cached).zip(floors)
        {
            if asked.splits {
                asked.fill::<true>(terms, [cached, with_coming], &mut lanes);
            } else {
                asked.fill::<false>(terms, [cached, with_coming], &mut lanes);
            }
            [*total, *ttft, *decode_leg, _] = lanes;
        }
        *sum_ms = lanes[3].iter().sum();
    }
}

#[cfg(test)]
mod tests;
