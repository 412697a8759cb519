//! An HTTP client that times answers: one connection per request in flight, kept for the next one.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use headrace_router::config::argv::NoKey;
use headrace_router::config::{environment, first_key};
use http_body_util::{BodyExt as _, Full};
use hyper::Response;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpSocket, TcpStream};

pub(crate) mod body;
pub(crate) mod pace;
pub(crate) mod sse;
mod starting;
mod tls;

use crate::BadInput;
use crate::client::pace::TokenPace;
use crate::client::sse::{Event, Lines, Usage};
use crate::client::tls::Tls;
use crate::report::sample::{Answer, Failure, Sample};

/// Names the worker that answers, where the router says it.
const WORKER_HEADER: &str = "x-headrace-worker";
/// Longest error text that is kept.
const MAX_ERROR_TEXT: usize = 300;

/// The endpoint and what every request to it carries.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ClientArgs {
    /// The endpoint: HOST:PORT, http://HOST:PORT, or https://HOST:PORT with --tls-ca.
    #[arg(long, visible_alias = "url", default_value = "127.0.0.1:8000")]
    pub(crate) target: String,
    /// Certificates (PEM) that the endpoint's is checked with, such as /etc/ssl/certs/ca-certificates.crt for those of the
    /// system.
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Model name to ask for; the endpoint's first one where left out.
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// File whose first key is sent as `Authorization: Bearer KEY`; or set HEADRACE_API_KEY.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// The key itself, from the variable.
    #[arg(skip = environment::one("HEADRACE_API_KEY"))]
    pub(crate) api_key: Option<String>,
    #[command(flatten)]
    pub(crate) no_key: NoKey,
    /// A header for every request, as `Name: value`; may be given again.
    #[arg(long = "header", visible_alias = "headers", value_name = "HEADER")]
    pub(crate) headers: Vec<String>,
    /// Local address of connections; given again, they take turns. More connections than one address has ports need several.
    #[arg(long = "source", value_name = "ADDRESS")]
    pub(crate) sources: Vec<IpAddr>,
    /// `priority` of every request: lower goes first.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) priority: Option<i32>,
    /// Longest wait for one answer, in seconds.
    #[arg(long, value_name = "S", default_value_t = 60)]
    pub(crate) timeout_s: u64,
    /// Longest wait for an endpoint that is still starting, in seconds; 0 does not wait.
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub(crate) start_timeout_s: u64,
}

/// One request, ready to go.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: &'static str,
    pub(crate) body: Bytes,
    /// Sent as `X-Session-ID`.
    pub(crate) session: Option<String>,
    /// The answer comes as events.
    pub(crate) streams: bool,
}

type Connection = SendRequest<Full<Bytes>>;

/// The way to one endpoint.
#[derive(Debug)]
pub(crate) struct Client {
    authority: String,
    tls: Option<Tls>,
    headers: Vec<(String, String)>,
    timeout: Duration,
    /// The server's clock runs so much faster: measured times are multiplied by it.
    clock: f64,
    /// What tokens are held against.
    pace: Option<TokenPace>,
    /// Local addresses of connections, and how many were made from them.
    sources: Vec<IpAddr>,
    dialled: AtomicUsize,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    /// # Errors
    /// The target or a header is not of the form it must have.
    pub(crate) fn new(args: &ClientArgs, clock: f64) -> Result<Self, BadInput> {
        let (encrypted, authority) = match args.target.strip_prefix("https://") {
            Some(authority) => (true, authority),
            None => (false, args.target.strip_prefix("http://").unwrap_or(&args.target)),
        };
        let authority = authority.trim_end_matches('/').to_owned();
        if authority.contains("://") || authority.contains('/') || !authority.contains(':') {
            let why = format!("--target {}: must be HOST:PORT or https://HOST:PORT", args.target);
            return Err(BadInput(why));
        }
        let tls = Tls::of(encrypted, &authority, args.tls_ca.as_deref())?;
        let split = |header: &String| {
            let (name, value) = header.split_once(':')?;
            let name = hyper::header::HeaderName::try_from(name.trim()).ok()?;
            let value = hyper::header::HeaderValue::try_from(value.trim()).ok()?;
            Some((name.to_string(), value.to_str().ok()?.to_owned()))
        };
        let mut headers = Vec::new();
        for header in &args.headers {
            let parts = split(header);
            headers.push(
                parts.ok_or_else(|| {
                    BadInput(format!("--header {header:?}: must be `Name: value`"))
                })?,
            );
        }
        let from_file = args.api_key_file.as_deref().map(first_key).transpose();
        let from_file = from_file.map_err(|error| BadInput(error.to_string()))?;
        if let Some(key) = from_file.as_ref().or(args.api_key.as_ref()) {
            headers.push(("authorization".into(), format!("Bearer {key}")));
        }
        let timeout = Duration::from_secs(args.timeout_s);
        let (sources, dialled) = (args.sources.clone(), AtomicUsize::new(0));
        let idle = Mutex::default();
        let pace = None;
        Ok(Self { authority, tls, headers, timeout, clock, pace, sources, dialled, idle })
    }

