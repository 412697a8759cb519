//! Bodies and headers that are too long, too slow, or no HTTP: over real sockets, as only they show what a client sees.

use std::time::Duration;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::Finish;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, pause};

use super::super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, EOS, MODEL, metric, passes};

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json";

#[tokio::test]
async fn a_body_of_100_mb_is_refused_and_the_client_gets_to_see_it() {
    let router = TestRouter::start(args()).await;
    let body = vec![b' '; 100 << 20];
    // A client that writes all of it before it reads, as most libraries do.
    let reply = router.send(CHAT, &body).await;
    assert_eq!(reply.status, 413);
    assert!(reply.error()["message"].as_str().unwrap().contains("16777216"), "{reply:?}");
    assert_eq!(metric(&router.app, "headrace_http_body_bytes", ""), 0.0, "the body was kept");
}

#[tokio::test]
async fn a_long_body_without_a_declared_length_is_cut_off_at_the_limit() {
    let router = TestRouter::start(RouterArgs { max_body_bytes: 1 << 20, ..args() }).await;
    let mut connection = router.connect().await;
    connection.request(&format!("{CHAT}\r\nTransfer-Encoding: chunked"), b"").await;
    let chunk = [format!("{:x}\r\n", 64 << 10).as_bytes(), &[b' '; 64 << 10], b"\r\n"].concat();
    for _ in 0..40 {
        connection.stream.write_all(&chunk).await.unwrap();
    }
    assert_eq!(connection.reply().await.status, 413);
}

#[tokio::test]
async fn a_client_that_asks_first_sends_nothing_in_vain() {
    let router = TestRouter::start(args()).await;
    let mut connection = router.connect().await;
    let head = format!(
        "{CHAT}\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 104857600\r\n\r\n"
    );
    connection.stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(connection.reply().await.status, 413);
}

#[tokio::test]
async fn slow_headers_end_with_408() {
    let router = TestRouter::start(RouterArgs { header_timeout_ms: 200, ..args() }).await;
    // Never a whole line, never a whole head, and slow again after a good request.
    for begin in
        ["POST /v1/chat", "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "]
    {
        let mut connection = router.connect().await;
        connection.stream.write_all(begin.as_bytes()).await.unwrap();
        let reply = connection.reply().await;
        assert_eq!(reply.status, 408, "{begin}");
        reply.error();
        connection.closed().await;
    }
    let mut connection = router.connect().await;
    connection.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 200);
    connection.stream.write_all(b"GET /health HTTP/1.1\r\nX-Slow: ").await.unwrap();
    assert_eq!(connection.reply().await.status, 408);
}

#[tokio::test]
async fn an_answer_and_a_connection_may_last_longer_than_headers() {
    let args = RouterArgs { header_timeout_ms: 200, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    for _ in 0..2 {
        let body = format!(r#"{{"model": "{MODEL}", "prompt": "x"}}"#);
        connection.request(&CHAT.replace("chat/", ""), body.as_bytes()).await;
        let request = worker.submitted().await.request;
        passes(Duration::from_millis(300)).await;
        worker.gives(request, &[EOS], Some(Finish::Stop));
        assert_eq!(connection.reply().await.status, 200);
    }
}

#[tokio::test]
async fn a_connection_may_rest_longer_than_headers_may_take() {
    let router = TestRouter::start(RouterArgs { header_timeout_ms: 200, ..args() }).await;
    let mut connection = router.connect().await;
    for _ in 0..2 {
        connection.request("GET /health HTTP/1.1", b"").await;
        assert_eq!(connection.reply().await.status, 200);
        passes(Duration::from_millis(500)).await;
    }
    // but from its first byte on a head has no more time than that
    pause();
    let began = Instant::now();
    connection.stream.write_all(b"GET /health HTTP/1.1\r\nX-Slow: ").await.unwrap();
    assert_eq!(connection.reply().await.status, 408);
    assert_eq!((began.elapsed().as_secs_f64() * 10.0).round(), 2.0, "tenths of a second");
    connection.closed().await;
}

#[tokio::test]
async fn a_slow_body_ends_with_408() {
    let router = TestRouter::start(RouterArgs { body_timeout_ms: 200, ..args() }).await;
    let mut connection = router.connect().await;
    let head = format!("{CHAT}\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{");
    connection.stream.write_all(head.as_bytes()).await.unwrap();
    let reply = connection.reply().await;
    assert_eq!((reply.status, &reply.error()["code"]), (408, &"body_too_slow".into()));
    connection.closed().await;
}

#[tokio::test]
async fn a_connection_lives_on_after_a_bad_request() {
    let router = TestRouter::start(args()).await;
    let mut connection = router.connect().await;
    for _ in 0..3 {
        connection.request(CHAT, b"{").await;
        assert_eq!(connection.reply().await.status, 400);
    }
}

#[tokio::test]
async fn what_is_no_http_does_no_harm() {
    let router = TestRouter::start(args()).await;
    for noise in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        &[0xff; 100],
    ] {
        let mut connection = router.connect().await;
        connection.stream.write_all(noise).await.unwrap();
        connection.stream.shutdown().await.unwrap();
        connection.closed().await;
    }
    assert_eq!(router.get("/health").await.status, 200);
}

#[tokio::test]
async fn other_media_types_and_encodings_are_refused() {
    let router = TestRouter::start(args()).await;
    for header in [
        "Content-Type: text/plain",
        "Content-Type: application/x-www-form-urlencoded",
        "Content-Type: application/json\r\nContent-Encoding: gzip",
    ] {
        let head = format!("POST /v1/completions HTTP/1.1\r\n{header}");
        let reply = router.send(&head, b"{}").await;
        assert_eq!(reply.status, 415, "{header}");
        reply.error();
    }
    let reply = router.send("POST /v1/completions HTTP/1.1", b"{}").await;
    assert_eq!(reply.status, 400); // no content type: read as JSON
}

#[tokio::test]
async fn bytes_that_are_no_json_are_a_bad_request() {
    let router = TestRouter::start(args()).await;
    let nested = "[".repeat(10_000);
    for (body, part) in [
        (&b""[..], "empty"),
        (b"[]", "must be a JSON object"),
        (b"{\"model\": \"m\",}", "line 1 column"),
        (b"{\"model\": \"\xff\xfe\"}", "not UTF-8"),
        (br#"{"model": "\ud800"}"#, "line 1 column"),
        (b"{\"temperature\": NaN}", "line 1 column"),
        (b"{\"temperature\": -Infinity}", "line 1 column"),
        (b"{\"temperature\": 1e999}", "out of range"),
        (b"{\"model\": \"m\", \"model\": \"n\"}", "`model` is there twice"),
        (b"{\"messages\": [{\"role\": \"user\", \"role\": \"user\"}]}", "`messages[0].role`"),
        (nested.as_bytes(), "deeper than 64 levels"),
    ] {
        for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
            let reply = router.post(path, body).await;
            let error = reply.error();
            assert_eq!(reply.status, 400, "{error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(part) && message.len() < 200, "{message}");
        }
    }
}
