//! `/v1/messages` as Anthropic's clients see it: events in their order, whole answers, errors in their form.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Failed, FailureKind, Submit};
use serde_json::{Value, json};

use super::super::client::{Connection, Reply, TestRouter, args};
use crate::fake_worker::{Behaviour, FakeWorker, MODEL, Script, letters};

const PATH: &str = "/v1/messages";
const HEAD: &str = "POST /v1/messages HTTP/1.1\r\nContent-Type: application/json";

fn body(more: &Value) -> String {
    let mut body = json!({"model": MODEL, "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// The data of all events, after a check that their names are their types.
fn events(text: &str) -> Vec<Value> {
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once("\ndata: ").unwrap_or_else(|| panic!("{event}"));
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    });
    events.collect()
}

/// The error, after a check that it has Anthropic's form.
fn error(reply: &Reply) -> (u16, String, String) {
    let body = reply.json();
    let keys: Vec<_> = body.as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        (keys.as_slice(), &body["type"]),
        (["type", "error", "request_id"].map(String::from).as_slice(), &json!("error"))
    );
    assert_eq!(body["request_id"], reply.header("request-id").unwrap());
    assert_eq!(reply.header("x-request-id"), reply.header("request-id"));
    let text = |field: &str| body["error"][field].as_str().unwrap().to_owned();
    (reply.status, text("type"), text("message"))
}

#[tokio::test]
async fn a_whole_answer_is_that_of_anthropic() {
    let (router, _worker) = TestRouter::saying("Hello!").await;
    let reply = router.post(PATH, body(&json!({}))).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")));
    let mut got = reply.json();
    let id = got.as_object_mut().unwrap().remove("id").unwrap();
    assert!(id.as_str().unwrap().starts_with("msg_"));
    let tokens = got["usage"]["input_tokens"].as_u64().unwrap();
    assert!(tokens > 5);
    let want = json!({
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": null,
        "usage": {
            "input_tokens": tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
            "service_tier": "standard",
        },
    });
    assert_eq!(got, want);
    let count = router.post("/v1/messages/count_tokens", body(&json!({}))).await;
    assert_eq!(count.json(), json!({"input_tokens": tokens}));
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says() {
    let (router, _worker) = TestRouter::saying("Hi there").await;
    let whole = router.post(PATH, body(&json!({}))).await.json();
    let reply = router.post(PATH, body(&json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = events(reply.text());
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let deltas = &events[3..events.len() - 3];
    let text: String =
        deltas.iter().map(|event| event["delta"]["text"].as_str().unwrap()).collect();
    assert_eq!(json!([{"type": "text", "text": text}]), whole["content"]);
    let end = &events[events.len() - 2];
    assert_eq!(
        (&end["usage"], &end["delta"]["stop_reason"]),
        (&whole["usage"], &json!("end_turn"))
    );
    assert_eq!(events[0]["message"]["content"], json!([]));
}

#[tokio::test]
async fn the_stop_sequence_that_ended_it_is_said() {
    let (router, _worker) = TestRouter::saying("one, two; three").await;
    let stops = json!({"stop_sequences": [";", "three"]});
    let whole = router.post(PATH, body(&stops)).await.json();
    assert_eq!(whole["content"][0]["text"], "one, two");
    assert_eq!(
        (&whole["stop_reason"], &whole["stop_sequence"]),
        (&json!("stop_sequence"), &json!(";"))
    );
    let streamed = json!({"stop_sequences": [";", "three"], "stream": true});
    let events = events(router.post(PATH, body(&streamed)).await.text());
    let want = json!({"stop_reason": "stop_sequence", "stop_sequence": ";"});
    assert_eq!(events[events.len() - 2]["delta"], want);
    let short = json!({"max_tokens": 2});
    let worker = Behaviour::new("long").answers(|submit: &Submit| {
        let text = &"abcdef"[..submit.max_tokens as usize];
        let finish = headrace_router::core::frame::Finish::Length;
        Some(Script { steps: vec![letters(text)], finish })
    });
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let whole = router.post(PATH, body(&short)).await.json();
    assert_eq!(
        (&whole["stop_reason"], &whole["content"][0]["text"]),
        (&json!("max_tokens"), &json!("ab"))
    );
}

/// What the worker gets of a request.
async fn submitted(router: &TestRouter, worker: &mut FakeWorker, path: &str, body: &str) -> Submit {
    let mut connection = router.connect().await;
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
    connection.request(&head, body.as_bytes()).await;
    worker.submitted().await
}

#[tokio::test]
async fn a_conversation_is_the_same_prompt_as_that_of_a_chat() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let theirs = json!({
        "system": "Be brief.", "seed": 5, "temperature": 0.5, "top_k": 7, "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "c"}]},
        ],
    });
    let call =
        json!({"id": "i", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}});
    let ours = json!({
        "model": MODEL, "max_tokens": 100, "seed": 5, "temperature": 0.5, "top_k": 7, "stop": "x",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "i", "content": "c"},
        ],
    });
    let theirs = submitted(&router, &mut worker, PATH, &body(&theirs)).await;
    let ours = submitted(&router, &mut worker, "/v1/chat/completions", &ours.to_string()).await;
    assert_eq!(theirs.tokens, ours.tokens);
    assert_eq!(theirs.sampling, ours.sampling);
    assert_eq!(theirs.max_tokens, ours.max_tokens);
}

