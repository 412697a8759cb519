//! Who may do what: pages in browsers, names that point here, clients, operators, and their addresses; `keys` and what they
//! may, `metrics`, and `tls`.

mod keys;
mod metrics;
mod tls;

use std::os::unix::fs::PermissionsExt as _;

use headrace_router::config::{RouterArgs, WorkerListen};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use super::client::{Connection, Reply, TestRouter, args};
use crate::fake_worker::{Behaviour, Event, FakeWorker, in_time};

const DRAIN: &str = "POST /workers/w/drain HTTP/1.1";
const JSON: &str = "Content-Type: application/json";

fn keys(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn is_ready(router: &TestRouter) -> bool {
    router.app.fleet.workers()["workers"][0]["state"] == "ready"
}

fn heard_nothing(worker: &mut FakeWorker) -> bool {
    !worker.so_far().iter().any(|event| matches!(event, Event::Drain(_) | Event::Submit(_)))
}

/// Sends a request whose Host is the test's own.
async fn raw(router: &TestRouter, head: &str, body: &str) -> Reply {
    let mut connection = router.connect().await;
    let bytes = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    connection.stream.write_all(bytes.as_bytes()).await.unwrap();
    connection.reply().await
}

#[tokio::test]
async fn a_page_of_another_origin_drains_no_worker_and_asks_for_nothing() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let prompt = json!({"model": "fake", "prompt": "x"}).to_string();
    for (headers, status) in [
        // what forms, images and `fetch` without a preflight can send
        ("X-A: b", 415),
        ("Content-Type: text/plain", 415),
        ("Content-Type: application/x-www-form-urlencoded", 415),
        ("Content-Type: multipart/form-data; boundary=x", 415),
        ("Origin: https://evil.com", 403),
        ("Origin: https://evil.com\r\nContent-Type: text/plain", 403),
        ("Origin: null\r\nContent-Type: application/json", 403),
        ("Origin: http://localhost:1\r\nContent-Type: application/json", 403),
        ("Sec-Fetch-Site: cross-site\r\nContent-Type: application/json", 403),
        ("Sec-Fetch-Site: same-site\r\nContent-Type: application/json", 403),
        (
            "Origin: http://localhost\r\nOrigin: https://evil.com\r\nContent-Type: application/json",
            400,
        ),
    ] {
        let reply = router.send(&format!("{DRAIN}\r\n{headers}"), b"{}").await;
        assert_eq!(reply.status, status, "{headers}");
        reply.error();
        if headers == "X-A: b" {
            continue; // programs may leave the type of a prompt out
        }
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
            let head = format!("POST {path} HTTP/1.1\r\n{headers}");
            let reply = router.send(&head, prompt.as_bytes()).await;
            assert_eq!(reply.status, status, "{path} {headers}");
        }
    }
    // nor does a preflight give it leave
    let head = format!(
        "OPTIONS /workers/w/drain HTTP/1.1\r\nOrigin: https://evil.com\r\n{}",
        "Access-Control-Request-Method: POST"
    );
    let reply = router.send(&head, b"").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (403, None));
    assert!(is_ready(&router) && heard_nothing(&mut worker));
    // its own pages and programs may
    let own =
        format!("{DRAIN}\r\n{JSON}\r\nOrigin: http://localhost\r\nSec-Fetch-Site: same-origin");
    assert_eq!(router.send(&own, b"{}").await.status, 202);
}

#[tokio::test]
async fn a_page_may_look_at_what_changes_nothing_as_far_as_its_browser_lets_it() {
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for method in ["GET", "HEAD"] {
        let head = format!("{method} /health HTTP/1.1\r\nOrigin: https://evil.com");
        let mut connection = router.connect().await;
        connection.request(&format!("{head}\r\nSec-Fetch-Site: cross-site"), b"").await;
        let reply = connection.head().await;
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, None));
    }
}

