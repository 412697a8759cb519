//! Those who wait for a worker: whatever changes may make room for them, and is looked at for that.

use std::sync::Arc;
use std::time::Duration;

use super::placing::no_worker;
use super::{Registry, RegistryState};
use crate::core::candidate::WorkerId;
use crate::core::frame::RequestId;
use crate::core::scheduler::LegOutput;
use crate::error::RouteError;
use crate::fleet::pool::WorkerPool;

impl Registry {
    /// Gives those who wait what room there is.
    pub(super) fn dispatch_waiting(self: &Arc<Self>, state: &mut RegistryState, model: &str) {
        let Some(pool) = state.pools.get_mut(model) else { return };
        if pool.dispatch.nobody_waits() {
            return;
        }
        let engine = pool.engine.clone();
        let may_open = pool.some_may_open();
        pool.dispatch.dispatch_waiting(may_open, self.clock_ms(), |waiting, placed, workers| {
            let understood =
                engine.as_ref().is_some_and(|own| Arc::ptr_eq(own, &waiting.model.engine));
            let answer = match placed {
                Ok(_) if !understood => Err(no_worker()), // its tokens mean something else now
                Ok(placement) => Ok(self.reserved(&placement, workers)),
                Err(refusal) => Err(self.refused(&refusal)),
            };
            let placed = answer.is_ok();
            match waiting.answer(answer) {
                Ok(()) => placed,
                Err(answer) => {
                    if let Ok(reservation) = answer {
                        reservation.forget(); // its drop would lock again; the dispatch gives it back
                    }
                    false
                }
            }
        });
    }

    /// Those who gathered need not wait for others any longer. The first one to say so does it for all.
    pub(super) fn place_gathered(self: &Arc<Self>, model: &str) {
        self.dispatch_waiting(&mut self.state(), model);
    }

    pub(in crate::fleet) fn leave_queue(&self, model: &str, request: RequestId) {
        if let Some(pool) = self.state().pools.get_mut(model) {
            pool.dispatch.leave(request);
        }
    }

    pub(super) fn why_none(&self, model: &str) -> RouteError {
        match self.state().pools.get(model) {
            Some(pool) if pool.some_open() => {
                let retry_after = Duration::from_secs_f64(pool.dispatch.retry_after_ms() / 1e3);
                RouteError::Overloaded { what: "all workers are full", retry_after }
            }
            Some(_) | None => no_worker(),
        }
    }

    /// Legs ended, or never started, with what they gave.
    pub(in crate::fleet) fn ended(self: &Arc<Self>, id: WorkerId, legs: &[(RequestId, LegOutput)]) {
        if legs.is_empty() {
            return;
        }
        let now_ms = self.clock_ms();
        self.change(id, |pool| {
            for (request, output) in legs {
                pool.dispatch.end(*request, *output, now_ms);
            }
        });
    }

    /// Changes what is known of a worker, and then gives those who wait the room that this made.
    pub(in crate::fleet) fn change<T>(
        self: &Arc<Self>,
        id: WorkerId,
        change: impl FnOnce(&mut WorkerPool) -> T,
    ) -> Option<T> {
        let mut state = self.state();
        let pool = state.pool(id)?;
        let changed = change(pool);
        let may_help = || pool.dispatch.scheduler.has_room(id, self.clock_ms());
        if !pool.dispatch.nobody_waits() && (may_help() || !pool.some_may_open()) {
            let model = pool.model.clone();
            self.dispatch_waiting(&mut state, &model);
        }
        Some(changed)
    }
}
