//! From start to the last answer: both addresses and the drain. `reload` reads files again meanwhile.

mod reload;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::app::App;
use crate::config::{Config, WorkerListen};
use crate::connection::accept_clients;
use crate::connection::admin::AdminListeners;
use crate::connection::tls_port::TlsPort;
use crate::fleet::StartError;
use crate::limits::descriptors;
use crate::net::{self, tls};
use crate::process::stopper::Stopper;

pub use reload::ReloadRequest;
use reload::{Watched, keep_fresh};

/// For answers that are cut to end with an error event, and for connections that are hung up on to end.
const LAST_EVENTS: Duration = Duration::from_secs(1);

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
    /// Connections of clients at a time.
    most: usize,
    stopper: Stopper,
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
            let listener = net::listen(&host, port).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bound
            .await
            .map_err(|source| StartError::Bind { address: format!("{host}:{port}"), source })?;
        let operators = {
            let http = &config.http;
            AdminListeners::bind(&http.access.admin_listen, http.tls.as_ref()).await?
        };
        let app = App::start(config).await?;
        let tls = TlsPort::open(&app, most)?;
        let (stopper, reload) = (Stopper::default(), ReloadRequest::default());
        Ok(Self { app, operators, listener, address, tls, reload, most, stopper })
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

    /// Has it read files of keys and certificates again.
    #[must_use]
    pub fn reload(&self) -> ReloadRequest {
        self.reload.clone()
    }

    /// True if there are such files.
    #[must_use]
    pub fn has_files(&self) -> bool {
        !Watched::of(&self.app, self.tls.as_deref(), self.operators.tls()).is_empty()
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
        let Self { app, operators, listener, address, tls, reload, most, stopper } = self;
        for warning in &app.config.http.access.warnings {
            tracing::warn!("{warning}");
        }
        for files in app.config.http.tls.iter().chain(&app.config.fleet.tls) {
            if let Some(warning) = tls::warning(files) {
                tracing::warn!("{warning}");
            }
        }
        let watched = Watched::of(&app, tls.as_deref(), operators.tls());
        let watching = keep_fresh(watched, Arc::clone(&app.metrics), reload);
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
        let accepting = tokio::spawn(async move {
            tokio::select! {
                () = accepting => {}
                () = draining.draining() => {}
                () = draining.stopping() => {}
            }
        });
        accepting.await.expect("accepting does not panic, and nobody aborts it");
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
        drop(watching);
        tracing::info!("stopped");
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
        stopper.drain();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = server.serve() => {}
        () = drain => {}
    }
    Ok(())
}
