//! What a step costs in milliseconds, learnt from the steps that ran. Nothing here is tuned for a model or a device: the
//! five coefficients of a worker's step time come from its own Step frames.

use std::array::from_fn;

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
/// Weight that what a worker brought keeps at least, however many steps have come: it decides only where they tell nothing.
const LEAST_WEIGHT: f64 = 1e-5;
/// Share of its duration by which a step may miss the model without telling anything. A guess.
const NOISE: f64 = 0.1;
/// Weight that a step keeps when another one has come: half of it is gone after some 70 steps, so that a worker that
/// becomes slower is known as such within seconds.
const MEMORY: f64 = 0.99;
/// The same of steps with prompts, which are fewer, and of a prior: half of one is gone after some 23 others. A guess.
const PROMPT_MEMORY: f64 = 0.97;
/// A step this many times as long as predicted, and what is open of the prediction, counts as this many times: one stalled step
/// teaches little, and the first ones of a kind that was thought to take no time more than that.
const OUTLIER: f64 = 4.0;
/// No step is taken for a stall below four times this, whatever is thought of its kind: it would weigh all the more, as the noise of a
/// step is a share of its time.
const LEAST_MS: f64 = 1e-3;
/// So many steps count as long as they were: they may tell that what was thought before was far off.
const TRUSTED: u64 = 8;

/// Fits the step time of one worker: least squares on *relative* errors, so that a decode step of 20 ms and a prefill step
/// of 900 ms count the same, over steps that fade, so that it follows a worker that becomes slower.
///
/// Kept are the normal equations rather than a covariance: sums of squares cannot lose their definiteness to rounding, as the
/// recursive form does within some thousand steps when features differ by ten powers of ten. The prior fades as steps come, so
/// that a wrong one is forgotten, but never whole: what no step tells about stays what it was. Steps with prompts fade as others with prompts come, and those without as others without do:
/// a minute in which nobody sends a prompt is no reason to forget what prompts cost. In units of the prior: `cost[i] = prior[i] + spread[i] * z[i]`, `z` of unit variance.
#[derive(Debug, Clone)]
pub struct StepFit {
    cost: Vector,
    prior: Vector,
    spread: Vector,
    /// Of the prior, beside that of the steps.
    weight: f64,
    least_weight: f64,
    /// Faded sums of `u u'` and `u r` over the steps, `u` the features and `r` the miss of the prior, both in units of what
    /// noise explains. First those of steps without prompts, then those of steps with some.
    sums: [Sums; 2],
    steps: u64,
    /// The prior is what somebody knew, not a guess.
    told: bool,
}

/// The normal equations of some steps.
#[derive(Debug, Clone, Default)]
struct Sums {
    squares: [Vector; 5],
    products: Vector,
}

impl Sums {
    fn add(&mut self, u: &Vector, miss: f64, memory: f64) {
        for (row, u_row) in self.squares.iter_mut().zip(u) {
            for (entry, u_column) in row.iter_mut().zip(u) {
                *entry = *entry * memory + u_row * u_column;
            }
        }
        for (entry, u) in self.products.iter_mut().zip(u) {
            *entry = *entry * memory + u * miss;
        }
    }

    /// Those of all steps.
    fn of([some, others]: &[Self; 2]) -> Self {
        Self {
            squares: from_fn(|i| from_fn(|j| some.squares[i][j] + others.squares[i][j])),
            products: from_fn(|i| some.products[i] + others.products[i]),
        }
    }

    /// Solves `(weight + squares) z = products` by Cholesky's method, with the held ones at their lowest.
    fn solve(&self, weight: f64, held: &[bool; 5], lowest: &Vector) -> Vector {
        let lower = self.factor(weight, held);
        let right = from_fn(|i| {
            if held[i] {
                return lowest[i];
            }
            let fixed = (0..5).filter(|&j| held[j]).map(|j| self.squares[i][j] * lowest[j]);
            self.products[i] - fixed.sum::<f64>()
        });
        let mut z = substituted(&lower, right);
        for i in (0..5).rev() {
            let sum = z[i] - (i + 1..5).map(|k| lower[k][i] * z[k]).sum::<f64>();
            z[i] = sum / lower[i][i];
        }
        z
    }

    /// What these steps leave open of a sum of `part[i] * z[i]`: its variance.
    fn variance(&self, weight: f64, part: Vector) -> f64 {
        let share = substituted(&self.factor(weight, &[false; 5]), part);
        dot(&share, &share)
    }

