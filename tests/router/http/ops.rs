//! Probes, lists, keys, and paths that do not exist; none needs a worker.

mod dashboard;
mod metrics;
mod scale;
mod traces;

use headrace_router::config::RouterArgs;
use serde_json::json;

use super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, MODEL, state_of, until};

#[tokio::test]
async fn a_router_without_workers_is_alive_and_not_ready() {
    let router = TestRouter::start(args()).await;
    for path in ["/health", "/healthz", "/livez", "/ping"] {
        let live = router.get(path).await;
        assert_eq!((live.status, &live.json()["status"]), (200, &"ok".into()), "{path}");
    }
    for path in ["/ready", "/readyz"] {
        let ready = router.get(path).await;
        assert_eq!((ready.status, ready.header("retry-after")), (503, Some("1")), "{path}");
        assert_eq!(ready.error()["code"], "no_worker");
    }
    assert_eq!(router.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    assert!(router.get("/metrics").await.text().contains("headrace_build_info"));
    assert_eq!(router.get("/workers").await.status, 200);
    let models = router.get("/v1/models").await.json();
    assert_eq!(models, serde_json::json!({"object": "list", "data": []}));
}

#[tokio::test]
async fn metrics_come_in_the_format_that_the_scraper_names() {
    let router = TestRouter::start(args()).await;
    let text = router.get("/metrics").await;
    assert_eq!(text.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(text.text().contains("# TYPE headrace_links_total counter\nheadrace_links_total 0\n"));
    let head =
        "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1";
    let open = router.send(head, b"").await;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(open.header("content-type"), Some(content_type));
    assert!(open.text().contains("# TYPE headrace_links counter\nheadrace_links_total 0\n"));
    assert!(open.text().ends_with("\n# EOF\n"));
    // what is read off at the moment, and what the log counts, is there in both
    let read_off = [
        "headrace_workers{state=\"ready\"} 0",
        "headrace_log_lines_dropped_total{why=",
        "headrace_tasks ",
    ];
    for name in read_off {
        assert!(text.text().contains(name) && open.text().contains(name), "{name}");
    }
}

#[tokio::test]
async fn the_types_of_the_weights_are_shown_by_model_and_by_worker() {
    let of = |worker: &str, dtype: &str| {
        let mut behaviour = Behaviour::new(worker);
        behaviour.hello.dtype = dtype.into();
        behaviour
    };
    let (router, one) = TestRouter::with(of("w1", "int8"), args()).await;
    let two = of("w2", "bfloat16").ready(&router.app).await;
    let _three = of("w3", "int8").ready(&router.app).await;
    let of_model = format!("/v1/models/{MODEL}");
    let dtypes = async || router.get(&of_model).await.json()["dtypes"].clone();
    assert_eq!(dtypes().await, json!(["bfloat16", "int8"]));
    assert_eq!(router.get("/v1/models").await.json()["data"][0]["dtypes"], dtypes().await);
    let workers = router.get("/workers").await.json();
    let each: Vec<_> = workers["workers"].as_array().unwrap().iter().map(|w| &w["dtype"]).collect();
    assert_eq!(each, ["int8", "bfloat16", "int8"]);
    drop((one, two));
    until("two are gone", || state_of(&router.app, "w2").is_empty()).await;
    assert_eq!(dtypes().await, json!(["int8"]));
}

#[tokio::test]
async fn without_a_worker_a_request_is_told_when_to_come_back() {
    let router = TestRouter::start(args()).await;
    let body = r#"{"model": "m", "messages": [{"role": "user", "content": "hi"}]}"#;
    let reply = router.post("/v1/chat/completions", body).await;
    assert_eq!(reply.status, 503);
    assert!(reply.header("retry-after").is_some());
    assert_eq!(reply.error()["code"], "no_worker");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_answered_in_openais_shape() {
    let router = TestRouter::start(args()).await;
    let reply = router.get("/v1/nothing").await;
    assert_eq!((reply.status, &reply.error()["code"]), (404, &"unknown_url".into()));
    let reply = router.get("/v1/chat/completions").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(reply.error()["code"], "method_not_allowed");
    let reply = router.send("DELETE /health HTTP/1.1", b"").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("GET,HEAD")));
    let reply = router.get("/v1/models/some/name").await;
    assert_eq!((reply.status, &reply.error()["code"]), (404, &"model_not_found".into()));
}

#[tokio::test]
async fn every_answer_carries_the_clients_request_id_or_a_new_one() {
    let router = TestRouter::start(args()).await;
    let reply = router.send("GET /health HTTP/1.1\r\nX-Request-ID: abc-1", b"").await;
    assert_eq!(reply.header("x-request-id"), Some("abc-1"));
    let one = router.get("/nothing").await;
    let two = router.get("/nothing").await;
    assert!(one.header("x-request-id").unwrap().starts_with("req-"));
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
}

#[tokio::test]
async fn keys_guard_all_but_probes_and_metrics() {
    let router =
        TestRouter::start(RouterArgs { api_key: vec!["one".into(), "two".into()], ..args() }).await;
    for path in [
        "/health", "/healthz", "/livez", "/ping", "/ready", "/readyz", "/metrics", "/version",
        "/nothing",
    ] {
        assert_ne!(router.get(path).await.status, 401, "{path}");
    }
    for path in ["/v1/models", "/decisions/x", "/v1/models/x"] {
        let reply = router.get(path).await;
        assert_eq!(
            (reply.status, reply.header("www-authenticate")),
            (401, Some("Bearer")),
            "{path}"
        );
        assert_eq!(reply.error()["code"], "invalid_api_key");
    }
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
        assert_eq!(router.post(path, "{}").await.status, 401, "{path}");
    }
    let head = |key| format!("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}");
    assert_eq!(router.send(&head("two"), b"").await.status, 200);
    assert_eq!(router.send(&head("three"), b"").await.status, 401);
}

#[tokio::test]
async fn requests_are_counted_by_route_status_and_error() {
    let router = TestRouter::start(args()).await;
    router.post("/v1/completions", "{").await;
    router.get("/v1/whatever-a-client-makes-up").await;
    let metrics = router.get("/metrics").await;
    let text = metrics.text();
    assert!(text.contains(r#"route="/v1/completions",status="400",error="bad_request""#), "{text}");
    assert!(text.contains(r#"route="unknown",status="404",error="unknown_url""#), "{text}");
}
