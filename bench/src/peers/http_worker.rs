//! `bench http-worker`: a worker without a model behind OpenAI's API over HTTP, for routers that proxy it. Its steps are an
//! engine's, and a step is a loop of writes, one for each answer: without a router it is the least that a token can cost.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::{Buf as _, BytesMut};
use serde::Serialize;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_local};

use self::answer::Answers;
use self::engine::{Engine, Row};
use self::prefixes::Prefixes;
use self::request::{Asked, Head, Unreadable, Wanted};
use crate::mock::clock::Clock;
use crate::mock::stop_signal;

mod answer;
mod engine;
mod prefixes;
mod request;
#[cfg(test)]
mod tests;

/// Connections that wait to be accepted: all clients of a run may dial at once.
const BACKLOG: u32 = 32_768;
/// Longest head of a request.
const HEAD_BYTES: usize = 64 << 10;
/// Longest body of a request: a prompt of 100,000 words takes less than a hundredth.
const BODY_BYTES: usize = 64 << 20;
/// Room that is read into at first. Most prompts of these runs are shorter.
const READ_BYTES: usize = 1 << 10;

/// A worker over HTTP.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HttpWorkerArgs {
    /// Address to serve at; port 0 takes a free one, which is printed.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    /// Milliseconds of a step, in which every answer that runs gets a token; 0 is as fast as it goes.
    #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = step_ms)]
    step_ms: f64,
    /// Microseconds that each token of a prompt adds to a step, but for those in the cache.
    #[arg(long, value_name = "US", default_value_t = 0.0, value_parser = prefill_us)]
    prefill_us: f64,
    /// Beginnings of prompts that the cache holds; the least recently used one goes first.
    #[arg(long, value_name = "N", default_value_t = 40)]
    prefixes: usize,
    /// Words of such a beginning. Shorter prompts are not cached.
    #[arg(long, value_name = "N", default_value_t = 7_500)]
    prefix_words: u32,
    /// Let other workers listen at the same address: each gets some of the connections.
    #[arg(long)]
    share_port: bool,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
}

fn step_ms(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=60_000.0).contains(value));
    value.ok_or_else(|| "must be a number from 0 to 60000".into())
}

fn prefill_us(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=1e6).contains(value));
    value.ok_or_else(|| "must be a number from 0 to 1000000".into())
}

/// What a worker did. A router may ask more of it than answers.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Served {
    /// Answers that were begun.
    answers: u64,
    /// Of those, cut off by whoever asked.
    hung_up: u64,
    tokens: u64,
    /// Prompts whose beginning was in the cache.
    cached: u64,
    /// Prompts that were turned into tokens for a router.
    tokenised: u64,
    /// All else: health, models, and what is not known here.
    other: u64,
}

/// What all connections share.
struct Worker {
    engine: RefCell<Engine>,
    prefixes: RefCell<Prefixes>,
    served: Cell<Served>,
    answers: Answers,
    prefill_us: f64,
}

impl Worker {
    fn new(args: &HttpWorkerArgs) -> Rc<Self> {
        Rc::new(Self {
            engine: RefCell::default(),
            prefixes: RefCell::new(Prefixes::new(args.prefixes, args.prefix_words)),
            served: Cell::default(),
            answers: Answers::new(&args.model),
            prefill_us: args.prefill_us,
        })
    }

    /// What a prompt adds to a step.
    fn prefill(&self, computed_tokens: u32) -> Duration {
        Duration::from_secs_f64(f64::from(computed_tokens) * self.prefill_us / 1e6)
    }

    fn count(&self, count: impl FnOnce(&mut Served)) {
        let mut served = self.served.get();
        count(&mut served);
        self.served.set(served);
    }
}

/// Serves until a signal comes, and tells what was served.
///
/// # Errors
/// The address cannot be bound, or there can be no thread for the clock.
pub(crate) async fn run(args: &HttpWorkerArgs) -> anyhow::Result<Served> {
    let listener =
        listen(&args.listen, args.share_port).await.with_context(|| args.listen.clone())?;
    crate::print(&format_args!("listening on {}\n", listener.local_addr()?));
    let worker = Worker::new(args);
    let step = Duration::from_secs_f64(args.step_ms / 1e3);
    let clock = Clock::start()?;
    let tasks = LocalSet::new();
    tokio::select! {
        () = tasks.run_until(serve(listener, Rc::clone(&worker), clock, step)) => {}
        signal = stop_signal() => signal.context("signals cannot be caught")?,
    }
    Ok(worker.served.get())
}

