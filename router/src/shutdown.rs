//! From start to the last answer: both addresses and the drain.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::App;
use crate::config::{Config, WorkerListen};
use crate::connection;
use crate::fleet::StartError;

/// After an accept that failed, for lack of descriptors perhaps.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A router that listens on both sides.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    address: SocketAddr,
    stopper: Stopper,
}

/// Ends a [`Server`] from anywhere. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Stopper {
    drain: CancellationToken,
    stop: CancellationToken,
}

impl Stopper {
    /// Take nothing new, finish what runs (up to `--drain-timeout-ms`), then end.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// End at once.
    pub fn stop(&self) {
        self.drain.cancel();
        self.stop.cancel();
    }

    pub(crate) async fn draining(&self) {
        self.drain.cancelled().await;
    }

    pub(crate) async fn stopped(&self) {
        self.stop.cancelled().await;
    }
}

impl Server {
    /// Binds both addresses.
    ///
    /// # Errors
    /// An address cannot be bound, or the certificate cannot be used.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let (host, port) = (config.http.host.clone(), config.http.port);
        let bound = async {
            let listener = TcpListener::bind((host.as_str(), port)).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bound
            .await
            .map_err(|source| StartError::Bind { address: format!("{host}:{port}"), source })?;
        let app = App::start(config).await?;
        Ok(Self { app, listener, address, stopper: Stopper::default() })
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

    /// What the requests share.
    #[must_use]
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Ends this server.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves until the stopper was used and, after a drain, the last answer ended.
    pub async fn serve(self) {
        let Self { app, listener, address, stopper } = self;
        tracing::info!(%address, workers = %app.fleet.address(), "listening");
        let connections = TaskTracker::new();
        tokio::select! {
            () = accept_clients(&app, listener, &stopper, &connections) => {}
            () = stopper.draining() => {}
        }
        app.fleet.shut_down();
        connections.close();
        tracing::info!(connections = connections.len(), "draining");
        tokio::select! {
            () = connections.wait() => {}
            () = sleep(app.config.drain_timeout) => tracing::warn!("out of time: answers are cut"),
            () = stopper.stopped() => tracing::warn!("stopped: answers are cut"),
        }
        stopper.stop();
        connections.wait().await;
        app.fleet.close().await;
        tracing::info!("stopped");
    }
}

/// Accepts for ever.
async fn accept_clients(
    app: &Arc<App>,
    listener: TcpListener,
    stopper: &Stopper,
    connections: &TaskTracker,
) {
    let routes = crate::http::app(Arc::clone(app));
    let room = Arc::new(Semaphore::new(app.config.http.max_connections));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            app.metrics.http.connections_refused.inc();
            connections.spawn(connection::turn_away(stream));
            continue;
        };
        let (app, routes, stopper) = (Arc::clone(app), routes.clone(), stopper.clone());
        connections.spawn(async move {
            let metrics = Arc::clone(&app.metrics);
            metrics.http.connections.add(1);
            connection::serve(stream, routes, app, stopper).await;
            metrics.http.connections.add(-1);
            drop(permit);
        });
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
