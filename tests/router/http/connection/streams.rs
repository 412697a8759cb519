//! Streams of events over HTTP/1.1, which links write to the sockets themselves: the same bytes as by any other way, in order,
//! whatever the client and the workers do meanwhile.

use axum::body::{Body, BodyDataStream};
use axum::http::Request;
use futures_util::StreamExt as _;
use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Finish, Frame, Output, Ranked, RequestId, TokenLogprob};
use headrace_router::fleet::codec::encode;
use headrace_router::http::app;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;
use tower::ServiceExt as _;

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::{
    Behaviour, EOS, FakeWorker, MODEL, in_time, letters, metric, output, step, until,
};

const HEAD: &str = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";

fn body(fields: &Value) -> String {
    let mut body = json!({"model": MODEL, "prompt": "x", "stream": true});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body.to_string()
}

fn direct_reads(router: &TestRouter) -> f64 {
    metric(&router.app, "headrace_direct_reads_total", "")
}

/// A stream that has begun: its worker has given one token, and the client has read it.
async fn begun(fields: Value, args: RouterArgs) -> (TestRouter, FakeWorker, Connection, RequestId) {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    let request = begin(&mut connection, &mut worker, HEAD, fields).await;
    (router, worker, connection, request)
}

async fn begin(
    connection: &mut Connection,
    worker: &mut FakeWorker,
    head: &str,
    fields: Value,
) -> RequestId {
    connection.request(head, body(&fields).as_bytes()).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    assert_eq!(texts(&connection.piece().await), "a");
    request
}

/// The text of completion events.
fn texts(events: &str) -> String {
    let events = events.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let events = events.filter(|event| *event != "[DONE]");
    let texts = events.map(|event| serde_json::from_str::<Value>(event).unwrap());
    texts.map(|event| event["choices"][0]["text"].as_str().unwrap_or("").to_owned()).collect()
}

