//! Ranks of an expert-parallel group step together: what the others make of the steps of one, and it of theirs.

use super::WorkerLoad;
use crate::core::frame::StepCost;

/// Share of what a rank does in the shadow of slower ones that counts against it. A guess: only to tell ranks apart.
const HIDDEN_SHARE: f64 = 0.1;

impl WorkerLoad {
    /// A step with all that it has, once the prompts are computed.
    pub(in crate::core) fn decode_step_ms(&self) -> f64 {
        let kv_tokens = self.kv_tokens + self.backlog_tokens + self.arriving_tokens;
        let StepCost { fixed_ms, row_ms, kv_ms, .. } = self.cost;
        fixed_ms + row_ms * self.occupied.min(self.slots) + kv_ms * kv_tokens
    }

    /// The steps that carry its prompts, and what those add to each.
    pub(in crate::core) fn prompt_steps(&self) -> (f64, f64) {
        let steps = (self.backlog_tokens / (self.step_tokens - self.rows).max(1.0)).ceil();
        let ms = self.cost.prefill_ms * self.backlog_tokens
            + self.cost.context_ms * self.backlog_context;
        (steps, ms / steps.max(1.0))
    }
}

/// The steps of the other ranks of a group, from now on: some that carry prompts, then others.
#[derive(Clone, Copy)]
pub(super) struct GroupSteps {
    ms: f64,
    prompt_ms: f64,
    prompt_steps: f64,
}

impl GroupSteps {
    pub(super) fn of(worker_load: &WorkerLoad) -> Self {
        let WorkerLoad { group_ms, group_prompt_ms, group_prompt_steps, .. } = *worker_load;
        Self { ms: group_ms, prompt_ms: group_prompt_ms, prompt_steps: group_prompt_steps }
    }

    /// The longest of them that runs.
    pub(super) fn step_ms(&self) -> f64 {
        if self.prompt_steps > 0.0 { self.ms + self.prompt_ms } else { self.ms }
    }

    /// Of `steps` steps from `from` on, those in which another rank computes a prompt, and the rest.
    fn parts(&self, from: f64, steps: f64) -> [(f64, f64); 2] {
        let beside = (self.prompt_steps - from).clamp(0.0, steps);
        [(beside, self.ms + self.prompt_ms), (steps - beside, self.ms)]
    }

    /// Ms of `steps` steps from `from` on that last `around_ms` each, and all together `prompt_ms` more, on one rank: each is as
    /// long as the longest of all ranks.
    pub(super) fn lockstep_ms(&self, from: f64, steps: f64, around_ms: f64, prompt_ms: f64) -> f64 {
        let own_ms = steps * around_ms + prompt_ms;
        if self.ms == 0.0 || steps <= 0.0 {
            return own_ms;
        }
        let each_ms = own_ms / steps;
        self.parts(from, steps).into_iter().map(|(steps, ms)| steps * each_ms.max(ms)).sum()
    }

    /// What these `prompt_ms` make the steps of all ranks longer by.
    pub(super) fn raise_ms(&self, from: f64, steps: f64, around_ms: f64, prompt_ms: f64) -> f64 {
        if self.ms == 0.0 || steps <= 0.0 {
            return prompt_ms;
        }
        let each_ms = prompt_ms / steps;
        let parts = self.parts(from, steps).into_iter();
        parts.map(|(steps, ms)| steps * raised(around_ms, each_ms, ms)).sum()
    }

    /// What prompts of other ranks add to `steps` steps from `from` on that last `around_ms` on this one.
    pub(super) fn prompts_ms(&self, from: f64, steps: f64, around_ms: f64) -> f64 {
        let [(beside, longer_ms), _] = self.parts(from, steps);
        beside * (longer_ms - around_ms.max(self.ms)).max(0.0)
    }
}

/// By how much a step becomes longer that lasts `own_ms` here and `others_ms` on the slowest of the other ranks, if `more_ms` come
/// here. What they hide behind others now counts a little, the more the less room there is: others end, too.
pub(super) fn raised(own_ms: f64, more_ms: f64, others_ms: f64) -> f64 {
    let then_ms = own_ms + more_ms;
    let beyond_ms =
        if others_ms > 0.0 { (then_ms - others_ms).clamp(0.0, more_ms) } else { more_ms };
    let hidden_ms = more_ms - beyond_ms;
    if hidden_ms > 0.0 {
        beyond_ms + HIDDEN_SHARE * hidden_ms * (then_ms / others_ms).min(1.0)
    } else {
        beyond_ms
    }
}

#[cfg(test)]
mod tests;
