//! What a step costs, learnt from the steps that ran, and what a placement would cost: all in milliseconds.
//!
//! Nothing here is tuned for a model or a device: the five coefficients of a worker's step time come from its own Step
//! frames, and every term of a placement follows from them. Two numbers of the shape were chosen and say so below: the
//! share of harm that counts, by simulation, and the exponent of the barrier, by guess.

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

/// Fits the step time of one worker: least squares on *relative* errors, so that a decode step of 20 ms and a prefill step
/// of 900 ms count the same, over steps that fade, so that it follows a worker that becomes slower.
///
/// Kept are the normal equations rather than a covariance: sums of squares cannot lose their definiteness to rounding, as the
/// recursive form does within some thousand steps when features differ by ten powers of ten. The prior never fades, so what no
/// step tells about stays what it was. In units of the prior: `cost[i] = prior[i] + spread[i] * z[i]`, `z` of unit variance.
#[derive(Debug, Clone)]
pub struct StepFit {
    cost: Vector,
    prior: Vector,
    spread: Vector,
    /// Faded sums of `u u'` and `u r` over the steps, `u` the features and `r` the miss of the prior, both in units of what
    /// noise explains.
    squares: [Vector; 5],
    products: Vector,
    steps: u64,
}

impl StepFit {
    /// Begins with what the worker said of itself, else with what its peers are like, else with a guess.
    #[must_use]
    pub fn new(own: Option<StepCost>, peers: Option<StepCost>) -> Self {
        let (prior, spread) = match (own.filter(StepCost::is_sane), peers.filter(StepCost::is_sane))
        {
            (Some(cost), _) | (None, Some(cost)) => (cost, PRIOR_SPREAD),
            (None, None) => (UNKNOWN, UNKNOWN_SPREAD),
        };
        let (prior, guess) = (prior.vector(), UNKNOWN.vector());
        // a coefficient given as 0 may be found to be more than that
        let spread = std::array::from_fn(|i| (spread * prior[i]).max(1e-3 * guess[i]));
        Self { cost: prior, prior, spread, squares: [[0.0; 5]; 5], products: [0.0; 5], steps: 0 }
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
        let noise = NOISE * ms;
        let u: Vector = std::array::from_fn(|i| x[i] * self.spread[i] / noise);
        let miss = (ms - dot(&self.prior, &x)) / noise;
        if !(miss.is_finite() && u.iter().all(|u| u.is_finite())) {
            return;
        }
        for (row, u_row) in self.squares.iter_mut().zip(u) {
            for (entry, u_column) in row.iter_mut().zip(u) {
                *entry = *entry * MEMORY + u_row * u_column;
            }
        }
        for (entry, u) in self.products.iter_mut().zip(u) {
            *entry = *entry * MEMORY + u * miss;
        }
        self.steps += 1;
        self.solve();
    }

    /// The best coefficients that are not negative: whichever would be is held at 0, and the others are found anew.
    fn solve(&mut self) {
        let lowest: Vector = std::array::from_fn(|i| -self.prior[i] / self.spread[i]);
        let mut held = [false; 5];
        for _ in 0..5 {
            let z = self.solve_with(&held, &lowest);
            let mut all = true;
            for i in 0..5 {
                if !held[i] && z[i] < lowest[i] {
                    held[i] = true;
                    all = false;
                }
            }
            if all {
                let cost: Vector =
                    std::array::from_fn(|i| (self.prior[i] + self.spread[i] * z[i]).max(0.0));
                if cost.iter().all(|cost| cost.is_finite()) {
                    self.cost = cost;
                }
                return;
            }
        }
    }

    /// Solves `(1 + squares) z = products` by Cholesky's method, with the held ones at their lowest.
    fn solve_with(&self, held: &[bool; 5], lowest: &Vector) -> Vector {
        let mut lower = [[0.0; 5]; 5];
        let mut z = [0.0; 5];
        for i in 0..5 {
            for j in 0..=i {
                let plain = match (held[i] || held[j], i == j) {
                    (true, same) => f64::from(u8::from(same)),
                    (false, same) => self.squares[i][j] + f64::from(u8::from(same)),
                };
                let sum = plain - (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
                // never less than the prior's own part, whatever rounding says
                lower[i][j] = if i == j { sum.max(1e-3).sqrt() } else { sum / lower[j][j] };
            }
            let right = if held[i] {
                lowest[i]
            } else {
                let fixed = (0..5).filter(|&j| held[j]).map(|j| self.squares[i][j] * lowest[j]);
                self.products[i] - fixed.sum::<f64>()
            };
            let sum = right - (0..i).map(|k| lower[i][k] * z[k]).sum::<f64>();
            z[i] = sum / lower[i][i];
        }
        for i in (0..5).rev() {
            let sum = z[i] - (i + 1..5).map(|k| lower[k][i] * z[k]).sum::<f64>();
            z[i] = sum / lower[i][i];
        }
        z
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
    /// Ms that later requests wait for each ms of prompt that is computed now, at the fleet's present load.
    pub pressure: f64,
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
    /// Delay of the rows that are there already, summed over them, and of the requests that are still to come.
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

/// Share of a row's delay that counts. Prompts have to be computed somewhere, and where there are few rows now there may be
/// more when it comes to that. Simulated on the Mooncake conversation trace at 60 % load: 1 makes the mean time to the first
/// token 13 % longer than 0.1 at the same time per token, and 0 lets both grow at 85 %.
const HARM: f64 = 0.1;

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

    // No room for the prompt's blocks: it comes as running requests end, each with its share of the pool; on average they are
    // half way through.
    let used = standing.blocks_used;
    let needed = demand.prompt_tokens / demand.block_tokens.max(1.0);
    let missing = (used + needed - standing.blocks).clamp(0.0, used);
    let room_ms = if missing > 0.0 { missing / used * output * tpot_ms / 2.0 } else { 0.0 };

    let prefill_ms = (steps_in_all - steps_ahead) * around_ms + own_ms;
    let decode_ms = (output - 1.0) * tpot_ms;
    let others = occupied + standing.group_rows;
    let more_ms = (cost.row_ms + cost.kv_ms * demand.prompt_tokens) * output / standing.accepted;
    let harm_ms = HARM * others * (own_ms + more_ms) + standing.pressure * own_ms;
    let blocks = (uncached + output) / demand.block_tokens.max(1.0);
    let fill = ((standing.blocks_used + blocks) / standing.blocks.max(1.0)).min(FULL);
    let barrier_ms = (prefill_ms + decode_ms) * fill.powi(BARRIER_EXPONENT) / (1.0 - fill);
    Estimate {
        queue_ms: waiting_ms + slot_ms.max(room_ms),
        prefill_ms,
        transfer_ms: 0.0,
        decode_ms,
        harm_ms,
        barrier_ms,
    }
}

#[cfg(test)]
mod tests;
