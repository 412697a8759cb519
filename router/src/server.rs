//! From start to the last answer: both addresses and the drain. `reload` reads files again meanwhile.

mod reload;
mod service;
mod summary;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::app::App;
use crate::config::{Config, SocketRole, WorkerListen};
use crate::connection::accept_clients;
use crate::connection::admin::AdminListeners;
use crate::connection::tls_port::TlsPort;
use crate::fleet::{Registry, StartError};
use crate::limits::descriptors;
use crate::net::{self, tls};
use crate::process::notify::Notifier;
use crate::process::stopper::Stopper;

pub use reload::{ReadConfig, ReloadRequest};
use reload::{Watched, keep_fresh};
use service::keep_told;
use summary::keep_summing_up;

/// For answers that are cut to end with an error event, and for connections that are hung up on to end.
const LAST_EVENTS: Duration = Duration::from_secs(1);

/// Where the socket of the clients is shared with another process: from the end of accepting to the drain. Requests that come on
/// connections accepted before are served meanwhile, as their clients cannot know. A guess: clients dial to ask at once.
const LAST_REQUESTS: Duration = Duration::from_secs(1);

/// There, too: clients wait so long for a first worker before they are accepted and told that there is none. Longer than workers
/// pause between two dials.
const FIRST_WORKER: Duration = Duration::from_secs(20);
/// Between two looks for it.
const LOOK: Duration = Duration::from_millis(10);

/// A router that listens on both sides.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    operators: AdminListeners,
    listener: TcpListener,
    address: SocketAddr,
    /// Of clients, where they are served over TLS.
    tls: Option<Arc<TlsPort>>,
    reload: ReloadRequest,
    /// Where there is a file of configuration.
    read_config: Option<ReadConfig>,
    /// Connections of clients at a time.
    most: usize,
    stopper: Stopper,
    notifier: Arc<Notifier>,
}

impl Server {
    /// Binds both addresses.
    ///
    /// # Errors
    /// An address cannot be bound, or the certificate cannot be used.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let (host, port) = (config.http.host.clone(), config.http.port);
        let most = descriptors::connections(config.http.max_connections);
        net::check_backlog();
        let bound = async {
            let passed = config.service.take(SocketRole::Clients, &client_address(&host, port))?;
            let listener = match passed {
                Some(socket) => net::passed(socket)?,
                None => net::listen(&host, port).await?,
            };
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bound
            .await
            .map_err(|source| StartError::Bind { address: format!("{host}:{port}"), source })?;
        let operators = {
            let http = &config.http;
            AdminListeners::bind(&http.access.admin_listen, &config.service, http.tls.as_ref())
                .await?
        };
        let app = App::start(config).await?;
        let tls = TlsPort::open(&app, most)?;
        let notifier = service::notifier(&app.config.service).map_err(StartError::Notifier)?;
        let notifier = Arc::new(notifier);
        let (stopper, reload) = (Stopper::default(), ReloadRequest::default());
        Ok(Self {
            app,
            operators,
            listener,
            address,
            tls,
            reload,
            read_config: None,
            most,
            stopper,
            notifier,
        })
    }

    /// Where clients connect.
    #[must_use]
    pub fn http_address(&self) -> SocketAddr {
        self.address
    }

    /// Where workers dial in, with the port that was taken.
    #[must_use]
    pub fn worker_address(&self) -> &WorkerListen {
        self.app.fleet.address()
    }

    /// Where operators are served besides, with the ports that were taken.
    #[must_use]
    pub fn admin_addresses(&self) -> Vec<WorkerListen> {
        self.operators.addresses()
    }

    /// What the requests share.
    #[must_use]
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// What is to be read again, before other files, when somebody asks for it.
    pub fn reads_again(&mut self, config: ReadConfig) {
        self.read_config = Some(config);
    }

    /// Has it read files of configuration, keys and certificates again.
    #[must_use]
    pub fn reload(&self) -> ReloadRequest {
        self.reload.clone()
    }

    /// True if there are such files.
    #[must_use]
    pub fn has_files(&self) -> bool {
        !self.watched().is_empty()
    }

    fn watched(&self) -> Vec<Watched> {
        let (config, tls) = (self.read_config.as_ref(), self.tls.as_deref());
        Watched::of(&self.app, config, tls, self.operators.tls())
    }

