//! Addresses of operators: Unix sockets that only the router's own user can open, or ports, each with the few routes that
//! show or change the fleet.
//!
//! Ports that other machines reach speak TLS where that of the clients does. They do not share the bounds of the clients: who floods the port of the clients keeps no operator out.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use crate::app::App;
use crate::config::{ServiceConfig, SocketRole, TlsListen, WorkerListen};
use crate::fleet::StartError;
use crate::http::access::Entrance;
use crate::net::tls::ServerTls;
use crate::net::{self, SocketFile};
use crate::process::stopper::Stopper;

/// Connections that may be open at once at one address; more wait to be accepted. A guess: some dashboards and a drain.
const CONNECTIONS: usize = 64;
/// One connection serves one request after the other for no longer than this, so that those that rest make room.
const LONGEST_CONNECTION: Duration = Duration::from_secs(120);
/// For the headers of a request to arrive.
const HEADERS: Duration = Duration::from_secs(10);
/// After an accept that failed, for lack of descriptors perhaps.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What operators speak.
const PROTOCOLS: [&str; 1] = ["http/1.1"];

/// Bound addresses of operators.
#[derive(Debug)]
pub(crate) struct AdminListeners {
    all: Vec<Listener>,
    /// Of addresses that other machines reach, where clients are served over TLS.
    tls: Option<Arc<ServerTls>>,
}

#[derive(Debug)]
enum Listener {
    /// Only processes of this machine reach it.
    Near(TcpListener),
    Far(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Listener {
    fn of(listener: TcpListener) -> Self {
        let near = listener.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback());
        if near { Self::Near(listener) } else { Self::Far(listener) }
    }
}

impl AdminListeners {
    /// Binds all of them. `tls` is that of the clients.
    ///
    /// # Errors
    /// One cannot be bound, or the certificate cannot be used.
    pub(crate) async fn bind(
        addresses: &[WorkerListen],
        service: &ServiceConfig,
        tls: Option<&TlsListen>,
    ) -> Result<Self, StartError> {
        let mut bound = Vec::new();
        for address in addresses {
            let failed = |source| StartError::Bind { address: address.to_string(), source };
            bound.push(Self::listen(address, service).await.map_err(failed)?);
        }
        let any_far = bound.iter().any(|listener| matches!(listener, Listener::Far(_)));
        let tls = tls.filter(|_| any_far).map(|files| ServerTls::load(files, &PROTOCOLS));
        Ok(Self { all: bound, tls: tls.transpose()? })
    }

    async fn listen(address: &WorkerListen, service: &ServiceConfig) -> io::Result<Listener> {
        let passed = service.take(SocketRole::Operators, address)?;
        Ok(match (address, passed) {
            (WorkerListen::Tcp(_), Some(socket)) => Listener::of(net::passed(socket)?),
            (WorkerListen::Tcp(text), None) => Listener::of(TcpListener::bind(text).await?),
            (WorkerListen::Unix(path), Some(socket)) => {
                let (listener, file) = net::passed_unix(socket, path)?;
                Listener::Unix(listener, file)
            }
            (WorkerListen::Unix(path), None) => {
                let (listener, file) = net::listen_unix(path, Some(0o600)).await?;
                Listener::Unix(listener, file)
            }
        })
    }

    pub(crate) fn tls(&self) -> Option<&Arc<ServerTls>> {
        self.tls.as_ref()
    }

    /// With the ports that were taken.
    pub(crate) fn addresses(&self) -> Vec<WorkerListen> {
        let address = |listener: &Listener| match listener {
            Listener::Near(listener) | Listener::Far(listener) => {
                listener.local_addr().ok().map(|address| WorkerListen::Tcp(address.to_string()))
            }
            Listener::Unix(_, file) => Some(WorkerListen::Unix(file.path().to_owned())),
        };
        self.all.iter().filter_map(address).collect()
    }

    /// Serves until the server stops; also while it drains, when there is something to see.
    pub(crate) async fn serve(self, app: Arc<App>, stopper: Stopper) {
        if self.all.is_empty() {
            return;
        }
        let tasks = TaskTracker::new();
        let routes = crate::http::operators(Arc::clone(&app));
        for listener in self.all {
            let door = Door {
                routes: routes.clone(),
                room: Arc::new(Semaphore::new(CONNECTIONS)),
                asks_for_key: app.keys.now().are_asked_of_operators(),
                tls: self.tls.clone(),
                stopper: stopper.clone(),
                tasks: tasks.clone(),
            };
            tasks.spawn(door.open(listener));
        }
        tasks.close();
        tasks.wait().await;
    }
}

/// What all connections to one address share.
#[derive(Clone)]
struct Door {
    routes: Router,
    room: Arc<Semaphore>,
    asks_for_key: bool,
    tls: Option<Arc<ServerTls>>,
    stopper: Stopper,
    tasks: TaskTracker,
}

impl Door {
    async fn open(self, listener: Listener) {
        tokio::select! {
            () = self.accept(&listener) => {}
            () = self.stopper.stopped() => {}
        }
    }