    /// The lower triangle whose product with itself is `weight + squares`, apart from the held ones.
    fn factor(&self, weight: f64, held: &[bool; 5]) -> [Vector; 5] {
        let mut lower = [[0.0; 5]; 5];
        for i in 0..5 {
            for j in 0..=i {
                let plain = match (held[i] || held[j], i == j) {
                    (true, same) => f64::from(u8::from(same)),
                    (false, same) => self.squares[i][j] + weight * f64::from(u8::from(same)),
                };
                let sum = plain - (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
                // never less than the prior's own part, whatever rounding says
                lower[i][j] =
                    if i == j { sum.max(1e-3 * weight).sqrt() } else { sum / lower[j][j] };
            }
        }
        lower
    }
}

/// Solves `lower z = right`.
fn substituted(lower: &[Vector; 5], right: Vector) -> Vector {
    let mut z = right;
    for i in 0..5 {
        let sum = z[i] - (0..i).map(|k| lower[i][k] * z[k]).sum::<f64>();
        z[i] = sum / lower[i][i];
    }
    z
}

impl StepFit {
    /// Begins with what the worker said of itself, else with what its peers are like, else with a guess.
    #[must_use]
    pub fn new(own: Option<StepCost>, peers: Option<StepCost>) -> Self {
        match own.filter(StepCost::is_sane).or(peers.filter(StepCost::is_sane)) {
            Some(cost) => Self { told: true, ..Self::around(cost, PRIOR_SPREAD, LEAST_WEIGHT) },
            None => Self::guess(None),
        }
    }

    fn around(prior: StepCost, spread: f64, least_weight: f64) -> Self {
        let (prior, guess) = (prior.vector(), UNKNOWN.vector());
        // one given as 0 was not measured
        let about: Vector = from_fn(|i| if prior[i] > 0.0 { prior[i] } else { guess[i] });
        let spread = from_fn(|i| (spread * about[i]).max(1e-3 * guess[i]));
        let sums = [Sums::default(), Sums::default()];
        Self { cost: prior, prior, spread, weight: 1.0, least_weight, sums, steps: 0, told: false }
    }

    /// Begins with what its peers are like, as a guess that the first steps replace.
    #[must_use]
    pub fn guess(peers: Option<StepCost>) -> Self {
        Self::around(peers.filter(StepCost::is_sane).unwrap_or(UNKNOWN), UNKNOWN_SPREAD, 1.0)
    }

    /// As far as it is known.
    #[must_use]
    pub fn cost(&self) -> StepCost {
        StepCost::from_vector(self.cost)
    }

    /// The cost is one that somebody told or that some steps took, not a guess.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.told || self.steps >= TRUSTED
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
        let stalled = self.steps >= TRUSTED && ms > OUTLIER * predicted;
        let ms = if stalled { ms.min(OUTLIER * self.longest(predicted, &x)) } else { ms };
        let noise = NOISE * ms;
        let u: Vector = from_fn(|i| x[i] * self.spread[i] / noise);
        let miss = (ms - dot(&self.prior, &x)) / noise;
        if !(miss.is_finite() && u.iter().all(|u| u.is_finite())) {
            return;
        }
        let [of_rows, of_prompts] = &mut self.sums;
        if features.prefill_tokens > 0.0 {
            of_prompts.add(&u, miss, PROMPT_MEMORY);
        } else {
            of_rows.add(&u, miss, MEMORY);
        }
        self.steps += 1;
        self.weight = (self.weight * PROMPT_MEMORY).max(self.least_weight);
        self.solve();
    }

    /// How long a step that is predicted so may well take, by what the steps so far leave open. The prior counts as on the first
    /// day here: that it has faded is no reason to take a stall for the truth where no step ever told anything.
    fn longest(&self, predicted_ms: f64, x: &Vector) -> f64 {
        let part = from_fn(|i| x[i] * self.spread[i]);
        let open = Sums::of(&self.sums).variance(1.0, part).sqrt();
        (predicted_ms + open).max(LEAST_MS)
    }

    /// The best coefficients that are not negative: whichever would be is held at 0, and the others are found anew.
    fn solve(&mut self) {
        let lowest: Vector = from_fn(|i| -self.prior[i] / self.spread[i]);
        let sums = Sums::of(&self.sums);
        let mut held = [false; 5];
        for _ in 0..5 {
            let z = sums.solve(self.weight, &held, &lowest);
            let mut all = true;
            for i in 0..5 {
                if !held[i] && z[i] < lowest[i] {
                    held[i] = true;
                    all = false;
                }
            }
            if all {
                let cost: Vector = from_fn(|i| (self.prior[i] + self.spread[i] * z[i]).max(0.0));
                if cost.iter().all(|cost| cost.is_finite()) {
                    self.cost = cost;
                }
                return;
            }
        }
    }
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests;
