//! HTTP/2: connections that rest, and clients that do not read.

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::client::{ResponseFuture, SendRequest};
use headrace_router::config::RouterArgs;
use headrace_router::core::frame::Finish;
use hyper::Request;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, MODEL, in_time, letters, metric, passes, until};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const EMPTY_SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
const GOAWAY: u8 = 7;

/// A connection whose streams may each be sent `window` bytes.
async fn connect(router: &TestRouter, window: u32) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(router.address).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window);
    let (client, connection) = builder.handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

fn get(client: &mut SendRequest<Bytes>, path: &str) -> ResponseFuture {
    let request = Request::get(format!("http://localhost{path}")).body(()).unwrap();
    client.send_request(request, true).unwrap().0
}

fn ask(client: &mut SendRequest<Bytes>, stream: bool) -> ResponseFuture {
    let request = Request::post("http://localhost/v1/completions").body(()).unwrap();
    let (answer, mut body) = client.send_request(request, false).unwrap();
    let json = format!(r#"{{"model": "{MODEL}", "prompt": "x", "stream": {stream}}}"#);
    body.send_data(json.into(), true).unwrap();
    answer
}

/// All of a body, its window kept open.
async fn read(answer: ResponseFuture) -> Result<(u16, Vec<u8>), h2::Error> {
    let answer = in_time("a head", answer).await?;
    let (status, mut body) = (answer.status().as_u16(), answer.into_body());
    let mut all = Vec::new();
    while let Some(data) = in_time("data", body.data()).await {
        let data = data?;
        body.flow_control().release_capacity(data.len()).unwrap();
        all.extend(data);
    }
    Ok((status, all))
}

/// How a stream was reset.
async fn reset(answer: ResponseFuture) -> Option<Reason> {
    read(answer).await.expect_err("it is not answered").reason()
}

/// Types of the frames in what a server sent.
fn frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut types = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(9) {
        types.push(head[3]);
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        bytes = rest.get(len..).expect("whole frames");
    }
    types
}

#[tokio::test]
async fn requests_are_answered_side_by_side() {
    let (router, _worker) = TestRouter::saying("abc").await;
    let mut client = connect(&router, 100).await; // less than any of the bodies
    let answers = [get(&mut client, "/metrics"), ask(&mut client, true), ask(&mut client, false)];
    for (answer, part) in
        answers.into_iter().zip(["headrace_build_info", "[DONE]", r#""text":"abc""#])
    {
        let (status, body) = read(answer).await.unwrap();
        let body = String::from_utf8(body).unwrap();
        assert!(status == 200 && body.contains(part), "{body}");
    }
    until("all is given back", || metric(&router.app, "headrace_http_unread_bytes", "") == 0.0)
        .await;
    assert_eq!(metric(&router.app, "headrace_streams", ""), 0.0);
}

#[tokio::test]
async fn a_head_says_what_it_has_to() {
    let router = TestRouter::start(args()).await;
    let mut client = connect(&router, 1 << 16).await;
    let head = in_time("a head", get(&mut client, "/health")).await.unwrap();
    assert_eq!(head.headers()["content-length"], "15");
    assert!(head.headers().contains_key("date") && head.headers().contains_key("x-request-id"));
    let request = Request::head("http://localhost/health").body(()).unwrap();
    let (answer, _) = client.send_request(request, true).unwrap();
    assert_eq!(read(answer).await.unwrap(), (200, Vec::new()));
    // a body that is too slow ends the connection in HTTP/1; here the word for it is not allowed
    let (answer, _body) = {
        let request = Request::post("http://localhost/v1/completions")
            .header("content-length", "99999999999");
        client.send_request(request.body(()).unwrap(), false).unwrap()
    };
    let head = in_time("a head", answer).await.unwrap();
    assert_eq!(
        (head.status(), head.headers().get("connection")),
        (hyper::StatusCode::PAYLOAD_TOO_LARGE, None)
    );
}

#[tokio::test]
async fn a_stream_that_is_taken_back_is_cancelled() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut client = connect(&router, 1 << 16).await;
    for first_token in [false, true] {
        let mut answer = Some(ask(&mut client, true));
        let request = worker.submitted().await.request;
        let mut body = None;
        if first_token {
            worker.gives(request, &letters("a"), None);
            body = Some(in_time("a head", answer.take().unwrap()).await.unwrap());
        }
        drop((answer, body));
        assert_eq!(worker.cancelled().await, request);
    }
    until("places are free", || metric(&router.app, "headrace_streams", "") == 0.0).await;
}

#[tokio::test]
async fn one_that_rests_is_told_goodbye_in_its_own_language() {
    let router = TestRouter::start(args()).await;
    let mut connection = router.connect().await;
    connection.stream.write_all(PREFACE).await.unwrap();
    connection.stream.write_all(EMPTY_SETTINGS).await.unwrap();
    until("it is there", || metric(&router.app, "headrace_http_connections", "") == 1.0).await;
    passes(Duration::from_secs(121)).await;
    let bytes = connection.until_closed().await;
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP/1.1"));
    assert!(frames(&bytes).contains(&GOAWAY), "{bytes:?}");
    assert_eq!(metric(&router.app, "headrace_http_requests_total", "headers_too_slow"), 0.0);
}

#[tokio::test]
async fn who_says_nothing_or_half_a_preface_is_no_slow_request() {
    let router = TestRouter::start(RouterArgs { header_timeout_ms: 100, ..args() }).await;
    for begin in [&b""[..], b"P", &PREFACE[..20]] {
        let mut connection = router.connect().await;
        connection.stream.write_all(begin).await.unwrap();
        assert_eq!(connection.closed().await, 0);
    }
    assert_eq!(metric(&router.app, "headrace_http_requests_total", "headers_too_slow"), 0.0);
}

#[tokio::test]
async fn an_answer_that_is_done_and_not_read_ends() {
    let args = RouterArgs { stall_timeout_ms: 200, ..args() };
    for (window, stream) in [(0, false), (0, true), (1, false), (1, true)] {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), args.clone()).await;
        let mut client = connect(&router, window).await;
        let answer = in_time("a head", ask(&mut client, stream)).await.unwrap();
        assert_eq!(answer.status(), 200);
        let mut body = answer.into_body();
        let end = async {
            loop {
                match body.data().await {
                    Some(Ok(_)) => {} // and the window stays as it is
                    Some(Err(error)) => return error.reason(),
                    None => panic!("it was sent beyond its window"),
                }
            }
        };
        assert_eq!(in_time("its end", end).await, Some(Reason::CANCEL));
        until("its place is free", || metric(&router.app, "headrace_streams", "") == 0.0).await;
        assert_eq!(metric(&router.app, "headrace_http_answers_stalled_total", ""), 1.0);
        assert_eq!(metric(&router.app, "headrace_http_unread_bytes", ""), 0.0);
    }
}

