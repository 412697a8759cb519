//! More clients than descriptors: the limit is raised, and who rests makes room.

use std::io::BufRead as _;
use std::num::NonZero;
use std::process::{Child, Command, Stdio};
use std::thread::available_parallelism;
use std::time::Duration;

use headrace_router::config::RouterArgs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, MODEL, in_time, metric, passes, until};

/// A router of its own process, with these limits of open files.
struct Limited(Child);

impl Limited {
    fn start(soft: u32, hard: u32) -> (Self, String) {
        let router = env!("CARGO_BIN_EXE_headrace-router");
        let script = format!(
            "ulimit -Sn {soft} && ulimit -Hn {hard} && exec {router} --port 0 --worker-listen 127.0.0.1:0"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufReader::new(out).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        (Self(child), address)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn healthy(address: &str) -> Connection {
    let mut connection = Connection::of(TcpStream::connect(address).await.unwrap());
    connection.request("GET /health HTTP/1.1", b"").await;
    let reply = tokio::time::timeout(Duration::from_secs(5), connection.reply()).await;
    assert_eq!(reply.expect("nobody waits for silent connections to end").status, 200);
    connection
}

#[tokio::test]
async fn the_limit_is_raised_and_silent_connections_make_room() {
    // more than the soft limit allows, and then more than the hard one
    let (_router, address) = Limited::start(64, 256);
    let mut silent = Vec::new();
    for _ in 0..150 {
        silent.push(TcpStream::connect(&address).await.unwrap());
    }
    // an answer of a core says that it knows all that came to it before: only those rest
    let mut of_cores = Vec::new();
    for _ in 0..2 * available_parallelism().map_or(1, NonZero::get).min(16) {
        of_cores.push(healthy(&address).await);
    }
    let mut kept = healthy(&address).await;
    for _ in 0..150 {
        silent.push(TcpStream::connect(&address).await.unwrap());
    }
    healthy(&address).await;
    // the one that rested less than most others is still there
    kept.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(kept.reply().await.status, 200);
}

#[tokio::test]
async fn who_rested_longest_goes_first_and_who_is_answered_stays() {
    let router = TestRouter::start(RouterArgs { max_connections: 3, ..args() }).await;
    let mut oldest = healthy(&router.address.to_string()).await;
    let mut busy = router.connect().await;
    busy.request(
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\nContent-Type: application/json",
        b"",
    )
    .await; // and its body does not come
    let mut newest = healthy(&router.address.to_string()).await;
    let mut fourth = healthy(&router.address.to_string()).await;
    assert_eq!(oldest.closed().await, 0);
    for connection in [&mut newest, &mut fourth] {
        connection.request("GET /health HTTP/1.1", b"").await;
        assert_eq!(connection.reply().await.status, 200);
    }
    assert_eq!(metric(&router.app, "headrace_http_connections_evicted_total", ""), 1.0);
    busy.stream.write_all(b"{\"a\": 1}\n").await.unwrap();
    assert_eq!(busy.reply().await.status, 400);
}

#[tokio::test]
async fn where_all_are_answered_one_more_is_told_so() {
    let args = RouterArgs { max_connections: 1, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut busy = router.connect().await;
    let body = format!(r#"{{"model": "{MODEL}", "prompt": "x"}}"#);
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    busy.request(&format!("{head}\r\nContent-Length: {}", body.len()), body.as_bytes()).await;
    worker.submitted().await;
    let mut refused = router.connect().await;
    assert_eq!(refused.reply().await.status, 503);
    assert_eq!(metric(&router.app, "headrace_http_connections_refused_total", ""), 1.0);
}

/// Dials until there is room for it, and is answered.
async fn newcomer(router: &TestRouter) {
    in_time("room", async {
        loop {
            let mut connection = router.connect().await;
            let asks = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            let _ = connection.stream.write_all(asks).await; // it may have been refused already
            let mut heard = Vec::new();
            let _ = connection.stream.read_to_end(&mut heard).await;
            if heard.starts_with(b"HTTP/1.1 200") {
                return;
            }
            assert!(heard.is_empty() || heard.starts_with(b"HTTP/1.1 503"), "{heard:?}");
        }
    })
    .await;
}

/// A client that sends the first of nine bytes.
async fn begins_a_body(router: &TestRouter) -> Connection {
    let mut client = router.connect().await;
    let head =
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\nContent-Type: application/json";
    client.request(head, b"").await;
    client.stream.write_all(b"{").await.unwrap();
    client
}

#[tokio::test]
async fn a_slow_body_makes_room_for_a_newcomer_and_is_told_why() {
    let router = TestRouter::start(RouterArgs { max_connections: 1, ..args() }).await;
    let mut slow = begins_a_body(&router).await;
    newcomer(&router).await;
    let reply = slow.reply().await;
    assert_eq!((reply.status, reply.header("retry-after")), (408, Some("1")));
    assert!(reply.text().contains("body_too_slow"), "{}", reply.text());
    let told = r#"route="unknown",status="408",error="body_too_slow""#;
    assert_eq!(metric(&router.app, "headrace_http_requests_total", told), 1.0);
    assert_eq!(metric(&router.app, "headrace_http_connections_evicted_total", ""), 1.0);
}

#[tokio::test]
async fn a_crowd_of_bodies_makes_room_at_once_for_another_host() {
    let router = TestRouter::start(RouterArgs { max_connections: 1, ..args() }).await;
    let mut crowd = begins_a_body(&router).await;
    let received = || metric(&router.app, "headrace_http_body_bytes", "") > 0.0;
    until("its body is waited for", received).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap(); // on Linux all of this network is the own machine
    let mut other = Connection::of(socket.connect(router.address).await.unwrap());
    other.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(other.reply().await.status, 200);
    assert_eq!(crowd.reply().await.status, 408);
}

#[tokio::test]
async fn a_slow_body_over_http2_makes_room_too() {
    let router = TestRouter::start(RouterArgs { max_connections: 1, ..args() }).await;
    let stream = TcpStream::connect(router.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = hyper::Request::post("http://localhost/v1/completions").body(()).unwrap();
    let (answer, mut body) = client.send_request(request, false).unwrap();
    body.send_data("{".into(), false).unwrap();
    newcomer(&router).await;
    in_time("its end", answer).await.unwrap_err();
    drop((client, body));
    let _ = in_time("the end of its connection", connection).await;
    assert_eq!(metric(&router.app, "headrace_http_connections_evicted_total", ""), 1.0);
}

#[tokio::test]
async fn who_reads_slowly_does_not_rest() {
    const PAGES: usize = 400; // more than the kernel keeps for the client
    let router = TestRouter::start(RouterArgs { max_connections: 1, ..args() }).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut slow = Connection::of(socket.connect(router.address).await.unwrap());
    for _ in 0..PAGES {
        slow.request("GET /metrics HTTP/1.1", b"").await;
    }
    let answered = || metric(&router.app, "headrace_http_requests_total", "/metrics") as usize;
    let mut before = PAGES;
    while answered() != before {
        before = answered();
        passes(Duration::from_millis(200)).await; // all are answered that there is room for
    }
    assert!(before < PAGES, "the kernel took all of them");
    assert_eq!(router.connect().await.reply().await.status, 503, "there is no room");
    for _ in 0..PAGES {
        assert_eq!(slow.reply().await.status, 200);
    }
}
