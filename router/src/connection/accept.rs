//! Takes connections in.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use super::last_words::TOO_MANY;
use super::open::Open;
use super::socket::Socket;
use super::unread::Unread;
use super::{Clients, serve};
use crate::app::App;
use crate::net::{Peer, pause_after};
use crate::process::stopper::Stopper;

/// Accepts for ever, at most `most` at a time.
pub(crate) async fn accept_clients(
    app: &Arc<App>,
    listener: TcpListener,
    most: usize,
    stopper: &Stopper,
    connections: &TaskTracker,
) {
    let clients = Arc::new(Clients {
        app: Arc::clone(app),
        routes: crate::http::app(Arc::clone(app)),
        stopper: stopper.clone(),
        open: Open::new(app, most),
        unread: Unread::default(),
        next: AtomicU64::new(1),
    });
    let mut failing = false;
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(pause) = pause_after(&error) {
                    if !failing {
                        tracing::warn!(%error, "cannot accept clients");
                    }
                    failing = true;
                    clients.open.make_room();
                    sleep(pause).await;
                }
                continue;
            }
        };
        failing = false;
        let address = peer.ip().to_canonical();
        let Some(room) = clients.open.room().await else {
            app.metrics.http.connections_refused.inc();
            let socket = Socket::new(stream, Peer { address, connection: u64::MAX });
            connections.spawn(async move { TOO_MANY.say(&socket).await });
            continue;
        };
        let clients = Arc::clone(&clients);
        connections.spawn(async move {
            serve(stream, address, &clients).await;
            drop(room);
        });
    }
}
