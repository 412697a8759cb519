//! The prompts of one worker: what is left of each, and what the step that runs is thought to compute.

use std::sync::Arc;

use super::Worker;
use crate::core::cost::context;
use crate::core::estimate::{Awaited, MOST_QUEUED, PromptQueue, QueuedPrompt, share_out};
use crate::core::frame::{OtherPrompt, RequestId};
use crate::core::scheduler::legs::AwaitedLeg;

/// Prompts among which a step's tokens are thought to be shared out; those behind them wait.
const MOST_PLANNED: usize = 16;

/// A prompt on its way through a worker.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) request: RequestId,
    pub(super) prompt_tokens: u32,
    /// Tokens still to be computed.
    pub(super) left: u32,
    /// Of them, those that the step that runs computes.
    pub(super) running: u32,
    /// A step that was reported computed some of it: it has all its blocks, and the worker counts them as used.
    pub(super) has_blocks: bool,
    /// The longest that its answer may become here.
    pub(super) max_tokens: f64,
    pub(super) keys: Arc<[u64]>,
    pub(super) awaits: Option<AwaitedLeg>,
    pub(super) yields: bool,
}

/// Whose prompt stands at a place of a worker's queue: by its number among those of this router, or among the others.
#[derive(Debug, Clone, Copy)]
enum InLine {
    Own(usize),
    Other(usize),
}

/// A prompt on its way to a worker.
#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) request: RequestId,
    pub(super) prompt_tokens: u32,
    /// Tokens, of the answer too, that will need blocks.
    pub(super) new_tokens: f64,
}

impl<W> Worker<W> {
    /// A step computed so many tokens: those that it was thought to compute, as far as the number is right.
    pub(super) fn computed(&mut self, mut tokens: u32) {
        let planned = |prefill: &Prefill| prefill.running;
        let parts: [fn(&Prefill) -> u32; 2] = [planned, |prefill| prefill.left];
        for part in parts {
            for prefill in &mut self.prefills {
                let done = part(prefill).min(tokens);
                prefill.left -= done;
                prefill.has_blocks |= done > 0;
                tokens -= done;
            }
        }
        self.count_backlog();
    }

    /// Thinks out what the step that runs computes of each prompt, if that is not done yet.
    pub(in crate::core::scheduler) fn plan(&mut self) {
        if std::mem::replace(&mut self.planned, true) || self.prefills.is_empty() {
            return;
        }
        let budget = (f64::from(self.capacity.batched_tokens) - self.rows()).max(1.0);
        let (mut left, mut chunks) = ([0.0; MOST_PLANNED], [0.0; MOST_PLANNED]);
        let line = self.line();
        let n = line.len().min(MOST_PLANNED);
        for (left, place) in left.iter_mut().zip(&line) {
            *left = match *place {
                InLine::Own(i) if self.awaited(&self.prefills[i]).is_some() => 0.0,
                InLine::Own(i) => self.prefills[i].left.into(),
                InLine::Other(i) => self.others.left_of(i),
            };
        }
        let behind = |i: usize| i + 1 < line.len();
        share_out(self.rule, budget, &left[..n], &mut chunks[..n], behind);
        for (chunk, place) in chunks.iter().zip(&line) {
            match *place {
                InLine::Own(i) => {
                    self.prefills[i].running = *chunk as u32;
                }
                InLine::Other(i) => {
                    self.others.entry(i).running = *chunk as u32;
                }
            }
        }
    }

    /// All prompts in the worker's order, as far as that is known.
    fn line(&self) -> Vec<InLine> {
        let n = self.prefills.len();
        let mut line = Vec::with_capacity(n);
        for own in 0..n {
            line.extend(self.others.behind(own).map(InLine::Other));
            line.push(InLine::Own(own));
        }
        line.extend(self.others.behind(n).chain(self.others.beyond(n)).map(InLine::Other));
        line
    }

    /// The worker has these prompts of other routers.
    pub(in crate::core::scheduler) fn tell_others(&mut self, prompts: &[OtherPrompt]) {
        self.others.tell(prompts);
    }

    /// The prompt that this one waits for, by its place, while it has to.
    fn awaited(&self, prefill: &Prefill) -> Option<Awaited> {
        let AwaitedLeg { request, left } = prefill.awaits?;
        let place = self.prefills.iter().position(|other| other.request == request)?;
        let place_there = u32::try_from(place).ok()?;
        (self.prefills[place].left > left).then_some(Awaited { place: place_there, left })
    }

