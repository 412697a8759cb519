//! How much is asked of a model: what comes, how long answers are, how busy the fleet is, and how many workers that takes.

mod arrivals;
pub(super) mod lengths;
mod needs;
pub(super) mod pressure;

use self::arrivals::Arrivals;
use self::lengths::AnswerLengths;
use self::needs::MeanWorker;
pub use self::needs::{Binding, Forecast, ModelDemand, Needs, Targets};
use self::pressure::Pressures;
use super::legs::LegPart;
use super::worker::Worker;
use super::{Scheduler, TAUGHT};
use crate::core::frame::{Role, StepCost};

/// Weight of each prompt in the share of them that workers compute that do nothing else. A guess: some fifty count.
const PROMPT_WEIGHT: f64 = 0.02;
/// What waits for a worker is to be computed within so many seconds, beside what comes. A guess: an autoscaler looks that often.
const WAITING_S: f64 = 60.0;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct DemandRecord {
    arrivals: Arrivals,
    pub(super) lengths: AnswerLengths,
    pub(super) pressure: Pressures,
    /// Share of prompt tokens that had to be computed, of late.
    pub(super) uncached_share: f64,
    /// Share of prompts that are computed where nothing else is.
    split_share: f64,
}

impl Default for DemandRecord {
    fn default() -> Self {
        Self {
            arrivals: Arrivals::default(),
            lengths: AnswerLengths::default(),
            pressure: Pressures::default(),
            uncached_share: 1.0,
            split_share: 0.0,
        }
    }
}

impl DemandRecord {
    /// A leg was placed.
    pub(super) fn placed(&mut self, part: LegPart) {
        let split = match part {
            LegPart::Prefill => 1.0,
            LegPart::Whole => 0.0,
            LegPart::Decode => return, // its prompt was counted
        };
        self.split_share += PROMPT_WEIGHT * (split - self.split_share);
    }

    /// Of a prompt so many tokens were in a cache.
    pub(super) fn found(&mut self, prompt_tokens: u32, cached_tokens: u32) {
        let uncached = 1.0 - f64::from(cached_tokens) / f64::from(prompt_tokens.max(1));
        self.uncached_share += PROMPT_WEIGHT * (uncached.clamp(0.0, 1.0) - self.uncached_share);
    }
}

/// Requests that wait for a worker, and their prompt tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct WaitingPrompts {
    /// How many.
    pub requests: usize,
    /// Of all of them.
    pub tokens: u64,
}

/// The workers of one role.
#[derive(Debug, Clone, Copy)]
pub struct RoleFleet {
    /// `Decode` for all that generate, where others compute prompts alone.
    pub role: Role,
    /// Those that take work.
    pub workers: u32,
    /// Unknown until steps of one of them are.
    machine: Option<MeanWorker>,
}

impl RoleFleet {
    /// How many of them what is asked takes; `None` until the steps of one are known. Some ten thousand operations at most.
    #[must_use]
    pub fn needs(&self, asked: &ModelDemand, targets: Targets) -> Option<Needs> {
        Some(Needs::of(asked, self.machine.as_ref()?, targets, self.workers))
    }
}

impl<W> Scheduler<W> {
    /// A request came, whatever becomes of it.
    pub fn arrived(&mut self, prompt_tokens: u32, now_ms: f64) {
        self.demand.arrivals.came(prompt_tokens, now_ms);
    }

    /// What is asked of the model, what waits included.
    #[must_use]
    pub fn asked(&self, waiting: WaitingPrompts, now_ms: f64) -> ModelDemand {
        let of_late = self.demand.arrivals.of_late(now_ms);
        let per_s = of_late.per_s + waiting.requests as f64 / WAITING_S;
        let tokens = of_late.per_s * of_late.prompt_tokens + waiting.tokens as f64 / WAITING_S;
        let prompt_tokens = if per_s > 0.0 { tokens / per_s } else { 0.0 };
        ModelDemand {
            per_s,
            prompt_tokens,
            computed_tokens: prompt_tokens * self.demand.uncached_share,
            spread: of_late.spread,
            output_tokens: self.demand.lengths.usual(),
        }
    }

    /// The workers by role. Roles that none has are left out.
    #[must_use]
    pub fn roles(&self) -> Vec<RoleFleet> {
        let splits = self.workers.iter().any(|worker| !worker.decodes());
        let split_share = if splits { self.demand.split_share } else { 0.0 };
        let roles = [(Role::Prefill, split_share), (Role::Decode, 1.0 - split_share)];
        let of_role = roles.into_iter().filter_map(|(role, share)| {
            let answers = role == Role::Decode;
            let workers: Vec<_> =
                self.workers.iter().filter(|worker| worker.decodes() == answers).collect();
            let open = workers.iter().filter(|worker| worker.open).count();
            (!workers.is_empty()).then(|| RoleFleet {
                role: if splits { role } else { Role::Both },
                workers: u32::try_from(open).unwrap_or(u32::MAX),
                machine: self.machine(&workers, share, answers),
            })
        });
        of_role.collect()
    }

    /// The mean of those whose steps are known.
    fn machine(&self, workers: &[&Worker<W>], share: f64, answers: bool) -> Option<MeanWorker> {
        let known: Vec<_> = workers.iter().filter(|one| one.fit.steps() >= TAUGHT).collect();
        let mean = |value: fn(&Worker<W>) -> f64| {
            known.iter().map(|worker| value(worker)).sum::<f64>() / known.len() as f64
        };
        (!known.is_empty()).then(|| MeanWorker {
            cost: StepCost {
                fixed_ms: mean(|worker| worker.fit.cost().fixed_ms),
                prefill_ms: mean(|worker| worker.fit.cost().prefill_ms),
                context_ms: mean(|worker| worker.fit.cost().context_ms),
                row_ms: mean(|worker| worker.fit.cost().row_ms),
                kv_ms: mean(|worker| worker.fit.cost().kv_ms),
            },
            accepted: mean(|worker| worker.accepted),
            sequences: mean(|worker| worker.capacity.sequences.into()),
            batched_tokens: mean(|worker| worker.capacity.batched_tokens.into()),
            kv_tokens: mean(|worker| worker.capacity.blocks.into()) * f64::from(self.block_tokens),
            prompt_share: share,
            answers,
        })
    }
}