#[tokio::test]
async fn operators_who_rest_or_left_keep_no_other_out() {
    let args = RouterArgs { admin_listen: vec!["127.0.0.1:0".into()], ..args() };
    let router = TestRouter::start(args).await;
    let WorkerListen::Tcp(address) = &router.operators[0] else { panic!("a port") };
    let ask = async || {
        let mut operator = Connection::of(TcpStream::connect(address).await.unwrap());
        operator.request("GET /workers HTTP/1.1", b"").await;
        assert_eq!(in_time("an answer", operator.reply()).await.status, 200);
        operator
    };
    for _ in 0..100 {
        ask().await;
    }
    let mut resting = Vec::new();
    for _ in 0..40 {
        resting.push(ask().await);
    }
}

#[tokio::test]
async fn origins_that_were_allowed_may() {
    let allowed_origins = keys(&["https://chat.example.com"]);
    let args = RouterArgs { allowed_origins, ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let head =
        |origin| format!("{DRAIN}\r\n{JSON}\r\nOrigin: {origin}\r\nSec-Fetch-Site: cross-site");
    let reply = router.send(&head("https://chat.example.org"), b"{}").await;
    assert_eq!((reply.status, &reply.error()["code"]), (403, &"foreign_origin".into()));
    assert_eq!(router.send(&head("https://chat.example.com"), b"{}").await.status, 202);
}

#[tokio::test]
async fn a_browser_that_asks_beforehand_hears_whether_a_page_may_send_and_read() {
    const ALLOWED: &str = "https://chat.example.com";
    let args = RouterArgs { allowed_origins: keys(&[ALLOWED]), ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let asks = |origin: &str| {
        format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nOrigin: {origin}\r\n{}\r\n{}",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization,content-type"
        )
    };
    let reply = router.send(&asks(ALLOWED), b"").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some(ALLOWED)));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,content-type"));
    assert!(reply.header("access-control-allow-methods").is_some_and(|all| all.contains("POST")));
    let reply = router.send(&asks("https://evil.com"), b"").await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
    for (origin, allowed) in [(ALLOWED, Some(ALLOWED)), ("https://evil.com", None)] {
        let head = format!("GET /v1/models HTTP/1.1\r\nOrigin: {origin}");
        let reply = router.send(&head, b"").await;
        assert_eq!(reply.header("access-control-allow-origin"), allowed, "{origin}");
        assert_eq!(reply.header("access-control-allow-credentials"), None);
    }
}

#[tokio::test]
async fn a_name_that_an_attacker_points_here_gets_nothing() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for host in [
        "evil.com",
        "evil.com:8000",
        "localhost.evil.com",
        "127.0.0.1.nip.io",
        "x".repeat(300).as_str(),
    ] {
        for path in ["/metrics", "/workers", "/health", "/v1/models", "/decisions/x", "/nothing"] {
            let reply = raw(&router, &format!("GET {path} HTTP/1.1\r\nHost: {host}"), "").await;
            let error = reply.error();
            assert_eq!(
                (reply.status, &error["code"]),
                (421, &"unknown_host".into()),
                "{host} {path}"
            );
            assert!(error["message"].as_str().unwrap().len() < 300, "{error}");
        }
        // to the browser it is the same origin
        let head = format!("{DRAIN}\r\n{JSON}\r\nHost: {host}\r\nOrigin: http://{host}");
        assert_eq!(raw(&router, &head, "{}").await.status, 421, "{host}");
        let target = format!("GET http://{host}/metrics HTTP/1.1\r\nHost: {host}");
        assert_eq!(raw(&router, &target, "").await.status, 421, "{host}");
    }
    assert!(is_ready(&router) && heard_nothing(&mut worker));
    for host in ["127.0.0.1", "localhost:1", "[::1]:8000", "192.168.1.7:8000", "a.localhost"] {
        let reply = raw(&router, &format!("GET /workers HTTP/1.1\r\nHost: {host}"), "").await;
        assert_eq!(reply.status, 200, "{host}");
    }
}

