//! The fleet at a glance: sums for the log's line of every ten seconds, and a tile of each worker for the dashboard.

use serde_json::Value;

use super::Registry;
use super::views::Totals;
use crate::core::admission::Class;
use crate::fleet::pool::{PoolSnapshot, Status};

/// Sums over all workers, and who waits for them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct FleetGlance {
    pub(crate) workers: usize,
    /// Workers that take new work.
    pub(crate) ready: usize,
    /// In the router's queue, by class, and how long the first of them has waited.
    pub(crate) waiting: usize,
    pub(crate) waiting_by_class: [usize; Class::ALL.len()],
    pub(crate) oldest_s: f64,
    /// Of the KV pools.
    pub(crate) blocks: u64,
    pub(crate) blocks_used: u64,
    pub(crate) blocks_cached: u64,
}

/// The same with workers and groups as the dashboard shows them.
pub(crate) struct FleetTiles {
    pub(crate) glance: FleetGlance,
    /// Of models that workers serve.
    pub(crate) models: Vec<String>,
    pub(crate) workers: Vec<Value>,
    /// Workers that are not shown.
    pub(crate) left_out: usize,
    pub(crate) groups: Vec<Value>,
}

impl FleetGlance {
    fn of(pools: &[PoolSnapshot], totals: &Totals) -> Self {
        let mut glance = Self {
            waiting: totals.waiting,
            waiting_by_class: totals.waiting_by_class,
            oldest_s: totals.oldest_s,
            ..Self::default()
        };
        for one in pools.iter().flat_map(|pool| &pool.workers) {
            let load = one.view.load;
            glance.workers += 1;
            glance.ready += usize::from(one.status == Status::Ready);
            glance.blocks += u64::from(one.worker.hello.capacity.blocks);
            glance.blocks_used += u64::from(load.blocks_used);
            glance.blocks_cached += u64::from(load.blocks_cached);
        }
        glance
    }

    /// Share of the KV pools' blocks that running requests hold; `None` without a block.
    pub(crate) fn kv_used(&self) -> Option<f64> {
        (self.blocks > 0).then(|| self.blocks_used as f64 / self.blocks as f64)
    }
}

impl Registry {
    /// Sums over the fleet as it is now.
    pub(crate) fn glance(&self) -> FleetGlance {
        let (pools, totals) = self.snapshot(self.clock_ms());
        FleetGlance::of(&pools, &totals)
    }

    /// The fleet as it is now, with so many workers at most: in order of their models, those that joined first.
    pub(crate) fn tiles(&self, most: usize) -> FleetTiles {
        let now_ms = self.now_ms();
        let (pools, totals) = self.snapshot(self.clock_ms());
        let glance = FleetGlance::of(&pools, &totals);
        let workers = pools.iter().flat_map(|pool| &pool.workers);
        let workers: Vec<Value> = workers.take(most).map(|one| one.as_tile(now_ms)).collect();
        let groups = pools.iter().flat_map(PoolSnapshot::groups).take(most);
        FleetTiles {
            glance,
            models: pools.iter().map(|pool| pool.model.clone()).take(most).collect(),
            left_out: glance.workers - workers.len(),
            workers,
            groups: groups.map(|group| group.as_tile()).collect(),
        }
    }
}
