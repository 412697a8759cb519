//! Who sees `/metrics`, and whose decisions are whose where nobody is known.

use headrace_router::config::{RouterArgs, WorkerListen};

use super::super::client::{Connection, TestRouter, args};
use tokio::net::TcpStream;

const FORWARDED: &str = "\r\nX-Forwarded-For: 10.0.0.1";

async fn status(router: &TestRouter, path: &str, headers: &str) -> u16 {
    router.send(&format!("GET {path} HTTP/1.1{headers}"), b"").await.status
}

fn keyed() -> RouterArgs {
    let admin_key = vec!["op".into(), "scrape only=metrics name=prometheus".into()];
    RouterArgs { api_key: vec!["k".into()], admin_key, ..args() }
}

#[tokio::test]
async fn metrics_are_for_this_machine_and_for_keys_of_operators() {
    let router = TestRouter::start(keyed()).await;
    for (headers, expected) in [
        ("", 200),
        ("\r\nAuthorization: Bearer op", 200),
        ("\r\nAuthorization: Bearer scrape", 200),
        (FORWARDED, 401),
        ("\r\nVia: 1.1 proxy\r\nAuthorization: Bearer wrong", 401),
        ("\r\nForwarded: for=10.0.0.1\r\nAuthorization: Bearer k", 403),
        ("\r\nX-Real-IP: 10.0.0.1\r\nAuthorization: Bearer scrape", 200),
        ("\r\nX-Forwarded-For: 10.0.0.1\r\nX-Api-Key: op", 200),
    ] {
        assert_eq!(status(&router, "/metrics", headers).await, expected, "{headers}");
    }
    // a key that reads metrics does nothing else, and the others are as before
    for (path, key, expected) in [
        ("/workers", "scrape", 403),
        ("/workers", "op", 200),
        ("/scale", "scrape", 403),
        ("/scale", "k", 403),
        ("/scale", "op", 200),
        ("/decisions/x", "scrape", 401),
        ("/v1/models", "scrape", 401),
        ("/v1/models", "k", 200),
        ("/version", "scrape", 200),
    ] {
        let headers = format!("\r\nAuthorization: Bearer {key}");
        assert_eq!(status(&router, path, &headers).await, expected, "{path} {key}");
    }
    let head = "POST /workers/w/drain HTTP/1.1\r\nContent-Type: application/json";
    let head = format!("{head}\r\nAuthorization: Bearer scrape");
    assert_eq!(router.send(&head, b"{}").await.status, 403);
}

#[tokio::test]
async fn without_keys_a_proxy_sees_neither_metrics_nor_decisions_and_a_flag_opens_the_metrics() {
    let router = TestRouter::start(args()).await;
    for (path, near) in [("/metrics", 200), ("/decisions/none", 404), ("/workers", 200)] {
        assert_eq!(status(&router, path, "").await, near, "{path}");
        let reply = router.send(&format!("GET {path} HTTP/1.1{FORWARDED}"), b"").await;
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (403, &"operators_only".into()),
            "{path}"
        );
    }
    for public in [
        RouterArgs { public_metrics: true, ..args() },
        RouterArgs { public_metrics: true, ..keyed() },
    ] {
        let router = TestRouter::start(public).await;
        assert_eq!(status(&router, "/metrics", FORWARDED).await, 200);
        assert_ne!(status(&router, "/workers", FORWARDED).await, 200);
    }
}

#[tokio::test]
async fn another_name_reaches_metrics_only_with_a_key_or_where_they_are_public() {
    let ask = async |router: &TestRouter, headers: &str| {
        let mut connection = router.connect().await;
        let head = format!("GET /metrics HTTP/1.1\r\nHost: router.example.com{headers}\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut connection.stream, head.as_bytes()).await.unwrap();
        connection.reply().await.status
    };
    let router = TestRouter::start(keyed()).await;
    assert_eq!(ask(&router, "").await, 421, "a name that a stranger's DNS may have pointed here");
    assert_eq!(ask(&router, "\r\nAuthorization: Bearer scrape").await, 200);
    let router = TestRouter::start(RouterArgs { public_metrics: true, ..keyed() }).await;
    assert_eq!(ask(&router, "").await, 200);
}

#[tokio::test]
async fn an_address_of_operators_shows_metrics_to_those_it_lets_in() {
    for (args, expected) in [(args(), 200), (keyed(), 401)] {
        let args = RouterArgs { admin_listen: vec!["127.0.0.1:0".into()], ..args };
        let router = TestRouter::start(args).await;
        let WorkerListen::Tcp(address) = &router.operators[0] else { panic!("a port") };
        let ask = async |headers: &str| {
            let mut operator = Connection::of(TcpStream::connect(address).await.unwrap());
            operator.request(&format!("GET /metrics HTTP/1.1{headers}"), b"").await;
            operator.reply().await.status
        };
        assert_eq!(ask("").await, expected);
        if expected == 401 {
            assert_eq!(ask("\r\nAuthorization: Bearer scrape").await, 200);
        }
    }
}
