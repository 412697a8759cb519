//! What placing a request costs at least, for all workers of a model in one pass. A choice among many workers looks closely
//! only at those whose floor is not above what another one costs.
//!
//! A floor has all terms of the estimate that follow from a few numbers of a worker, which are kept until the worker changes. It
//! leaves out what takes longer to find out: prompts that wait there, and room in a full pool. Both only add. Where neither is,
//! the floor is the estimate but for rounding.

use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

use super::{Estimate, FULL, INTERFERENCE_SHARE, WorkerLoad};
use crate::core::frame::Role;

/// A sum of the same terms in another order may differ by some 1e-13 of it; this much is taken off, so that no floor is above its
/// estimate.
pub(in crate::core) const SURE: f64 = 1.0 - 1e-9;
/// With more tokens ahead than this a replay may give up before the end. Nobody has as many who counts right.
const ENDLESS_TOKENS: f64 = 500_000.0;

/// Workers that are looked at side by side: two vectors of the least that every x86-64 has.
const LANES: usize = 4;
const TERMS: usize = 17;

/// The same term of some workers.
#[derive(Debug, Clone, Copy)]
struct Lane([f64; LANES]);

impl Lane {
    fn all(value: f64) -> Self {
        Self([value; LANES])
    }

    fn with(mut self, other: Self, each: impl Fn(f64, f64) -> f64) -> Self {
        for i in 0..LANES {
            self.0[i] = each(self.0[i], other.0[i]);
        }
        self
    }

    /// Unlike `f64::max`, one instruction.
    fn max(self, other: Self) -> Self {
        self.with(other, |one, other| if one > other { one } else { other })
    }

    fn min(self, other: Self) -> Self {
        self.with(other, |one, other| if one < other { one } else { other })
    }
}

impl Add for Lane {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, |one, other| one + other)
    }
}

impl Sub for Lane {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, |one, other| one - other)
    }
}

impl Mul for Lane {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.with(other, |one, other| one * other)
    }
}

impl Div for Lane {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        self.with(other, |one, other| one / other)
    }
}

/// A worker as its floor depends on it.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct Standing<'a> {
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

impl Standing<'_> {
    /// The numbers that a floor is made of, in the order in which [`Asked::of`] reads them. All 0, which makes the floor 0, where
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
pub(in crate::core) struct Asked {
    pub(in crate::core) prompt_tokens: f64,
    pub(in crate::core) output_tokens: f64,
    pub(in crate::core) block_tokens: f64,
    /// See [`WorkerLoad::pressure`]; of workers that only compute prompts, and of the others.
    pub(in crate::core) pressure: [f64; 2],
    /// See [`WorkerLoad::reuse`].
    pub(in crate::core) reuse: f64,
    pub(in crate::core) now_ms: f64,
}

/// What a placement costs at least, in ms.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::core) struct Floor {
    /// Of [`Estimate::total_ms`].
    pub(in crate::core) total_ms: f64,
    /// Of [`Estimate::ttft_ms`].
    pub(in crate::core) ttft_ms: f64,
    /// Of what a decode leg costs whoever computes the prompt.
    pub(in crate::core) decode_leg_ms: f64,
}

impl Floor {
    /// They are no numbers.
    pub(in crate::core) fn is_nonsense(&self) -> bool {
        self.total_ms.is_nan()
    }

    /// The estimate is known.
    pub(in crate::core) fn raise(&mut self, estimate: &Estimate) {
        (self.total_ms, self.ttft_ms) = (estimate.total_ms(), estimate.ttft_ms());
    }
}

impl Asked {
    /// The floors of some workers. `has`: tokens of the prompt that each of them has, or that come.
    fn of(&self, terms: &[Lane; TERMS], has: &[[f64; 2]; LANES]) -> [Floor; LANES] {
        let [busy_ms, began_ms, around_ms, of_step, prefill_ms, context_ms, used, of_pool, ..] =
            *terms;
        let [.., rows, tpot, tpot_kv, slots, row, row_kv, free, cached_blocks, answers] = *terms;
        let [zero, one] = [0.0, 1.0].map(Lane::all);
        let [prompt, output, block] =
            [self.prompt_tokens, self.output_tokens.max(1.0), self.block_tokens].map(Lane::all);
        let lacks = |part: usize| (prompt - Lane(from_fn(|i| has[i][part]))).max(one);
        let uncached = lacks(0);
        // until the step that runs ends, and its own steps
        let elapsed_ms = (Lane::all(self.now_ms) - began_ms).max(zero);
        let rest_ms = (busy_ms - elapsed_ms).max(zero);
        let positions = uncached * (prompt - uncached + (uncached - one) * Lane::all(0.5));
        let own_ms = prefill_ms * uncached + context_ms * positions;
        let prompt_ms = (uncached * of_step).max(one) * around_ms + own_ms;
        // the answer
        let tpot_ms = tpot + tpot_kv * prompt;
        let answer_ms = (output - one) * tpot_ms;
        let queue_ms = rest_ms.max(slots * output * tpot_ms);
        let rows_ms = output * (row + row_kv * prompt);
        // what it costs others
        let [of_prompts, of_others] = self.pressure.map(Lane::all);
        let pressure = answers * of_others + (one - answers) * of_prompts;
        let saturation_ms = |lacks: Lane, service_ms: Lane| {
            let share = (lacks + answers * output) / block * of_pool;
            let taken = (used + share).min(Lane::all(FULL));
            service_ms * share * taken / (one - taken)
        };
        let blocks = (uncached + answers * output) / block;
        let evicted = (blocks - free).max(zero).min(cached_blocks);
        let others_ms = rows * own_ms
            + rows_ms
            + pressure * own_ms
            + Lane::all(self.reuse) * block * prefill_ms * evicted
            + saturation_ms(uncached, prompt_ms + answer_ms);
        let sure = Lane::all(SURE);
        let ttft_ms = queue_ms + prompt_ms;
        let total_ms = sure * (ttft_ms + answer_ms + others_ms);
        let decode_leg_ms = sure * (answer_ms + rows_ms + saturation_ms(lacks(1), answer_ms));
        let ttft_ms = sure * ttft_ms;
        from_fn(|i| Floor {
            total_ms: total_ms.0[i],
            ttft_ms: ttft_ms.0[i],
            decode_leg_ms: decode_leg_ms.0[i],
        })
    }
}

/// The terms of all workers, by their places.
#[derive(Debug, Default)]
pub(in crate::core) struct FloorTable {
    terms: Vec<[Lane; TERMS]>,
}

impl FloorTable {
    /// How the worker at a place stands now. Places before it are there.
    pub(in crate::core) fn set(&mut self, place: usize, standing: &Standing<'_>) {
        let (group, lane) = (place / LANES, place % LANES);
        if group == self.terms.len() {
            self.terms.push([Lane::all(0.0); TERMS]);
        }
        for (lanes, term) in self.terms[group].iter_mut().zip(standing.terms()) {
            lanes.0[lane] = term;
        }
    }

    /// Fills `floors` for all workers. `has`: leading tokens of the prompt that each of them counts on, whole or as a decode leg.
    pub(in crate::core) fn floors(&self, asked: &Asked, has: &[[f64; 2]], floors: &mut Vec<Floor>) {
        floors.clear();
        for (terms, has) in self.terms.iter().zip(has.chunks(LANES)) {
            let mut all = [[0.0; 2]; LANES];
            all[..has.len()].copy_from_slice(has);
            floors.extend_from_slice(&asked.of(terms, &all)[..has.len()]);
        }
    }
}

#[cfg(test)]
mod tests;
