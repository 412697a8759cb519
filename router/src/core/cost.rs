//! What a step costs, learnt from the steps that ran, and what a placement would cost: all in milliseconds.
//!
//! Nothing here is tuned by hand for a model or a device: the five coefficients of a worker's step time come from its own
//! Step frames, and every term of a placement follows from them.

use serde::{Deserialize, Serialize};

use crate::core::frame::{Step, StepCost};

/// What one step was about: the factors of [`StepCost`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepFeatures {
    /// Prompt tokens computed.
    pub prefill_tokens: f64,
    /// Their positions, summed up: the KV tokens that their attention reads.
    pub prefill_context: f64,
    /// Sequences that decode.
    pub rows: f64,
    /// KV tokens that decoding reads.
    pub kv_tokens: f64,
}

impl StepFeatures {
    /// As a worker reported them.
    #[must_use]
    pub fn of(step: &Step) -> Self {
        Self {
            prefill_tokens: step.prefill_tokens.into(),
            prefill_context: step.prefill_context as f64,
            rows: step.decode_rows.into(),
            kv_tokens: step.kv_tokens as f64,
        }
    }

    fn vector(&self) -> Vector {
        [1.0, self.prefill_tokens, self.prefill_context, self.rows, self.kv_tokens]
    }
}

impl StepCost {
    /// Predicted duration of a step in ms.
    #[must_use]
    pub fn step_ms(&self, features: &StepFeatures) -> f64 {
        dot(&self.vector(), &features.vector())
    }

    /// Ms of computing `tokens` prompt tokens that stand at positions from `from` on, without the steps around them.
    #[must_use]
    pub fn prompt_ms(&self, from: f64, tokens: f64) -> f64 {
        self.prefill_ms * tokens + self.context_ms * context(from, tokens)
    }

    /// No coefficient is negative or not a number.
    #[must_use]
    pub fn is_sane(&self) -> bool {
        self.vector().iter().all(|value| value.is_finite() && *value >= 0.0)
    }

    fn vector(&self) -> Vector {
        [self.fixed_ms, self.prefill_ms, self.context_ms, self.row_ms, self.kv_ms]
    }

    fn from_vector([fixed_ms, prefill_ms, context_ms, row_ms, kv_ms]: Vector) -> Self {
        Self { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms }
    }
}

/// Positions of `tokens` tokens from `from` on, summed up.
#[must_use]
pub fn context(from: f64, tokens: f64) -> f64 {
    tokens * (from + (tokens - 1.0).max(0.0) / 2.0)
}

type Vector = [f64; 5];

/// Stands in where neither the worker nor its peers know better: something between a small model on a CPU and a large
/// one on a GPU. A guess, and given up within the first few steps.
const UNKNOWN: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.2, context_ms: 1e-6, row_ms: 0.5, kv_ms: 1e-4 };
/// Relative standard deviation of a coefficient that a worker brought, and of one that was guessed.
const PRIOR_SPREAD: f64 = 0.5;
const UNKNOWN_SPREAD: f64 = 20.0;
/// Share of its duration by which a step may miss the model without telling anything. A guess.
const NOISE: f64 = 0.1;
/// Weight that a step keeps when another one has come: half of it is gone after some 70 steps, so that a worker that
/// becomes slower is known as such within seconds.
const MEMORY: f64 = 0.99;
/// A step this many times as long as predicted counts as this many times, so that one stalled step teaches little.
const OUTLIER: f64 = 4.0;

/// Fits the step time of one worker by recursive least squares on *relative* errors: a decode step of 20 ms and a prefill
/// step of 900 ms count the same. Old steps fade, so it follows a worker that becomes slower.
#[derive(Debug, Clone)]
pub struct StepFit {
    cost: Vector,
    covariance: [Vector; 5],
    /// No coefficient becomes less certain than it was at the start, however long nothing tells about it.
    ceiling: Vector,
    steps: u64,
}

