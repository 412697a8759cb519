//! What people and metrics see of the scheduler.

use std::sync::Arc;

use super::Scheduler;
use super::claims::Doubt;
use super::credit::Withdrawal;
use super::worker::Worker;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Load, RequestId, StepCost};
use crate::core::transfer::TransferCost;

/// What is known of pulling from one worker.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceView {
    /// Name of the worker that is pulled from.
    pub worker: Arc<str>,
    /// What a pull from it costs.
    pub cost: TransferCost,
}

/// What is known of one worker, for people and metrics.
#[derive(Debug, Clone, Copy)]
pub struct WorkerView {
    /// It takes new work.
    pub open: bool,
    /// Its own last report.
    pub load: Load,
    /// Legs of this router.
    pub booked_requests: u32,
    /// Their prompts and longest answers.
    pub booked_tokens: u64,
    /// Prompt tokens of them that are still to be computed, as far as is known.
    pub backlog_tokens: u64,
    /// Blocks that it said it holds on its device.
    pub held_blocks: u32,
    /// Why it gets no credit for them.
    pub withdrawn: Option<Withdrawal>,
    /// Why its word about its speed counts for nothing.
    pub doubt: Option<Doubt>,
    /// Of its steps.
    pub cost: StepCost,
    /// Steps that this was learnt from.
    pub steps_learnt: u64,
    /// Tokens that a row gets from a step.
    pub accepted: f64,
    /// Prompt tokens whose KV is on its way to it.
    pub arriving_tokens: u64,
    /// Prefill legs that are done, whose KV waits to be fetched.
    pub pinned_requests: u32,
    /// What pulling KV costs it, from a source of which nothing is known.
    pub pull_cost: TransferCost,
}

impl<W> Scheduler<W> {
    /// What the caller keeps of each worker, with what is known of it.
    pub fn views(&self) -> impl Iterator<Item = (&W, WorkerView)> {
        self.workers.iter().map(move |worker| (&worker.member, self.view_of(worker)))
    }

    /// What is known of one worker.
    #[must_use]
    pub fn view(&self, id: WorkerId) -> Option<WorkerView> {
        Some(self.view_of(&self.workers[self.find(id)?]))
    }

    fn view_of(&self, worker: &Worker<W>) -> WorkerView {
        WorkerView {
            open: worker.open,
            load: worker.load,
            booked_requests: worker.booked_requests,
            booked_tokens: worker.booked_tokens,
            backlog_tokens: worker.backlog_tokens(),
            held_blocks: self.holdings.held(&worker.places),
            withdrawn: worker.credit.withdrawn(),
            doubt: worker.claims.doubt(),
            cost: worker.fit.cost(),
            steps_learnt: worker.fit.steps(),
            accepted: worker.accepted,
            arriving_tokens: worker.arriving_tokens,
            pinned_requests: worker.pinned,
            pull_cost: worker.inbound.costs().any,
        }
    }

    /// What pulling costs a worker, by source; only of those that it has pulled from.
    #[must_use]
    pub fn sources(&self, id: WorkerId) -> Vec<SourceView> {
        let Some(i) = self.find(id) else { return Vec::new() };
        let known = self.workers[i].inbound.costs().known.iter();
        let view = |(from, cost): &(WorkerId, TransferCost)| {
            let worker = Arc::clone(self.workers[self.find(*from)?].name.text());
            Some(SourceView { worker, cost: *cost })
        };
        known.filter_map(view).collect()
    }

    /// A worker said that it holds this block on its device.
    #[must_use]
    pub fn holds(&self, id: WorkerId, key: u64) -> bool {
        self.find(id).is_some_and(|i| self.holdings.holds(&self.workers[i].places, key))
    }

    /// A worker takes new requests.
    #[must_use]
    pub fn some_open(&self) -> bool {
        self.workers.iter().any(|worker| worker.open && worker.decodes())
    }

    /// Where a leg is booked.
    #[must_use]
    pub fn worker_of(&self, request: RequestId) -> Option<WorkerId> {
        self.legs.get(&request).map(|leg| leg.worker)
    }

    /// Legs that are booked.
    #[must_use]
    pub fn legs(&self) -> usize {
        self.legs.len()
    }

    /// Pairs of block and holder that the index keeps, and its memory in bytes, predictions included.
    #[must_use]
    pub fn index_size(&self) -> (usize, usize) {
        self.holdings.size()
    }
}