    /// Accepts for ever.
    async fn accept(&self, listener: &Listener) {
        loop {
            let room = Arc::clone(&self.room).acquire_owned().await;
            let room = room.expect("nobody closes it");
            let accepted = match listener {
                Listener::Far(listener) => {
                    listener.accept().await.map(|(stream, _)| match &self.tls {
                        Some(tls) => self.spawn_encrypted(stream, tls.acceptor(), room),
                        None => self.spawn(stream, self.peer(), room),
                    })
                }
                Listener::Near(listener) => {
                    listener.accept().await.map(|(stream, _)| self.spawn(stream, self.peer(), room))
                }
                Listener::Unix(listener, _) => listener
                    .accept()
                    .await
                    .map(|(stream, _)| self.spawn(stream, Entrance::Operator, room)),
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "cannot accept an operator");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    /// Who comes through a port.
    fn peer(&self) -> Entrance {
        if self.asks_for_key { Entrance::Anybody } else { Entrance::Operator }
    }

    fn spawn_encrypted(&self, stream: TcpStream, tls: TlsAcceptor, room: OwnedSemaphorePermit) {
        let (door, peer) = (self.clone(), self.peer());
        self.tasks.spawn(async move {
            let agreed = tokio::select! {
                agreed = timeout(HEADERS, tls.accept(stream)) => agreed,
                () = door.stopper.stopped() => return,
            };
            if let Ok(Ok(stream)) = agreed {
                door.spawn(stream, peer, room);
            }
        });
    }

    fn spawn<S>(&self, stream: S, peer: Entrance, room: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (routes, stopper) = (self.routes.clone(), self.stopper.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                _ = timeout(LONGEST_CONNECTION, converse(stream, peer, routes)) => {}
                () = stopper.stopped() => {}
            }
            drop(room);
        });
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    peer: Entrance,
    routes: Router,
) -> Result<(), hyper::Error> {
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        hyper::service::Service::call(&routes, request)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS).half_close(true);
    http.serve_connection(TokioIo::new(stream), service).await
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    fn door() -> Door {
        Door {
            routes: Router::new(),
            room: Arc::new(Semaphore::new(CONNECTIONS)),
            asks_for_key: false,
            tls: None,
            stopper: Stopper::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// An operator's end of a connection.
    async fn come(door: &Door) -> DuplexStream {
        let (ours, theirs) = duplex(4_096);
        let room = Arc::clone(&door.room).acquire_owned().await.unwrap();
        door.spawn(ours, Entrance::Operator, room);
        theirs
    }

    /// Asks for what is not there, and reads the answer as far as its head.
    async fn ask(connection: &mut DuplexStream) -> io::Result<()> {
        connection.write_all(b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n").await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(connection.read_u8().await?);
        }
        assert!(answer.starts_with(b"HTTP/1.1 404"), "{}", String::from_utf8_lossy(&answer));
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_and_who_stays_for_ever_makes_room() {
        let (door, begin) = (door(), Instant::now());
        let silent = come(&door).await;
        door.tasks.close();
        door.tasks.wait().await;
        assert_eq!(begin.elapsed().as_secs(), HEADERS.as_secs());
        drop(silent);
        door.tasks.reopen();

        let (begin, mut busy) = (Instant::now(), come(&door).await);
        while ask(&mut busy).await.is_ok() {
            sleep(HEADERS / 2).await;
        }
        assert!(begin.elapsed() >= LONGEST_CONNECTION, "it is served until then");
        assert!(begin.elapsed() <= LONGEST_CONNECTION + HEADERS, "{:?}", begin.elapsed());
        door.tasks.close();
        door.tasks.wait().await;
        assert_eq!(door.room.available_permits(), CONNECTIONS);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_server_ends_them() {
        let (door, begin) = (door(), Instant::now());
        let _silent = come(&door).await;
        door.stopper.hang_up();
        door.tasks.close();
        door.tasks.wait().await;
        assert!(begin.elapsed() < HEADERS);
    }
}
