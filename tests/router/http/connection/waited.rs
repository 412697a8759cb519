//! Answers over HTTP/1.1 that have to be waited for: written past hyper, and no client can tell.

use std::time::Duration;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Failed, FailureKind, Finish, Frame, RequestId};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::super::client::{Connection, Reply, TestRouter, args};
use crate::fake_worker::{Behaviour, EOS, FakeWorker, MODEL, letters, metric, passes, until};

const HEAD: &str = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";

fn body() -> String {
    json!({"model": MODEL, "prompt": "x"}).to_string()
}

async fn asked(connection: &mut Connection, worker: &mut FakeWorker, head: &str) -> RequestId {
    connection.request(head, body().as_bytes()).await;
    worker.submitted().await.request
}

async fn answered(
    connection: &mut Connection,
    worker: &FakeWorker,
    request: RequestId,
    text: &str,
) -> Reply {
    worker.gives(request, &letters(text), None);
    worker.gives(request, &[EOS], Some(Finish::Stop));
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.json()["choices"][0]["text"].as_str()), (200, Some(text)));
    reply
}

#[tokio::test]
async fn a_whole_answer_has_its_length_and_its_date_and_the_connection_goes_on() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let mut other = router.connect().await;
    other.request("GET /version HTTP/1.1", b"").await;
    let at_once = other.reply().await;
    for text in ["one", "two"] {
        let request = asked(&mut connection, &mut worker, HEAD).await;
        let reply = answered(&mut connection, &worker, request, text).await;
        let length = reply.header("content-length").map(str::to_owned);
        assert_eq!(length, Some(reply.text().len().to_string()));
        assert_eq!((reply.header("transfer-encoding"), reply.header("connection")), (None, None));
        // as hyper writes it
        let date = |reply: &Reply| reply.header("date").unwrap().len();
        assert_eq!(date(&reply), date(&at_once));
        assert_eq!(reply.header("content-type"), Some("application/json"));
        assert!(reply.header("x-request-id").is_some());
    }
    assert_eq!(metric(&router.app, "headrace_http_connections", ""), 2.0);
}

#[tokio::test]
async fn what_was_sent_behind_a_request_that_waits_is_answered_after_it() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let first = asked(&mut connection, &mut worker, HEAD).await;
    // more than is read ahead of its turn
    let long = format!("GET /health HTTP/1.1\r\nX-Long: {}", "x".repeat(20 << 10));
    connection.request(&long, b"").await;
    connection.request(HEAD, body().as_bytes()).await;
    answered(&mut connection, &worker, first, "first").await;
    assert_eq!(connection.reply().await.status, 200);
    let second = worker.submitted().await.request;
    answered(&mut connection, &worker, second, "second").await;
}

#[tokio::test]
async fn a_failure_is_an_answer_like_any_other() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let request = asked(&mut connection, &mut worker, HEAD).await;
    let (kind, message) = (FailureKind::BadToken, "out of luck".into());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    assert_eq!(connection.reply().await.status, 500);
    let request = asked(&mut connection, &mut worker, HEAD).await;
    answered(&mut connection, &worker, request, "after it").await;
}

#[tokio::test]
async fn a_connection_is_kept_unless_its_client_or_the_router_ends_it() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for word in ["close", "keep-alive, Close"] {
        let mut connection = router.connect().await;
        let head = format!("{HEAD}\r\nConnection: {word}");
        let request = asked(&mut connection, &mut worker, &head).await;
        let reply = answered(&mut connection, &worker, request, "a").await;
        assert_eq!(reply.header("connection"), Some("close"));
        assert_eq!(connection.closed().await, 0, "{word}");
    }
    let mut connection = router.connect().await;
    let request = asked(&mut connection, &mut worker, HEAD).await;
    router.drain();
    let reply = answered(&mut connection, &worker, request, "b").await;
    assert_eq!(reply.header("connection"), Some("close"));
    assert_eq!(connection.closed().await, 0);
}