#[tokio::test]
async fn tokens_that_keep_coming_do_not_hide_that_nobody_reads() {
    let args = RouterArgs { stall_timeout_ms: 300, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut client = connect(&router, 0).await;
    let answer = ask(&mut client, true);
    let request = worker.submitted().await.request;
    let cancelled = async {
        loop {
            worker.gives(request, &letters("a"), None);
            passes(Duration::from_millis(20)).await; // from token to token
            if worker
                .so_far()
                .iter()
                .any(|event| matches!(event, crate::fake_worker::Event::Cancel(_)))
            {
                return;
            }
        }
    };
    in_time("a cancel", cancelled).await;
    assert_eq!(reset(answer).await, Some(Reason::CANCEL));
    until("its place is free", || metric(&router.app, "headrace_streams", "") == 0.0).await;
    worker.gives(request, &letters("a"), Some(Finish::Length)); // too late, and harmless
    assert_eq!(get_status(&router).await, 200);
}

async fn get_status(router: &TestRouter) -> u16 {
    router.get("/health").await.status
}

#[tokio::test]
async fn what_a_connection_leaves_unread_is_bounded() {
    let router = TestRouter::start(args()).await;
    let mut client = connect(&router, 0).await;
    let unread = || metric(&router.app, "headrace_http_unread_bytes", "");
    let refused = || metric(&router.app, "headrace_http_answers_refused_total", "");
    let mut answers = Vec::new();
    for _ in 0..400 {
        client = in_time("room for a stream", client.ready()).await.unwrap();
        answers.push(get(&mut client, "/metrics"));
        if refused() > 0.0 {
            break;
        }
        if answers.len() % 16 == 0 {
            let all = || unread() as usize >= 10_000 * answers.len() || refused() > 0.0;
            until("they are answered", all).await;
        }
        if answers.len() == 127 {
            break; // all that a connection may ask at once
        }
    }
    assert!(unread() <= (2 << 20) as f64, "{}", unread());
    drop((client, answers));
    until("it is given back", || unread() == 0.0).await;
}

#[tokio::test]
async fn pages_of_metrics_that_nobody_reads_are_one() {
    let router = TestRouter::start(args()).await;
    let mut client = connect(&router, 0).await;
    let unread = || metric(&router.app, "headrace_http_unread_bytes", "");
    let first = get(&mut client, "/metrics");
    until("it is made", || unread() > 0.0).await;
    let fresh = router.get("/metrics").await;
    let version = |page: &str| page.contains("headrace_http_connections 2\n");
    assert!(!version(fresh.text()), "made when there was one connection");
    drop((first, client));
    until("it is given back", || unread() == 0.0).await;
    let both = (router.connect().await, router.connect().await);
    until("they are open", || metric(&router.app, "headrace_http_connections", "") == 2.0).await;
    assert!(router.get("/metrics").await.text().contains("headrace_http_connections 3\n"));
    drop(both);
}

#[tokio::test]
async fn a_body_longer_than_the_window_is_read_to_its_end() {
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut client = connect(&router, 1 << 20).await;
    let request = Request::post("http://localhost/v1/completions").body(()).unwrap();
    let (answer, mut body) = client.send_request(request, false).unwrap();
    body.send_data(vec![b'x'; 3 << 20].into(), true).unwrap();
    assert_eq!(read(answer).await.unwrap().0, 400, "it is no JSON");
}

#[tokio::test]
async fn who_reads_a_byte_at_a_time_is_too_slow() {
    let router = TestRouter::start(RouterArgs { stall_timeout_ms: 20, ..args() }).await;
    let mut client = connect(&router, 1).await;
    let mut body = in_time("a head", get(&mut client, "/metrics")).await.unwrap().into_body();
    let end = async {
        loop {
            match body.data().await {
                Some(Ok(data)) => body.flow_control().release_capacity(data.len()).unwrap(),
                Some(Err(error)) => return error.reason(),
                None => panic!("all of it came, byte by byte"),
            }
        }
    };
    assert_eq!(in_time("its end", end).await, Some(Reason::CANCEL));
}