    /// The prompt without a first token that is going to compute the last of these blocks, of which `held` are there.
    pub(in crate::core::scheduler) fn computes(
        &self,
        booked: &[u64],
        held: u32,
        block_tokens: u32,
    ) -> Option<AwaitedLeg> {
        let last = *booked.get(held as usize..)?.last()?;
        let at = booked.len() - 1;
        let prefill = self.prefills.iter().find(|prefill| prefill.keys.get(at) == Some(&last))?;
        let tokens = u32::try_from(booked.len()).ok()?.saturating_mul(block_tokens);
        let left = prefill.prompt_tokens.saturating_sub(tokens);
        Some(AwaitedLeg { request: prefill.request, left })
    }

    /// Fills `queue` with its prompts, for one that could wait for `awaits`.
    pub(in crate::core::scheduler) fn queue(
        &self,
        awaits: Option<AwaitedLeg>,
        queue: &mut PromptQueue,
    ) {
        (queue.rule, queue.awaits) = (self.rule, None);
        queue.prompts.clear();
        let line = self.line();
        if line.is_empty() {
            return;
        }
        let place_of = |awaits: AwaitedLeg| {
            let is_it = |place: &InLine| match *place {
                InLine::Own(i) => self.prefills[i].request == awaits.request,
                InLine::Other(_) => false,
            };
            // only those that are told apart in the queue; thousands may wait, each for one before it
            let at = line.iter().take(MOST_QUEUED).position(is_it)?;
            Some(Awaited { place: u32::try_from(at).ok()?, left: awaits.left })
        };
        for place in &line {
            match *place {
                InLine::Own(i) => {
                    let prefill = &self.prefills[i];
                    let left = prefill.left - prefill.running;
                    queue.push(QueuedPrompt {
                        running: prefill.running,
                        left,
                        from: prefill.prompt_tokens.saturating_sub(left),
                        prompts: 1,
                        awaits: prefill.awaits.and_then(place_of),
                    });
                }
                InLine::Other(i) => queue.push(self.others.queued(i)),
            }
        }
        let (theirs, foreign) = self.foreign();
        if theirs >= 1.0 {
            let (left, prompts) = (theirs as u32, foreign); // saturates
            queue.push(QueuedPrompt { running: 0, left, from: 0, prompts, awaits: None });
        }
        queue.awaits = awaits.and_then(place_of);
    }

    /// Its prompts without a first token, in the order of the queue; `None` for those of other routers.
    pub(in crate::core::scheduler) fn queued(&self) -> Vec<Option<RequestId>> {
        let request = |place: &InLine| match *place {
            InLine::Own(i) => Some(self.prefills[i].request),
            InLine::Other(_) => None,
        };
        self.line().iter().map(request).collect()
    }

    /// The prompt of this leg is computed or has come, or neither will happen.
    pub(super) fn settled(&mut self, request: RequestId) {
        if let Some(i) = self.prefills.iter().position(|prefill| prefill.request == request) {
            self.prefills.remove(i);
            self.count_backlog();
        }
        if let Some(i) = self.arrivals.iter().position(|arriving| arriving.request == request) {
            self.arrivals.swap_remove(i);
            self.count_arrivals();
        }
    }

    /// Legs without a first token.
    pub(in crate::core::scheduler) fn unbegun(&self) -> impl Iterator<Item = RequestId> {
        let prefills = self.prefills.iter().map(|prefill| prefill.request);
        prefills.chain(self.arrivals.iter().map(|arriving| arriving.request))
    }

    pub(super) fn count_arrivals(&mut self) {
        let prompts = self.arrivals.iter().map(|arriving| u64::from(arriving.prompt_tokens));
        self.arriving_tokens = prompts.sum();
        self.arriving_new = self.arrivals.iter().map(|arriving| arriving.new_tokens).sum();
    }

    pub(super) fn count_backlog(&mut self) {
        let (mut tokens, mut positions) = (0, 0.0);
        self.without_blocks = 0;
        for prefill in &self.prefills {
            tokens += u64::from(prefill.left);
            if !prefill.has_blocks {
                self.without_blocks += u64::from(prefill.left);
            }
            positions +=
                context((prefill.prompt_tokens - prefill.left).into(), prefill.left.into());
        }
        (self.backlog_tokens, self.backlog_context) = (tokens, positions);
        let yielding = self.prefills.iter().filter(|prefill| prefill.yields);
        self.yielding_tokens = yielding.map(|prefill| u64::from(prefill.left)).sum();
    }
}