#[tokio::test]
async fn mistakes_are_told_in_anthropics_form_and_by_name() {
    let (router, _worker) = TestRouter::saying("x").await;
    for (path, body, status, kind, says) in [
        (PATH, body(&json!({"wish": 1})), 400, "invalid_request_error", "`wish`"),
        (
            PATH,
            body(&json!({"stop_sequences": [""]})),
            400,
            "invalid_request_error",
            "`stop_sequences`",
        ),
        (PATH, body(&json!({"model": "other"})), 404, "not_found_error", "`other`"),
        (PATH, "{".into(), 400, "invalid_request_error", "JSON"),
        (
            PATH,
            body(&json!({"max_tokens": 100_000})),
            400,
            "invalid_request_error",
            "context length",
        ),
        ("/v1/messages/batches", "{}".into(), 404, "not_found_error", "/v1/messages/batches"),
        ("/v1/messages/count_tokens", "{}".into(), 400, "invalid_request_error", "`messages`"),
    ] {
        let (got, got_kind, message) = error(&router.post(path, &body).await);
        assert_eq!((got, got_kind.as_str()), (status, kind), "{path} {body}");
        assert!(message.contains(says), "{message}");
    }
    let (status, kind, _) = error(&router.get(PATH).await);
    assert_eq!((status, kind.as_str()), (405, "invalid_request_error"));
    let chat = router.post("/v1/chat/completions", "{}").await;
    chat.error(); // has OpenAI's form
}

#[tokio::test]
async fn versions_betas_and_queries_of_clients_are_taken() {
    let (router, _worker) = TestRouter::saying("x").await;
    let head = "POST /v1/messages?beta=true HTTP/1.1\r\nContent-Type: application/json\r\n\
        anthropic-version: 2023-06-01\r\nanthropic-beta: some-beta-2025-01-01\r\nx-api-key: any";
    assert_eq!(router.send(head, body(&json!({})).as_bytes()).await.status, 200);
}

#[tokio::test]
async fn a_key_may_come_as_anthropics_clients_send_it() {
    let args = RouterArgs {
        api_key: vec!["k1".into()],
        max_body_bytes: 1_000,
        max_body_memory_bytes: 1 << 20,
        ..args()
    };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
    for (headers, status) in [
        ("x-api-key: k1", 200),
        ("Authorization: Bearer k1", 200),
        ("Authorization: Bearer k1\r\nx-api-key: other", 200),
        ("Authorization: Bearer other\r\nx-api-key: k1", 200),
        ("x-api-key: other", 401),
        ("x-other: k1", 401),
        ("x-api-key: k1\r\nx-api-key: k1", 400),
    ] {
        let reply = router.send(&format!("{HEAD}\r\n{headers}"), body(&json!({})).as_bytes()).await;
        assert_eq!(reply.status, status, "{headers}");
        if status != 200 {
            let kind = if status == 401 { "authentication_error" } else { "invalid_request_error" };
            assert_eq!(error(&reply).1, kind);
        }
    }
    let long = body(&json!({"system": "x".repeat(2_000)}));
    let reply = router.send(&format!("{HEAD}\r\nx-api-key: k1"), long.as_bytes()).await;
    let (status, kind, _) = error(&reply);
    assert_eq!((status, kind.as_str()), (413, "request_too_large"));
}

#[tokio::test]
async fn a_fleet_without_workers_is_overloaded() {
    let args = RouterArgs { queue_timeout_ms: 1, ..args() };
    let (router, worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
    worker.leaves(&router.app).await;
    let reply = router.post(PATH, body(&json!({}))).await;
    let (status, kind, _) = error(&reply);
    assert_eq!((status, kind.as_str()), (529, "overloaded_error"));
    assert!(reply.header("retry-after").is_some());
}

async fn stream(worker: Behaviour) -> (TestRouter, FakeWorker, Connection, Submit) {
    let args = RouterArgs { queue_timeout_ms: 300, ..args() };
    let (router, mut worker) = TestRouter::with(worker, args).await;
    let mut connection = router.connect().await;
    connection.request(HEAD, body(&json!({"stream": true})).as_bytes()).await;
    let submit = worker.submitted().await;
    (router, worker, connection, submit)
}

#[tokio::test]
async fn a_failure_in_the_middle_is_an_error_event_and_no_stop() {
    let (_router, worker, mut connection, submit) = stream(Behaviour::new("w")).await;
    worker.gives(submit.request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    let mut text = connection.piece().await;
    let (kind, message) = (FailureKind::BadToken, "out of luck".into());
    let failed = Failed { request: submit.request, kind, message };
    worker.send(headrace_router::core::frame::Frame::Failed(failed));
    while let Some(chunk) = connection.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let events = events(&text);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(events.iter().all(|event| event["type"] != "message_stop"), "{text}");
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels() {
    let (_router, mut worker, mut connection, submit) = stream(Behaviour::new("w")).await;
    worker.gives(submit.request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    connection.piece().await;
    drop(connection);
    assert_eq!(worker.cancelled().await, submit.request);
}