    /// The same, and of each answer it is told how late its tokens are.
    pub(crate) fn with_pace(self, pace: Option<TokenPace>) -> Self {
        Self { pace, ..self }
    }

    /// Sends a request that was due at `due`, counted from `begin`, and reads its answer to the end.
    ///
    /// # Cancel safety
    /// A dropped call closes its connection, which cancels the request.
    pub(crate) async fn sample(&self, request: &Request, begin: Instant, due: Instant) -> Sample {
        let sent = Instant::now();
        let ms = |from: Instant, to: Instant| {
            to.saturating_duration_since(from).as_secs_f64() * 1e3 * self.clock
        };
        let answer = tokio::time::timeout(self.timeout, self.answer(request)).await;
        let result = match answer {
            Ok(Ok(timed)) => Ok(timed.answer(|to| ms(due, to), self.clock, self.pace.as_ref())),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(fail("timeout", format!("no whole answer in {:?}", self.timeout))),
        };
        Sample { due_ms: ms(begin, due), lag_ms: ms(due, sent), result }
    }

    async fn answer(&self, request: &Request) -> Result<Timed, Failure> {
        let (connection, response) = self.send(request).await?;
        let status = response.status();
        let worker = response.headers().get(WORKER_HEADER).and_then(|name| name.to_str().ok());
        let mut timed = Timed::new(worker.map(Arc::from));
        if !status.is_success() {
            let text = response.into_body().collect().await.map_err(transport)?.to_bytes();
            self.keep(connection);
            return Err(fail(status.as_str(), String::from_utf8_lossy(&text)));
        }
        if request.streams {
            timed.read_events(response, self.pace.as_ref()).await?;
        } else {
            let text = response.into_body().collect().await.map_err(transport)?.to_bytes();
            let body = serde_json::from_slice(&text);
            let body = body.map_err(|error| fail("transport", format!("not JSON: {error}")))?;
            timed.tokens(Instant::now());
            timed.usage = Usage::of(&body);
        }
        timed.end = Instant::now();
        self.keep(connection);
        Ok(timed)
    }

    async fn send(&self, request: &Request) -> Result<(Connection, Response<Incoming>), Failure> {
        let kept = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|connection| !connection.is_closed());
            idle.pop()
        };
        if let Some(mut connection) = kept {
            // A server may close a connection just as it is used again: that is no failure of a request.
            if let Ok(response) = connection.send_request(self.http(request)?).await {
                return Ok((connection, response));
            }
        }
        let dialled = self.dial().await;
        let mut connection = dialled.map_err(|error| fail("connect", format!("{error:#}")))?;
        let response = connection.send_request(self.http(request)?).await.map_err(transport)?;
        Ok((connection, response))
    }

    fn http(&self, request: &Request) -> Result<hyper::Request<Full<Bytes>>, Failure> {
        let mut http = hyper::Request::post(request.path)
            .header("host", &self.authority)
            .header("content-type", "application/json");
        for (name, value) in &self.headers {
            http = http.header(name, value);
        }
        if let Some(session) = &request.session {
            http = http.header("x-session-id", session);
        }
        http.body(Full::new(request.body.clone())).map_err(|e| fail("request", e.to_string()))
    }

    async fn dial(&self) -> anyhow::Result<Connection> {
        let number = self.dialled.fetch_add(1, Ordering::Relaxed);
        let socket = match self.sources.get(number % self.sources.len().max(1)) {
            Some(source) => self.dial_from(*source).await?,
            None => TcpStream::connect(&self.authority).await?,
        };
        socket.set_nodelay(true)?;
        // each connection is a task that ends with its sender
        Ok(match &self.tls {
            None => {
                let (sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
                tokio::spawn(connection);
                sender
            }
            Some(tls) => {
                let stream = tls.connect(socket).await?;
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                sender
            }
        })
    }

    async fn dial_from(&self, source: IpAddr) -> anyhow::Result<TcpStream> {
        let mut targets = tokio::net::lookup_host(&self.authority).await?;
        let target = targets.find(|target| target.is_ipv4() == source.is_ipv4());
        let target =
            target.with_context(|| format!("{} has no address like {source}", self.authority))?;
        let socket = if source.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.bind(SocketAddr::new(source, 0)).with_context(|| format!("--source {source}"))?;
        Ok(socket.connect(target).await?)
    }

    fn keep(&self, connection: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }
}

