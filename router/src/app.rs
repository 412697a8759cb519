//! What all requests share.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::registry::Registry as MetricRegistry;
use tokio::time::Instant;

use crate::config::{Config, Names};
use crate::decisions::Decisions;
use crate::decisions::log::DecisionLog;
use crate::fleet::registry::VllmNames;
use crate::fleet::{self, Registry, StartError};
use crate::limits::key_ring::{KeyRing, KeysShown};
use crate::limits::memory::Memory;
use crate::limits::shares::Shares;
use crate::log::requests::RequestLog;
use crate::log::traces::Traces;
use crate::log::{LostLines, change_filter};
use crate::metrics::{Exposition, Metrics, Tasks, ThisProcess};
use crate::process::cores::Cores;
use crate::process::feed::Feed;
use crate::response_store::ResponseStore;

/// The router without its HTTP server. Tests and `http::app` need no more.
#[derive(Debug)]
pub struct App {
    /// Checked at the start.
    pub config: Config,
    /// Drops before the fleet, which waits for the threads of the tokeniser: its log is on the disk first.
    pub(crate) decisions: Decisions,
    /// The workers. Their links end when this drops.
    pub fleet: Arc<Registry>,
    /// Everything that is counted.
    pub metrics: Arc<Metrics>,
    pub(crate) shares: Arc<Shares>,
    /// Keys that let somebody in.
    pub(crate) keys: Arc<KeyRing>,
    /// Web origins whose pages may send requests, as they are now.
    origins: RwLock<Arc<Names>>,
    pub(crate) memory: Memory,
    /// Responses that clients may ask for again.
    pub(crate) responses: ResponseStore,
    /// Told of every request that ends.
    pub(crate) request_log: Arc<RequestLog>,
    /// Makes their spans, if there are to be some.
    pub(crate) traces: Traces,
    /// What the dashboard shows, for all who look at it.
    pub(crate) feed: Feed,
    /// All that `/metrics` shows.
    exposed: MetricRegistry,
    metrics_pages: Mutex<HashMap<Exposition, (Instant, Bytes)>>,
}

/// Flags that [`App::change`] puts in force while the router serves, without their dashes.
pub(crate) const CHANGEABLE: [&str; 7] = [
    "api-key-file",
    "admin-key-file",
    "allowed-origins",
    "max-streams",
    "tenant-streams",
    "log-level",
    "log-requests-per-s",
];

/// Of a page of metrics that somebody has not read yet. A guess: scrapers come every few seconds.
const METRICS_AGE: Duration = Duration::from_secs(1);

impl App {
    /// Binds the address of the workers and starts to listen there.
    ///
    /// # Errors
    /// The address cannot be bound, or the certificate, the decision log or the response store cannot be used.
    pub async fn start(config: Config) -> Result<Arc<Self>, StartError> {
        let metrics = Arc::new(Metrics::default());
        let log = config.routing.decision_log.as_ref().map(|log| {
            DecisionLog::start(log, Arc::clone(&metrics)).map_err(|source| {
                StartError::DecisionLog { path: log.path.display().to_string(), source }
            })
        });
        let decisions = Decisions::new(log.transpose()?);
        let memory = Memory::new(&config.memory, config.store.bytes, &metrics);
        let responses =
            ResponseStore::open(&config.store, &memory, &metrics).map_err(|source| {
                let path = config.store.file.as_deref().unwrap_or(Path::new("memory"));
                StartError::ResponseStore {
                    path: path.display().to_string(),
                    source: source.into(),
                }
            })?;
        let fleet = fleet::start(&config, Arc::clone(&metrics)).await?;
        let traces = Traces::start(config.traces.as_ref(), fleet.name(), &metrics)?;
        let bounds = config.bounds;
        let request_log = Arc::new(RequestLog::new(&config.log));
        let keys = KeyRing::new(&config.http.access);
        let exposed = exposed(&metrics, &fleet, &keys, config.vllm_metrics);
        let shares = Shares::new(bounds.streams, bounds.tenant_streams, Arc::clone(&metrics));
        let origins = RwLock::new(Arc::new(config.http.access.origins.clone()));
        Ok(Arc::new(Self {
            config,
            origins,
            fleet,
            metrics,
            decisions,
            shares,
            keys,
            memory,
            responses,
            request_log,
            traces,
            feed: Feed::default(),
            exposed,
            metrics_pages: Mutex::default(),
        }))
    }

    /// Puts what can change of a configuration in force; `config` stays as it was at the start.
    ///
    /// # Errors
    /// Why nothing of it was: whether there are keys at all is part of what the ports were opened for.
    pub(crate) fn change(&self, new: &Config) -> Result<(), String> {
        let access = &new.http.access;
        let now = self.keys.now();
        let (clients, operators) = (&access.keys.clients, &access.keys.operators);
        for (whose, before, after) in [
            ("clients", now.are_asked_of_clients(), !clients.is_empty()),
            ("operators", now.are_asked_of_operators(), !operators.is_empty()),
        ] {
            if before != after {
                return Err(format!(
                    "whether {whose} need a key cannot change while the router serves: restart it, or take that back"
                ));
            }
        }
        change_filter(&new.log)?;
        self.keys.replace(access);
        *self.origins.write().expect("no holder panics") = Arc::new(access.origins.clone());
        self.shares.change(new.bounds.streams, new.bounds.tenant_streams);
        self.request_log.change(&new.log);
        Ok(())
    }

    /// Web origins whose pages may send requests.
    pub(crate) fn origins(&self) -> Arc<Names> {
        Arc::clone(&self.origins.read().expect("no holder panics"))
    }

    /// The body of `/metrics`: the last one, while another client has not read it and for [`METRICS_AGE`] at most, so that
    /// clients that do not read share it.
    pub(crate) fn metrics_page(&self, format: Exposition) -> Bytes {
        let mut pages = self.metrics_pages.lock().expect("no holder panics");
        if let Some((since, page)) = pages.get(&format)
            && !page.is_unique()
            && since.elapsed() < METRICS_AGE
        {
            return page.clone();
        }
        let page = Bytes::from(format.render(&self.exposed));
        pages.insert(format, (Instant::now(), page.clone()));
        page
    }

    /// What is counted, as text, as it is now.
    #[must_use]
    pub fn render_metrics(&self) -> String {
        Exposition::Text.render(&self.exposed)
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.fleet.close_all();
    }
}

fn exposed(
    metrics: &Metrics,
    fleet: &Arc<Registry>,
    keys: &Arc<KeyRing>,
    vllm_names: bool,
) -> MetricRegistry {
    let mut exposed = MetricRegistry::default();
    metrics.register(&mut exposed);
    exposed.register_collector(Box::new(Arc::clone(fleet)));
    if vllm_names {
        exposed.register_collector(Box::new(VllmNames(Arc::clone(fleet))));
    }
    if keys.now().are_asked_of_clients() {
        exposed.register_collector(Box::new(KeysShown(Arc::clone(keys))));
    }
    exposed.register_collector(Box::new(LostLines::of_this_process()));
    exposed.register_collector(Box::new(Tasks(Cores::runtimes_here())));
    exposed.register_collector(Box::new(ThisProcess));
    exposed
}
