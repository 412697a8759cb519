//! The answers that one worker generates, and when they are likely to give their blocks back.

use std::sync::Arc;

use super::Worker;
use crate::core::frame::RequestId;
use crate::core::scheduler::demand::lengths::AnswerLengths;

/// An answer that is being generated.
#[derive(Debug)]
pub(in crate::core::scheduler) struct RunningAnswer {
    pub(super) request: RequestId,
    pub(super) prompt_tokens: u32,
    pub(super) keys: Arc<[u64]>,
    /// The longest that it may become.
    pub(super) max_tokens: f64,
    /// The last step that was reported when it began.
    pub(super) since_step: u64,
}

/// A request that needs room.
pub(in crate::core::scheduler) struct Wanted<'a> {
    pub(in crate::core::scheduler) prompt_tokens: u32,
    /// Of the blocks that it can share.
    pub(in crate::core::scheduler) keys: &'a [u64],
}

/// An answer that is likely to end, and what it gives back.
struct Leaves {
    in_ms: f64,
    blocks: f64,
}

impl<W> Worker<W> {
    /// Ms until there is room for a request: its prompt, beside what the worker keeps free for those that run and for the prompts
    /// before it; answers end, one after the other, and give back what they hold. Blocks that the request shares with one that
    /// runs are there already. `None` where there is room now, or where too little is known.
    pub(in crate::core::scheduler) fn room_ms(
        &self,
        wanted: &Wanted<'_>,
        blocks_used: f64,
        lengths: &AnswerLengths,
        block_tokens: u32,
    ) -> Option<f64> {
        let block = f64::from(block_tokens);
        let usual = lengths.usual();
        let prompt_blocks = f64::from(wanted.prompt_tokens) / block;
        let needed = blocks_used + prompt_blocks - f64::from(self.capacity.blocks);
        let most_kept =
            (self.answers.len() + self.prefills.len()) as f64 * usual.max(block) / block;
        if needed + most_kept <= 0.0 || self.answers.is_empty() {
            return None;
        }
        // the engine's rule, see `engine/admission.py`, `spoken_for`: each is to become as long as answers are, and may ask for a
        // block more at least
        let kept = |tokens: f64, most: f64| (usual.max(tokens + block).min(most) - tokens) / block;
        let written = |answer: &RunningAnswer| {
            let steps = self.step.saturating_sub(answer.since_step) as f64;
            (steps * self.accepted).min(answer.max_tokens)
        };
        let of_prompts = self.prefills.iter().map(|prefill| kept(0.0, prefill.max_tokens));
        let of_answers = self.answers.iter().map(|one| kept(written(one), one.max_tokens));
        let kept_blocks: f64 = of_prompts.chain(of_answers).sum();
        if needed + kept_blocks <= 0.0 {
            return None; // as a rule: what follows is dear
        }
        let with_prompts = self.prefills.iter().map(|prefill| shared(&prefill.keys, wanted.keys));
        let with_answers = self.answers.iter().map(|answer| shared(&answer.keys, wanted.keys));
        let there = with_prompts.chain(with_answers).max().unwrap_or(0) as f64;
        let mut missing = needed + kept_blocks - there;
        if missing <= 0.0 {
            return (needed > 0.0).then_some(0.0);
        }
        let step_ms = self.running_ms() / self.accepted.max(1.0);
        let mut leaves: Vec<Leaves> = Vec::with_capacity(self.answers.len());
        for answer in &self.answers {
            let (tokens, most) = (written(answer), answer.max_tokens);
            let rest = lengths.rest(tokens).min(most - tokens).max(1.0);
            let held = (f64::from(answer.prompt_tokens) + tokens) / block + kept(tokens, most);
            let blocks = held - shared(&answer.keys, wanted.keys) as f64; // the request keeps those
            leaves.push(Leaves { in_ms: rest * step_ms, blocks });
        }
        leaves.sort_by(|a, b| a.in_ms.total_cmp(&b.in_ms));
        for leave in &leaves {
            missing -= leave.blocks;
            if missing <= 0.0 {
                return Some(leave.in_ms);
            }
        }
        leaves.last().map(|leave| leave.in_ms)
    }
}

/// Leading blocks that two prompts share: a key stands for all blocks up to its own.
fn shared(one: &[u64], other: &[u64]) -> usize {
    let (mut same, mut differs) = (0, one.len().min(other.len()) + 1);
    while differs - same > 1 {
        let middle = usize::midpoint(same, differs);
        if one[middle - 1] == other[middle - 1] { same = middle } else { differs = middle }
    }
    same
}
