//! Clients' connections: HTTP/1 or 2 on sockets that may neither be silent at the start of a request nor stop reading in
//! the middle of an answer.
//!
//! `accept` takes connections in, `open` bounds them and makes room, `gate` keeps a burst of them beside running streams;
//! `guarded` is the socket as the protocols see it, `wire` what waits for it, `socket` whose turn it is; `http1` and `http2`
//! serve, `received` is the body of a request, `half_closed` keeps an answer for a client that only stopped writing, `unread` bounds what waits for clients that
//! do not read. `tls_port` agrees on TLS before all that, where there is a certificate; `transport` is then what a socket
//! reads and writes.
//!
//! At the end each connection calls its own protocol's graceful shutdown. `hyper-util`'s `GracefulShutdown` would only bring
//! the signal and the wait for all, which `Stopper` and the task tracker have. It takes connections of hyper alone, and HTTP/2
//! is served with `h2` here; and it hides the connection in a future of its own, whereas the loop of `http1` goes on to
//! look for half-closed clients, for late headers and for its turn to be evicted while the answer in hand is finished.

mod accept;
pub(crate) mod admin;
mod gate;
mod guarded;
mod half_closed;
mod http1;
mod http2;
mod last_words;
mod open;
mod received;
mod socket;
pub(crate) mod tls_port;
mod transport;
mod unread;
mod wire;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::Router;
use futures_util::FutureExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::app::App;
use crate::net::Peer;
use crate::process::stopper::Stopper;
use gate::{Gates, InHand};
use guarded::{Guarded, Plain, Protocol};
use open::Open;
use socket::Socket;
use tls_port::TlsPort;
use transport::Transport;
use unread::Unread;

pub(crate) use accept::accept_clients;

/// What all connections share.
struct Clients {
    app: Arc<App>,
    routes: Router,
    stopper: Stopper,
    open: Open,
    gates: Gates,
    unread: Unread,
    next: AtomicU64,
    /// Where clients are served over TLS.
    tls: Option<Arc<TlsPort>>,
}

/// Serves a connection until the client or the stopper ends it, or room is needed while it rests.
async fn serve(stream: TcpStream, address: IpAddr, clients: &Arc<Clients>) {
    let stream = match &clients.tls {
        None => Transport::from(stream),
        Some(port) => {
            let entering = tls_port::enter(stream, address, port, clients);
            let entered = Box::pin(clients.gates.pass(&InHand::default(), entering)).await;
            let Some(stream) = entered else { return };
            stream
        }
    };
    let peer = Peer { address, connection: clients.next.fetch_add(1, Relaxed) };
    let socket = Arc::new(Socket::new(stream, peer));
    let _open = clients.open.enter(&socket);
    let in_hand = socket.in_hand.clone();
    // on the heap: a future that is handed on by value has room in each of those that hand it on
    let conversation = Box::pin(async move {
        let _ = socket.wire().stream.set_nodelay(true); // fails only on a socket that is gone
        tokio::select! {
            () = talk(&socket, clients) => {}
            () = clients.stopper.stopped() => {}
        }
    });
    clients.gates.pass(&in_hand, conversation).await;
}

