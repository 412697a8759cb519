//! What operators see of a pool, as it is at one moment: copied while the lock is held, shown when it is not.

use std::sync::Arc;

use super::groups::GroupView;
use super::series::WorkerSeries;
use super::{PooledWorker, Status, WorkerPool};
use crate::core::frame::Role;
use crate::core::scheduler::{ModelDemand, RoleFleet, SourceView, WorkerView};
use crate::metrics::ModelMetrics;
use crate::prompt::PromptEngine;

/// A pool at one moment.
pub(in crate::fleet) struct PoolSnapshot {
    pub(in crate::fleet) model: String,
    pub(in crate::fleet) engine: Option<Arc<PromptEngine>>,
    pub(in crate::fleet) workers: Vec<WorkerSnapshot>,
    /// What is counted of workers without series of their own.
    pub(super) others: Option<Box<WorkerSeries>>,
    /// What is counted of the model's requests.
    pub(in crate::fleet) metrics: Arc<ModelMetrics>,
    /// Tokens of a block.
    pub(in crate::fleet) block_tokens: u32,
    /// Legs that wait in the router for one of its workers.
    pub(in crate::fleet) queued: usize,
    /// What is asked of it.
    pub(in crate::fleet) asked: ModelDemand,
    /// Its workers by role.
    pub(in crate::fleet) roles: Vec<RoleFleet>,
}

/// A worker at one moment.
pub(in crate::fleet) struct WorkerSnapshot {
    pub(in crate::fleet) worker: PooledWorker,
    pub(in crate::fleet) view: WorkerView,
    /// What pulling KV costs it, by source.
    pub(super) sources: Vec<SourceView>,
    pub(in crate::fleet) status: Status,
}

impl WorkerPool {
    /// The pool as it is now. Some hundred bytes are copied of each worker.
    pub(in crate::fleet) fn snapshot(&self, clock_ms: f64) -> PoolSnapshot {
        let described = self.engine.is_some();
        let workers = self.dispatch.scheduler.views().map(|(worker, view)| WorkerSnapshot {
            worker: worker.clone(),
            view,
            sources: self.dispatch.scheduler.sources(worker.link.id),
            status: worker.status(described),
        });
        PoolSnapshot {
            model: self.model.clone(),
            engine: self.engine.clone(),
            workers: workers.collect(),
            others: self.others.clone(),
            metrics: Arc::clone(&self.metrics),
            block_tokens: self.dispatch.scheduler.block_tokens(),
            queued: self.dispatch.queue().len(),
            asked: self.dispatch.asked(clock_ms),
            roles: self.dispatch.scheduler.roles(),
        }
    }
}

impl PoolSnapshot {
    /// Ranks of a group of workers of this role: of its largest one, and 1 where there is none.
    pub(in crate::fleet) fn group_size(&self, role: Role) -> u32 {
        let is_of = |one: &&WorkerSnapshot| {
            (one.worker.hello.role == Role::Prefill) == (role == Role::Prefill)
        };
        let sizes = self.workers.iter().filter(is_of).filter_map(|one| {
            let group = one.worker.hello.group.as_ref()?;
            Some(group.size)
        });
        sizes.max().unwrap_or(1).max(1)
    }

    /// Its groups.
    pub(in crate::fleet) fn groups(&self) -> Vec<GroupView<'_>> {
        GroupView::of(&self.model, self.workers.iter().map(|one| &one.worker))
    }
}
