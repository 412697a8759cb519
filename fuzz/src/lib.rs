//! What several targets need: a router with a worker, in this process, and a client's socket to it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use headrace_router::config::{Config, RouterArgs};
use headrace_router::server::Server;
use tokio::runtime::{Builder, Runtime};

/// Every answer has to come within this, whatever the question. libFuzzer's own limit is longer.
const ANSWER: Duration = Duration::from_secs(5);
const READY: Duration = Duration::from_secs(30);

/// A router that listens, and one mock worker that answers at once.
#[derive(Debug)]
pub struct Stand {
    /// For clients.
    pub http: SocketAddr,
    /// For workers.
    pub workers: String,
    _runtime: Runtime,
}

impl Stand {
    /// The one of this process.
    ///
    /// # Panics
    /// It does not become ready.
    pub fn get() -> &'static Self {
        static STAND: OnceLock<Stand> = OnceLock::new();
        STAND.get_or_init(Self::start)
    }

    fn start() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        let args = RouterArgs {
            port: 0,
            worker_listen: "127.0.0.1:0".into(),
            secret: None,
            api_key: Vec::new(),
            tokenizer_threads: 1,
            ..RouterArgs::default()
        };
        let config = Config::try_from(args).expect("the flags are right");
        let server = runtime.block_on(Server::start(config)).expect("ports are free");
        let (http, workers) = (server.http_address(), server.worker_address().to_string());
        runtime.spawn(server.serve());
        let router = workers.clone();
        std::thread::spawn(move || {
            let flags = ["--workers", "1", "--cost", "0.01,0,0,0,0", "--longest-answer", "4"];
            headrace_bench::main(
                ["headrace-bench", "mock", "--router", &router].iter().chain(&flags),
            )
        });
        let stand = Self { http, workers, _runtime: runtime };
        let give_up = Instant::now() + READY;
        let ask = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        while stand.send(ask).status() != Some(200) {
            assert!(Instant::now() < give_up, "the worker is not ready");
            std::thread::yield_now();
        }
        stand
    }

    /// Sends bytes on a new connection, and reads what comes until the router closes it.
    ///
    /// # Panics
    /// The router does not close, or cannot be reached.
    pub fn send(&self, bytes: &[u8]) -> Said {
        self.exchange(bytes, false)
    }

    /// The same, and this side of the connection is closed before anything is read.
    ///
    /// # Panics
    /// As [`Self::send`].
    pub fn send_and_close(&self, bytes: &[u8]) -> Said {
        self.exchange(bytes, true)
    }

    fn exchange(&self, bytes: &[u8], close: bool) -> Said {
        let mut socket = TcpStream::connect(self.http).expect("the router listens");
        socket.set_read_timeout(Some(ANSWER)).expect("the time is above 0");
        socket.set_write_timeout(Some(ANSWER)).expect("the time is above 0");
        // a router that has refused the head may close before it has read the rest
        let whole = socket.write_all(bytes).is_ok();
        if close {
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
        let mut said = Vec::new();
        match socket.read_to_end(&mut said) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("no end of the answer: {error}"),
        }
        Said { bytes: said, whole }
    }

    /// Whether the router still answers.
    ///
    /// # Panics
    /// It does not.
    pub fn check(&self) {
        let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        assert_eq!(self.send(ask).status(), Some(200), "the router is not healthy");
    }
}

/// What a router wrote before it closed.
#[derive(Debug)]
pub struct Said {
    /// All of it.
    pub bytes: Vec<u8>,
    /// It read all that was sent.
    pub whole: bool,
}

impl Said {
    /// Of the first answer.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        let digits = self.bytes.strip_prefix(b"HTTP/1.")?.get(2..5)?;
        std::str::from_utf8(digits).ok()?.parse().ok()
    }

    /// What stands behind the first head.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        let end = self.bytes.windows(4).position(|four| four == b"\r\n\r\n");
        end.map_or(&[], |end| &self.bytes[end + 4..])
    }
}

/// As much of the bytes as is text.
#[must_use]
pub fn text(bytes: &[u8]) -> &str {
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
    }
}

/// Calls in threads of the router are faults, too: a panic anywhere ends the process.
pub fn abort_on_panic() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            std::process::abort();
        }));
    });
}
