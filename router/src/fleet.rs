//! The workers: their links, what they said of themselves, and their load.
//!
//! A worker finds the router ([`discovery`] makes it known), dials ([`listen`]), introduces itself ([`handshake`]) and
//! joins the [`registry`]; from then on its [`link`] carries frames. The registry places requests in the [`pool`] of their
//! model, or lets them wait in its [`queue`].

pub(crate) mod booking;
mod budget;
pub mod codec;
mod discovery;
pub(crate) mod drain;
mod etcd;
mod handshake;
pub(crate) mod link;
mod listen;
mod lobby;
mod pool;
mod pulls;
mod queue;
pub(crate) mod registry;
pub mod stream;
mod told;
mod views;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::discovery::{Entry, stay_registered};
pub use self::drain::{DrainError, DrainOrder};
use self::listen::{Listener, accept_workers, tls_acceptor};
use self::registry::Registry;
pub use self::registry::ServedModel;
use crate::config::{Config, WorkerListen};
use crate::core::secret::{AuthKey, HashKey};
use crate::error::RouteError;
use crate::metrics::{Metrics, Text};
use crate::prompt::{PrefixCache, TokenizePool};

/// Prompts that may wait for a thread of the tokeniser.
const TOKENIZER_QUEUE: usize = 4_096;

/// For the tasks of all links to end.
const CLOSE: Duration = Duration::from_secs(2);

/// The workers, and what listens for more of them. Dropping it ends all links.
#[derive(Debug)]
pub struct Fleet {
    address: WorkerListen,
    pub(crate) registry: Arc<Registry>,
    tasks: TaskTracker,
    /// Workers are to look for other routers from now on.
    leave: CancellationToken,
}

/// What stays as it was at the start.
#[derive(Debug)]
pub(crate) struct Setup {
    config: Config,
    /// Name of this router, new at each start.
    name: String,
    auth: Option<AuthKey>,
    hash_key: HashKey,
    tokenize_pool: Arc<TokenizePool>,
    prefix_cache: Arc<PrefixCache>,
}

impl Setup {
    fn random_bytes<const N: usize>(&self) -> [u8; N] {
        random_bytes()
    }
}

/// Why the router could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Which.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// Certificate or key cannot be used.
    #[error("cannot use {path} for TLS: {reason}")]
    Tls {
        /// Which file.
        path: String,
        /// Why.
        reason: String,
    },
    /// The file for decisions cannot be written.
    #[error("--decision-log: cannot use {path}: {source}")]
    DecisionLog {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// No threads for the tokeniser.
    #[error("cannot start the threads of the tokeniser: {0}")]
    Threads(std::io::Error),
}

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// As clients write it.
    pub name: String,
    /// Longest sequence that every one of its workers takes.
    pub context_tokens: u32,
    /// Seconds since 1970 at which its first worker joined.
    pub created: u64,
}

impl Fleet {
    pub(crate) async fn start(config: &Config, metrics: Arc<Metrics>) -> Result<Self, StartError> {
        let tls = config.fleet.tls.as_ref().map(tls_acceptor).transpose()?;
        let pool = TokenizePool::new(config.tokenizer.threads, TOKENIZER_QUEUE);
        let secret = config.fleet.secret.as_ref().map(|secret| secret.0.as_bytes());
        let setup = Setup {
            config: config.clone(),
            name: format!("router-{:016x}", u64::from_le_bytes(random_bytes())),
            auth: secret.map(AuthKey::derive),
            hash_key: secret.map_or_else(|| HashKey(random_bytes()), HashKey::derive),
            tokenize_pool: Arc::new(pool.map_err(StartError::Threads)?),
            prefix_cache: PrefixCache::new(config.tokenizer.cache_bytes),
        };
        let (listener, address) = Listener::bind(&config.fleet.listen).await?;
        let heartbeat = config.fleet.heartbeat;
        let registry = Registry::new(setup, metrics, u64::from_le_bytes(random_bytes()));
        let (tasks, end) = (TaskTracker::new(), registry.end.clone());
        let leave = end.child_token();
        if let Some(registration) = config.fleet.registration.clone() {
            let router = registry.setup.name.clone();
            let address = registration.advertise.clone().unwrap_or_else(|| address.to_string());
            let (entry, metrics) = (Entry { router, address }, Arc::clone(&registry.metrics));
            tasks.spawn(stay_registered(registration, entry, metrics, leave.clone()));
        }
        let accepting = accept_workers(listener, tls, Arc::clone(&registry), tasks.clone());
        tasks.spawn(end.clone().run_until_cancelled_owned(accepting));
        let sweeping = sweep(Arc::clone(&registry), sweep_interval(heartbeat));
        tasks.spawn(end.run_until_cancelled_owned(sweeping));
        Ok(Self { address, registry, tasks, leave })
    }

    /// Where workers dial in, with the port that was taken.
    #[must_use]
    pub fn address(&self) -> &WorkerListen {
        &self.address
    }

    /// Models with a worker that can serve them.
    #[must_use]
    pub fn models(&self) -> Vec<ModelInfo> {
        self.registry.models()
    }

    /// A model that can be asked for.
    ///
    /// # Errors
    /// `UnknownModel`; `NoWorker` if it is known and no worker is there, or nothing is known at all.
    pub fn find(&self, model: &str) -> Result<Arc<ServedModel>, RouteError> {
        self.registry.find(model)
    }

    /// The body of `/workers`.
    #[must_use]
    pub fn workers(&self) -> serde_json::Value {
        self.registry.workers()
    }

    /// At least one worker takes new work, and the router is not shutting down.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.registry.ready()
    }

    /// Tells a worker to hand its hottest blocks over, to finish what it has, and to leave; how that stands, as in
    /// [`Self::drain_state`].
    ///
    /// # Errors
    /// There is none of this name, or it leaves already.
    pub fn drain(&self, worker: &str, order: DrainOrder) -> Result<serde_json::Value, DrainError> {
        self.registry.drain(worker, order)
    }

    /// The body of `/workers/NAME/drain`; `None` if this worker was never drained.
    #[must_use]
    pub fn drain_state(&self, worker: &str) -> Option<serde_json::Value> {
        self.registry.drain_state(worker)
    }

    /// From now on no new request is taken. What runs goes on.
    pub fn shut_down(&self) {
        self.leave.cancel();
        self.registry.shut_down();
    }

    /// All that still runs or waits ends with `ShuttingDown`, which its client is told.
    pub(crate) fn cut(&self) {
        self.registry.cut();
    }

    /// Hangs up on all workers; they dial again when a router is there again.
    pub(crate) async fn close(&self) {
        self.registry.close_all();
        self.tasks.close();
        if timeout(CLOSE, self.tasks.wait()).await.is_err() {
            tracing::warn!("some links did not close in time");
        }
    }

    /// For tests that keep its threads busy.
    #[cfg(test)]
    pub(crate) fn tokenize_pool(&self) -> &Arc<TokenizePool> {
        &self.registry.setup.tokenize_pool
    }

    pub(crate) fn render(&self, text: &mut Text) {
        self.registry.render(text);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.registry.close_all();
    }
}

/// Often enough that a silent worker is noticed within its third missed heartbeat.
fn sweep_interval(heartbeat: Duration) -> Duration {
    (heartbeat / 8).max(Duration::from_millis(1))
}

async fn sweep(registry: Arc<Registry>, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Instant::now();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        // all the time in which no task ran counts for nothing
        registry.sweep(now, now - last > 4 * every);
        last = now;
    }
}

fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let provider = rustls::crypto::ring::default_provider();
    provider.secure_random.fill(&mut bytes).expect("the system has randomness");
    bytes
}
