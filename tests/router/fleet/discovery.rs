//! Being found: what a router asks of etcd, and what it does when that is gone, forgetful or not an etcd at all.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::fake_worker::*;

type Answer = Box<dyn FnMut(&str, usize) -> (u16, String) + Send>;

/// An etcd that says what the test wants; `answer` gets the path and how often it was asked before.
struct FakeEtcd {
    endpoint: String,
    asked: mpsc::UnboundedReceiver<(String, Value)>,
}

impl FakeEtcd {
    async fn start(answer: impl FnMut(&str, usize) -> (u16, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let (tell, asked) = mpsc::unbounded_channel();
        let answer: Arc<Mutex<(Answer, Vec<String>)>> =
            Arc::new(Mutex::new((Box::new(answer), Vec::new())));
        tokio::spawn(async move {
            'calls: loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = Vec::new();
                let (path, body) = loop {
                    let mut piece = [0; 4096];
                    let n = stream.read(&mut piece).await.unwrap_or(0);
                    if n == 0 {
                        continue 'calls; // given up in the middle
                    }
                    bytes.extend_from_slice(&piece[..n]);
                    let text = String::from_utf8(bytes.clone()).unwrap();
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    if let Ok(body) = serde_json::from_str::<Value>(body) {
                        break (head.split(' ').nth(1).unwrap().to_owned(), body);
                    }
                };
                let (status, text) = {
                    let mut guard = answer.lock().unwrap();
                    let before = guard.1.iter().filter(|other| **other == path).count();
                    guard.1.push(path.clone());
                    (guard.0)(&path, before)
                };
                let _ = tell.send((path, body));
                let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", text.len());
                let _ = stream.write_all(format!("{head}{text}").as_bytes()).await;
            }
        });
        Self { endpoint, asked }
    }

    async fn next(&mut self, path: &str) -> Value {
        let (asked, body) = in_time(path, self.asked.recv()).await.unwrap();
        assert_eq!(asked, path);
        body
    }
}

/// As an etcd whose lease lives for `rounds` of keep-alives.
fn good(rounds: usize) -> impl FnMut(&str, usize) -> (u16, String) + Send + 'static {
    move |path, before| {
        let answer = match path {
            "/v3/lease/grant" => json!({"ID": format!("{}", 77 + before), "TTL": "2"}),
            "/v3/lease/keepalive" if before < rounds => json!({"result": {"ID": "77", "TTL": "2"}}),
            "/v3/lease/keepalive" => json!({"result": {"ID": "77"}}),
            _ => json!({"header": {}}),
        };
        (200, format!("{answer}\n"))
    }
}

async fn registered(endpoints: &str) -> Arc<headrace_router::app::App> {
    let register = format!("etcd:{endpoints}/head/race");
    start_router(move |args| {
        args.register = Some(register);
        args.register_ttl_s = 2;
    })
    .await
}

#[tokio::test]
async fn a_router_registers_stays_and_withdraws() {
    let mut etcd = FakeEtcd::start(good(usize::MAX)).await;
    let app = registered(&etcd.endpoint).await;
    assert_eq!(etcd.next("/v3/lease/grant").await, json!({"TTL": 2}));
    let put = etcd.next("/v3/kv/put").await;
    let text = |name: &str| {
        String::from_utf8(base64::decode(put[name].as_str().unwrap()).unwrap()).unwrap()
    };
    let value: Value = serde_json::from_str(&text("value")).unwrap();
    assert_eq!(value["address"], app.fleet.address().to_string(), "with the port that was taken");
    assert_eq!(text("key"), format!("head/race/{}", value["router"].as_str().unwrap()));
    assert_eq!(put["lease"], "77");
    until("the metric", || metric(&app, "headrace_discovery_registered", "") == 1.0).await;
    assert_eq!(etcd.next("/v3/lease/keepalive").await, json!({"ID": "77"}));
    app.fleet.shut_down();
    loop {
        let (path, body) = in_time("the withdrawal", etcd.asked.recv()).await.unwrap();
        if path == "/v3/lease/revoke" {
            assert_eq!(body, json!({"ID": "77"}));
            break;
        }
    }
    assert_eq!(metric(&app, "headrace_discovery_registered", ""), 0.0);
}

#[tokio::test]
async fn a_lost_lease_is_replaced() {
    let mut etcd = FakeEtcd::start(good(0)).await;
    let app = registered(&etcd.endpoint).await;
    for round in 0..2 {
        etcd.next("/v3/lease/grant").await;
        assert_eq!(etcd.next("/v3/kv/put").await["lease"], format!("{}", 77 + round));
        etcd.next("/v3/lease/keepalive").await;
    }
    let errors = || metric(&app, "headrace_discovery_errors_total", "lease_lost");
    until("the metric", || errors() >= 1.0).await;
}

#[tokio::test]
async fn another_endpoint_does_where_one_is_gone() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut etcd = FakeEtcd::start(good(usize::MAX)).await;
    let app = registered(&format!("{gone},{}", etcd.endpoint)).await;
    etcd.next("/v3/lease/grant").await;
    etcd.next("/v3/kv/put").await;
    until("the metric", || metric(&app, "headrace_discovery_registered", "") == 1.0).await;
    assert_eq!(metric(&app, "headrace_discovery_errors_total", ""), 0.0, "it was reached");
}

#[tokio::test]
async fn what_is_no_etcd_is_asked_again_and_named() {
    let answers = [
        (200, "", "etcd_answer"),
        (200, "[]", "etcd_answer"),
        (200, "<html>", "etcd_answer"),
        (200, "{\"ID\": 7}", "etcd_answer"),
        (503, "no leader", "etcd_unreachable"),
    ];
    for (status, text, reason) in answers {
        let mut well = good(usize::MAX);
        let mut etcd = FakeEtcd::start(move |path, before| match (path, before) {
            ("/v3/lease/grant", 0) => (status, text.to_owned()),
            _ => well(path, before),
        })
        .await;
        let app = registered(&etcd.endpoint).await;
        etcd.next("/v3/lease/grant").await;
        etcd.next("/v3/lease/grant").await;
        etcd.next("/v3/kv/put").await;
        assert_eq!(metric(&app, "headrace_discovery_errors_total", reason), 1.0, "{text}");
        app.fleet.shut_down();
    }
}

#[tokio::test]
async fn without_etcd_a_router_serves_all_the_same() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let app = registered(&gone.to_string()).await;
    let _worker = Behaviour::new("w1").ready(&app).await;
    let errors = || metric(&app, "headrace_discovery_errors_total", "etcd_unreachable");
    until("the metric", || errors() >= 1.0).await;
    assert!(app.fleet.ready());
}
