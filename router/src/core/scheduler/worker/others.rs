//! The prompts that one worker has of other routers, as it tells: what is left of each, and what the step that runs is thought to
//! compute of it.

use crate::core::cost::context;
use crate::core::estimate::QueuedPrompt;
use crate::core::frame::OtherPrompt;

/// In the worker's order.
#[derive(Debug, Default)]
pub(in crate::core::scheduler) struct OtherQueue {
    told: bool,
    prompts: Vec<OtherEntry>,
    /// Tokens of them that were computed since the last step that was reported.
    done: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct OtherEntry {
    pub(super) prompt: OtherPrompt,
    /// Tokens that the step that runs computes.
    pub(super) running: u32,
}

impl OtherQueue {
    /// As the worker has them now. Those that it had before come first, in the same order, unless they are done or gone.
    pub(super) fn tell(&mut self, prompts: &[OtherPrompt]) {
        self.told = true;
        let mut before = std::mem::take(&mut self.prompts).into_iter();
        for &prompt in prompts {
            let same = |old: &OtherEntry| {
                old.prompt.tokens == prompt.tokens && old.prompt.left >= prompt.left
            };
            let mut running = 0;
            for old in before.by_ref() {
                if same(&old) {
                    self.done = self.done.saturating_add(old.prompt.left - prompt.left);
                    running = old.running;
                    break;
                }
                self.done = self.done.saturating_add(old.prompt.left);
            }
            self.prompts.push(OtherEntry { prompt, running });
        }
        for old in before {
            self.done = self.done.saturating_add(old.prompt.left);
        }
    }

    /// The worker tells of them.
    pub(super) fn told(&self) -> bool {
        self.told
    }

    /// Tokens of theirs that the step which ended computed.
    pub(super) fn take_done(&mut self) -> u32 {
        std::mem::take(&mut self.done)
    }

    pub(super) fn step_ends(&mut self) {
        self.prompts.iter_mut().for_each(|entry| entry.running = 0);
    }

    /// Those that stand behind so many prompts of this router's own.
    pub(super) fn behind(&self, own: usize) -> impl Iterator<Item = usize> {
        let there = move |(_, entry): &(usize, &OtherEntry)| entry.prompt.behind as usize == own;
        self.prompts.iter().enumerate().filter(there).map(|(i, _)| i)
    }

    /// Those that stand behind more than so many.
    pub(super) fn beyond(&self, own: usize) -> impl Iterator<Item = usize> {
        let there = move |(_, entry): &(usize, &OtherEntry)| entry.prompt.behind as usize > own;
        self.prompts.iter().enumerate().filter(there).map(|(i, _)| i)
    }

    pub(super) fn len(&self) -> usize {
        self.prompts.len()
    }

    pub(super) fn entry(&mut self, i: usize) -> &mut OtherEntry {
        &mut self.prompts[i]
    }

    pub(super) fn queued(&self, i: usize) -> QueuedPrompt {
        let OtherEntry { prompt, running } = self.prompts[i];
        let left = prompt.left.saturating_sub(running);
        let from = prompt.tokens.saturating_sub(left);
        QueuedPrompt { running, left, from, prompts: prompt.prompts, awaits: None }
    }

    pub(super) fn left_of(&self, i: usize) -> f64 {
        self.prompts[i].prompt.left.into()
    }

    pub(super) fn left(&self) -> f64 {
        self.prompts.iter().map(|entry| f64::from(entry.prompt.left)).sum()
    }

    pub(super) fn prompts(&self) -> f64 {
        self.prompts.iter().map(|entry| f64::from(entry.prompt.prompts)).sum()
    }

    /// Positions of what is left, summed up.
    pub(super) fn context(&self) -> f64 {
        let of = |OtherPrompt { tokens, left, prompts, .. }: OtherPrompt| {
            let each = f64::from(prompts.max(1));
            context(f64::from(tokens.saturating_sub(left)) / each, f64::from(left) / each) * each
        };
        self.prompts.iter().map(|entry| of(entry.prompt)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: u32, left: u32) -> OtherPrompt {
        OtherPrompt { behind: 0, tokens, left, prompts: 1 }
    }

    #[test]
    fn who_is_told_again_without_progress_is_the_same_and_in_the_same_step() {
        let mut others = OtherQueue::default();
        others.tell(&[prompt(900, 600), prompt(500, 500)]);
        others.entry(1).running = 200;
        others.tell(&[prompt(900, 600), prompt(500, 450)]);
        let queued = others.queued(1);
        assert_eq!((queued.running, queued.left, queued.from), (200, 250, 250));
        assert_eq!([others.take_done(), others.take_done()], [50, 0]);
    }

    #[test]
    fn who_is_not_told_any_more_is_done_wherever_it_stood() {
        let mut others = OtherQueue::default();
        others.tell(&[prompt(900, 600), prompt(500, 500), prompt(70, 7)]);
        others.tell(&[prompt(500, 400)]);
        assert_eq!(others.take_done(), 600 + 100 + 7);
    }

    #[test]
    fn prompts_that_are_none_are_one() {
        let mut others = OtherQueue::default();
        others.tell(&[OtherPrompt { prompts: 0, ..prompt(100, 40) }]);
        assert_eq!(others.context(), context(60.0, 40.0));
    }
}