#[tokio::test]
async fn other_names_can_be_allowed_and_who_has_a_key_needs_none() {
    let named = RouterArgs { allowed_hosts: keys(&["chat.example.com"]), ..args() };
    let router = TestRouter::start(named).await;
    let get = |host| format!("GET /v1/models HTTP/1.1\r\nHost: {host}");
    assert_eq!(raw(&router, &get("chat.example.com:443"), "").await.status, 200);
    assert_eq!(raw(&router, &get("example.com"), "").await.status, 421);
    let router = TestRouter::start(RouterArgs { allowed_hosts: keys(&["*"]), ..args() }).await;
    assert_eq!(raw(&router, &get("example.com"), "").await.status, 200);
    let router = TestRouter::start(RouterArgs { api_key: keys(&["k"]), ..args() }).await;
    let with = |key| format!("{}\r\nAuthorization: Bearer {key}", get("router.svc.local"));
    assert_eq!(raw(&router, &with("k"), "").await.status, 200);
    assert_eq!(raw(&router, &with("wrong"), "").await.status, 421);
    // balancers have no keys
    for (request, status) in [
        ("GET /health", 200),
        ("GET /ready", 503), // there is no worker
        ("GET /metrics", 421),
        ("GET /version", 200),
        ("POST /health", 421),
        ("GET /workers", 421),
        ("GET /health/", 421),
    ] {
        let head = format!("{request} HTTP/1.1\r\nHost: router.svc.local\r\n{JSON}");
        assert_eq!(raw(&router, &head, "").await.status, status, "{request}");
    }
}

#[tokio::test]
async fn http_2_names_its_host_in_the_target() {
    use headrace_router::http::app;
    use tower::ServiceExt as _;
    let router = TestRouter::start(args()).await;
    for (target, host, status) in [
        ("http://localhost:1/health", None, 200),
        ("http://evil.com/health", None, 421),
        ("http://localhost/health", Some("localhost"), 200),
        ("http://localhost/health", Some("evil.com"), 400),
    ] {
        let mut request = axum::http::Request::get(target).version(axum::http::Version::HTTP_2);
        if let Some(host) = host {
            request = request.header("host", host);
        }
        let request = request.body(axum::body::Body::empty()).unwrap();
        let answer = app(router.app.clone()).oneshot(request).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{target} {host:?}");
    }
}

#[tokio::test]
async fn a_key_of_clients_neither_drains_nor_shows_the_fleet() {
    let keyed = RouterArgs { api_key: keys(&["client"]), ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), keyed).await;
    let with = |head: &str, key: &str| format!("{head}\r\n{JSON}\r\nAuthorization: {key}");
    for head in [DRAIN, "GET /workers HTTP/1.1", "GET /workers/w/drain HTTP/1.1"] {
        let body: &[u8] = if head == DRAIN { b"{}" } else { b"" };
        // from this machine, too: there are keys, so there are strangers
        for key in ["Bearer client", "Bearer wrong", "Basic client", "client", "Bearer ", ""] {
            let reply = router.send(&with(head, key), body).await;
            assert_eq!(
                (reply.status, &reply.error()["code"]),
                (403, &"operators_only".into()),
                "{key}"
            );
        }
    }
    assert!(is_ready(&router) && heard_nothing(&mut worker));
    assert_eq!(router.get("/v1/models").await.status, 401);
}

#[tokio::test]
async fn a_key_of_operators_does_and_is_no_key_of_clients() {
    let keyed = RouterArgs { api_key: keys(&["client"]), admin_key: keys(&["op"]), ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), keyed).await;
    let with = |head: &str, key: &str| format!("{head}\r\n{JSON}\r\nAuthorization: Bearer {key}");
    let reply = router.get("/workers").await;
    assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(router.send(&with("GET /workers HTTP/1.1", "client"), b"").await.status, 403);
    assert_eq!(router.send(&with("GET /workers HTTP/1.1", "op"), b"").await.status, 200);
    assert_eq!(router.send(&with("GET /v1/models HTTP/1.1", "op"), b"").await.status, 401);
    assert_eq!(router.send(&with(DRAIN, "client"), b"{}").await.status, 403);
    assert!(is_ready(&router));
    let untyped = format!("{DRAIN}\r\nAuthorization: Bearer op");
    assert_eq!(router.send(&untyped, b"{}").await.status, 415);
    assert_eq!(router.send(&with(DRAIN, "op"), b"{}").await.status, 202);
    // keys of operators alone leave the clients alone
    let router = TestRouter::start(RouterArgs { admin_key: keys(&["op"]), ..args() }).await;
    assert_eq!(router.get("/v1/models").await.status, 200);
    assert_eq!(router.get("/workers").await.status, 401);
}