async fn talk(socket: &Arc<Socket>, clients: &Arc<Clients>) {
    let mut io = Box::new(Guarded::new(socket, &clients.app)); // handed on by value
    let protocol = tokio::select! {
        biased; // what has come is answered, also where the drain came at the same time
        protocol = io.protocol() => protocol,
        // it said nothing, or too little to tell in which language it could be answered
        () = socket.late(clients.app.config.http.header_timeout) => return,
        () = socket.evicted() => return,
        () = clients.stopper.draining() => return,
    };
    match protocol {
        Ok(Some(Protocol::Http1)) => http1::serve(io, socket, clients).await,
        Ok(Some(Protocol::Http2)) => {
            socket.multiplexes();
            Box::pin(http2::serve(*io, socket, clients)).await; // its room is no burden to HTTP/1
        }
        Ok(None) | Err(_) => {} // it left
    }
    if socket.wire().stream.plain().is_none() {
        let _ = Plain(socket).shutdown().now_or_never(); // a client may tell this end from a cut one
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::{Instant, advance, sleep};

    use super::*;
    use crate::config::{Config, RouterArgs};

    /// A router without clients.
    pub(super) async fn app() -> Arc<App> {
        let args =
            RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
        App::start(Config::try_from(args).unwrap()).await.unwrap()
    }

    /// What connections share, before there is any.
    pub(super) async fn clients() -> Arc<Clients> {
        let app = app().await;
        Arc::new(Clients {
            app: Arc::clone(&app),
            routes: crate::http::app(Arc::clone(&app)),
            stopper: Stopper::default(),
            open: Open::new(&app, 64),
            gates: Gates::new(),
            unread: Unread::default(),
            next: AtomicU64::new(1),
            tls: None,
        })
    }

    /// A client's end of a connection that is served.
    async fn connect(clients: &Arc<Clients>) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, from) = listener.accept().await.unwrap();
        let clients = Arc::clone(clients);
        tokio::spawn(async move { serve(stream, from.ip(), &clients).await });
        client
    }

    /// All that comes until the connection is closed, and the seconds until then.
    async fn rest(client: &mut TcpStream) -> (String, f64) {
        let (begin, mut bytes) = (Instant::now(), Vec::new());
        let _ = client.read_to_end(&mut bytes).await; // a reset is an end, too
        let seconds = begin.elapsed().as_secs_f64().round();
        (String::from_utf8_lossy(&bytes).into_owned(), seconds)
    }

    fn slow_headers(clients: &Clients) -> bool {
        clients.app.metrics.text().contains("headers_too_slow")
    }

    const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";

    #[tokio::test(start_paused = true)]
    async fn half_a_head_is_told_what_it_lacked_and_counted_and_one_that_rests_is_not() {
        let clients = clients().await;
        let limit = clients.app.config.http.header_timeout.as_secs_f64();
        let mut silent = connect(&clients).await;
        assert_eq!(rest(&mut silent).await, (String::new(), limit));

        let mut rests = connect(&clients).await;
        rests.write_all(HEALTH).await.unwrap();
        let (text, seconds) = rest(&mut rests).await;
        assert!(text.starts_with("HTTP/1.1 200") && !text.contains("408"), "{text}");
        assert_eq!(seconds, 120.0);
        assert!(!slow_headers(&clients));

        let mut half = connect(&clients).await;
        half.write_all(&HEALTH[..20]).await.unwrap();
        let (text, seconds) = rest(&mut half).await;
        assert!(text.starts_with("HTTP/1.1 408") && text.contains("headers_too_slow"), "{text}");
        assert_eq!(seconds, limit);
        assert!(slow_headers(&clients));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_came_in_time_is_answered_however_late_its_turn_is() {
        let clients = clients().await;
        for _ in 0..16 {
            // were it left to chance, one of these would be cut off
            let (socket, mut client) = socket::pair().await;
            client.write_all(HEALTH).await.unwrap();
            poll_fn(|context| {
                let wire = socket.wire();
                wire.stream.plain().expect("no TLS").poll_read_ready(context)
            })
            .await
            .unwrap();
            advance(2 * clients.app.config.http.header_timeout).await;
            let answering = async {
                let socket = socket;
                talk(&socket, &clients).await;
            };
            let reading = async {
                let mut start = [0; 12];
                let _ = client.read_exact(&mut start).await;
                drop(client);
                start
            };
            let (_, start) = tokio::join!(answering, reading);
            assert_eq!(&start, b"HTTP/1.1 200");
        }
    }

    #[tokio::test]
    async fn who_asks_on_and_on_gives_way_after_each_request() {
        const REQUESTS: usize = 40;
        let clients = clients().await;
        let answered = || {
            let metrics = clients.app.metrics.text();
            let count =
                metrics.lines().find(|line| line.contains(r#"route="/health",status="200""#));
            count.map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
        };
        let (socket, mut client) = socket::pair().await;
        client.write_all(&HEALTH.repeat(REQUESTS)).await.unwrap();
        client.shutdown().await.unwrap();
        let mut talking = std::pin::pin!(talk(&socket, &clients));
        let mut turns = Vec::new();
        poll_fn(|context| {
            let before: usize = answered();
            let end = talking.as_mut().poll(context);
            turns.push(answered() - before);
            end
        })
        .await;
        assert_eq!(turns.iter().sum::<usize>(), REQUESTS);
        assert_eq!(turns.iter().max(), Some(&1), "{turns:?}");
    }

    /// The time that a connection takes whose client has sent so many requests, each before it has the last answer.
    async fn pipelined(clients: &Arc<Clients>, requests: usize) -> Duration {
        let (socket, mut client) = socket::pair().await;
        client.write_all(&HEALTH.repeat(requests)).await.unwrap();
        client.shutdown().await.unwrap();
        let here = |context: &mut std::task::Context<'_>| {
            socket.wire().stream.plain().unwrap().poll_read_ready(context)
        };
        poll_fn(here).await.unwrap();
        let begin = Instant::now();
        talk(&socket, clients).await;
        begin.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_ask_on_and_on_share_slots_and_who_asks_a_little_has_none() {
        let clients = clients().await;
        // the first waits for nobody, eight more are not too many, and ten slots are early
        assert_eq!(pipelined(&clients, 19).await, Duration::ZERO);
        advance(Duration::from_secs(1)).await;
        let times = tokio::join!(pipelined(&clients, 509), pipelined(&clients, 509));
        for time in [times.0, times.1] {
            assert!((98..103).contains(&time.as_millis()), "{time:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_that_is_not_waited_for_is_left_to_others_and_a_client_has_one_at_a_time() {
        let clients = clients().await;
        let (one, _client) = socket::pair().await;
        let (other, _client) = socket::pair().await;
        let begin = Instant::now();
        {
            let mut waiting: Vec<_> =
                (0..100).map(|_| Box::pin(clients.gates.slot(&one))).collect();
            for slot in &mut waiting {
                let _ = futures_util::poll!(slot);
            }
        }
        let ten = async {
            for _ in 0..10 {
                clients.gates.slot(&other).await;
            }
        };
        ten.await;
        assert!(begin.elapsed() <= Duration::from_millis(2), "{:?}", begin.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_drain_and_the_end_close_connections_that_have_said_nothing() {
        let clients = clients().await;
        let mut silent = connect(&clients).await;
        sleep(Duration::from_millis(1)).await; // it is served
        clients.stopper.drain();
        assert_eq!(rest(&mut silent).await, (String::new(), 0.0));
    }

    #[tokio::test]
    async fn http2_is_told_its_bounds_and_the_end() {
        let clients = clients().await;
        let mut client = connect(&clients).await;
        let empty_settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        client.write_all(&[&preface[..], &empty_settings].concat()).await.unwrap();
        let mut bounds = Vec::new();
        loop {
            let mut head = [0; 9];
            client.read_exact(&mut head).await.unwrap();
            let mut body = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
            client.read_exact(&mut body).await.unwrap();
            let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
            match (head[3], head[4]) {
                (4, 0) => {
                    bounds.extend(body.chunks(6).map(|one| (one[1], number(&one[2..]))));
                    clients.stopper.drain();
                }
                (8, _) => bounds.push((0, number(&body))),
                (7, _) => break, // GOAWAY
                _ => {}
            }
        }
        let of = |what: u8| bounds.iter().find(|(id, _)| *id == what).map(|(_, bound)| *bound);
        assert_eq!(of(3), Some(128), "requests at a time");
        assert_eq!(of(4), Some(1 << 20), "of the body of one");
        assert_eq!(of(6), Some(16 << 10), "of the head of one");
        assert!(of(0).is_some_and(|more| more + 65_535 == 1 << 20), "of all bodies: {bounds:?}");
    }

    #[tokio::test]
    async fn a_head_may_be_128_kib_long() {
        let clients = clients().await;
        for (kib, status) in [(100, "HTTP/1.1 200"), (200, "HTTP/1.1 431")] {
            let mut client = connect(&clients).await;
            let long = format!("X-Long: {}\r\nConnection: close\r\n\r\n", "x".repeat(kib << 10));
            let head = [&HEALTH[..HEALTH.len() - 2], long.as_bytes()].concat();
            let (mut from, mut to) = client.split();
            let (mut text, written) = (String::new(), async { to.write_all(&head).await.ok() });
            let (_, read) = tokio::join!(written, async {
                let mut start = [0; 12];
                from.read_exact(&mut start).await.ok();
                start
            });
            text.push_str(&String::from_utf8_lossy(&read));
            assert_eq!(text, status, "{kib} KiB");
        }
    }
}
