//! What operators see of a pool, as it is at one moment: copied while the lock is held, shown when it is not.

use std::sync::Arc;

use super::groups::GroupView;
use super::{PooledWorker, Status, WorkerPool};
use crate::core::scheduler::{SourceView, WorkerView};
use crate::prompt::PromptEngine;

/// A pool at one moment.
pub(in crate::fleet) struct PoolSnapshot {
    pub(in crate::fleet) model: String,
    pub(in crate::fleet) engine: Option<Arc<PromptEngine>>,
    pub(in crate::fleet) workers: Vec<WorkerSnapshot>,
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
    pub(in crate::fleet) fn snapshot(&self) -> PoolSnapshot {
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
        }
    }
}

impl PoolSnapshot {
    /// Its groups.
    pub(in crate::fleet) fn groups(&self) -> Vec<GroupView<'_>> {
        GroupView::of(&self.model, self.workers.iter().map(|one| &one.worker))
    }
}