#[tokio::test]
async fn what_a_proxy_forwards_comes_not_from_this_machine() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for header in
        ["X-Forwarded-For: 1.2.3.4", "Forwarded: for=1.2.3.4", "X-Real-IP: 1.2.3.4", "Via: 1.1 p"]
    {
        let reply = router.send(&format!("{DRAIN}\r\n{JSON}\r\n{header}"), b"{}").await;
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (403, &"operators_only".into()),
            "{header}"
        );
        assert_eq!(
            router.send(&format!("GET /workers HTTP/1.1\r\n{header}"), b"").await.status,
            403
        );
        assert_eq!(
            router.send(&format!("GET /v1/models HTTP/1.1\r\n{header}"), b"").await.status,
            200
        );
    }
    assert!(is_ready(&router) && heard_nothing(&mut worker));
}

#[tokio::test]
async fn requests_of_unknown_connections_are_nobodys() {
    use headrace_router::http::app;
    use tower::ServiceExt as _;
    let router = TestRouter::start(args()).await;
    let request = axum::http::Request::get("/workers").header("host", "localhost");
    let request = request.body(axum::body::Body::empty()).unwrap();
    assert_eq!(app(router.app.clone()).oneshot(request).await.unwrap().status().as_u16(), 403);
}

/// The status line and what follows it, of a request on a socket of any kind.
async fn on_socket(path: &std::path::Path, head: &str, body: &str) -> String {
    let mut stream = UnixStream::connect(path).await.unwrap();
    let length = body.len();
    let bytes = format!("{head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut text = String::new();
    in_time("an answer", stream.read_to_string(&mut text)).await.unwrap();
    text
}

#[tokio::test]
async fn operators_have_addresses_of_their_own() {
    let path = std::env::temp_dir().join(format!("headrace-admin-{}", std::process::id()));
    drop(std::os::unix::net::UnixListener::bind(&path)); // left over from a router that was killed
    let args = RouterArgs {
        api_key: keys(&["client"]),
        admin_listen: vec![format!("unix:{}", path.display()), "127.0.0.1:0".into()],
        ..args()
    };
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else can open it");
    let WorkerListen::Tcp(port) = &router.operators[1] else { panic!("{:?}", router.operators) };
    let mut connection = Connection::of(TcpStream::connect(port).await.unwrap());
    connection.request("GET /workers HTTP/1.1", b"").await;
    let listed = connection.reply().await.json();
    assert_eq!(listed["workers"][0]["id"], "w");
    // nothing of the clients is served there, and the same requests are turned away
    connection.request("GET /v1/models HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 404);
    let evil = on_socket(&path, "GET /workers HTTP/1.1\r\nHost: evil.com", "").await;
    assert!(evil.starts_with("HTTP/1.1 421 "), "{evil}");
    let page = format!("{DRAIN}\r\nHost: localhost\r\n{JSON}\r\nOrigin: https://evil.com");
    assert!(on_socket(&path, &page, "{}").await.starts_with("HTTP/1.1 403 "));
    let untyped = format!("{DRAIN}\r\nHost: localhost");
    assert!(on_socket(&path, &untyped, "{}").await.starts_with("HTTP/1.1 415 "));
    for path_of in ["/health", "/ready", "/metrics", "/version", "/workers"] {
        let answer =
            on_socket(&path, &format!("GET {path_of} HTTP/1.1\r\nHost: localhost"), "").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let drain = on_socket(&path, &format!("{DRAIN}\r\nHost: localhost\r\n{JSON}"), "{}").await;
    assert!(drain.starts_with("HTTP/1.1 202 "), "{drain}");
    drop(router);
    let gone = async {
        while path.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    in_time("the socket's file to go", gone).await;
}

#[tokio::test]
async fn operators_that_are_served_at_their_own_addresses_alone_are_nobody_at_the_port_of_clients()
{
    let admin_listen = vec!["127.0.0.1:0".into()];
    let apart = RouterArgs { admin_listen, admin_listen_only: true, ..args() };
    let keyed =
        RouterArgs { admin_key: keys(&["op"]), api_key: keys(&["client"]), ..apart.clone() };
    let public = RouterArgs { public_metrics: true, ..apart.clone() };
    for (args, metrics, decisions) in [(apart, 404, 404), (public, 200, 404), (keyed, 404, 401)] {
        let op = if args.admin_key.is_empty() { "" } else { "\r\nAuthorization: Bearer op" };
        let (router, _worker) = TestRouter::with(Behaviour::new("w"), args).await;
        let WorkerListen::Tcp(own) = &router.operators[0] else { panic!("a port") };
        let mut operator = Connection::of(TcpStream::connect(own).await.unwrap());
        for (path, at_clients) in [
            ("/workers", 404),
            ("/scale", 404),
            ("/dashboard/events?once", 404),
            ("/", 404),
            ("/dashboard/page.js", 404),
            ("/metrics", metrics),
            ("/decisions/none", decisions),
            ("/health", 200),
            ("/version", 200),
        ] {
            let reply = router.send(&format!("GET {path} HTTP/1.1{op}"), b"").await;
            assert_eq!(reply.status, at_clients, "{path} at the port of clients");
            if at_clients == 404 && path != "/decisions/none" {
                assert_eq!(reply.error()["code"], "unknown_url", "{path}");
            }
            operator.request(&format!("GET {path} HTTP/1.1{op}"), b"").await;
            let reply = operator.reply().await;
            let expected = if path == "/decisions/none" { 404 } else { 200 };
            assert_eq!(reply.status, expected, "{path} at the address of operators");
        }
        let head = format!("{DRAIN}\r\n{JSON}{op}");
        assert_eq!(router.send(&head, b"{}").await.error()["code"], "unknown_url");
        operator.request(&head, b"{}").await;
        assert_eq!(operator.reply().await.status, 202);
    }
}

#[tokio::test]
async fn an_address_of_operators_asks_for_their_key_where_there_is_one() {
    let args =
        RouterArgs { admin_key: keys(&["op"]), admin_listen: vec!["127.0.0.1:0".into()], ..args() };
    let router = TestRouter::start(args).await;
    let WorkerListen::Tcp(port) = &router.operators[0] else { panic!("{:?}", router.operators) };
    let mut connection = Connection::of(TcpStream::connect(port).await.unwrap());
    connection.request("GET /workers HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 401);
    connection.request("GET /workers HTTP/1.1\r\nAuthorization: Bearer op", b"").await;
    assert_eq!(connection.reply().await.status, 200);
}

#[tokio::test]
async fn odd_authorizations_are_nobodys() {
    let router = TestRouter::start(RouterArgs { api_key: keys(&["key"]), ..args() }).await;
    for (value, status) in [
        ("Bearer key".to_owned(), 200),
        ("bearer  key ".into(), 200),
        ("Bearer key\r\nAuthorization: Bearer other".into(), 400),
        ("Bearer other\r\nAuthorization: Bearer key".into(), 400),
        ("Bearer".into(), 401),
        ("Bearer\tkey".into(), 401),
        ("Bearer key,key".into(), 401),
        ("Bearer \u{e9}key".into(), 401),
        (format!("Bearer {}", "k".repeat(8_000)), 401),
    ] {
        let reply =
            router.send(&format!("GET /v1/models HTTP/1.1\r\nAuthorization: {value}"), b"").await;
        assert_eq!(reply.status, status, "{value:.60}");
    }
}
