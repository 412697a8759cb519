//! Takes connections in.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use super::gate::{Gates, InHand};
use super::last_words::TOO_MANY;
use super::open::Open;
use super::socket::Socket;
use super::tls_port::TlsPort;
use super::unread::Unread;
use super::{Clients, serve};
use crate::app::App;
use crate::net::{Peer, pause_after};
use crate::process::cores::{Cores, Kind};
use crate::process::stopper::Stopper;

/// Accepted in one turn at the gate: some 100 us of work.
const ACCEPTED_AT_ONCE: usize = 4;

/// Accepts for ever, at most `most` at a time.
pub(crate) async fn accept_clients(
    app: Arc<App>,
    listener: TcpListener,
    most: usize,
    tls: Option<Arc<TlsPort>>,
    stopper: Stopper,
    connections: TaskTracker,
) {
    let clients = Arc::new(Clients {
        routes: crate::http::app(Arc::clone(&app)),
        stopper,
        open: Open::new(&app, most),
        gates: Gates::new(),
        unread: Unread::default(),
        next: AtomicU64::new(1),
        tls,
        app,
    });
    let accepting = accept(&clients, &listener, &connections);
    clients.gates.pass(&InHand::default(), accepting).await;
}

async fn accept(clients: &Arc<Clients>, listener: &TcpListener, connections: &TaskTracker) {
    let mut accepted = 0;
    let mut failing = false;
    loop {
        if accepted == ACCEPTED_AT_ONCE {
            accepted = 0;
            yield_now().await;
        }
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(pause) = pause_after(&error) {
                    if !failing {
                        tracing::warn!(%error, "cannot accept clients");
                    }
                    failing = true;
                    clients.open.make_room(None);
                    sleep(pause).await;
                }
                continue;
            }
        };
        failing = false;
        accepted += 1;
        let address = peer.ip().to_canonical();
        let Some(room) = clients.open.room(address).await else {
            clients.app.metrics.http.connections_refused.inc();
            if clients.tls.is_none() {
                let socket = Socket::new(stream, Peer { address, connection: u64::MAX });
                connections.spawn(async move { TOO_MANY.say(&socket).await });
            }
            continue;
        };
        let clients = Arc::clone(clients);
        let Some(place) = Cores::current().map(|cores| cores.place(Kind::Connection)) else {
            connections.spawn(async move {
                serve(stream, address, &clients).await;
                drop(room);
            });
            continue;
        };
        let core = place.handle().clone();
        let moved = stream.into_std();
        let serving = async move {
            match moved.and_then(TcpStream::from_std) {
                Ok(stream) => serve(stream, address, &clients).await,
                Err(error) => tracing::warn!(%error, "a client was lost on the way to its core"),
            }
            drop((room, place));
        };
        connections.spawn_on(serving, &core);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use tokio::net::TcpStream;

    use super::super::tests::clients;
    use super::*;

    #[tokio::test]
    async fn few_of_those_who_come_at_once_are_accepted_in_one_turn() {
        const DIALS: usize = 5 * ACCEPTED_AT_ONCE + 1;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut dials = Vec::new();
        for _ in 0..DIALS {
            dials.push(TcpStream::connect(address).await.unwrap());
        }
        let (clients, connections) = (clients().await, TaskTracker::new());
        let mut accepting = pin!(accept(&clients, &listener, &connections));
        let mut turns = Vec::new();
        while connections.len() < DIALS {
            let before = connections.len();
            let turn = poll_fn(|context| Poll::Ready(accepting.as_mut().poll(context)));
            assert!(turn.await.is_pending());
            turns.extend(Some(connections.len() - before).filter(|accepted| *accepted > 0));
            yield_now().await;
        }
        assert!(turns.iter().all(|accepted| *accepted <= ACCEPTED_AT_ONCE), "{turns:?}");
    }
}
