//! A request at the registry: what its model is, and a place for it or a wait.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Registry;
use crate::core::dispatch::{Refusal, Submitted};
use crate::core::scheduler::{Placement, PlacementRequest, Scheduler};
use crate::error::RouteError;
use crate::fleet::booking::Reservation;
use crate::fleet::pool::{PooledWorker, WorkerPool, places};
use crate::fleet::queue::{QueueTicket, Waiting};
use crate::metrics::ModelMetrics;
use crate::prompt::PromptEngine;

/// A model that can be asked for, as it was found: a request goes by this from its body to its last attempt.
#[derive(Debug)]
pub struct ServedModel {
    /// As clients write it.
    pub name: String,
    /// Its tokenizer and template.
    pub engine: Arc<PromptEngine>,
    /// Longest sequence that all its workers take.
    pub context_tokens: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Values of a pooled prompt; 0 where its workers pool none.
    pub pooled_width: u32,
    /// Where its requests are counted.
    pub metrics: Arc<ModelMetrics>,
}

enum Placed {
    Now(Reservation),
    Waits(QueueTicket),
}

impl Registry {
    /// A model that can be asked for, by its name or by a further one. Names go before further ones, and of two models with
    /// the same further name it is the first in the alphabet.
    ///
    /// # Errors
    /// `UnknownModel`; `NoWorker` if it is known and no worker is there, or nothing is known at all.
    pub fn find(&self, model: &str) -> Result<Arc<ServedModel>, RouteError> {
        let state = self.state();
        let by_alias = || state.pools.values().find(|pool| pool.has_alias(model));
        match state.pools.get(model).or_else(by_alias) {
            Some(pool) => match (&pool.engine, pool.context_tokens()) {
                (Some(engine), Some(context_tokens)) => Ok(Arc::new(ServedModel {
                    name: pool.model.clone(),
                    engine: Arc::clone(engine),
                    context_tokens,
                    block_tokens: pool.dispatch.scheduler.block_tokens(),
                    pooled_width: pool.pooled_width(),
                    metrics: Arc::clone(&pool.metrics),
                })),
                _ => Err(no_worker()),
            },
            None if state.pools.is_empty() => Err(no_worker()),
            None => {
                let served: BTreeSet<&str> =
                    state.pools.values().flat_map(WorkerPool::names).collect();
                let served: Vec<&str> = served.into_iter().collect();
                let (model, served) = (model.to_owned(), served.join(", "));
                Err(RouteError::UnknownModel { model, served })
            }
        }
    }

    /// Books a place on a worker, at once if one has room and nobody waits.
    ///
    /// # Errors
    /// `NoWorker`, `Overloaded`, `ShuttingDown`.
    ///
    /// # Cancel safety
    /// A dropped call leaves the queue.
    pub(crate) fn place(
        self: &Arc<Self>,
        model: &Arc<ServedModel>,
        wanted: PlacementRequest,
        deadline: Instant,
    ) -> impl Future<Output = Result<Reservation, RouteError>> + Send {
        let tried = self.try_place(model, wanted); // whoever waits has no room for what it wants: the queue has it
        async move {
            let mut ticket = match tried? {
                Placed::Now(reservation) => {
                    model.metrics.queue_seconds.observe(Duration::ZERO);
                    return Ok(reservation);
                }
                Placed::Waits(ticket) => ticket,
            };
            let until = deadline.min(ticket.since + self.setup.config.deadlines.queue);
            let mut gathers = ticket.gathers_until;
            let placed = loop {
                let wakes = gathers.map_or(until, |gathered| gathered.min(until));
                let placed = tokio::select! {
                    placed = tokio::time::timeout_at(wakes, ticket.wait()) => placed,
                    () = self.cut_off.cancelled() => return Err(RouteError::ShuttingDown),
                };
                if placed.is_ok() || gathers.take().is_none() {
                    break placed;
                }
                self.place_gathered(&model.name);
            };
            let waited = ticket.since.elapsed();
            model.metrics.queue_seconds.observe(waited);
            match placed {
                Ok(Some(result)) => result.map(|place| place.after(waited)),
                Ok(None) => Err(RouteError::ShuttingDown),
                Err(_) => {
                    ticket.expire();
                    Err(self.why_none(&model.name))
                }
            }
        }
    }

    fn try_place(
        self: &Arc<Self>,
        model: &Arc<ServedModel>,
        wanted: PlacementRequest,
    ) -> Result<Placed, RouteError> {
        let mut state = self.state();
        if state.cut {
            return Err(RouteError::ShuttingDown);
        }
        let pool = state.pools.get_mut(&model.name).ok_or_else(no_worker)?;
        pool.want();
        if !pool.understands(&model.engine) {
            return Err(no_worker());
        }
        let request = wanted.request;
        let (waiting, answer) = Waiting::new(Arc::clone(model));
        let may_open = pool.some_may_open();
        match pool.dispatch.submit(wanted, waiting, may_open, self.clock_ms()) {
            Submitted::Placed(placement, _) => {
                Ok(Placed::Now(self.reserved(&placement, &pool.dispatch.scheduler)))
            }
            Submitted::Waits => {
                let mut ticket =
                    QueueTicket::new(Arc::clone(self), request, Arc::clone(model), answer);
                ticket.gathers_until = pool.dispatch.gathers_until_ms().map(|ms| self.after_ms(ms));
                // those before it may wait for a worker that failed nobody else
                self.dispatch_waiting(&mut state, &model.name);
                Ok(Placed::Waits(ticket))
            }
            Submitted::Refused(refusal, _) => Err(self.refused(&refusal)),
        }
    }

    pub(super) fn reserved(
        self: &Arc<Self>,
        placement: &Placement,
        workers: &Scheduler<PooledWorker>,
    ) -> Reservation {
        self.metrics.scheduling.placed(&placement.decision);
        let (decode, prefill) = places(workers, placement);
        Reservation::new(Arc::clone(self), decode, prefill, Arc::clone(&placement.decision))
    }

    pub(super) fn refused(&self, refusal: &Refusal) -> RouteError {
        // a worker that miscounts its tokens can make any prediction absurd
        let after = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX);
        match *refusal {
            Refusal::NoneOpen | Refusal::AllExcluded => no_worker(),
            Refusal::QueueFull { what, retry_after_ms } => {
                self.metrics.scheduling.refused.inc(what.as_str());
                let retry_after = after(retry_after_ms);
                RouteError::Overloaded { what: what.as_str(), retry_after }
            }
            Refusal::TooLate { predicted_ms, deadline_ms, retry_after_ms } => {
                self.metrics.scheduling.refused.inc("deadline");
                RouteError::TooLate {
                    predicted: after(predicted_ms),
                    deadline: after(deadline_ms.max(0.0)),
                    retry_after: after(retry_after_ms),
                }
            }
        }
    }
}

pub(super) fn no_worker() -> RouteError {
    RouteError::NoWorker { retry_after: Duration::from_secs(2) }
}
