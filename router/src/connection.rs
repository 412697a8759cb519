//! One client's connection: HTTP/1 or 2 on a socket that may neither be silent at the start of a request nor stop
//! reading in the middle of an answer.

use std::future::pending;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};

use crate::app::App;
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

/// Serves a connection until the client or the stopper ends it.
pub(crate) async fn serve(stream: TcpStream, routes: Router, app: Arc<App>, stopper: Stopper) {
    let config = &app.config;
    let _ = stream.set_nodelay(true); // fails only on a socket that is gone
    let socket = Arc::new(Socket { stream: Mutex::new(stream), asked: AtomicBool::new(false) });
    let begun = AtomicBool::new(false);
    let outcome = {
        let routes = TowerToHyperService::new(routes);
        let service = service_fn(|request| {
            begun.store(true, Relaxed);
            routes.call(request)
        });
        let io = Guarded {
            socket: Arc::clone(&socket),
            app: Arc::clone(&app),
            stall: config.deadlines.stall,
            stalled: None,
        };
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1().timer(TokioTimer::new()).header_read_timeout(config.http.header_timeout);
        http.http2().timer(TokioTimer::new());
        let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(io), service));
        // hyper's own time-out begins when it knows the version of HTTP
        let silent = async {
            sleep(config.http.header_timeout).await;
            if begun.load(Relaxed) {
                pending::<()>().await; // from the first request on the time-out is hyper's
            }
        };
        let mut silent = std::pin::pin!(silent);
        let mut draining = false;
        loop {
            tokio::select! {
                result = connection.as_mut() => break result.err().map(|error| is_timeout(&*error)),
                () = silent.as_mut() => break Some(true),
                () = stopper.draining(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = stopper.stopped() => break None,
            }
        }
    };
    // a client that sent nothing since the last answer only kept the connection for later
    if outcome == Some(true) && socket.asked.load(Relaxed) {
        app.metrics.http_request("unknown", 408, "headers_too_slow");
        say(&socket, HEADERS_TOO_SLOW).await;
    }
}

/// Turns a client away.
pub(crate) async fn turn_away(stream: TcpStream) {
    let socket = Socket { stream: Mutex::new(stream), asked: AtomicBool::new(true) };
    say(&socket, TOO_MANY).await;
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

fn is_timeout(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut error = Some(error);
    while let Some(inner) = error {
        if inner.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout) {
            return true;
        }
        error = inner.source();
    }
    false
}

/// Shared, so that last words can be said after hyper gave up. The lock is never contended.
struct Socket {
    stream: Mutex<TcpStream>,
    /// Bytes came since the last ones that were sent.
    asked: AtomicBool,
}

impl Socket {
    fn stream(&self) -> MutexGuard<'_, TcpStream> {
        self.stream.lock().expect("no holder panics")
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
        self.app.metrics.connections_stalled.inc();
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
            self.socket.asked.store(true, Relaxed);
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
