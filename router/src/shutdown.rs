//! From start to the last answer: both addresses, the drain, the signals.

use std::future::Future;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing_subscriber::EnvFilter;

use crate::admin::AdminListeners;
use crate::app::App;
use crate::config::{Config, LogConfig, WorkerListen};
use crate::connection;
use crate::fleet::StartError;

/// After an accept that failed, for lack of descriptors perhaps.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A router that listens on both sides.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    operators: AdminListeners,
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
        let operators = AdminListeners::bind(&config.http.access.admin_listen).await?;
        let app = App::start(config).await?;
        Ok(Self { app, operators, listener, address, stopper: Stopper::default() })
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

    /// Ends this server.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves until the stopper was used and, after a drain, the last answer ended.
    pub async fn serve(self) {
        let Self { app, operators, listener, address, stopper } = self;
        for warning in &app.config.http.access.warnings {
            tracing::warn!("{warning}");
        }
        tracing::info!(%address, workers = %app.fleet.address(), "listening");
        for address in operators.addresses() {
            tracing::info!(%address, "listening for operators");
        }
        let _stop = stopper.stop.clone().drop_guard(); // whoever drops this future ends the tasks, too
        let operators = tokio::spawn(operators.serve(Arc::clone(&app), stopper.clone()));
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
        let _ = operators.await; // it was stopped with the rest
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

/// Drains on the first SIGTERM or SIGINT, stops at once on the second. The signals are caught from now on; the future
/// acts on them.
///
/// # Errors
/// The signals cannot be caught.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn stop_on_signals(
    stopper: Stopper,
) -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        stopper.drain();
        next().await;
        stopper.stop();
    })
}

/// Sends the log to stderr. Without effect where the process has a log already.
pub fn init_log(log: &LogConfig) {
    let filter = EnvFilter::try_new(&log.filter).expect("checked by config");
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let lines = lines.with_ansi(std::io::stderr().is_terminal());
    let _ = if log.json { lines.json().try_init() } else { lines.try_init() };
}
