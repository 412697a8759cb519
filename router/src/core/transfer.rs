//! What moving KV from one worker to another costs, learnt from the pulls that ended.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::candidate::WorkerId;

/// Of pulling KV: `ms = latency + mib_ms * MiB`, and the share of pulls from which nothing comes.
/// Written as three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; 3]", into = "[f64; 3]")]
pub struct TransferCost {
    /// Of any pull.
    pub latency_ms: f64,
    /// Of each MiB.
    pub mib_ms: f64,
    /// Of the latest pulls, those that failed; 0 to 1.
    pub failing: f64,
}

/// Stands in until something was pulled: 4 GiB/s. A guess, and rather too fast: that shows with the first pulls, while a way
/// that is taken for too slow is never tried.
pub const UNKNOWN: TransferCost =
    TransferCost { latency_ms: 1.0, mib_ms: 1e3 / 4096.0, failing: 0.0 };
/// How many pulls the guess, or what other sources tell, counts for. A guess: the first own pull tells more.
const PRIOR_PULLS: f64 = 0.1;
/// Relative standard deviation of either coefficient, once the pulls have told the order of magnitude of both. A guess.
const SPREAD: f64 = 10.0;
/// Share of its duration by which a pull may miss the model without telling anything. A guess.
const NOISE: f64 = 0.2;
/// Weight that a pull keeps when another one has come. A guess: some twenty count.
const MEMORY: f64 = 0.95;
/// Time after which a pull has lost all but a third of its weight, a failure, too: what was slow or broken is tried again. A
/// guess.
const FORGOTTEN_MS: f64 = 60_000.0;

/// Fits what pulls cost, over pulls that fade with their number and with time. First their size: by what factor they are
/// slower than the guess, for memory and networks lie far apart. Then the shape, by least squares on relative errors.
#[derive(Debug, Clone, Copy, Default)]
pub struct TransferFit {
    /// Faded sums of `1`, `x`, `x x`, `y` and `x y` over the pulls, `x` their MiB and `y` their ms, in units of noise.
    sums: [f64; 5],
    /// Faded number of them, and the sum of the logarithms of those factors.
    count: f64,
    factors: f64,
    /// Pulls, and those that failed; fading with time only.
    pulls: f64,
    failed: f64,
    at_ms: f64,
}

impl TransferFit {
    /// So many MiB came in so many ms.
    pub fn observe(&mut self, mib: f64, ms: f64, now_ms: f64) {
        if !(ms.is_finite() && ms >= 0.0 && mib.is_finite() && mib > 0.0) {
            return;
        }
        self.fade(now_ms);
        self.pulls += 1.0;
        let ms = ms.max(1e-3); // clocks are no finer
        let weight = (NOISE * ms).powi(-2);
        let guess_ms = UNKNOWN.latency_ms + UNKNOWN.mib_ms * mib;
        self.count = self.count * MEMORY + 1.0;
        self.factors = self.factors * MEMORY + (ms / guess_ms).ln();
        let new = [1.0, mib, mib * mib, ms, mib * ms];
        for (sum, new) in self.sums.iter_mut().zip(new) {
            *sum = *sum * MEMORY + weight * new;
        }
    }

    /// Takes note of a pull that brought nothing.
    pub fn failed(&mut self, now_ms: f64) {
        self.fade(now_ms);
        self.pulls += 1.0;
        self.failed += 1.0;
    }

