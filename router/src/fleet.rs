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
pub mod etcd;
mod handshake;
pub(crate) mod link;
mod listen;
mod pool;
mod queue;
pub(crate) mod registry;
pub mod stream;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use self::discovery::{RouterRecord, stay_registered};
pub use self::drain::{DrainError, DrainOrder};
use self::listen::{Listener, accept_workers};
pub use self::registry::{Registry, ServedModel};
use crate::config::{Config, WorkerListen};
use crate::core::blocks::ChainMemo;
use crate::core::secret::{AuthKey, HashKey};
use crate::log::traces::TracesError;
use crate::metrics::Metrics;
use crate::net::tls::{ServerTls, TlsError};
use crate::prompt::{Conventions, PrefixCache, TokenizePool};

/// Prompts that may wait for a thread of the tokeniser.
const TOKENIZER_QUEUE: usize = 4_096;

/// What stays as it was at the start.
#[derive(Debug)]
pub(crate) struct Setup {
    config: Config,
    /// Name of this router, new at each start.
    name: String,
    /// Where workers dial in, with the port that was taken.
    address: WorkerListen,
    auth: Option<AuthKey>,
    hash_key: HashKey,
    tokenize_pool: Arc<TokenizePool>,
    prefix_cache: Arc<PrefixCache>,
    chain_memo: Arc<ChainMemo>,
    /// Of the links, where they use it.
    tls: Option<Arc<ServerTls>>,
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
        /// The address that could not be bound.
        address: String,
        /// What the system said of it.
        source: std::io::Error,
    },
    /// Certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The file for decisions cannot be written.
    #[error("--decision-log: cannot use {path}: {source}")]
    DecisionLog {
        /// The file that could not be used.
        path: String,
        /// What the system said of it.
        source: std::io::Error,
    },
    /// The file for responses cannot be used.
    #[error("--response-store: cannot use {path}: {source}")]
    ResponseStore {
        /// The file that could not be used.
        path: String,
        /// What is wrong with it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No threads for the tokeniser.
    #[error("cannot start the threads of the tokeniser: {0}")]
    Threads(#[source] std::io::Error),
    /// Requests cannot be traced.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// No socket for what a service manager is told.
    #[error("NOTIFY_SOCKET: cannot open a socket: {0}")]
    Notifier(#[source] std::io::Error),
}

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// As clients write it.
    pub name: String,
    /// Other names under which they find it, in order of the alphabet.
    pub aliases: Vec<String>,
    /// Longest sequence that every one of its workers takes.
    pub context_tokens: u32,
    /// Types of the weights in which its workers compute, in order of the alphabet.
    pub dtypes: Vec<String>,
    /// Seconds since 1970 at which its first worker joined.
    pub created: u64,
    /// What its chat template shows of its answers.
    pub conventions: Conventions,
}

/// Binds the address of the workers and listens there, until [`Registry::close_all`].
pub(crate) async fn start(
    config: &Config,
    metrics: Arc<Metrics>,
) -> Result<Arc<Registry>, StartError> {
    let tls = config.fleet.tls.as_ref().map(|files| ServerTls::load(files, &[])).transpose()?;
    let pool = TokenizePool::new(config.tokenizer.threads, TOKENIZER_QUEUE);
    let secret = config.fleet.secret.as_ref().map(|secret| secret.0.as_bytes());
    let (listener, address) = Listener::bind(&config.fleet.listen, &config.service).await?;
    let local = match &config.fleet.socket {
        Some(path) => {
            Some(Listener::bind(&WorkerListen::Unix(path.clone()), &config.service).await?.0)
        }
        None => None,
    };
    let setup = Setup {
        config: config.clone(),
        name: format!("router-{:016x}", u64::from_le_bytes(random_bytes())),
        address,
        auth: secret.map(AuthKey::derive),
        hash_key: secret.map_or_else(|| HashKey(random_bytes()), HashKey::derive),
        tokenize_pool: Arc::new(pool.map_err(StartError::Threads)?),
        prefix_cache: PrefixCache::new(config.tokenizer.cache_bytes),
        chain_memo: ChainMemo::new(config.tokenizer.cache_bytes / 2),
        tls: tls.clone(),
    };
    let registry = Registry::new(setup, metrics, u64::from_le_bytes(random_bytes()));
    let (tasks, end) = (registry.tasks.clone(), registry.end.clone());
    if let Some(registration) = config.fleet.registration.clone() {
        let router = registry.setup.name.clone();
        let address = registration.advertise.clone();
        let address = address.unwrap_or_else(|| registry.address().to_string());
        let (entry, metrics) = (RouterRecord { router, address }, Arc::clone(&registry.metrics));
        tasks.spawn(stay_registered(registration, entry, metrics, registry.leaves.clone()));
    }
    for (listener, tls) in [(Some(listener), tls), (local, None)] {
        let Some(listener) = listener else { continue };
        let accepting = accept_workers(listener, tls, Arc::clone(&registry), tasks.clone());
        tasks.spawn(registry.dials.clone().run_until_cancelled_owned(accepting));
    }
    let sweeping = sweep(Arc::clone(&registry), sweep_interval(config.fleet.heartbeat));
    tasks.spawn(end.run_until_cancelled_owned(sweeping));
    Ok(registry)
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
