//! Clients' connections: HTTP/1 or 2 on sockets that may neither be silent at the start of a request nor stop reading in
//! the middle of an answer.
//!
//! `accept` takes connections in, `open` bounds them and makes room; `guarded` is the socket as the protocols see it,
//! `socket` whose turn it is; `http1` and `http2` serve, `half_closed` keeps an answer for a client that only stopped
//! writing, `unread` bounds what waits for clients that do not read.

mod accept;
mod guarded;
mod half_closed;
mod http1;
mod http2;
mod last_words;
mod open;
mod socket;
mod unread;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::Router;
use tokio::net::TcpStream;

use crate::app::App;
use crate::shutdown::Stopper;
use guarded::{Guarded, Protocol};
use open::Open;
use socket::Socket;
use unread::Unread;

pub(crate) use accept::accept_clients;

/// What all connections share.
struct Clients {
    app: Arc<App>,
    routes: Router,
    stopper: Stopper,
    open: Open,
    unread: Unread,
    next: AtomicU64,
}

/// Which connection a request came on; an extension of each request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// The client's address, or that of the proxy before it.
    pub(crate) address: IpAddr,
    /// Number of the connection.
    pub(crate) connection: u64,
}

/// Serves a connection until the client or the stopper ends it, or room is needed while it rests.
async fn serve(stream: TcpStream, address: IpAddr, clients: &Arc<Clients>) {
    let _ = stream.set_nodelay(true); // fails only on a socket that is gone
    let peer = Peer { address, connection: clients.next.fetch_add(1, Relaxed) };
    let socket = Arc::new(Socket::new(stream, peer));
    let _open = clients.open.enter(&socket);
    tokio::select! {
        () = talk(&socket, clients) => {}
        () = clients.stopper.stopped() => {}
    }
}

async fn talk(socket: &Arc<Socket>, clients: &Arc<Clients>) {
    let mut io = Guarded::new(socket, &clients.app);
    let protocol = tokio::select! {
        protocol = io.protocol() => protocol,
        // it said nothing, or too little to tell in which language it could be answered
        () = socket.late(clients.app.config.http.header_timeout) => return,
        () = socket.evicted() => return,
        () = clients.stopper.draining() => return,
    };
    match protocol {
        Ok(Some(Protocol::Http1)) => http1::serve(io, socket, clients).await,
        Ok(Some(Protocol::Http2)) => {
            socket.multiplexes();
            http2::serve(io, socket, clients).await;
        }
        Ok(None) | Err(_) => {} // it left
    }
}
