//! Where workers dial in: a TCP or Unix socket, with or without TLS; from the accepted connection to the running link.

mod told;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use self::told::Told;
use super::StartError;
use super::codec::{FrameReader, FrameWriter};
use super::handshake::{HELLO_BYTES, HandshakeError, greet, send};
use super::link::{Link, LinkError, SubmitQueue};
use super::registry::Registry;
use crate::config::{ServiceConfig, SocketRole, WorkerListen};
use crate::core::events::BlockEvents;
use crate::core::frame::MAX_FRAME_BYTES;
use crate::error::Causes;
use crate::net::lobby::{Lobby, MOST, Origin, Visit};
use crate::net::tls::ServerTls;
use crate::net::{self, SocketFile};
use crate::process::cores::{Cores, Kind};
use crate::process::lock::Lock;

type ReadHalf = Box<dyn AsyncRead + Send + Unpin>;
type WriteHalf = Box<dyn AsyncWrite + Send + Unpin>;

/// The bound socket.
#[derive(Debug)]
pub(super) enum Listener {
    /// Port and all.
    Tcp(TcpListener),
    /// Its file is removed with it.
    Unix(UnixListener, SocketFile),
}

impl Listener {
    pub(super) async fn bind(
        listen: &WorkerListen,
        service: &ServiceConfig,
    ) -> Result<(Self, WorkerListen), StartError> {
        let bound = async {
            match (listen, service.take(SocketRole::Workers, listen)?) {
                (_, Some(socket)) => Ok((Self::passed(socket, listen)?, listen.clone())),
                (WorkerListen::Tcp(address), None) => bind_tcp(address).await,
                (WorkerListen::Unix(path), None) => bind_unix(path).await,
            }
        };
        bound.await.map_err(|source| StartError::Bind { address: listen.to_string(), source })
    }

    fn passed(socket: OwnedFd, listen: &WorkerListen) -> io::Result<Self> {
        Ok(match listen {
            WorkerListen::Tcp(_) => Self::Tcp(net::passed(socket)?),
            WorkerListen::Unix(path) => {
                let (listener, file) = net::passed_unix(socket, path)?;
                Self::Unix(listener, file)
            }
        })
    }

    async fn accept(&self) -> io::Result<(Socket, Dial)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let (peer, address) = (Origin::of(from.ip()), from.to_string());
                Ok((Socket::Tcp(stream), Dial { peer, address }))
            }
            Self::Unix(listener, file) => {
                let (stream, _) = listener.accept().await?;
                let peer = Origin::User(stream.peer_cred().ok().map(|peer| peer.uid()));
                let address = format!("unix:{}", file.path().display());
                Ok((Socket::Unix(stream), Dial { peer, address }))
            }
        }
    }
}

async fn bind_tcp(address: &str) -> io::Result<(Listener, WorkerListen)> {
    let (host, port) = address.rsplit_once(':').expect("HOST:PORT, says config");
    let port = port.parse().expect("a port, says config");
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let listener = net::listen(host, port).await?;
    let bound = WorkerListen::Tcp(listener.local_addr()?.to_string());
    Ok((Listener::Tcp(listener), bound))
}

