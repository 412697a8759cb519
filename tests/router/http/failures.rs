//! What goes wrong after a good request: workers that fail or die, clients that leave or do not read.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{
    Failed, FailureKind, Finish, Frame, Output, Ranked, RequestId, TokenLogprob,
};
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, FakeWorker, MODEL, letters, metric, output, step, until};

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json";

fn chat(extra: &Value) -> Vec<u8> {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

/// A router with one worker that leaves the answers to the test, and a request that it holds.
async fn in_flight(stream: bool) -> (TestRouter, FakeWorker, Connection, RequestId) {
    let args = RouterArgs { queue_timeout_ms: 300, ..args() }; // one that broke off waits so long for another worker
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    connection.request(CHAT, &chat(&json!({ "stream": stream }))).await;
    let request = worker.submitted().await.request;
    (router, worker, connection, request)
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_a_status_streamed_or_not() {
    for stream in [false, true] {
        let (_router, worker, mut connection, request) = in_flight(stream).await;
        let (kind, message) = (FailureKind::BadToken, "out of luck".into());
        worker.send(Frame::Failed(Failed { request, kind, message }));
        let reply = connection.reply().await;
        let error = reply.error();
        assert_eq!((reply.status, &error["code"]), (500, &json!("worker_failed")));
        assert!(error["message"].as_str().unwrap().contains("out of luck"));
    }
}

#[tokio::test]
async fn what_only_the_worker_can_refuse_is_still_the_clients_mistake() {
    let (_router, worker, mut connection, request) = in_flight(false).await;
    let (kind, message) = (FailureKind::BadSampling, "prompt_logprobs asks for too much".into());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    let reply = connection.reply().await;
    let error = reply.error();
    assert_eq!((reply.status, &error["code"]), (400, &json!("bad_sampling")));
    assert_eq!(error["type"], "invalid_request_error");
}

#[tokio::test]
async fn a_worker_lost_in_the_middle_is_an_error_event_and_no_done() {
    let (_router, worker, mut connection, request) = in_flight(true).await;
    worker.gives(request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    let mut text = connection.piece().await;
    drop(worker);
    while let Some(chunk) = connection.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let last = text.split_terminator("\n\n").last().unwrap();
    let data = last.strip_prefix("event: error\ndata: ").unwrap_or_else(|| panic!("{text}"));
    let error: Value = serde_json::from_str(data).unwrap();
    assert_eq!(error["error"]["code"], "worker_lost");
    assert!(!text.contains("[DONE]"), "{text}");
}

#[tokio::test]
async fn a_failure_in_the_middle_of_a_whole_answer_has_a_status() {
    let (_router, worker, mut connection, request) = in_flight(false).await;
    worker.gives(request, &letters("a"), None);
    let (kind, message) = (FailureKind::BadToken, "out of luck".into());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    let reply = connection.reply().await;
    assert_eq!((reply.status, &reply.error()["code"]), (500, &json!("worker_failed")));
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_before_and_after_the_first_token() {
    for (stream, first_token) in [(true, false), (true, true), (false, false), (false, true)] {
        let (_router, mut worker, mut connection, request) = in_flight(stream).await;
        if first_token {
            worker.gives(request, &letters("a"), None);
        }
        if stream && first_token {
            assert_eq!(connection.head().await.status, 200);
            connection.piece().await;
        }
        drop(connection);
        assert_eq!(worker.cancelled().await, request, "stream {stream}, first {first_token}");
    }
}

#[tokio::test]
async fn a_body_counts_until_its_prompt_is_tokens() {
    let (router, worker, mut connection, request) = in_flight(false).await;
    let body = || metric(&router.app, "headrace_http_body_bytes", "");
    until("its body is given back", || body() == 0.0).await;
    worker.gives(request, &letters("a"), Some(Finish::Length));
    assert_eq!(connection.reply().await.status, 200);
    let answers = || metric(&router.app, "headrace_http_answer_bytes", "");
    until("its answer is given back", || answers() == 0.0).await;
}

#[tokio::test]
async fn a_request_whose_client_leaves_before_its_answer_is_counted() {
    let (router, mut worker, connection, _) = in_flight(true).await;
    drop(connection);
    worker.cancelled().await;
    let gone = || metric(&router.app, "headrace_http_requests_total", "status=\"499\"");
    until("it is counted", || gone() == 1.0).await;
}

#[tokio::test]
async fn every_prompt_of_a_request_is_cancelled_with_it() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let body = json!({"model": MODEL, "prompt": ["a", "b"], "n": 2, "stream": true}).to_string();
    connection.request(&CHAT.replace("chat/", ""), body.as_bytes()).await;
    let mut submitted = Vec::new();
    for _ in 0..4 {
        submitted.push(worker.submitted().await.request);
    }
    worker.gives(submitted[0], &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    drop(connection);
    let mut cancelled = Vec::new();
    for _ in 0..4 {
        cancelled.push(worker.cancelled().await);
    }
    submitted.sort();
    cancelled.sort();
    assert_eq!(submitted, cancelled);
}

/// A step of many bytes: 50 tokens with 20 alternatives each, about 60 kB of events.
fn heavy(request: RequestId) -> Output {
    let ids = letters("abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwx");
    let top: Vec<Ranked> = (0..20).map(|i| Ranked(5 + i, -1.25 - f64::from(i))).collect();
    let logprobs = ids.iter().map(|_| TokenLogprob { logprob: -0.5, top: top.clone() }).collect();
    Output { logprobs: Some(logprobs), ..output(request, ids, None) }
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off() {
    let args = RouterArgs { stall_timeout_ms: 500, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut connection = Connection::of(socket.connect(router.address).await.unwrap());
    let extra = json!({"stream": true, "logprobs": true, "top_logprobs": 20, "n": 8});
    connection.request(CHAT, &chat(&extra)).await;
    let mut requests = Vec::new();
    for _ in 0..8 {
        requests.push(worker.submitted().await.request);
    }
    // 8 * 80 * 60 kB = 38 MB of events, if anybody made them.
    for _ in 0..80 {
        let outputs = requests.iter().map(|request| heavy(*request)).collect();
        worker.send(Frame::Step(step(outputs)));
    }
    let mut cancelled = Vec::new();
    for _ in 0..8 {
        cancelled.push(worker.cancelled().await);
    }
    cancelled.sort();
    requests.sort();
    assert_eq!(cancelled, requests);
    // What was on its way is all that there is: the connection is gone too.
    assert!(connection.closed().await < 16 << 20);
}
