//! Requests that are sent without waiting for answers: answered in their order, one at a time, and never more than a client
//! reads.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::Finish;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, EOS, Event, MODEL, letters, metric, until};

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

fn ask() -> String {
    let body = json!({"model": MODEL, "prompt": "x"}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn answers_come_in_the_order_of_the_requests_and_one_request_runs_at_a_time() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let all = [get("/health"), ask(), get("/nothing"), ask(), get("/version")].concat();
    connection.stream.write_all(all.as_bytes()).await.unwrap();
    assert_eq!(connection.reply().await.status, 200);
    for text in ["first", "second"] {
        let request = worker.submitted().await.request;
        router.get("/health").await; // the router has had time to read on
        let more = worker.so_far();
        assert!(!more.iter().any(|event| matches!(event, Event::Submit(_))), "one at a time");
        worker.gives(request, &letters(text), None);
        worker.gives(request, &[EOS], Some(Finish::Stop));
        let reply = connection.reply().await;
        assert_eq!((reply.status, reply.json()["choices"][0]["text"].as_str()), (200, Some(text)));
        let after = connection.reply().await;
        assert_eq!(after.status, if text == "first" { 404 } else { 200 });
    }
}

#[tokio::test]
async fn what_follows_a_broken_request_is_not_read() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for broken in [
        "GARBAGE\r\n\r\n".to_owned(),
        "GET /health HTTP/1.1\r\n\r\n".to_owned(),
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"
            .to_owned(),
        "POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n".to_owned(),
    ] {
        let mut connection = router.connect().await;
        let all = [get("/health"), broken.clone(), ask()].concat();
        connection.stream.write_all(all.as_bytes()).await.unwrap();
        assert_eq!(connection.reply().await.status, 200);
        let rest = String::from_utf8_lossy(&connection.until_closed().await).into_owned();
        assert!(!rest.contains("200 OK"), "{broken}: {rest}");
    }
    assert!(!worker.so_far().iter().any(|event| matches!(event, Event::Submit(_))));
}

#[tokio::test]
async fn a_pipeline_that_nobody_reads_takes_bounded_memory_and_is_cut_off_by_name() {
    let router = TestRouter::start(RouterArgs { stall_timeout_ms: 300, ..args() }).await;
    let stalled = || metric(&router.app, "headrace_http_connections_stalled_total", "");
    let unread = || metric(&router.app, "headrace_http_unread_bytes", "");
    let mut deaf = router.connect().await;
    let many = get("/openapi.json").repeat(100);
    let mut most: f64 = 0.0;
    let asks = async { while deaf.stream.write_all(many.as_bytes()).await.is_ok() {} };
    let cut_off = until("it was cut off", || {
        most = most.max(unread());
        stalled() == 1.0
    });
    tokio::select! {
        () = asks => {}
        () = cut_off => {}
    }
    until("it was counted", || stalled() == 1.0).await;
    assert!(most <= f64::from(2 << 20), "{most} bytes waited");
    until("all is given back", || unread() == 0.0).await;
    assert_eq!(router.get("/health").await.status, 200);
}