    /// As far as it is known; `others` is what is known of other sources.
    #[must_use]
    pub fn cost(&self, others: Option<&TransferCost>, now_ms: f64) -> TransferCost {
        let prior = self.prior(others.unwrap_or(&UNKNOWN), now_ms);
        let kept = self.kept(now_ms);
        let [one, x, xx, y, xy] = self.sums.map(|sum| sum * kept);
        // the prior counts as one measurement of each coefficient
        let [weight_l, weight_m] =
            [prior.latency_ms, prior.mib_ms].map(|value| (SPREAD * value).powi(-2));
        let (a, b, c) = (one + weight_l, x, xx + weight_m);
        let (d, e) = (y + weight_l * prior.latency_ms, xy + weight_m * prior.mib_ms);
        let determinant = a * c - b * b;
        let mut latency_ms = (d * c - b * e) / determinant;
        let mut mib_ms = (a * e - b * d) / determinant;
        // neither can be negative: whichever would be is 0, and the other one is found anew
        if latency_ms < 0.0 {
            (latency_ms, mib_ms) = (0.0, e / c);
        } else if mib_ms < 0.0 {
            (latency_ms, mib_ms) = (d / a, 0.0);
        }
        if !(latency_ms.is_finite() && mib_ms.is_finite()) {
            (latency_ms, mib_ms) = (prior.latency_ms, prior.mib_ms);
        }
        // as if one more had come, so that a single failure is no certainty
        let failing = self.failed * kept / (self.pulls * kept + 1.0);
        TransferCost { latency_ms, mib_ms, failing }.rounded()
    }

    /// What `others` tell, given way to the pulls' own order of magnitude.
    fn prior(&self, others: &TransferCost, now_ms: f64) -> TransferCost {
        let kept = self.kept(now_ms);
        let (count, factors) = (self.count * kept, self.factors * kept);
        let blend = |guess: f64, other: f64| {
            let own = count * guess.ln() + factors;
            let log = (own + PRIOR_PULLS * other.max(1e-6).ln()) / (count + PRIOR_PULLS);
            log.exp().clamp(1e-6, 1e12)
        };
        TransferCost {
            latency_ms: blend(UNKNOWN.latency_ms, others.latency_ms),
            mib_ms: blend(UNKNOWN.mib_ms, others.mib_ms),
            failing: 0.0,
        }
    }

    fn fade(&mut self, now_ms: f64) {
        let kept = self.kept(now_ms);
        (self.count, self.factors) = (self.count * kept, self.factors * kept);
        self.sums = self.sums.map(|sum| sum * kept);
        (self.pulls, self.failed) = (self.pulls * kept, self.failed * kept);
        self.at_ms = now_ms;
    }

    fn kept(&self, now_ms: f64) -> f64 {
        (-(now_ms - self.at_ms).max(0.0) / FORGOTTEN_MS).exp()
    }
}

impl From<[f64; 3]> for TransferCost {
    fn from([latency_ms, mib_ms, failing]: [f64; 3]) -> Self {
        Self { latency_ms, mib_ms, failing }
    }
}

impl From<TransferCost> for [f64; 3] {
    fn from(cost: TransferCost) -> Self {
        [cost.latency_ms, cost.mib_ms, cost.failing]
    }
}

impl TransferCost {
    /// To what is worth writing down in a decision, of which there may be a thousand in each.
    fn rounded(self) -> Self {
        let Self { latency_ms, mib_ms, failing } = self;
        let shares = |value: f64| (value * 1e4).round() / 1e4;
        Self { latency_ms: shares(latency_ms), mib_ms: shares(mib_ms), failing: shares(failing) }
    }
}

/// What pulling costs one worker, by source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sources {
    /// From any that is not among `known`.
    pub any: TransferCost,
    /// From those that it has pulled from, in the order of their ids.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known: Vec<(WorkerId, TransferCost)>,
}

impl Sources {
    /// From each of these workers, which are in the order of their ids.
    pub(super) fn each(
        &self,
        workers: impl Iterator<Item = WorkerId>,
    ) -> impl Iterator<Item = &TransferCost> {
        let mut known = self.known.iter().peekable();
        workers.map(move |worker| {
            while known.next_if(|(id, _)| *id < worker).is_some() {}
            known.peek().filter(|(id, _)| *id == worker).map_or(&self.any, |(_, cost)| cost)
        })
    }
}

