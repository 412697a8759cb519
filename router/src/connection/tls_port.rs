//! TLS at the port of the clients: from an accepted connection to the stream that HTTP is spoken on. Whoever does not come
//! that far holds a place in a lobby for a bounded time, and is told what was wrong where it could read it.

use std::net::IpAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Clients;
use super::last_words::{HTTPS_ONLY, linger};
use super::transport::Transport;
use crate::app::App;
use crate::fleet::StartError;
use crate::metrics::Gauge;
use crate::net::lobby::{Lobby, MOST, Origin, Visit};
use crate::net::tls::{ServerTls, failure};

/// HTTP/2 and HTTP/1, as ALPN names them.
const PROTOCOLS: [&str; 2] = ["h2", "http/1.1"];
/// One in so many connections may be one that has not agreed on TLS yet.
const OF_CONNECTIONS: usize = 4;
/// The first byte of a handshake.
const HANDSHAKE: u8 = 0x16;

/// What the port shows, and who has not agreed on TLS with it yet.
#[derive(Debug)]
pub(crate) struct TlsPort {
    pub(crate) tls: Arc<ServerTls>,
    lobby: Arc<Lobby>,
}

impl TlsPort {
    /// `None` where clients are served over plain HTTP. `most`: connections that may be open.
    ///
    /// # Errors
    /// The certificate cannot be used.
    pub(crate) fn open(app: &App, most: usize) -> Result<Option<Arc<Self>>, StartError> {
        let Some(files) = &app.config.http.tls else { return Ok(None) };
        let tls = ServerTls::load(files, &PROTOCOLS)?;
        let lobby = Lobby::new("clients", (most / OF_CONNECTIONS).clamp(1, MOST));
        Ok(Some(Arc::new(Self { tls, lobby })))
    }
}

/// How it went with TLS.
enum Agreed {
    Yes(Transport),
    /// It speaks plain HTTP.
    PlainHttp(TcpStream),
    /// It speaks no TLS, or none that suits both.
    No(&'static str, Option<TcpStream>),
}

/// The stream that HTTP is to be spoken on; `None` where there is none.
pub(super) async fn enter(
    stream: TcpStream,
    address: IpAddr,
    port: &TlsPort,
    clients: &Clients,
) -> Option<Transport> {
    let metrics = &clients.app.metrics.edges;
    let _open = Counted::of(&metrics.tls_handshaking);
    let visit = port.lobby.enter(Origin::of(address));
    let limit = clients.app.config.http.header_timeout;
    let agreed = tokio::select! {
        agreed = timeout(limit, agree(stream, port, &visit)) => agreed,
        () = visit.turned_out() => Ok(Agreed::No("turned_out", None)),
        () = clients.stopper.draining() => return None,
        () = clients.stopper.stopped() => return None,
    };
    drop(visit);
    match agreed.unwrap_or(Agreed::No("late", None)) {
        Agreed::Yes(stream) => {
            metrics.tls_handshakes.inc("agreed");
            Some(stream)
        }
        Agreed::PlainHttp(mut stream) => {
            metrics.tls_handshakes.inc("plain_http");
            HTTPS_ONLY.say_to(&mut stream).await;
            linger(&mut stream).await;
            None
        }
        Agreed::No(why, stream) => {
            metrics.tls_handshakes.inc(why);
            tracing::debug!(%address, why, "a client did not agree on TLS");
            if let Some(mut stream) = stream {
                linger(&mut stream).await; // so that it can read the alert
            }
            None
        }
    }
}

async fn agree(stream: TcpStream, port: &TlsPort, visit: &Visit) -> Agreed {
    let mut first = [0];
    match stream.peek(&mut first).await {
        Ok(0) | Err(_) => return Agreed::No("gone", None),
        Ok(_) => visit.spoke(),
    }
    if first[0] != HANDSHAKE && first[0].is_ascii_uppercase() {
        return Agreed::PlainHttp(stream);
    }
    match port.tls.acceptor().accept(stream).into_fallible().await {
        Ok(stream) => Agreed::Yes(Transport::Tls(Box::new(stream))),
        Err((error, stream)) => Agreed::No(failure(&error), Some(stream)),
    }
}

/// One more, until it drops.
struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    fn of(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