impl StepFit {
    /// Begins with what the worker said of itself, else with what its peers are like, else with a guess.
    #[must_use]
    pub fn new(own: Option<StepCost>, peers: Option<StepCost>) -> Self {
        let sane = |cost: &StepCost| cost.is_sane();
        let (prior, spread) = match (own.filter(sane), peers.filter(sane)) {
            (Some(cost), _) | (None, Some(cost)) => (cost, PRIOR_SPREAD),
            (None, None) => (UNKNOWN, UNKNOWN_SPREAD),
        };
        let (cost, guess) = (prior.vector(), UNKNOWN.vector());
        let mut covariance = [[0.0; 5]; 5];
        let mut ceiling = [0.0; 5];
        for i in 0..5 {
            // a coefficient given as 0 may be found to be more than that
            let deviation = (spread * cost[i]).max(1e-3 * guess[i]);
            ceiling[i] = deviation * deviation;
            covariance[i][i] = ceiling[i];
        }
        Self { cost, covariance, ceiling, steps: 0 }
    }

    /// As far as it is known.
    #[must_use]
    pub fn cost(&self) -> StepCost {
        StepCost::from_vector(self.cost)
    }

    /// Steps that it learnt from.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A step of these features took so long.
    pub fn observe(&mut self, features: &StepFeatures, ms: f64) {
        let x = features.vector();
        let predicted = dot(&self.cost, &x);
        if !(ms.is_finite() && ms > 0.0 && predicted.is_finite()) {
            return;
        }
        let ms = if self.steps < 8 { ms } else { ms.min(OUTLIER * predicted.max(1e-3)) };
        let px = self.covariance.map(|row| dot(&row, &x));
        let noise = NOISE * ms;
        let gain = 1.0 / (MEMORY * noise * noise + dot(&x, &px));
        let error = ms - predicted;
        for (cost, px) in self.cost.iter_mut().zip(px) {
            *cost = (*cost + gain * px * error).max(0.0);
        }
        for (row, px_row) in self.covariance.iter_mut().zip(px) {
            for (entry, px_column) in row.iter_mut().zip(px) {
                *entry = (*entry - gain * px_row * px_column) / MEMORY;
            }
        }
        for i in 0..5 {
            self.bound(i);
        }
        self.steps += 1;
    }

    /// Shrinks row and column `i` so that the variance there stays between nothing and the ceiling.
    fn bound(&mut self, i: usize) {
        let variance = self.covariance[i][i];
        let (low, high) = (1e-12 * self.ceiling[i], self.ceiling[i]);
        if variance > high {
            let shrink = (high / variance).sqrt();
            for j in 0..5 {
                self.covariance[i][j] *= shrink;
                self.covariance[j][i] *= shrink;
            }
        } else if variance.is_nan() || variance < low {
            // rounding ate it: begin anew in this direction
            for j in 0..5 {
                self.covariance[i][j] = 0.0;
                self.covariance[j][i] = 0.0;
            }
            self.covariance[i][i] = low;
        }
    }
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// How a worker stands at the moment of a decision. Counts are real numbers, as predictions may be.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Standing {
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
    /// Of the step that runs, ms that are over; 0 when idle.
    pub elapsed_ms: f64,
    /// The step that runs works on the backlog.
    pub backlog_runs: bool,
    /// Blocks that running requests hold.
    pub blocks_used: f64,
    /// Blocks of the pool.
    pub blocks: f64,
    /// Tokens that a row gets from a step: 1, more with multi-token prediction.
    pub accepted: f64,
    /// The longest step among the other ranks of its expert-parallel group, which step in time with it; 0 without.
    pub group_ms: f64,
    /// Rows of the other ranks.
    pub group_rows: f64,
}

