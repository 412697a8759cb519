//! What the protocols read and write: a socket on which a write that makes no progress for `--stall-timeout-ms` fails,
//! as the client has stopped reading.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::socket::Socket;
use crate::app::App;

/// What HTTP/2 begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

pub(super) struct Guarded {
    socket: Arc<Socket>,
    app: Arc<App>,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    /// Read already, to find out which protocol it is.
    begin: Bytes,
    /// The client has stopped writing.
    is_over: bool,
}

impl Guarded {
    pub(super) fn new(socket: &Arc<Socket>, app: &Arc<App>) -> Self {
        Self {
            socket: Arc::clone(socket),
            app: Arc::clone(app),
            stall: app.config.deadlines.stall,
            stalled: None,
            begin: Bytes::new(),
            is_over: false,
        }
    }

    /// Reads until it is certain what the client speaks; what was read comes again. `None` if it leaves before it says
    /// anything.
    pub(super) async fn protocol(&mut self) -> io::Result<Option<Protocol>> {
        let mut begin = [0; PREFACE.len()];
        let mut len = 0;
        let protocol = loop {
            let read = self.read(&mut begin[len..]).await?;
            len += read;
            if len == 0 {
                return Ok(None);
            }
            if read == 0 || begin[..len] != PREFACE[..len] {
                break Protocol::Http1;
            }
            if len == PREFACE.len() {
                break Protocol::Http2;
            }
        };
        self.begin = Bytes::copy_from_slice(&begin[..len]);
        Ok(Some(protocol))
    }

    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            self.socket.spoke();
            return written;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(self.stall)));
        if stalled.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        self.app.metrics.http.connections_stalled.inc();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.begin.is_empty() {
            let len = self.begin.len().min(buffer.remaining());
            buffer.put_slice(&self.begin[..len]);
            self.begin.advance(len);
            return Poll::Ready(Ok(()));
        }
        if !self.is_over {
            let before = buffer.filled().len();
            let read = Pin::new(&mut *self.socket.stream()).poll_read(context, buffer);
            if buffer.filled().len() > before {
                self.socket.hear();
                return read;
            }
            let end = matches!(read, Poll::Ready(Ok(())));
            if !end || buffer.remaining() == 0 {
                return read;
            }
            self.is_over = true;
        }
        if self.socket.holds_back(context) { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.socket.unflushed.store(true, Relaxed);
        let written = Pin::new(&mut *self.socket.stream()).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket.unflushed.store(true, Relaxed);
        let written = Pin::new(&mut *self.socket.stream()).poll_write_vectored(context, parts);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.unflushed.store(false, Relaxed); // called when all is written
        Pin::new(&mut *self.socket.stream()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.socket.stream()).poll_shutdown(context)
    }
}

/// The bare socket.
pub(super) struct Plain<'a>(pub(super) &'a Socket);

impl AsyncWrite for Plain<'_> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.stream()).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream()).poll_shutdown(context)
    }
}
