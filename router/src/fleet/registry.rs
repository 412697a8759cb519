//! All workers and the queue for them, under one short lock that is never held across an await. A mutex rather than a
//! task, so that a request is placed without a hop between tasks.

mod blocks;
mod descriptions;
mod glance;
mod groups;
mod joining;
mod keys;
mod members;
mod names;
mod placing;
mod reports;
mod scaling;
mod sweep;
mod views;
mod vllm_names;
mod waiting;

pub(crate) use self::glance::FleetGlance;
pub use self::placing::ServedModel;
pub(super) use self::reports::Said;
pub(crate) use self::vllm_names::VllmNames;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Setup;
use super::budget::{DescriptionBytes, IndexRoom};
use super::drain::Drains;
use super::link::{Link, LinkError};
use super::pool::WorkerPool;
use crate::config::WorkerListen;
use crate::core::candidate::WorkerId;
use crate::core::circuit::{CircuitRule, Circuits};
use crate::core::frame::RequestId;
use crate::error::RouteError;
use crate::metrics::Metrics;
use crate::net::tls::ServerTls;
use crate::process::lock::{Held, Lock};
#[cfg(test)]
use crate::prompt::TokenizePool;

/// For the tasks of all links to end.
const CLOSE: Duration = Duration::from_secs(2);

/// All workers, and what listens for more of them.
#[derive(Debug)]
pub struct Registry {
    pub(super) metrics: Arc<Metrics>,
    pub(super) setup: Setup,
    /// Of all links, and of what listens for them.
    pub(super) tasks: TaskTracker,
    /// All links end.
    pub(super) end: CancellationToken,
    /// No new request is taken, and workers are to look for other routers.
    pub(super) leaves: CancellationToken,
    /// No worker is let in any more: another process listens at the same socket.
    pub(super) dials: CancellationToken,
    /// Who waits in a queue waits no longer.
    cut_off: CancellationToken,
    pub(super) drains: Drains,
    pub(super) descriptions: DescriptionBytes,
    begin: Instant,
    last_request: AtomicU64,
    state: Lock<RegistryState>,
    /// A turn to apply a piece of a long block event: however many workers send such events, they are one thread's work.
    block_turn: Semaphore,
}

#[derive(Debug)]
pub(super) struct RegistryState {
    next_worker: u32,
    pub(super) pools: BTreeMap<String, WorkerPool>,
    /// Model of each worker.
    models: HashMap<WorkerId, String>,
    /// Workers by their names: one that joins takes the place of another one of its name.
    names: HashMap<String, WorkerId>,
    index_room: IndexRoom,
    seed: u64,
    /// Nothing is placed any more.
    cut: bool,
    /// Workers that come and go too often.
    pub(super) circuits: Circuits,
}

impl RegistryState {
    pub(super) fn pool(&mut self, id: WorkerId) -> Option<&mut WorkerPool> {
        self.pools.get_mut(self.models.get(&id)?)
    }
}

impl Registry {
    pub(super) fn new(setup: Setup, metrics: Arc<Metrics>, seed: u64) -> Arc<Self> {
        let state = RegistryState {
            next_worker: 0,
            pools: BTreeMap::new(),
            models: HashMap::new(),
            names: HashMap::new(),
            index_room: IndexRoom::new(setup.config.fleet.limits.index_blocks),
            seed,
            cut: false,
            circuits: Circuits::new(CircuitRule::new(setup.config.fleet.circuit_breaks)),
        };
        let end = CancellationToken::new();
        let drains = Drains::default();
        let descriptions = DescriptionBytes::new(setup.config.fleet.limits.description_bytes);
        let state = Lock::new("what is known of the workers", state);
        Arc::new(Self {
            metrics,
            setup,
            tasks: TaskTracker::new(),
            leaves: end.child_token(),
            dials: end.child_token(),
            end,
            cut_off: CancellationToken::new(),
            drains,
            descriptions,
            begin: Instant::now(),
            last_request: AtomicU64::new(0),
            state,
            block_turn: Semaphore::new(1),
        })
    }

    /// Ms since the start.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The same, to the fraction: the scheduler's clock.
    pub(super) fn clock_ms(&self) -> f64 {
        self.at_ms(Instant::now())
    }

    /// A moment of that clock, or a millionth of a second later: never before it.
    pub(super) fn after_ms(&self, ms: f64) -> Instant {
        let since = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        self.begin + since + Duration::from_micros(1)
    }

    /// A moment on that clock.
    pub(crate) fn at_ms(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.begin).as_secs_f64() * 1e3
    }

    /// For tests that keep its threads busy.
    #[cfg(test)]
    pub(crate) fn tokenize_pool(&self) -> &Arc<TokenizePool> {
        &self.setup.tokenize_pool
    }

    pub(super) fn state(&self) -> Held<'_, RegistryState> {
        self.state.lock()
    }

    /// Names for the legs of a request: of the one that answers, and of the one that computes its prompt if it comes to a
    /// split. Later ones are greater.
    pub(crate) fn new_legs(&self) -> (RequestId, RequestId) {
        let answer = self.last_request.fetch_add(2, Relaxed) + 2;
        (RequestId(answer), RequestId(answer - 1))
    }

    /// Answers may begin.
    ///
    /// # Errors
    /// `ShuttingDown`.
    pub(crate) fn takes_requests(&self) -> Result<(), RouteError> {
        if self.leaves.is_cancelled() { Err(RouteError::ShuttingDown) } else { Ok(()) }
    }

    /// Is cancelled when no new request is taken any more.
    pub(crate) fn leaving(&self) -> &CancellationToken {
        &self.leaves
    }

    /// Where workers dial in, with the port that was taken.
    #[must_use]
    pub fn address(&self) -> &WorkerListen {
        &self.setup.address
    }

    /// Name of this router, new at each start.
    pub(crate) fn name(&self) -> &str {
        &self.setup.name
    }

    /// What the links use, where they use TLS.
    pub(crate) fn tls(&self) -> Option<&Arc<ServerTls>> {
        self.setup.tls.as_ref()
    }

    /// Workers that dial from now on are left to whoever else listens at the same socket.
    pub(crate) fn leave_dials(&self) {
        self.dials.cancel();
    }

    /// From now on no new request is taken. What runs goes on.
    pub fn shut_down(&self) {
        self.leaves.cancel();
    }

    /// All that still runs or waits ends with `ShuttingDown`, which its client is told, and nothing more is placed.
    pub(crate) fn cut(&self) {
        let links: Vec<Arc<Link>> = {
            let mut state = self.state();
            state.cut = true;
            state.pools.values().flat_map(WorkerPool::links).collect()
        };
        self.cut_off.cancel();
        for link in links {
            link.cut_legs();
        }
    }

    /// Hangs up on all workers; they dial again when a router is there again.
    pub(crate) async fn close(&self) {
        self.close_all();
        self.tasks.close();
        if timeout(CLOSE, self.tasks.wait()).await.is_err() {
            tracing::warn!("some links did not close in time");
        }
    }

    /// Ends all links, and lets none begin.
    pub(crate) fn close_all(&self) {
        self.end.cancel();
        let links: Vec<Arc<Link>> =
            self.state().pools.values().flat_map(WorkerPool::links).collect();
        for link in links {
            link.close(LinkError::Shutdown);
        }
    }
}
