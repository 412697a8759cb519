//! Streams of events over HTTP/1.1. Hyper read the request and let go of the connection; the answer is written here, its
//! events as chunks, each as soon as it is made and by whoever makes it. So a stream that waits for tokens holds no buffers.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::response::Parts;
use bytes::BytesMut;
use tokio::io::AsyncWriteExt as _;

use super::super::Clients;
use super::super::guarded::Guarded;
use super::super::socket::{Answering, Socket};
use super::head::{Framing, head_bytes};
use crate::http::{EventStream, Outlet, PIECE_HEAD};

/// An event that says nothing: it shows whether the client is there.
pub(super) const COMMENT: &[u8] = b":\n\n";
/// The same as a chunk.
const COMMENT_CHUNK: &[u8] = b"3\r\n:\n\n\r\n";
pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// An answer whose events are still to come.
pub(super) struct StreamedAnswer {
    events: EventStream,
    answering: Arc<Answering>,
    /// The client is told that there is none after it on this connection.
    closes: bool,
}

impl StreamedAnswer {
    /// Its head waits for its first event. `is_last`: the client wants no further answer on this connection.
    pub(super) fn begin(
        head: &Parts,
        events: EventStream,
        answering: Arc<Answering>,
        is_last: bool,
        socket: &Arc<Socket>,
        clients: &Arc<Clients>,
    ) -> Self {
        let closes = is_last || clients.stopper.is_draining();
        socket.wire().hold(head_bytes(head, Framing::Chunks, closes));
        events.send_to(Arc::new(SocketOutlet {
            socket: Arc::clone(socket),
            clients: Arc::clone(clients),
        }));
        Self { events, answering, closes }
    }
}

/// Sends an answer. True if the connection is there for the next request.
pub(super) async fn send(
    answer: StreamedAnswer,
    io: &mut Guarded,
    socket: &Socket,
    clients: &Clients,
) -> bool {
    let StreamedAnswer { events, answering, mut closes } = answer;
    let sent = {
        let mut gone = pin!(socket.gone());
        loop {
            tokio::select! {
                sent = poll_fn(|context| poll_sent(&events, io, socket, &answering, context)) => break sent,
                () = gone.as_mut() => break Err(io::ErrorKind::BrokenPipe.into()),
                () = socket.evicted() => break Err(io::ErrorKind::BrokenPipe.into()),
                () = clients.stopper.draining(), if !closes => closes = true,
            }
        }
    };
    drop((events, answering));
    match sent {
        Ok(()) if closes => {
            let _ = io.shutdown().await;
            false
        }
        sent => sent.is_ok(),
    }
}

/// Done when all is in the socket.
fn poll_sent(
    events: &EventStream,
    io: &mut Guarded,
    socket: &Socket,
    answering: &Answering,
    context: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    loop {
        if io.poll_sent(context)?.is_pending() {
            break;
        }
        if events.poll_sent(context)?.is_ready() {
            return io.poll_sent(context);
        }
        if socket.wire().has_to_write() {
            continue;
        }
        if !answering.takes_comment() {
            break;
        }
        socket.wire().send(COMMENT_CHUNK);
    }
    io.poll_broken(context).map(Err)
}

/// The socket of a connection that sends one stream of events.
struct SocketOutlet {
    socket: Arc<Socket>,
    clients: Arc<Clients>,
}

impl Outlet for SocketOutlet {
    fn is_free(&self) -> bool {
        self.socket.wire().is_free()
    }

    fn send(&self, piece: &mut BytesMut, is_last: bool) {
        self.clients.gates.stream_goes();
        if !self.socket.wire().send(chunk(piece, is_last)) {
            self.clients.app.metrics.http.stream_waits.inc();
        }
    }
}

/// A piece as a chunk: its length in the room before it.
fn chunk(piece: &mut BytesMut, is_last: bool) -> &[u8] {
    let length = piece.len() - PIECE_HEAD;
    let mut begin = PIECE_HEAD;
    if length > 0 {
        // an empty one would be the last
        piece.extend_from_slice(b"\r\n");
        begin -= 2;
        piece[begin..PIECE_HEAD].copy_from_slice(b"\r\n");
        let mut rest = length;
        while rest > 0 {
            begin -= 1;
            piece[begin] = b"0123456789abcdef"[rest % 16];
            rest /= 16;
        }
    }
    if is_last {
        piece.extend_from_slice(LAST_CHUNK);
    }
    &piece[begin..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk_of(events: &str, is_last: bool) -> String {
        let mut piece = BytesMut::zeroed(PIECE_HEAD);
        piece.extend_from_slice(events.as_bytes());
        String::from_utf8(chunk(&mut piece, is_last).to_vec()).unwrap()
    }

    #[test]
    fn a_piece_is_a_chunk_and_no_piece_is_none() {
        assert_eq!(chunk_of("a", false), "1\r\na\r\n");
        assert_eq!(
            chunk_of(&"a".repeat(0xfe0), true),
            format!("fe0\r\n{}\r\n0\r\n\r\n", "a".repeat(0xfe0))
        );
        assert_eq!(chunk_of("", false), "", "it would end the answer");
        assert_eq!(chunk_of("", true), "0\r\n\r\n");
    }
}
