//! The end of a router: what runs is finished or cut, by name and in time.

use std::time::Duration;

use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::{Capacity, Finish};
use headrace_router::server::{Server, run};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::fake_worker::*;

fn args() -> RouterArgs {
    RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() }
}

/// A client in the middle of a stream.
struct InFlight {
    serving: JoinHandle<()>,
    stopper: headrace_router::process::stopper::Stopper,
    worker: FakeWorker,
    request: headrace_router::core::frame::RequestId,
    client: TcpStream,
    address: std::net::SocketAddr,
    app: std::sync::Arc<headrace_router::app::App>,
}

async fn in_flight(args: RouterArgs) -> InFlight {
    in_flight_on(Behaviour::new("w1"), args).await
}

async fn in_flight_on(worker: Behaviour, args: RouterArgs) -> InFlight {
    let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
    let (address, stopper, app) = (server.http_address(), server.stopper(), server.app().clone());
    let serving = tokio::spawn(server.serve());
    let mut worker = worker.ready(&app).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let body = format!(r#"{{"model": "{MODEL}", "prompt": "x", "stream": true}}"#);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(request.as_bytes()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("first"), None);
    let mut begin = String::new();
    while !begin.contains("first") {
        let mut bytes = [0; 4096];
        let n = in_time("the first token", client.read(&mut bytes)).await.unwrap();
        assert_ne!(n, 0, "closed after {begin:?}");
        begin.push_str(std::str::from_utf8(&bytes[..n]).unwrap());
    }
    InFlight { serving, stopper, worker, request, client, address, app }
}

async fn rest(client: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    let _ = in_time("the end of the stream", client.read_to_end(&mut rest)).await; // cut or ended
    String::from_utf8(rest).unwrap()
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_takes_nothing_new() {
    let mut it = in_flight(args()).await;
    it.stopper.drain();
    until("no new connection", || std::net::TcpStream::connect(it.address).is_err()).await;
    assert!(!it.serving.is_finished());
    it.worker.gives(it.request, &letters("last"), Some(Finish::Length));
    let rest = rest(&mut it.client).await;
    assert!(rest.contains("last") && rest.contains("[DONE]"), "{rest}");
    in_time("the end", it.serving).await.unwrap();
    it.worker.closed().await;
}

/// What a client got of an answer that was cut: not whole, and told so.
fn assert_cut(rest: &str) {
    assert!(!rest.contains("[DONE]"), "{rest}");
    let (_, error) = rest.split_once("event: error\ndata: ").expect(rest);
    let error: serde_json::Value = serde_json::from_str(error.lines().next().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "shutting_down", "{rest}");
}

#[tokio::test]
async fn an_answer_past_the_deadline_of_a_drain_ends_with_an_error() {
    let mut it = in_flight(RouterArgs { drain_timeout_ms: 100, ..args() }).await;
    it.stopper.drain();
    in_time("the end", it.serving).await.unwrap();
    assert_cut(&rest(&mut it.client).await);
    it.worker.closed().await;
}

#[tokio::test]
async fn a_second_signal_ends_at_once_and_says_so() {
    let mut it = in_flight(args()).await;
    it.stopper.drain();
    it.stopper.stop();
    in_time("the end", it.serving).await.unwrap();
    assert_cut(&rest(&mut it.client).await);
    it.worker.closed().await;
}

/// Asks for a whole answer, and does not wait for it.
async fn asks(it: &InFlight) -> TcpStream {
    let mut client = TcpStream::connect(it.address).await.unwrap();
    let body = format!(r#"{{"model": "{MODEL}", "prompt": "y"}}"#);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(request.as_bytes()).await.unwrap();
    client
}

fn assert_refused(answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("shutting_down"), "{answer}");
}

#[tokio::test]
async fn who_has_nothing_yet_is_refused_by_name_when_the_drain_is_cut() {
    let mut it = in_flight(args()).await;
    let mut waiting = asks(&it).await;
    it.worker.submitted().await; // and the worker says nothing
    it.stopper.stop();
    assert_refused(&rest(&mut waiting).await);
    in_time("the end", it.serving).await.unwrap();
}

#[tokio::test]
async fn who_waits_for_a_worker_is_refused_by_name_when_the_drain_is_cut() {
    let mut worker = Behaviour::new("w1");
    worker.hello.capacity = Capacity { sequences: 1, waiting: 0, ..worker.hello.capacity.clone() };
    let mut it = in_flight_on(worker, args()).await;
    let mut waiting = asks(&it).await;
    let app = it.app.clone();
    until("it waits", || metric(&app, "headrace_queue_requests", "") == 1.0).await;
    it.stopper.drain(); // who waits already may still be served
    it.stopper.stop();
    assert_refused(&rest(&mut waiting).await);
    assert_cut(&rest(&mut it.client).await);
    in_time("the end", it.serving).await.unwrap();
}

#[tokio::test]
async fn a_request_that_never_comes_whole_does_not_hold_up_the_end() {
    let it = in_flight(args()).await;
    let mut half = TcpStream::connect(it.address).await.unwrap();
    let request =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{";
    half.write_all(request.as_bytes()).await.unwrap();
    it.stopper.stop();
    in_time("the end", it.serving).await.unwrap();
    assert_eq!(rest(&mut half).await, "");
}

#[tokio::test]
async fn an_idle_router_ends_with_its_future() {
    let config = Config::try_from(args()).unwrap();
    in_time("the end", run(config, std::future::ready(()))).await.unwrap();
    let error = run(
        Config::try_from(RouterArgs { host: "no such host".into(), ..args() }).unwrap(),
        std::future::ready(()),
    );
    let error = error.await.unwrap_err().to_string();
    assert!(error.starts_with("cannot listen on no such host:0"), "{error}");
}

#[tokio::test]
async fn idle_connections_do_not_hold_up_a_drain_and_too_many_are_turned_away() {
    let server =
        Server::start(Config::try_from(RouterArgs { max_connections: 2, ..args() }).unwrap())
            .await
            .unwrap();
    let (address, stopper) = (server.http_address(), server.stopper());
    let app = server.app().clone();
    let serving = tokio::spawn(server.serve());
    let open = || metric(&app, "headrace_http_connections", "");
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut connection = TcpStream::connect(address).await.unwrap();
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n";
        connection.write_all(head.as_bytes()).await.unwrap();
        busy.push(connection);
    }
    until("both are open", || open() == 2.0).await;
    passes(Duration::from_millis(100)).await; // their heads are read
    let mut third = TcpStream::connect(address).await.unwrap();
    let words = rest(&mut third).await;
    assert!(words.starts_with("HTTP/1.1 503 ") && words.contains("retry-after: 1"), "{words}");
    let (head, body) = words.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("content-length: {}", body.len())), "{words}");
    serde_json::from_str::<serde_json::Value>(body).unwrap();
    assert_eq!(metric(&app, "headrace_http_connections_refused_total", ""), 1.0);
    drop(busy);
    until("both are closed", || open() == 0.0).await;
    let mut idle = Vec::new();
    for _ in 0..2 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    until("both are open", || open() == 2.0).await;
    stopper.drain();
    tokio::time::timeout(Duration::from_secs(5), serving)
        .await
        .expect("idle ones are closed")
        .unwrap();
}