async fn listen(address: &str, share_port: bool) -> std::io::Result<TcpListener> {
    let address = tokio::net::lookup_host(address).await?.next();
    let address = address.ok_or_else(|| std::io::Error::other("no such address"))?;
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    if share_port {
        socket.set_reuseport(true)?;
    }
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Steps, and accepts connections. Ends never.
async fn serve(listener: TcpListener, worker: Rc<Worker>, clock: Clock, step: Duration) {
    let stepping = Rc::clone(&worker);
    spawn_local(async move { engine::run(&stepping.engine, &clock, step).await });
    loop {
        // without a descriptor left, those that are open go on, and one of them will end
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let worker = Rc::clone(&worker);
        spawn_local(async move {
            let _ = connection(&worker, stream).await; // who asks sees that it ended
        });
    }
}

/// Requests of one connection, one after the other.
async fn connection(worker: &Rc<Worker>, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let stream = Rc::new(stream);
    let mut input = BytesMut::new();
    loop {
        let head = match read_head(&stream, &mut input).await? {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(()),
            Err(why) => return write(&stream, &answer::refusal(why)).await,
        };
        while input.len() < head.body_bytes {
            if read(&stream, &mut input).await? == 0 {
                return Ok(());
            }
        }
        let body = input.split_to(head.body_bytes);
        match Wanted::of(&head, &body) {
            Wanted::Answer(Ok(asked)) => {
                if !generate(worker, &stream, &asked).await {
                    worker.count(|served| served.hung_up += 1);
                    return Ok(());
                }
            }
            Wanted::Tokens(Ok(asked)) => {
                worker.count(|served| served.tokenised += 1);
                write(&stream, &answer::tokens(&asked)).await?;
            }
            Wanted::Answer(Err(why)) | Wanted::Tokens(Err(why)) => {
                return write(&stream, &answer::refusal(why)).await;
            }
            Wanted::Other => {
                worker.count(|served| served.other += 1);
                write(&stream, &worker.answers.about(&head)).await?;
            }
        }
    }
}

/// True when the whole answer was written.
async fn generate(worker: &Rc<Worker>, stream: &Rc<TcpStream>, asked: &Asked<'_>) -> bool {
    let cached_tokens = worker.prefixes.borrow_mut().take(asked);
    worker.count(|served| {
        served.answers += 1;
        served.tokens += u64::from(asked.max_tokens);
        served.cached += u64::from(cached_tokens > 0);
    });
    let (done, ended) = oneshot::channel();
    let prompt_tokens = u32::try_from(asked.words()).unwrap_or(u32::MAX);
    let prefill = worker.prefill(prompt_tokens.saturating_sub(cached_tokens));
    let parts = worker.answers.parts(asked, prompt_tokens, cached_tokens);
    let row = Row::new(Rc::clone(stream), asked.max_tokens, prefill, parts, done);
    worker.engine.borrow_mut().join(row);
    ended.await.unwrap_or(false) // the engine drops what has hung up
}

/// `Ok(None)` at the end of the connection.
async fn read_head(
    stream: &TcpStream,
    input: &mut BytesMut,
) -> std::io::Result<Result<Option<Head>, Unreadable>> {
    loop {
        match Head::of(input) {
            Ok(Some((head, length))) if head.body_bytes <= BODY_BYTES => {
                input.advance(length);
                input.reserve(head.body_bytes.saturating_sub(input.len()));
                return Ok(Ok(Some(head)));
            }
            Ok(Some(_)) => return Ok(Err(Unreadable::TooLong)),
            Ok(None) if input.len() > HEAD_BYTES => return Ok(Err(Unreadable::TooLong)),
            Ok(None) => {}
            Err(why) => return Ok(Err(why)),
        }
        if read(stream, input).await? == 0 {
            return Ok(Ok(None));
        }
    }
}

async fn read(stream: &TcpStream, input: &mut BytesMut) -> std::io::Result<usize> {
    input.reserve(READ_BYTES);
    loop {
        match stream.try_read_buf(input) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => stream.readable().await?,
            read => return read,
        }
    }
}

async fn write(stream: &TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
