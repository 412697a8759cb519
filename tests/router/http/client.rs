//! A router on a free port, and a client that shows every byte.

use std::net::SocketAddr;
use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::config::{Config, RouterArgs, WorkerListen};
use headrace_router::process::stopper::Stopper;
use headrace_router::server::{ReloadRequest, Server};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fake_worker::{Behaviour, FakeWorker, in_time};

/// Flags for tests: free ports, everything else as users have it.
pub(super) fn args() -> RouterArgs {
    RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() }
}

/// A router that listens, until it is dropped.
pub(super) struct TestRouter {
    pub(super) address: SocketAddr,
    /// Where operators are served besides.
    pub(super) operators: Vec<WorkerListen>,
    pub(super) app: Arc<App>,
    /// Has its files read again.
    pub(super) reload: ReloadRequest,
    pub(super) stopper: Stopper,
}

impl TestRouter {
    pub(super) async fn start(args: RouterArgs) -> Self {
        let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
        let (address, app) = (server.http_address(), Arc::clone(server.app()));
        let (operators, stopper) = (server.admin_addresses(), server.stopper());
        let reload = server.reload();
        tokio::spawn(server.serve());
        Self { address, operators, app, reload, stopper }
    }

    /// A router with one worker that is ready.
    pub(super) async fn with(worker: Behaviour, args: RouterArgs) -> (Self, FakeWorker) {
        let router = Self::start(args).await;
        let worker = worker.ready(&router.app).await;
        (router, worker)
    }

    /// A router whose only worker always says the same.
    pub(super) async fn saying(text: &str) -> (Self, FakeWorker) {
        Self::with(Behaviour::says("w", text), args()).await
    }

    /// Takes no new connections, and ends those that there are after their answers.
    pub(super) fn drain(&self) {
        self.stopper.drain();
    }

    pub(super) async fn connect(&self) -> Connection {
        Connection::of(TcpStream::connect(self.address).await.unwrap())
    }

    /// One request on a connection of its own.
    pub(super) async fn send(&self, head: &str, body: &[u8]) -> Reply {
        let mut connection = self.connect().await;
        connection.request(head, body).await;
        connection.reply().await
    }

    pub(super) async fn get(&self, path: &str) -> Reply {
        self.send(&format!("GET {path} HTTP/1.1"), b"").await
    }

    pub(super) async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Reply {
        let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
        self.send(&head, body.as_ref()).await
    }
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}

/// One HTTP/1.1 connection.
pub(super) struct Connection<S = TcpStream> {
    pub(super) stream: S,
    /// Bytes that were read and not used yet.
    rest: Vec<u8>,
}

/// One answer, its body decoded.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.as_str())
    }

    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {}", String::from_utf8_lossy(&self.body)))
    }

    /// The error object, after a check that it has OpenAI's shape and nothing else.
    pub(super) fn error(&self) -> Value {
        assert_eq!(self.header("content-type"), Some("application/json"), "{self:?}");
        let body = self.json();
        let error = &body["error"];
        let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(error["message"].is_string() && error["type"].is_string());
        assert_eq!(body.as_object().unwrap().len(), 1);
        error.clone()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub(super) fn of(stream: S) -> Self {
        Self { stream, rest: Vec::new() }
    }

    /// Sends a request line with further headers, and a body with its length.
    pub(super) async fn request(&mut self, head: &str, body: &[u8]) {
        let length = if body.is_empty() {
            String::new()
        } else {
            format!("Content-Length: {}\r\n", body.len())
        };
        let head = format!("{head}\r\nHost: localhost\r\n{length}\r\n");
        self.stream.write_all(head.as_bytes()).await.unwrap();
        self.stream.write_all(body).await.unwrap();
    }

    /// Reads the status line and headers; interim answers are skipped.
    pub(super) async fn head(&mut self) -> Reply {
        loop {
            let head = self.any_head().await;
            if head.status != 100 {
                return head;
            }
        }
    }

    /// Reads so many interim answers.
    pub(super) async fn interim(&mut self, count: usize) {
        for _ in 0..count {
            assert_eq!(self.any_head().await.status, 100);
        }
    }

    async fn any_head(&mut self) -> Reply {
        let end = loop {
            if let Some(end) = find(&self.rest, b"\r\n\r\n") {
                break end;
            }
            assert!(
                self.more().await > 0,
                "closed inside the head: {:?}",
                String::from_utf8_lossy(&self.rest)
            );
        };
        let head: Vec<u8> = self.rest.drain(..end + 4).collect();
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.map(|line| line.split_once(": ").unwrap());
        let headers = headers.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Reply { status, headers, body: Vec::new() }
    }

    /// Reads a whole answer.
    pub(super) async fn reply(&mut self) -> Reply {
        let mut reply = self.head().await;
        if reply.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk().await {
                reply.body.extend(chunk);
            }
        } else if let Some(length) = reply.header("content-length") {
            let length: usize = length.parse().unwrap();
            while self.rest.len() < length {
                assert!(self.more().await > 0, "closed inside the body");
            }
            reply.body = self.rest.drain(..length).collect();
        }
        reply
    }

    /// Reads the next piece of a stream as text.
    pub(super) async fn piece(&mut self) -> String {
        String::from_utf8(self.chunk().await.expect("the stream ended")).unwrap()
    }

    /// Reads one chunk of a chunked body; `None` at its end.
    pub(super) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = loop {
            if let Some(end) = find(&self.rest, b"\r\n") {
                break end;
            }
            assert!(self.more().await > 0, "closed between chunks");
        };
        let size = std::str::from_utf8(&self.rest[..line]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        let all = line + 2 + size + 2;
        while self.rest.len() < all {
            assert!(self.more().await > 0, "closed inside a chunk");
        }
        let chunk: Vec<u8> = self.rest.drain(..all).skip(line + 2).take(size).collect();
        (size > 0).then_some(chunk)
    }

    /// Waits until the other side closes. Returns how many bytes came before that.
    pub(super) async fn closed(&mut self) -> usize {
        while self.more().await > 0 {}
        self.rest.len()
    }

    /// All that comes until the other side closes.
    pub(super) async fn until_closed(&mut self) -> Vec<u8> {
        self.closed().await;
        std::mem::take(&mut self.rest)
    }

    async fn more(&mut self) -> usize {
        let mut buffer = [0; 16 << 10];
        let read = in_time("an answer", self.stream.read(&mut buffer)).await;
        let read = read.unwrap_or(0); // a reset is an end
        self.rest.extend_from_slice(&buffer[..read]);
        read
    }
}

/// All events of a whole answer as JSON, after a check that it is whole.
pub(super) fn chunks(text: &str) -> Vec<Value> {
    let events = text.split_terminator("\n\n");
    let mut events: Vec<&str> = events.map(|event| event.strip_prefix("data: ").unwrap()).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{text}");
    events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