/// When the parts of an answer came.
struct Timed {
    first: Option<Instant>,
    last: Instant,
    end: Instant,
    gaps: Vec<Duration>,
    /// Events and their tokens, where these are held against a pace.
    came: Vec<(Instant, u32)>,
    usage: Usage,
    worker: Option<Arc<str>>,
}

impl Timed {
    fn new(worker: Option<Arc<str>>) -> Self {
        let now = Instant::now();
        Self {
            first: None,
            last: now,
            end: now,
            gaps: Vec::new(),
            came: Vec::new(),
            usage: Usage::default(),
            worker,
        }
    }

    fn tokens(&mut self, now: Instant) {
        if self.first.is_some() {
            self.gaps.push(now - self.last);
        } else {
            self.first = Some(now);
        }
        self.last = now;
    }

    async fn read_events(
        &mut self,
        mut response: Response<Incoming>,
        pace: Option<&TokenPace>,
    ) -> Result<(), Failure> {
        let mut lines = Lines::default();
        let mut done = false;
        while let Some(frame) = response.frame().await {
            let Ok(data) = frame.map_err(transport)?.into_data() else { continue };
            let now = Instant::now();
            for line in lines.push(&data) {
                let tokens = pace.map_or(0, |pace| pace.tokens(&line));
                if tokens > 0 {
                    self.came.push((now, tokens));
                }
                match Event::of(&line) {
                    Some(Event::Tokens) => self.tokens(now),
                    Some(Event::Usage(usage, with_text)) => {
                        self.usage = usage;
                        if with_text {
                            self.tokens(now);
                        }
                    }
                    Some(Event::Done) => done = true,
                    Some(Event::Error(text)) => return Err(fail("stream_error", text)),
                    Some(Event::Nothing) | None => {}
                }
            }
        }
        if done { Ok(()) } else { Err(fail("cut", "the stream ended without [DONE]")) }
    }

    /// `ms` gives the time from when the request was due.
    fn answer(self, ms: impl Fn(Instant) -> f64, clock: f64, pace: Option<&TokenPace>) -> Answer {
        let gap_ms = |gap: &Duration| (gap.as_secs_f64() * 1e3 * clock) as f32;
        Answer {
            // Tokens without any text have no event: then all that is known is the end.
            ttft_ms: ms(self.first.unwrap_or(self.end)),
            last_ms: ms(if self.first.is_some() { self.last } else { self.end }),
            e2e_ms: ms(self.end),
            gaps_ms: self.gaps.iter().map(gap_ms).collect(),
            late_ms: pace.map(|pace| pace.late_ms(&self.came)).unwrap_or_default(),
            prompt_tokens: self.usage.prompt_tokens,
            completion_tokens: self.usage.completion_tokens,
            cached_tokens: self.usage.cached_tokens,
            worker: self.worker,
        }
    }
}

fn fail(kind: &str, text: impl AsRef<str>) -> Failure {
    let text = text.as_ref().chars().take(MAX_ERROR_TEXT).collect();
    Failure { kind: kind.to_owned(), text }
}

fn transport(error: hyper::Error) -> Failure {
    fail("transport", format!("{:#}", anyhow::Error::from(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn client(target: &str, header: &str) -> Result<Client, BadInput> {
        let args = ClientArgs {
            target: target.into(),
            tls_ca: None,
            model: None,
            api_key_file: None,
            api_key: Some("k".into()),
            no_key: NoKey::default(),
            headers: vec![header.into()],
            sources: Vec::new(),
            priority: None,
            timeout_s: 1,
            start_timeout_s: 1,
        };
        Client::new(&args, 1.0)
    }

    #[test]
    fn targets_and_headers_are_checked_before_anything_is_sent() {
        let good = client("http://127.0.0.1:9/", "X-A: b: c").unwrap();
        assert_eq!(good.authority, "127.0.0.1:9");
        assert_eq!(good.headers[0], ("x-a".into(), "b: c".into()));
        assert_eq!(good.headers[1], ("authorization".into(), "Bearer k".into()));
        for (target, header) in [
            ("https://a:1", "A: b"),
            ("a", "A: b"),
            ("a:1/v1", "A: b"),
            ("a:1", "A"),
            ("a:1", "\n: b"),
        ] {
            assert!(client(target, header).is_err(), "{target} {header}");
        }
    }
}