impl Sources {
    /// From this worker.
    pub(super) fn from(&self, worker: WorkerId) -> &TransferCost {
        let known = self.known.binary_search_by_key(&worker, |(id, _)| *id);
        known.map_or(&self.any, |i| &self.known[i].1)
    }
}

/// Every how many ms at most what fades is looked at anew.
const FRESH_MS: f64 = 1_000.0;

/// When it was looked at last what pulling costs a worker, and what it costs from any source at least.
#[derive(Debug, Clone, Copy)]
pub(super) struct PullsLook {
    at_ms: f64,
    pub(super) latency_ms: f64,
    pub(super) mib_ms: f64,
}

impl PullsLook {
    fn of(sources: &Sources, at_ms: f64) -> Self {
        let known = sources.known.iter().map(|(_, cost)| cost);
        let least = known.fold(sources.any, |least, cost| TransferCost {
            latency_ms: least.latency_ms.min(cost.latency_ms),
            mib_ms: least.mib_ms.min(cost.mib_ms),
            ..least
        });
        Self { at_ms, latency_ms: least.latency_ms, mib_ms: least.mib_ms }
    }

    /// It is time to look again.
    pub(super) fn is_due(&self, now_ms: f64) -> bool {
        now_ms - self.at_ms >= FRESH_MS
    }
}

/// What one worker learnt of its pulls.
#[derive(Debug)]
pub struct Inbound {
    any: TransferFit,
    known: Vec<(WorkerId, TransferFit)>,
    /// What follows from them, as it was looked at last; shared with the decisions that were made from it.
    costs: Arc<Sources>,
    look: PullsLook,
}

impl Default for Inbound {
    fn default() -> Self {
        let costs = Arc::new(Sources { any: UNKNOWN, known: Vec::new() });
        let look = PullsLook::of(&costs, f64::NEG_INFINITY);
        Self { any: TransferFit::default(), known: Vec::new(), costs, look }
    }
}

impl Inbound {
    /// A pull ended; `from` is `None` if that worker is gone, `moved` the MiB and ms, or `None` if it failed.
    pub fn ended(&mut self, from: Option<WorkerId>, moved: Option<(f64, f64)>, now_ms: f64) {
        let tell = |fit: &mut TransferFit| match moved {
            Some((mib, ms)) => fit.observe(mib, ms, now_ms),
            None => fit.failed(now_ms),
        };
        tell(&mut self.any);
        if let Some(from) = from {
            tell(self.of(from));
        }
        self.look.at_ms = f64::NEG_INFINITY;
    }

    /// A source is gone.
    pub fn forget(&mut self, from: WorkerId) {
        self.known.retain(|(id, _)| *id != from);
        self.look.at_ms = f64::NEG_INFINITY;
    }

    /// Looks at what fades.
    pub fn refresh(&mut self, now_ms: f64) {
        if self.look.is_due(now_ms) {
            let any = self.any.cost(None, now_ms);
            let known = self.known.iter().map(|(id, fit)| (*id, fit.cost(Some(&any), now_ms)));
            // that one source failed says nothing of the others
            let any = TransferCost { failing: 0.0, ..any };
            let costs = Sources { any, known: known.collect() };
            if costs != *self.costs {
                self.costs = Arc::new(costs);
            }
            self.look = PullsLook::of(&self.costs, now_ms);
        }
    }

    /// What a pass over all workers has to know of it.
    pub(super) fn looked_at(&self) -> PullsLook {
        self.look
    }

    /// What pulling costs, as it was looked at last.
    #[must_use]
    pub fn costs(&self) -> &Arc<Sources> {
        &self.costs
    }

    fn of(&mut self, from: WorkerId) -> &mut TransferFit {
        let place = self.known.binary_search_by_key(&from, |(id, _)| *id);
        let i = place.unwrap_or_else(|i| {
            self.known.insert(i, (from, TransferFit::default()));
            i
        });
        &mut self.known[i].1
    }
}

#[cfg(test)]
mod tests;