/// All events that are left.
async fn rest(connection: &mut Connection) -> String {
    let mut rest = String::new();
    while let Some(chunk) = connection.chunk().await {
        rest.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    rest
}

async fn ends(worker: &FakeWorker, connection: &mut Connection, request: RequestId) -> String {
    worker.gives(request, &[EOS], Some(Finish::Stop));
    let rest = rest(connection).await;
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    rest
}

#[tokio::test]
async fn each_token_is_an_event_that_the_link_writes() {
    let (router, worker, mut connection, request) = begun(json!({}), args()).await;
    for (place, letter) in ["b", "c", "d"].into_iter().enumerate() {
        worker.gives(request, &letters(letter), None);
        assert_eq!(texts(&connection.piece().await), letter);
        assert_eq!(direct_reads(&router), place as f64 + 1.0);
    }
    ends(&worker, &mut connection, request).await;
    assert_eq!(metric(&router.app, "headrace_completion_tokens_total", ""), 5.0);
    assert_eq!(metric(&router.app, "headrace_itl_seconds_count", ""), 4.0);
    assert_eq!(metric(&router.app, "headrace_http_stream_waits_total", ""), 0.0);
}

#[tokio::test]
async fn tokens_of_frames_that_come_together_leave_together() {
    let (router, worker, mut connection, request) = begun(json!({}), args()).await;
    let mut bytes = Vec::new();
    for letter in ["b", "c", "d"] {
        let mut frame = Vec::new();
        let outputs = vec![output(request, letters(letter), None)];
        encode(&Frame::Step(step(outputs)), &mut frame).unwrap();
        bytes.extend(u32::try_from(frame.len()).unwrap().to_le_bytes());
        bytes.extend(frame);
    }
    worker.send_raw(&bytes);
    assert_eq!(texts(&connection.piece().await), "bcd");
    assert_eq!(direct_reads(&router), 1.0);
    ends(&worker, &mut connection, request).await;
}

/// What differs from answer to answer: its id and its time.
fn without_names(text: &str) -> String {
    let is_name = |word: &str| word.len() >= 10 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let words = words.map(|word| {
        let name = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_name(name) { word.replace(name, "*") } else { word.to_owned() }
    });
    words.collect()
}

/// A client of either kind.
enum Client {
    Socket(Connection),
    /// The body of a response, with nothing of a connection.
    Body(BodyDataStream),
}

impl Client {
    async fn piece(&mut self) -> Option<String> {
        let piece = match self {
            Self::Socket(connection) => connection.chunk().await,
            Self::Body(body) => {
                let piece = in_time("a piece", body.next()).await;
                piece.map(|piece| piece.unwrap().to_vec())
            }
        };
        piece.map(|piece| String::from_utf8(piece).unwrap())
    }
}

/// The whole answer where the worker gives `steps` one by one, each when there is an event of the one before.
async fn said(
    router: &TestRouter,
    worker: &mut FakeWorker,
    path: &str,
    fields: &Value,
    steps: &[&str],
    directly: bool,
) -> String {
    let body = fields.to_string();
    let connection = if directly {
        let mut connection = router.connect().await;
        let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
        connection.request(&head, body.as_bytes()).await;
        Ok(connection)
    } else {
        let request = Request::post(path).header("Content-Type", "application/json");
        let request = request.header("Host", "localhost").body(Body::from(body)).unwrap();
        Err(tokio::spawn(app(router.app.clone()).oneshot(request)))
    };
    let n = fields["n"].as_u64().unwrap_or(1);
    let mut requests = Vec::new();
    for _ in 0..n {
        requests.push(worker.submitted().await.request);
    }
    requests.sort_by_key(|request| request.0);
    let give = |text: &str, last: bool| {
        let ids = if last { [letters(text), vec![EOS]].concat() } else { letters(text) };
        let finish = last.then_some(Finish::Stop);
        let outputs = requests.iter().map(|request| output(*request, ids.clone(), finish));
        worker.send(Frame::Step(step(outputs.collect())));
    };
    give(steps[0], false);
    let mut client = match connection {
        Ok(mut connection) => {
            assert_eq!(connection.head().await.status, 200);
            Client::Socket(connection)
        }
        Err(answer) => Client::Body(answer.await.unwrap().unwrap().into_body().into_data_stream()),
    };
    let (mut text, mut events) = (String::new(), 0);
    for step in 1..steps.len() {
        while text.matches("\n\n").count() < events + requests.len() {
            text.push_str(&client.piece().await.expect("it goes on"));
        }
        events = text.matches("\n\n").count();
        give(steps[step], step + 1 == steps.len());
    }
    while let Some(piece) = client.piece().await {
        text.push_str(&piece);
    }
    without_names(&text)
}

#[tokio::test]
async fn the_bytes_are_those_of_a_body() {
    let args = RouterArgs { reasoning_parser: Some("think".into()), ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let chat = json!([{"role": "user", "content": "x"}]);
    let prompt = |fields: Value| ("/v1/completions", "prompt", json!("x"), fields);
    let messages = |fields: Value| ("/v1/chat/completions", "messages", chat.clone(), fields);
    let plain = ["Hel", "lo ", "there", " \"friend\""];
    let stops = ["a S", "T c", "d S", "x STOP y", "z"];
    let thinks = ["<think>hm", "m</think>He", "llo", "!"];
    for ((path, name, input, fields), steps) in [
        (prompt(json!({})), &plain[..]),
        (prompt(json!({"stream_options": {"include_usage": true}})), &plain),
        (
            prompt(
                json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
            ),
            &plain,
        ),
        (prompt(json!({"logprobs": 2})), &plain),
        (prompt(json!({"stop": ["STOP"]})), &stops),
        (prompt(json!({"n": 2})), &plain),
        (messages(json!({})), &plain),
        (messages(json!({"logprobs": true, "top_logprobs": 2})), &plain),
        (messages(json!({})), &thinks),
        (("/v1/messages", "messages", chat.clone(), json!({})), &thinks),
        (("/v1/responses", "input", json!("x"), json!({})), &thinks),
    ] {
        let limit = if name == "input" { "max_output_tokens" } else { "max_tokens" };
        let mut body = json!({"model": MODEL, "stream": true, limit: 100, name: input});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let before = direct_reads(&router);
        let directly = said(&router, &mut worker, path, &body, steps, true).await;
        let reads = direct_reads(&router) - before;
        assert_eq!(reads > 0.0, body["n"].is_null(), "{body} took another way");
        let as_body = said(&router, &mut worker, path, &body, steps, false).await;
        assert_eq!(directly, as_body, "{body}");
        assert_eq!(direct_reads(&router) - before, reads, "a body is read by its own task");
    }
}

#[tokio::test]
async fn requests_that_wait_behind_a_stream_are_answered_after_it() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let first = begin(&mut connection, &mut worker, HEAD, json!({})).await;
    // more than is read ahead of its turn
    let long = format!("GET /health HTTP/1.1\r\nX-Long: {}", "x".repeat(20 << 10));
    connection.request(&long, b"").await;
    connection.request(HEAD, body(&json!({})).as_bytes()).await;
    connection.request("GET /health HTTP/1.1", b"").await;
    worker.gives(first, &letters("b"), None);
    ends(&worker, &mut connection, first).await;
    assert_eq!(connection.reply().await.status, 200);
    let second = worker.submitted().await.request;
    worker.gives(second, &letters("c"), None);
    assert_eq!(connection.head().await.status, 200);
    ends(&worker, &mut connection, second).await;
    assert_eq!(connection.reply().await.status, 200);
}

#[tokio::test]
async fn a_connection_is_kept_unless_its_client_or_the_router_ends_it() {
    let (router, mut worker, mut connection, request) = begun(json!({}), args()).await;
    ends(&worker, &mut connection, request).await;
    for word in ["close", "keep-alive, Close"] {
        let mut connection = router.connect().await;
        connection
            .request(&format!("{HEAD}\r\nConnection: {word}"), body(&json!({})).as_bytes())
            .await;
        let request = worker.submitted().await.request;
        worker.gives(request, &letters("a"), None);
        assert_eq!(connection.head().await.header("connection"), Some("close"));
        ends(&worker, &mut connection, request).await;
        assert_eq!(connection.closed().await, 0, "{word}");
    }
    let request = begin(&mut connection, &mut worker, HEAD, json!({})).await;
    router.drain();
    worker.gives(request, &letters("b"), None);
    ends(&worker, &mut connection, request).await;
    assert_eq!(connection.closed().await, 0);
}

#[tokio::test]
async fn a_body_in_chunks_that_was_asked_for_is_read_to_its_end() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let head = format!("{HEAD}\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked");
    for _ in 0..2 {
        connection.request(&head, b"").await;
        connection.interim(1).await;
        let body = body(&json!({}));
        let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
        connection.stream.write_all(chunked.as_bytes()).await.unwrap();
        let request = worker.submitted().await.request;
        worker.gives(request, &letters("a"), None);
        assert_eq!(connection.head().await.status, 200);
        ends(&worker, &mut connection, request).await;
    }
}