#[tokio::test]
async fn after_an_answer_it_rests_until_the_next_request_begins_or_the_router_drains() {
    let args = RouterArgs { header_timeout_ms: 200, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    for stream in [false, true] {
        let body = json!({"model": MODEL, "prompt": "x", "stream": stream}).to_string();
        connection.request(HEAD, body.as_bytes()).await;
        let request = worker.submitted().await.request;
        worker.gives(request, &[EOS], Some(Finish::Stop));
        assert_eq!(connection.reply().await.status, 200, "stream: {stream}");
        passes(Duration::from_millis(500)).await;
    }
    let request = asked(&mut connection, &mut worker, HEAD).await;
    answered(&mut connection, &worker, request, "a").await;
    passes(Duration::from_millis(500)).await;
    connection.stream.write_all(b"GET /health HTTP/1.1\r\nX-Slow: ").await.unwrap();
    assert_eq!(connection.reply().await.status, 408, "from its first byte on");
    connection.closed().await;

    let mut connection = router.connect().await;
    let request = asked(&mut connection, &mut worker, HEAD).await;
    answered(&mut connection, &worker, request, "a").await;
    router.drain();
    assert_eq!(connection.closed().await, 0);
}

/// A request with what follows it, in one piece, so that both are read together.
fn with_behind(behind: &str) -> String {
    let body = body();
    format!("{HEAD}\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}{behind}", body.len())
}

#[tokio::test]
async fn a_head_that_began_to_come_before_its_turn_has_no_more_time_than_others() {
    let args = RouterArgs { header_timeout_ms: 200, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    let bytes = with_behind("GET /health HTTP/1.1\r\nX-Slow: ");
    connection.stream.write_all(bytes.as_bytes()).await.unwrap();
    let request = worker.submitted().await.request;
    answered(&mut connection, &worker, request, "a").await;
    assert_eq!(connection.reply().await.status, 408);
    connection.closed().await;

    let mut connection = router.connect().await;
    connection.stream.write_all(with_behind("\r\n").as_bytes()).await.unwrap();
    let request = worker.submitted().await.request;
    answered(&mut connection, &worker, request, "a").await;
    passes(Duration::from_millis(500)).await;
    let request = asked(&mut connection, &mut worker, HEAD).await;
    answered(&mut connection, &worker, request, "b").await;
}

#[tokio::test]
async fn a_body_with_both_a_length_and_chunks_is_the_last_one() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for both in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ] {
        for stream in [false, true] {
            let mut connection = router.connect().await;
            let body = json!({"model": MODEL, "prompt": "x", "stream": stream}).to_string();
            let smuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
            let bytes = format!(
                "{HEAD}\r\nHost: localhost\r\n{both}\r\n{:x}\r\n{body}\r\n0\r\n\r\n{smuggled}",
                body.len()
            );
            connection.stream.write_all(bytes.as_bytes()).await.unwrap();
            let request = worker.submitted().await.request;
            worker.gives(request, &[EOS], Some(Finish::Stop));
            let reply = connection.reply().await;
            assert_eq!((reply.status, reply.header("connection")), (200, Some("close")));
            assert_eq!(connection.closed().await, 0, "what came after it was answered: {both}");
        }
    }
}

#[tokio::test]
async fn an_old_client_gets_its_answer_and_the_end() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let request = asked(&mut connection, &mut worker, &HEAD.replace("1.1", "1.0")).await;
    answered(&mut connection, &worker, request, "old").await;
    assert_eq!(connection.closed().await, 0);
}

#[tokio::test]
async fn a_body_in_chunks_that_was_asked_for_is_read_to_its_end() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let head = format!("{HEAD}\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked");
    for text in ["a", "b"] {
        connection.request(&head, b"").await;
        connection.interim(1).await;
        let body = body();
        // the last chunk comes by itself
        let chunk = format!("{:x}\r\n{body}\r\n", body.len());
        connection.stream.write_all(chunk.as_bytes()).await.unwrap();
        connection.stream.write_all(b"0\r\n\r\n").await.unwrap();
        let request = worker.submitted().await.request;
        answered(&mut connection, &worker, request, text).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_is_noticed() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    // some send an empty line after a body, or the next request
    for behind in ["", "\r\n", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"] {
        for reset in [false, true] {
            let mut connection = router.connect().await;
            connection.stream.write_all(with_behind(behind).as_bytes()).await.unwrap();
            let request = worker.submitted().await.request;
            if reset {
                connection.stream.set_zero_linger().unwrap();
            }
            drop(connection);
            assert_eq!(worker.cancelled().await, request, "reset: {reset}, behind it {behind:?}");
        }
    }
    until("nothing is left", || metric(&router.app, "headrace_http_connections", "") == 0.0).await;
}
