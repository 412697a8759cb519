//! Clients that stop writing after their request: they get their answer, unless they are gone.

use std::time::Duration;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Finish, RequestId};
use tokio::io::AsyncWriteExt as _;

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, FakeWorker, MODEL, letters, metric, passes, until};

/// Looks of the router for its client.
const LOOKS: usize = 3;

async fn ask(version: &str, stream: bool) -> (TestRouter, FakeWorker, Connection, RequestId) {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let body = format!(r#"{{"model": "{MODEL}", "prompt": "x", "stream": {stream}}}"#);
    let head = format!("POST /v1/completions {version}\r\nContent-Type: application/json");
    connection.request(&head, body.as_bytes()).await;
    connection.stream.shutdown().await.unwrap();
    let request = worker.submitted().await.request;
    (router, worker, connection, request)
}

#[tokio::test]
async fn an_answer_that_needs_no_worker_comes() {
    let router = TestRouter::start(args()).await;
    for version in ["HTTP/1.0", "HTTP/1.1"] {
        let mut connection = router.connect().await;
        connection.request(&format!("GET /health {version}"), b"").await;
        connection.stream.shutdown().await.unwrap();
        assert_eq!(connection.reply().await.status, 200);
        assert_eq!(connection.closed().await, 0, "and then it is over");
    }
}

#[tokio::test]
async fn all_requests_that_were_sent_are_answered() {
    let router = TestRouter::start(args()).await;
    let mut connection = router.connect().await;
    for _ in 0..3 {
        connection.request("GET /health HTTP/1.1", b"").await;
    }
    connection.stream.shutdown().await.unwrap();
    for _ in 0..3 {
        assert_eq!(connection.reply().await.status, 200);
    }
    assert_eq!(connection.closed().await, 0);
}

#[tokio::test]
async fn a_generation_comes_however_long_it_takes() {
    for version in ["HTTP/1.0", "HTTP/1.1"] {
        let (_router, worker, mut connection, request) = ask(version, false).await;
        if version == "HTTP/1.0" {
            passes(Duration::from_millis(150)).await; // the client is looked for, and hears nothing of it
        } else {
            connection.interim(LOOKS).await;
        }
        worker.gives(request, &letters("abc"), Some(Finish::Length));
        let reply = connection.reply().await;
        assert_eq!((reply.status, &reply.json()["choices"][0]["text"]), (200, &"abc".into()));
        assert_eq!(connection.closed().await, 0);
    }
}

#[tokio::test]
async fn a_stream_comes_with_comments_between_its_events() {
    let (_router, worker, mut connection, request) = ask("HTTP/1.1", true).await;
    worker.gives(request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    let mut text = connection.piece().await;
    for _ in 0..LOOKS {
        assert_eq!(connection.piece().await, ":\n\n");
    }
    worker.gives(request, &letters("b"), Some(Finish::Length));
    while let Some(chunk) = connection.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(text.contains(r#""text":"b""#) && text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn one_that_leaves_later_is_noticed() {
    for stream in [false, true] {
        let (router, mut worker, mut connection, request) = ask("HTTP/1.1", stream).await;
        connection.interim(LOOKS).await; // of a stream without a token, too
        drop(connection);
        assert_eq!(worker.cancelled().await, request);
        until("its place is free", || metric(&router.app, "headrace_streams", "") == 0.0).await;
    }
}

#[tokio::test]
async fn half_a_request_is_none() {
    let router = TestRouter::start(RouterArgs { body_timeout_ms: 60_000, ..args() }).await;
    for begin in [
        "GET /heal",
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{",
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ] {
        let mut connection = router.connect().await;
        connection.stream.write_all(begin.as_bytes()).await.unwrap();
        connection.stream.shutdown().await.unwrap();
        connection.closed().await;
    }
}