#[tokio::test]
async fn an_old_client_gets_no_chunks() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    connection.request(&HEAD.replace("1.1", "1.0"), body(&json!({})).as_bytes()).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("ab"), None);
    let head = connection.head().await;
    assert_eq!((head.status, head.header("transfer-encoding")), (200, None));
    worker.gives(request, &[EOS], Some(Finish::Stop));
    let rest = String::from_utf8(connection.until_closed().await).unwrap();
    assert!(rest.starts_with("data: {") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(direct_reads(&router), 0.0);
}

/// A step whose tokens come with twenty alternatives each.
fn large(request: RequestId, text: &str) -> Frame {
    let top = (0..20).map(|id| Ranked(id, -1.25)).collect::<Vec<_>>();
    let logprobs = text.chars().map(|_| TokenLogprob { logprob: -0.5, top: top.clone() });
    let logprobs = Some(logprobs.collect());
    Frame::Step(step(vec![Output { logprobs, ..output(request, letters(text), None) }]))
}

#[tokio::test]
async fn what_a_full_socket_does_not_take_waits_and_comes_in_order() {
    const TOKENS: u32 = 1 << 20;
    let mut worker = Behaviour::new("w");
    worker.hello.context_tokens = 2 * TOKENS;
    let (router, mut worker) = TestRouter::with(worker, args()).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut slow = Connection::of(socket.connect(router.address).await.unwrap());
    let fields = json!({"max_tokens": TOKENS, "logprobs": 5});
    let request = begin(&mut slow, &mut worker, HEAD, fields).await;
    let count = |name: &str| metric(&router.app, name, "");
    let mut tokens = 1.0;
    for _ in 0..3 {
        let (mut given, mut more) = (String::new(), 3);
        let before = count("headrace_http_stream_waits_total");
        // until its socket is full, and some more
        while more > 0 {
            let word = format!("{:04}", given.len() / 200).repeat(50);
            worker.send(large(request, &word));
            given.push_str(&word);
            tokens += 200.0;
            until("it came", || count("headrace_completion_tokens_total") == tokens).await;
            more -= u32::from(count("headrace_http_stream_waits_total") > before);
        }
        let mut got = String::new();
        while got.len() < given.len() {
            got.push_str(&texts(&slow.piece().await));
        }
        assert_eq!(got, given);
        // and then it goes on as before
        let reads = direct_reads(&router);
        worker.gives(request, &letters("z"), None);
        tokens += 1.0;
        while !texts(&slow.piece().await).ends_with('z') {} // log-probabilities come after their text
        assert!(direct_reads(&router) > reads);
    }
    ends(&worker, &mut slow, request).await;
}

