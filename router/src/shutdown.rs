//! From start to the last answer: the HTTP server, the signals, and the drain.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::App;
use crate::config::{Config, WorkerListen};
use crate::fleet::StartError;

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
}

impl Server {
    /// Binds both addresses.
    ///
    /// # Errors
    /// An address cannot be bound, or the certificate cannot be used.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let wanted = (config.http.host.clone(), config.http.port);
        let bound = async {
            let listener = TcpListener::bind((wanted.0.as_str(), wanted.1)).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bound.await.map_err(|source| StartError::Bind {
            address: format!("{}:{}", wanted.0, wanted.1),
            source,
        })?;
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
        let service = TowerToHyperService::new(crate::http::app(Arc::clone(&self.app)));
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.app.config.http.header_timeout);
        let builder = Arc::new(builder);
        let connections = TaskTracker::new();
        loop {
            let (stream, _) = tokio::select! {
                () = self.stopper.drain.cancelled() => break,
                accepted = self.listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(_) => continue,
                },
            };
            let _ = stream.set_nodelay(true);
            let (builder, service) = (Arc::clone(&builder), service.clone());
            connections.spawn(async move {
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
        connections.close();
        tokio::select! {
            () = self.stopper.stop.cancelled() => {}
            () = tokio::time::sleep(self.app.config.drain_timeout) => {}
            () = connections.wait() => {}
        }
    }
}

/// Starts a router and serves until `shutdown` is done and the drain is over.
///
/// # Errors
/// It could not start.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), StartError> {
    let server = Server::start(config).await?;
    let stopper = server.stopper();
    tokio::select! {
        () = server.serve() => {}
        () = async { shutdown.await; stopper.drain(); std::future::pending().await } => {}
    }
    Ok(())
}
