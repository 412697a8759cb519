//! A socket, and what of a stream of events waits for it. Whoever has events writes them at once if nothing waits; what the
//! socket does not take waits for the connection's own task, and everything after it as well.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::AsyncWrite as _;

use super::transport::Transport;

/// See the head of this file.
pub(super) struct ClientWire {
    pub(super) stream: Transport,
    waiting: BytesMut,
    /// What waits is a head, which goes with the first piece.
    is_held: bool,
}

impl ClientWire {
    pub(super) fn new(stream: Transport) -> Self {
        Self { stream, waiting: BytesMut::new(), is_held: false }
    }

    /// Nothing waits that has to be written before the next piece is made.
    pub(super) fn is_free(&self) -> bool {
        self.is_held || self.waiting.is_empty()
    }

    /// Holds the head of an answer back for its first piece.
    pub(super) fn hold(&mut self, head: BytesMut) {
        self.waiting = head;
        self.is_held = true;
    }

    /// Something has to be written before there is another piece: a head goes without one.
    pub(super) fn has_to_write(&mut self) -> bool {
        self.is_held = false;
        !self.is_free()
    }

    /// Writes as much as the socket takes at once, after what waits. False if that is not all. With an error all of it waits:
    /// whoever writes on finds the error again.
    pub(super) fn send(&mut self, bytes: &[u8]) -> bool {
        self.is_held = false;
        if self.waiting.is_empty() {
            let written = self.try_write(bytes);
            self.waiting.extend_from_slice(&bytes[written..]);
        } else {
            self.waiting.extend_from_slice(bytes);
            let written = self.try_write(&self.waiting);
            self.wrote(written);
        }
        self.waiting.is_empty()
    }

    /// TLS takes nothing without its task.
    fn try_write(&self, bytes: &[u8]) -> usize {
        self.stream.plain().and_then(|socket| socket.try_write(bytes).ok()).unwrap_or(0)
    }

    /// Writes of what waits.
    pub(super) fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.waiting))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.wrote(written);
        Poll::Ready(Ok(()))
    }

    fn wrote(&mut self, bytes: usize) {
        self.waiting.advance(bytes);
        if self.waiting.is_empty() {
            self.waiting = BytesMut::new(); // few streams ever wait
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair() -> (ClientWire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let wire = ClientWire::new(listener.accept().await.unwrap().0.into());
        wire.stream.plain().unwrap().writable().await.unwrap();
        (wire, client)
    }

    async fn write_all(wire: &mut ClientWire) {
        while !wire.is_free() {
            std::future::poll_fn(|context| wire.poll_write(context)).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_head_goes_with_the_first_piece_or_by_itself() {
        let (mut wire, mut client) = pair().await;
        wire.hold(BytesMut::from("head "));
        assert!(wire.is_free(), "it does not keep the first piece from being made");
        assert!(wire.send(b"piece "));
        assert!(!wire.has_to_write());
        wire.hold(BytesMut::from("another head"));
        assert!(wire.is_free() && wire.has_to_write() && !wire.is_free());
        write_all(&mut wire).await;
        drop(wire);
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "head piece another head");
    }

    #[tokio::test]
    async fn what_does_not_fit_waits_with_all_that_follows_and_comes_in_order() {
        let (mut wire, mut client) = pair().await;
        let much: Vec<u8> = (0..32 << 20).map(|i: u32| (i >> 8) as u8).collect();
        assert!(!wire.send(&much) && !wire.is_free());
        assert!(!wire.send(b"the rest"));
        let reads = tokio::spawn(async move {
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).await.map(|_| bytes)
        });
        write_all(&mut wire).await;
        assert!(wire.waiting.capacity() == 0, "nothing is kept");
        drop(wire);
        assert!(reads.await.unwrap().unwrap() == [&much[..], b"the rest"].concat());
    }

    #[tokio::test]
    async fn who_writes_on_finds_the_error() {
        let (mut wire, client) = pair().await;
        client.set_zero_linger().unwrap();
        drop(client);
        wire.stream.plain().unwrap().readable().await.unwrap(); // the reset is here
        assert!(!wire.send(b"piece"));
        assert!(std::future::poll_fn(|context| wire.poll_write(context)).await.is_err());
    }
}
