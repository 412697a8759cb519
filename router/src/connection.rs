//! One client's connection: HTTP/1 or 2 on a socket that may neither be silent at the start of a request nor stop
//! reading in the middle of an answer.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use crate::app::App;
use crate::http::access::Entrance;
use crate::shutdown::Stopper;

const HEADERS_TOO_SLOW: LastWords = LastWords {
    head: "408 Request Timeout",
    body: r#"{"error":{"message":"the headers of the request were too slow","type":"invalid_request_error","param":null,"code":"headers_too_slow"}}"#,
};
const TOO_MANY: LastWords = LastWords {
    head: "503 Service Unavailable\r\nretry-after: 1",
    body: r#"{"error":{"message":"too many connections; try again later","type":"overloaded_error","param":null,"code":"too_many_connections"}}"#,
};
/// An answer to a client that hyper does not talk to.
struct LastWords {
    head: &'static str,
    body: &'static str,
}

/// For them to be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A connection may rest this long between two requests. A guess: longer than the 60 s after which clients and proxies
/// tend to give one up themselves, so that none sends a request into a connection that is just being closed.
const REST: Duration = Duration::from_secs(120);

/// Serves a connection until the client or the stopper ends it.
pub(crate) async fn serve(stream: TcpStream, routes: Router, app: Arc<App>, stopper: Stopper) {
    let config = &app.config;
    let _ = stream.set_nodelay(true); // fails only on a socket that is gone
    let peer = Entrance::of(&stream);
    let socket = Arc::new(Socket::new(stream));
    let late = {
        let routes = TowerToHyperService::new(routes);
        let service = service_fn(|request: Request<Incoming>| {
            let answering = Arc::new(Answering::begin(&socket, request.version()));
            let held = Arc::clone(&answering);
            let mut request = request.map(|body| Held { body, _answering: held });
            request.extensions_mut().insert(peer);
            let answer = routes.call(request);
            async move {
                answer.await.map(|answer| answer.map(|body| Held { body, _answering: answering }))
            }
        });
        let io = Guarded {
            socket: Arc::clone(&socket),
            app: Arc::clone(&app),
            stall: config.deadlines.stall,
            stalled: None,
        };
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1().header_read_timeout(None); // hyper's also runs while a connection rests
        let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(io), service));
        let mut late = std::pin::pin!(socket.late(config.http.header_timeout));
        let mut draining = false;
        loop {
            tokio::select! {
                _ = connection.as_mut() => break false,
                () = late.as_mut() => break true,
                () = stopper.draining(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = stopper.stopped() => break false,
            }
        }
    };
    // a client that sent nothing since the last answer only kept the connection for later
    if late && socket.asked.load(Relaxed) {
        app.metrics.http.request("unknown", 408, "headers_too_slow");
        say(&socket, HEADERS_TOO_SLOW).await;
    }
}

/// Turns a client away.
pub(crate) async fn turn_away(stream: TcpStream) {
    say(&Socket::new(stream), TOO_MANY).await;
}

async fn say(socket: &Socket, LastWords { head, body }: LastWords) {
    let len = body.len();
    let words = format!(
        "HTTP/1.1 {head}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
    );
    let mut writer = Plain(socket);
    let _ = timeout(LAST_WORDS, async {
        writer.write_all(words.as_bytes()).await?;
        writer.shutdown().await
    })
    .await;
}

/// Shared, so that last words can be said after hyper gave up. The locks are never contended.
struct Socket {
    stream: Mutex<TcpStream>,
    /// Bytes came since the last ones that were sent.
    asked: AtomicBool,
    turn: Mutex<Turn>,
}

/// Whose turn it is: the server's while it answers, else the client's.
struct Turn {
    /// Requests whose answers are not over.
    answering: usize,
    /// Since when it is the client's turn, or since when its request comes.
    since: Instant,
    /// A request has begun to come.
    asking: bool,
    /// HTTP/2, where bytes without a request are nothing unusual.
    multiplexed: bool,
}

impl Turn {
    fn deadline(&self, header_timeout: Duration) -> Option<Instant> {
        let limit = if self.asking { header_timeout } else { REST };
        (self.answering == 0).then(|| self.since + limit)
    }
}

impl Socket {
    fn new(stream: TcpStream) -> Self {
        // the first request has to come at once
        let turn = Turn { answering: 0, since: Instant::now(), asking: true, multiplexed: false };
        Self { stream: Mutex::new(stream), asked: AtomicBool::new(false), turn: Mutex::new(turn) }
    }

    fn stream(&self) -> MutexGuard<'_, TcpStream> {
        self.stream.lock().expect("no holder panics")
    }

    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().expect("no holder panics")
    }

    /// Bytes came.
    fn hear(&self) {
        self.asked.store(true, Relaxed);
        let mut turn = self.turn();
        if turn.answering == 0 && !turn.asking && !turn.multiplexed {
            turn.asking = true;
            turn.since = Instant::now();
        }
    }

    /// Returns when the client is too late with its request. Nothing wakes it: no deadline is nearer than
    /// `header_timeout` when it is set.
    async fn late(&self, header_timeout: Duration) {
        loop {
            let now = Instant::now();
            let deadline = self.turn().deadline(header_timeout);
            if deadline.is_some_and(|deadline| deadline <= now) {
                return;
            }
            let look = now + header_timeout;
            sleep_until(deadline.map_or(look, |deadline| deadline.min(look))).await;
        }
    }
}

/// A request that is answered. When this drops, it is the client's turn again.
struct Answering(Arc<Socket>);

impl Answering {
    fn begin(socket: &Arc<Socket>, version: Version) -> Self {
        let mut turn = socket.turn();
        turn.answering += 1;
        turn.asking = false;
        turn.multiplexed = version == Version::HTTP_2;
        drop(turn);
        Self(Arc::clone(socket))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut turn = self.0.turn();
        turn.answering -= 1;
        turn.since = Instant::now();
    }
}

/// The body of a request or of its answer: neither is over before both are.
struct Held<B> {
    body: B,
    _answering: Arc<Answering>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Held<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What hyper reads and writes. A write that makes no progress for `stall` fails: the client has stopped reading.
struct Guarded {
    socket: Arc<Socket>,
    app: Arc<App>,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Guarded {
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            self.socket.asked.store(false, Relaxed);
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
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut *self.socket.stream()).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.socket.hear();
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
        let written = Pin::new(&mut *self.socket.stream()).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut *self.socket.stream()).poll_write_vectored(context, parts);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.socket.stream()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.socket.stream()).poll_shutdown(context)
    }
}

/// The bare socket.
struct Plain<'a>(&'a Socket);

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
