//! What decisions read of a worker whatever the request is: worked out when the worker changed, and kept together.

use super::Worker;
use crate::core::candidate::{Exclusion, WorkerId};
use crate::core::estimate::WorkerLoad;
use crate::core::frame::Role;
use crate::core::scheduler::holdings::HolderPlaces;
use crate::core::transfer::PullsLook;

/// See the head of this file.
#[derive(Debug, Clone)]
pub(in crate::core::scheduler) struct Outline {
    pub(in crate::core::scheduler) id: WorkerId,
    /// Digest of the worker's name.
    pub(in crate::core::scheduler) digest: u64,
    pub(in crate::core::scheduler) role: Role,
    /// Its KV can be moved.
    pub(in crate::core::scheduler) moves_kv: bool,
    /// Prompts wait there.
    pub(in crate::core::scheduler) has_queue: bool,
    pub(in crate::core::scheduler) places: HolderPlaces,
    /// Why no request can go there, or none that makes way for others.
    excluded: [Option<Exclusion>; 2],
    pub(in crate::core::scheduler) pulls: PullsLook,
    step_began_ms: f64,
    /// Without what depends on the moment and on other workers.
    pub(in crate::core::scheduler) worker_load: WorkerLoad,
}

impl Outline {
    pub(in crate::core::scheduler) fn of<W>(worker: &Worker<W>, block_tokens: u32) -> Self {
        Self {
            id: worker.id,
            digest: worker.name.digest(),
            role: worker.role,
            moves_kv: worker.kv_block_bytes > 0,
            has_queue: worker.has_queue(),
            places: worker.places.places(worker.credit.given()),
            excluded: [false, true].map(|yields| worker.exclusion(yields)),
            pulls: worker.inbound.looked_at(),
            step_began_ms: worker.step_began_ms,
            worker_load: worker.standing_load(block_tokens),
        }
    }

    pub(in crate::core::scheduler) fn decodes(&self) -> bool {
        self.role != Role::Prefill
    }

    pub(in crate::core::scheduler) fn is_open(&self) -> bool {
        self.excluded[0] != Some(Exclusion::Closed)
    }

    /// Why it cannot be chosen, as far as that does not depend on the request but for whether it makes way for others.
    pub(in crate::core::scheduler) fn excluded(&self, yields: bool) -> Option<Exclusion> {
        self.excluded[usize::from(yields)]
    }

    /// How it stands now, but for others of its group.
    pub(in crate::core::scheduler) fn worker_load(
        &self,
        now_ms: f64,
        pressure: f64,
        reuse: f64,
    ) -> WorkerLoad {
        let load = &self.worker_load;
        let elapsed_ms = load.elapsed_ms(self.step_began_ms, now_ms);
        WorkerLoad { elapsed_ms, pressure, reuse, ..*load }
    }
}
