//! The prompts of one worker: what is left of each, and what the step that runs is thought to compute.

use super::Worker;
use super::prefills::Prefill;
use crate::core::estimate::{Awaited, MOST_QUEUED, PromptQueue, QueuedPrompt, share_out};
use crate::core::frame::{OtherPrompt, RequestId};
use crate::core::scheduler::legs::AwaitedLeg;

/// Prompts among which a step's tokens are thought to be shared out; those behind them wait.
const MOST_PLANNED: usize = 16;

/// Whose prompt stands at a place of a worker's queue: by its number among those of this router, or among the others.
#[derive(Debug, Clone, Copy)]
enum InLine {
    Own(usize),
    Other(usize),
}

/// What prompts in a line amount to: tokens of the step that runs, tokens after it, and their number.
struct InAll {
    running: u64,
    left: u64,
    prompts: u64,
}

impl InAll {
    /// As one prompt, for those that are not told apart.
    fn as_one(&self) -> QueuedPrompt {
        let short = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        QueuedPrompt {
            running: short(self.running),
            left: short(self.left),
            from: 0,
            prompts: short(self.prompts),
            awaits: None,
        }
    }
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
    /// Thinks out what the step that runs computes of each prompt, if that is not done yet.
    pub(in crate::core::scheduler) fn plan(&mut self) {
        if std::mem::replace(&mut self.planned, true) || self.prefills.is_empty() {
            return;
        }
        let budget = (f64::from(self.capacity.batched_tokens) - self.rows()).max(1.0);
        let (mut left, mut chunks) = ([0.0; MOST_PLANNED], [0.0; MOST_PLANNED]);
        let line: Vec<InLine> = self.line().take(MOST_PLANNED + 1).collect();
        let n = line.len().min(MOST_PLANNED);
        for (left, place) in left.iter_mut().zip(&line) {
            *left = match *place {
                InLine::Own(i) if self.awaited(self.prefills.get(i)).is_some() => 0.0,
                InLine::Own(i) => self.prefills.get(i).left.into(),
                InLine::Other(i) => self.others.left_of(i),
            };
        }
        let behind = |i: usize| i + 1 < line.len();
        share_out(self.rule, budget, &left[..n], &mut chunks[..n], behind);
        for (chunk, place) in chunks.iter().zip(&line) {
            match *place {
                InLine::Own(i) => self.prefills.run(i, *chunk as u32),
                InLine::Other(i) => self.others.entry(i).running = *chunk as u32,
            }
        }
    }

    /// All prompts in the worker's order, as far as that is known.
    fn line(&self) -> impl Iterator<Item = InLine> {
        let n = self.prefills.len();
        let own = (0..n).flat_map(|own| {
            let before = self.others.behind(own).map(InLine::Other);
            before.chain(std::iter::once(InLine::Own(own)))
        });
        own.chain(self.others.behind(n).chain(self.others.beyond(n)).map(InLine::Other))
    }

    /// The worker has these prompts of other routers.
    pub(in crate::core::scheduler) fn tell_others(&mut self, prompts: &[OtherPrompt]) {
        self.others.tell(prompts);
    }

    /// The prompt that this one waits for, by its place, while it has to.
    fn awaited(&self, prefill: &Prefill) -> Option<Awaited> {
        let AwaitedLeg { request, left } = prefill.awaits?;
        let place = self.prefills.find(request)?;
        let place_there = u32::try_from(place).ok()?;
        (self.prefills.get(place).left > left).then_some(Awaited { place: place_there, left })
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
        if !self.has_queue() {
            return;
        }
        // only the first of them are told apart; thousands may wait, each for one before it
        let line: Vec<InLine> = self.line().take(MOST_QUEUED).collect();
        let place_of = |awaits: AwaitedLeg| {
            let is_it = |place: &InLine| match *place {
                InLine::Own(i) => self.prefills.get(i).request == awaits.request,
                InLine::Other(_) => false,
            };
            let at = line.iter().position(is_it)?;
            Some(Awaited { place: u32::try_from(at).ok()?, left: awaits.left })
        };
        let mut behind = self.all_in_line();
        for place in &line {
            let prompt = match *place {
                InLine::Own(i) => {
                    let prefill = self.prefills.get(i);
                    let left = prefill.left - prefill.running;
                    QueuedPrompt {
                        running: prefill.running,
                        left,
                        from: prefill.prompt_tokens.saturating_sub(left),
                        prompts: 1,
                        awaits: prefill.awaits.and_then(place_of),
                    }
                }
                InLine::Other(i) => self.others.queued(i),
            };
            behind.running -= u64::from(prompt.running);
            behind.left -= u64::from(prompt.left);
            behind.prompts -= u64::from(prompt.prompts);
            queue.push(prompt);
        }
        if line.len() < self.prefills.len() + self.others.len() {
            queue.push(behind.as_one());
        }
        let (theirs, foreign) = self.foreign();
        if theirs >= 1.0 {
            let (left, prompts) = (theirs as u32, foreign); // saturates
            queue.push(QueuedPrompt { running: 0, left, from: 0, prompts, awaits: None });
        }
        queue.awaits = awaits.and_then(place_of);
    }

    /// [`Self::queue`] has prompts.
    pub(in crate::core::scheduler) fn has_queue(&self) -> bool {
        !self.prefills.is_empty() || self.others.len() > 0
    }

    /// How many.
    pub(in crate::core::scheduler) fn waiting(&self) -> f64 {
        if !self.has_queue() {
            return 0.0;
        }
        let (theirs, foreign) = self.foreign();
        let foreign = if theirs >= 1.0 { f64::from(foreign) } else { 0.0 };
        self.prefills.len() as f64 + self.others.prompts() + foreign
    }

    /// What all prompts in the line amount to.
    fn all_in_line(&self) -> InAll {
        let own = self.prefills.sums();
        let mut all = InAll {
            running: own.running,
            left: own.left - own.running,
            prompts: self.prefills.len() as u64,
        };
        for other in (0..self.others.len()).map(|i| self.others.queued(i)) {
            all.running += u64::from(other.running);
            all.left += u64::from(other.left);
            all.prompts += u64::from(other.prompts);
        }
        all
    }

    /// Its prompts without a first token, in the order of the queue; `None` for those of other routers.
    pub(in crate::core::scheduler) fn queued(&self) -> impl Iterator<Item = Option<RequestId>> {
        self.line().map(|place| match place {
            InLine::Own(i) => Some(self.prefills.get(i).request),
            InLine::Other(_) => None,
        })
    }

    /// The prompt of this leg is computed or has come, or neither will happen.
    pub(super) fn settled(&mut self, request: RequestId) {
        self.prefills.remove(request);
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
}
