//! What the protocols read and write: a socket on which a write that makes no progress for `--stall-timeout-ms` fails,
//! as the client has stopped reading.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::http2::frames::Frames;
use super::socket::Socket;
use crate::app::App;

/// What HTTP/2 begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Read at once of a request that comes before its turn. A guess.
const READ_BYTES: usize = 1 << 10;

/// Read of HTTP/2 in one turn of its task. A ping takes 17 bytes, and a connection that sends nothing else would hold its
/// core until the socket is empty, which it never is. A guess: half a millisecond of pings.
const TURN_BYTES: usize = 8 << 10;

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
    /// Of HTTP/2.
    http2: Option<Http2Reading>,
}

/// How HTTP/2 is read.
struct Http2Reading {
    frames: Frames,
    /// Nothing is read any more.
    floods: bool,
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
            http2: None,
        }
    }

    /// From now on, with the preface, its task gives way, however much there is to read, and its frames are counted.
    pub(super) fn reads_http2(mut self) -> Self {
        let frames = Frames::behind(PREFACE.len());
        self.http2 = Some(Http2Reading { frames, floods: false });
        self
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

    /// What was read too far comes again. It is copied: it is the end of hyper's buffer of 16 KiB, even where it is empty, and
    /// an answer may take an hour.
    pub(super) fn read_again(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.begin = [bytes, &self.begin].concat().into();
        }
    }

    /// Writes what waits of a stream of events.
    pub(super) fn poll_sent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut wire = self.socket.wire();
            if wire.is_free() {
                self.stalled = None;
                return Poll::Ready(Ok(()));
            }
            let written = wire.poll_write(context);
            drop(wire);
            ready!(self.watch(context, written))?;
        }
    }

    /// Waits for the client to break off while its answer is made or sent. The begin of a further request of it stays here, and
    /// the rest in the socket, behind which its end is not seen.
    pub(super) fn poll_broken(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let mut bytes = [0; READ_BYTES];
        while self.begin.len() < READ_BYTES {
            let mut buffer = ReadBuf::new(&mut bytes[self.begin.len()..]);
            match ready!(self.poll_socket(context, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => {
                    return Poll::Ready(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(()) => self.begin = [&self.begin, buffer.filled()].concat().into(),
                Err(error) => return Poll::Ready(error),
            }
        }
        Poll::Pending
    }

    /// Waits for bytes of the client, or for its end, and reads nothing of it.
    pub(super) fn poll_heard(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.is_over || !self.begin.is_empty() {
            return Poll::Ready(());
        }
        match self.socket.wire().stream.plain() {
            Some(socket) => socket.poll_read_ready(context).map(|_| ()), // of an error the reader hears
            None => Poll::Ready(()), // TLS may hold bytes that are no longer in the socket
        }
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

impl Guarded {
    /// What came behind the first bytes is read with them: after so few hyper would double its buffer for the rest.
    fn read_behind(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) {
        if self.is_over || buffer.remaining() == 0 {
            return;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket.wire().stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.socket.hear();
        } else if matches!(read, Poll::Ready(Ok(()))) {
            self.is_over = true;
        } // and of an error the next reader hears
    }

    /// Reads what nobody has read yet. The end may be kept from the reader.
    fn poll_socket(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.is_over {
            if let Some(http2) = &self.http2 {
                if http2.floods {
                    return Poll::Pending; // and last words are written
                }
                if self.socket.of_turn.load(Relaxed) >= TURN_BYTES {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
            let before = buffer.filled().len();
            let read = Pin::new(&mut self.socket.wire().stream).poll_read(context, buffer);
            let came = buffer.filled().len() - before;
            if self.http2.is_some() {
                self.socket.of_turn.fetch_add(came, Relaxed);
            }
            if came > 0 {
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

    /// What comes next: what was put aside, and what nobody has read yet.
    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.begin.is_empty() {
            let len = self.begin.len().min(buffer.remaining());
            buffer.put_slice(&self.begin[..len]);
            // its time runs from here on, unless it is an empty line, which some send after a body
            if self.begin.iter().any(|byte| !matches!(byte, b'\r' | b'\n')) {
                self.socket.hear();
            }
            self.begin.advance(len);
            self.read_behind(context, buffer);
            return Poll::Ready(Ok(()));
        }
        self.poll_socket(context, buffer)
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = self.poll_next(context, buffer);
        let Self { socket, http2, .. } = &mut *self;
        if let Some(http2) = http2
            && !http2.frames.read(&buffer.filled()[before..], &socket.carried)
        {
            http2.floods = true;
            socket.floods.notify_one();
        }
        read
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.socket.unflushed.store(true, Relaxed);
        let written = Pin::new(&mut self.socket.wire().stream).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket.unflushed.store(true, Relaxed);
        let written = Pin::new(&mut self.socket.wire().stream).poll_write_vectored(context, parts);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket.wire().stream).poll_flush(context);
        if flushed.is_pending() {
            return self.watch(context, flushed); // TLS has more for the socket than it takes
        }
        self.stalled = None;
        self.socket.unflushed.store(false, Relaxed); // called when all is written
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket.wire().stream).poll_shutdown(context)
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
        Pin::new(&mut self.0.wire().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.wire().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.wire().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;
    use tokio::time::{Instant, timeout};

    use super::super::socket::pair;
    use super::super::tests::app;
    use super::*;

    /// More than the kernel takes from one that nobody reads.
    const MUCH: usize = 64 << 20;

    fn take_all(client: &TcpStream) {
        let mut bytes = vec![0; 1 << 20];
        while client.try_read(&mut bytes).is_ok_and(|read| read > 0) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_fails_when_it_makes_no_progress_for_so_long() {
        let app = app().await;
        let stall = app.config.deadlines.stall;
        let (socket, client) = pair().await;
        let mut io = Guarded::new(&socket, &app);
        let much = vec![b'x'; MUCH];
        {
            let mut write = std::pin::pin!(io.write_all(&much));
            // whoever reads now and then is not stalled, however long all of it takes
            for _ in 0..3 {
                assert!(timeout(stall * 2 / 3, write.as_mut()).await.is_err());
                client.readable().await.unwrap();
                take_all(&client);
            }
            assert_eq!(app.metrics.http.connections_stalled.get(), 0);
            let _progress = timeout(stall / 3, write.as_mut()).await;
            let begin = Instant::now();
            let error = write.await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(begin.elapsed() <= stall, "{:?}", begin.elapsed());
        }
        assert_eq!(app.metrics.http.connections_stalled.get(), 1);
    }

    #[tokio::test]
    async fn who_always_has_more_to_say_gives_way_in_between() {
        const PIECE: usize = 100;
        let app = app().await;
        let (socket, mut client) = pair().await;
        client.write_all(&[b'x'; 5 * TURN_BYTES]).await.unwrap();
        client.shutdown().await.unwrap();
        let mut io = Guarded::new(&socket, &app).reads_http2();
        // each poll of the task is a turn, in which it reads what it is given
        let mut turns = vec![0];
        let reading = async {
            let mut piece = [0; PIECE];
            poll_fn(|context| {
                socket.of_turn.store(0, Relaxed);
                loop {
                    let mut buffer = ReadBuf::new(&mut piece);
                    let read = Pin::new(&mut io).poll_read(context, &mut buffer);
                    let came = buffer.filled().len();
                    *turns.last_mut().expect("the first") += came;
                    match read {
                        Poll::Ready(Ok(())) if came == 0 => return Poll::Ready(()),
                        Poll::Ready(read) => read.unwrap(),
                        Poll::Pending => {
                            turns.push(0);
                            return Poll::Pending;
                        }
                    }
                }
            })
            .await;
        };
        timeout(Duration::from_secs(60), reading).await.expect("it is woken");
        assert_eq!(turns.iter().sum::<usize>(), 5 * TURN_BYTES);
        assert!(turns.iter().all(|read| *read < TURN_BYTES + PIECE), "{turns:?}");
    }

    #[tokio::test]
    async fn what_was_read_too_far_comes_before_what_was_put_aside() {
        let app = app().await;
        let (socket, client) = pair().await;
        drop(client);
        let mut io = Guarded::new(&socket, &app);
        for bytes in [&b"third"[..], b"", b"first, "] {
            io.read_again(bytes);
        }
        let mut again = String::new();
        io.read_to_string(&mut again).await.unwrap();
        assert_eq!(again, "first, third");
    }

    #[tokio::test]
    async fn a_hang_up_is_seen_behind_few_bytes_and_all_of_them_come_again() {
        let app = app().await;
        let (socket, mut client) = pair().await;
        let mut io = Guarded::new(&socket, &app);
        let mut sent = Vec::new();
        for piece in [&b"GET"[..], b" / HTTP/1.1\r\n", &[b'x'; 2 * READ_BYTES]] {
            client.write_all(piece).await.unwrap();
            sent.extend_from_slice(piece);
            poll_fn(|context| {
                assert!(io.poll_broken(context).is_pending());
                let is_kept = io.begin.len() == sent.len().min(READ_BYTES);
                if is_kept { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        assert_eq!(io.begin.len(), READ_BYTES, "the rest stays in the socket");
        drop(client);
        let mut again = Vec::new();
        io.read_to_end(&mut again).await.unwrap();
        assert_eq!(again, sent);
        let broken = poll_fn(|context| io.poll_broken(context)).await;
        assert_eq!(broken.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_ends_within_the_preface_is_http1() {
        let app = app().await;
        for (begin, protocol) in [
            ("", None),
            ("PRI * HTT", Some(Protocol::Http1)),
            ("GET / HTTP/1.1", Some(Protocol::Http1)),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore", Some(Protocol::Http2)),
        ] {
            let (socket, mut client) = pair().await;
            client.write_all(begin.as_bytes()).await.unwrap();
            drop(client);
            let mut io = Guarded::new(&socket, &app);
            assert_eq!(io.protocol().await.unwrap(), protocol, "{begin}");
            let mut again = String::new();
            io.read_to_string(&mut again).await.unwrap();
            assert_eq!(again, begin);
        }
    }
}