    /// True if clients are served over TLS.
    #[must_use]
    pub fn speaks_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Ends this server.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves until the stopper was used and, after a drain, the last answer ended.
    pub async fn serve(self) {
        let watched = self.watched();
        let Self {
            app, operators, listener, address, tls, reload, most, stopper, notifier, ..
        } = self;
        for warning in &app.config.http.access.warnings {
            tracing::warn!("{warning}");
        }
        for files in app.config.http.tls.iter().chain(&app.config.fleet.tls) {
            if let Some(warning) = tls::warning(files) {
                tracing::warn!("{warning}");
            }
        }
        let watching = keep_fresh(watched, Arc::clone(&app.metrics), reload, Arc::clone(&notifier));
        let watching = tokio::spawn(watching);
        let watching = AbortOnDropHandle::new(watching);
        tracing::info!(%address, workers = %app.fleet.address(), "listening");
        for address in operators.addresses() {
            tracing::info!(%address, "listening for operators");
        }
        // whoever drops this future ends the tasks, too
        let _guards = stopper.guards();
        let operators = tokio::spawn(operators.serve(Arc::clone(&app), stopper.clone()));
        let connections = TaskTracker::new();
        // on a thread of the runtime: a connection is served where it was accepted, without a switch between threads
        let (accepting, draining) = (
            accept_clients(
                Arc::clone(&app),
                listener,
                most,
                tls,
                stopper.clone(),
                connections.clone(),
            ),
            stopper.clone(),
        );
        let shared = app.config.service.shares_clients();
        let fleet = Arc::clone(&app.fleet);
        let accepting = tokio::spawn(async move {
            let accepting = async {
                if shared {
                    some_worker(&fleet).await;
                }
                accepting.await;
            };
            tokio::select! {
                () = accepting => {}
                () = draining.leaving() => {}
            }
        });
        notifier.ready();
        let telling = keep_told(Arc::clone(&app), Arc::clone(&notifier));
        let telling = AbortOnDropHandle::new(tokio::spawn(telling));
        let summing_up = AbortOnDropHandle::new(tokio::spawn(keep_summing_up(Arc::clone(&app))));
        accepting.await.expect("accepting does not panic, and nobody aborts it");
        notifier.stopping();
        if shared {
            app.fleet.leave_dials();
            tracing::info!("left the sockets to whoever listens there next");
            tokio::select! {
                () = sleep(LAST_REQUESTS) => {}
                () = stopper.draining() => {}
            }
        }
        stopper.drain();
        app.fleet.shut_down();
        connections.close();
        tracing::info!(connections = connections.len(), "draining");
        tokio::select! {
            () = connections.wait() => {}
            () = sleep(app.config.drain_timeout) => tracing::warn!("out of time: answers are cut"),
            () = stopper.stopping() => tracing::warn!("stopped: answers are cut"),
        }
        stopper.stop();
        app.fleet.cut();
        let ended = timeout(LAST_EVENTS, connections.wait()).await.is_ok();
        stopper.hang_up();
        if !ended && timeout(LAST_EVENTS, connections.wait()).await.is_err() {
            tracing::warn!(connections = connections.len(), "busy, and left behind");
        }
        let _ = timeout(LAST_EVENTS, operators).await; // hung up on with the rest
        app.fleet.close().await;
        app.traces.end().await;
        drop((watching, telling, summing_up));
        tracing::info!("stopped");
    }
}

/// As a socket that was passed is known.
fn client_address(host: &str, port: u16) -> WorkerListen {
    let address = host.parse().map(|ip: IpAddr| SocketAddr::new(ip, port).to_string());
    WorkerListen::Tcp(address.unwrap_or_else(|_| format!("{host}:{port}")))
}

/// Returns when a worker takes requests, or after [`FIRST_WORKER`]. Until then clients wait in the socket, or the process that
/// is to be replaced serves them.
async fn some_worker(fleet: &Registry) {
    let there = async {
        while !fleet.ready() {
            sleep(LOOK).await;
        }
    };
    if timeout(FIRST_WORKER, there).await.is_err() {
        tracing::warn!("no worker came: clients are accepted, and told so");
    }
}

/// Starts a router and serves until `shutdown` is done and the drain is over.
///
/// # Errors
/// It could not start.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), StartError> {
    let server = Server::start(config).await?;
    let stopper = server.stopper();
    let drain = async {
        shutdown.await;
        stopper.leave();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = server.serve() => {}
        () = drain => {}
    }
    Ok(())
}