/// What a request asks of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    /// Tokens of the prompt.
    pub prompt_tokens: f64,
    /// Those of them that need not be computed.
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
    /// Moving KV between workers; 0 where one worker does both.
    pub transfer_ms: f64,
    /// All tokens after the first.
    pub decode_ms: f64,
    /// Delay of the rows that are there already, summed over them.
    pub harm_ms: f64,
    /// For a pool that fills: convex, nothing at first, much at the end.
    pub barrier_ms: f64,
}

impl Estimate {
    /// Placement to first token.
    #[must_use]
    pub fn ttft_ms(&self) -> f64 {
        self.queue_ms + self.prefill_ms + self.transfer_ms
    }

    /// What is compared.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.ttft_ms() + self.decode_ms + self.harm_ms + self.barrier_ms
    }
}

/// The barrier is `service * fill^8 / (1 - fill)`: under 1 % of the service time up to half a pool, 0.8 of it at 80 %, 4 of
/// it at 90 %. The shape is M/M/1's; the exponent is a guess that keeps it out of the way of a pool with room.
const BARRIER_EXPONENT: i32 = 8;
/// A pool is never taken for fuller than this, so that full ones can still be told apart by their other terms.
const FULL: f64 = 0.99;

/// Predicts what placing `demand` on a worker that stands like this would cost.
#[must_use]
pub fn estimate(standing: &Standing, demand: &Demand) -> Estimate {
    let Standing { cost, rows, kv_tokens, backlog_tokens, occupied, .. } = *standing;
    let uncached = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
    let own_ms = cost.prompt_ms(demand.cached_tokens, uncached);

    // Every step that carries a piece of a prompt also carries the rows that decode.
    let around_ms =
        (cost.fixed_ms + cost.row_ms * rows + cost.kv_ms * kv_tokens).max(standing.group_ms);
    let per_step = (standing.step_tokens - rows).max(1.0);
    let steps_ahead = backlog_tokens / per_step;
    let steps_in_all = ((backlog_tokens + uncached) / per_step).ceil();
    let ahead_ms = steps_ahead * around_ms
        + cost.prefill_ms * backlog_tokens
        + cost.context_ms * standing.backlog_context;
    let busy = occupied > 0.0;
    let rest_ms = if busy { (around_ms - standing.elapsed_ms).max(0.0) } else { 0.0 };
    let waiting_ms = if backlog_tokens > 0.0 && standing.backlog_runs {
        (ahead_ms - standing.elapsed_ms).max(0.0)
    } else {
        rest_ms + ahead_ms
    };

    // With a row more, and with those that are rows once the backlog is done.
    let rows_then = (occupied + 1.0).min(standing.slots);
    let kv_then = kv_tokens + backlog_tokens + demand.prompt_tokens;
    let step_then = cost.fixed_ms + cost.row_ms * rows_then + cost.kv_ms * kv_then;
    let tpot_ms = step_then.max(standing.group_ms) / standing.accepted.max(1.0);
    let output = demand.output_tokens.max(1.0);

    // All slots taken: one becomes free each time that one of them ends.
    let too_many = (occupied + 1.0 - standing.slots).max(0.0);
    let slot_ms = too_many * output * tpot_ms / standing.slots.max(1.0);

    let prefill_ms = (steps_in_all - steps_ahead) * around_ms + own_ms;
    let decode_ms = (output - 1.0) * tpot_ms;
    let others = occupied + standing.group_rows;
    let more_ms = (cost.row_ms + cost.kv_ms * demand.prompt_tokens) * output / standing.accepted;
    let harm_ms = others * (own_ms + more_ms);
    let blocks = (uncached + output) / demand.block_tokens.max(1.0);
    let fill = ((standing.blocks_used + blocks) / standing.blocks.max(1.0)).min(FULL);
    let barrier_ms = (prefill_ms + decode_ms) * fill.powi(BARRIER_EXPONENT) / (1.0 - fill);
    Estimate {
        queue_ms: waiting_ms + slot_ms,
        prefill_ms,
        transfer_ms: 0.0,
        decode_ms,
        harm_ms,
        barrier_ms,
    }
}

#[cfg(test)]
mod tests;