async fn bind_unix(path: &Path) -> io::Result<(Listener, WorkerListen)> {
    let (listener, file) = net::listen_unix(path, None).await?;
    Ok((Listener::Unix(listener, file), WorkerListen::Unix(path.to_owned())))
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A [`Socket`] on its way to another thread's runtime.
enum Moved {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

impl Moved {
    fn take(self) -> io::Result<Socket> {
        Ok(match self {
            Self::Tcp(stream) => Socket::Tcp(TcpStream::from_std(stream)?),
            Self::Unix(stream) => Socket::Unix(UnixStream::from_std(stream)?),
        })
    }
}

impl Socket {
    fn let_go(self) -> io::Result<Moved> {
        Ok(match self {
            Self::Tcp(stream) => Moved::Tcp(stream.into_std()?),
            Self::Unix(stream) => Moved::Unix(stream.into_std()?),
        })
    }

    async fn halves(
        self,
        tls: Option<&TlsAcceptor>,
        visit: &Visit,
    ) -> io::Result<(ReadHalf, WriteHalf)> {
        fn split(
            stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        ) -> (ReadHalf, WriteHalf) {
            let (reader, writer) = tokio::io::split(stream);
            (Box::new(reader), Box::new(writer))
        }
        Ok(match (self, tls) {
            (Self::Tcp(stream), None) => {
                let (reader, writer) = stream.into_split();
                (Box::new(visit.listen(reader)), Box::new(writer))
            }
            (Self::Unix(stream), None) => {
                let (reader, writer) = stream.into_split();
                (Box::new(visit.listen(reader)), Box::new(writer))
            }
            (Self::Tcp(stream), Some(tls)) => split(tls.accept(visit.listen(stream)).await?),
            (Self::Unix(stream), Some(tls)) => split(tls.accept(visit.listen(stream)).await?),
        })
    }
}

/// Accepts workers for ever.
pub(super) async fn accept_workers(
    listener: Listener,
    tls: Option<Arc<ServerTls>>,
    registry: Arc<Registry>,
    links: TaskTracker,
) {
    let lobby = Lobby::new("workers", MOST);
    let told = Arc::new(Lock::new("what was said of dials", Told::default()));
    loop {
        match listener.accept().await {
            Ok((socket, dial)) => {
                let visit = lobby.enter(dial.peer);
                let tls = tls.as_ref().map(|tls| tls.acceptor());
                let (registry, told) = (Arc::clone(&registry), Arc::clone(&told));
                let Some(place) = Cores::current().map(|cores| cores.place(Kind::Link)) else {
                    links.spawn(serve_worker(socket, dial, tls, registry, visit, told));
                    continue;
                };
                let core = place.handle().clone();
                let moved = socket.let_go();
                let serving = async move {
                    match moved.and_then(Moved::take) {
                        Ok(socket) => serve_worker(socket, dial, tls, registry, visit, told).await,
                        Err(error) => {
                            tracing::warn!(%error, "a worker was lost on the way to its core");
                        }
                    }
                    drop(place);
                };
                links.spawn_on(serving, &core);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a worker");
                registry.metrics.links.errors.inc("accept");
                if let Some(pause) = net::pause_after(&error) {
                    sleep(pause).await;
                }
            }
        }
    }
}

/// Where a connection comes from.
pub(super) struct Dial {
    pub(super) peer: Origin,
    /// Address for people and logs.
    pub(super) address: String,
}

async fn serve_worker(
    socket: Socket,
    dial: Dial,
    tls: Option<TlsAcceptor>,
    registry: Arc<Registry>,
    visit: Visit,
    told: Arc<Lock<Told>>,
) {
    let limit = registry.setup.config.fleet.handshake_timeout;
    let (peer, address) = (dial.peer, dial.address.clone());
    let first_byte = registry.setup.config.fleet.limits.first_byte;
    let joined = tokio::select! {
        biased; // what has come is read before it is said that nothing came
        joined = timeout(limit, join(socket, dial, tls, &registry, &visit)) => joined,
        () = visit.silent_for(first_byte) => Ok(Err(HandshakeError::Silent(first_byte))),
        () = visit.turned_out() => Ok(Err(HandshakeError::TurnedOut)),
        () = registry.end.cancelled() => return,
    };
    drop(visit);
    let Joined { worker, events, link, submits, mut reader, writer } = match joined
        .unwrap_or(Err(HandshakeError::Late(limit)))
    {
        Ok(joined) => joined,
        Err(error) => {
            let (worker, reason) = (error.worker(), error.reason());
            registry.metrics.links.errors.inc(reason.clone());
            // as many as anybody likes: the lobby has said so
            let of_a_crowd = matches!(error, HandshakeError::TurnedOut | HandshakeError::Silent(_));
            let line = (peer, worker.map(str::to_owned), reason);
            if of_a_crowd || !told.lock().is_news(line, Instant::now()) {
                tracing::debug!(worker, peer = address, error = %Causes(&error), "worker did not join");
            } else {
                tracing::warn!(worker, peer = address, error = %Causes(&error), "worker did not join");
            }
            return;
        }
    };
    tracing::info!(worker, peer = address, epoch = events.epoch(), "worker joined");
    reader.set_limit(MAX_FRAME_BYTES);
    if registry.end.is_cancelled() {
        link.close(LinkError::Shutdown); // it joined while all others were told
    }
    let error = link.run(reader, writer, submits, events).await;
    registry.link_ended(&worker, link.id, link.leaves() || matches!(*error, LinkError::Shutdown));
    let closed = matches!(*error, LinkError::Closed);
    let as_it_said = link.leaves() && closed;
    // Ctrl-C in one terminal tells both at once, and a worker without answers need not be told to go
    let with_the_router = closed && registry.takes_requests().is_err();
    let in_good_order = as_it_said || with_the_router || matches!(*error, LinkError::Shutdown);
    if in_good_order {
        let reason = if as_it_said { "it was drained" } else { "the router is shutting down" };
        tracing::info!(worker, peer = address, reason, "worker left in good order");
    } else {
        tracing::warn!(worker, peer = address, error = %Causes(&*error), "worker left");
    }
    registry.metrics.links.errors.inc(error.reason());
}

/// A worker that was taken in.
struct Joined {
    worker: String,
    events: BlockEvents,
    link: Arc<Link>,
    submits: SubmitQueue,
    reader: FrameReader<ReadHalf>,
    writer: FrameWriter<WriteHalf>,
}

/// From the first byte to the link.
async fn join(
    socket: Socket,
    dial: Dial,
    tls: Option<TlsAcceptor>,
    registry: &Arc<Registry>,
    visit: &Visit,
) -> Result<Joined, HandshakeError> {
    let halves = socket.halves(tls.as_ref(), visit).await;
    let (reader, writer) = halves.map_err(HandshakeError::Tls)?;
    let mut reader = FrameReader::new(reader, HELLO_BYTES);
    let mut writer = FrameWriter::new(writer);
    let taken_in = match greet(&registry.setup, registry, dial.peer, &mut reader, &mut writer).await
    {
        Ok(hello) => {
            let (worker, events) = (hello.worker.clone(), BlockEvents::new(&hello));
            match registry.join(hello, dial) {
                Ok((link, submits)) => Ok((worker, events, link, submits)),
                Err(refuse) => Err(HandshakeError::Refused(worker, refuse)),
            }
        }
        Err(error) => Err(error),
    };
    if let Err(error) = &taken_in
        && let Some(answer) = error.answer()
    {
        send(&mut writer, answer).await?;
        writer.close().await?;
    }
    let (worker, events, link, submits) = taken_in?;
    Ok(Joined { worker, events, link, submits, reader, writer })
}