#[tokio::test]
async fn a_stream_behind_answers_that_wait_for_their_reader_comes_after_them() {
    const PAGES: usize = 100; // more than the kernel keeps for the client
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut slow = Connection::of(socket.connect(router.address).await.unwrap());
    for _ in 0..PAGES {
        slow.request("GET /openapi.json HTTP/1.1", b"").await;
    }
    slow.request(HEAD, body(&json!({})).as_bytes()).await;
    for _ in 0..PAGES {
        assert_eq!(slow.reply().await.json()["openapi"], "3.1.0");
    }
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    assert_eq!(slow.head().await.status, 200);
    ends(&worker, &mut slow, request).await;
}

#[tokio::test]
async fn a_stream_goes_on_directly_when_its_worker_dies() {
    let args = RouterArgs { queue_timeout_ms: 5_000, ..args() };
    let (router, first, mut connection, request) = begun(json!({}), args).await;
    first.gives(request, &letters("b"), None);
    assert_eq!(texts(&connection.piece().await), "b");
    let mut second = Behaviour::new("v").ready(&router.app).await;
    drop(first);
    let request = second.submitted().await.request;
    let before = direct_reads(&router);
    for letter in ["c", "d", "e"] {
        second.gives(request, &letters(letter), None);
        assert_eq!(texts(&connection.piece().await), letter);
    }
    assert_eq!(direct_reads(&router) - before, 3.0);
    ends(&second, &mut connection, request).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_in_a_direct_stream_is_noticed() {
    let (router, mut worker, connection, request) = begun(json!({}), args()).await;
    worker.gives(request, &letters("b"), None);
    until("it is written", || direct_reads(&router) == 1.0).await;
    drop(connection);
    assert_eq!(worker.cancelled().await, request);
    until("its place is free", || metric(&router.app, "headrace_streams", "") == 0.0).await;
    until("its connection is gone", || metric(&router.app, "headrace_http_connections", "") == 0.0)
        .await;
}

#[tokio::test]
async fn an_error_in_the_middle_is_an_event_without_done() {
    let (_router, worker, mut connection, request) = begun(json!({}), args()).await;
    worker.gives(request, &letters("b"), None);
    assert_eq!(texts(&connection.piece().await), "b");
    worker.gives(request, &[], Some(Finish::Cancelled)); // its deadline passed
    let rest = rest(&mut connection).await;
    assert!(rest.starts_with("event: error\n") && !rest.contains("[DONE]"), "{rest}");
    connection.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 200, "the answer was sent as a whole");
}
