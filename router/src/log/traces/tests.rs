//! The queue of spans: its bound, what it loses, and how often that is told.

use axum::http::{HeaderName, HeaderValue};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use super::*;
use crate::log::kept::KeptLog;

/// Spans that a router makes without a request, and that go to `endpoint`.
fn traces(endpoint: &str) -> (Traces, Arc<Metrics>) {
    let config = TracesConfig {
        endpoint: endpoint.parse().unwrap(),
        sample_ratio: 1.0,
        timeout: Duration::from_secs(60),
        certificate: None,
        service: Some("mine".into()),
    };
    let metrics = Arc::new(Metrics::default());
    (Traces::start(Some(&config), "router-1", &metrics).unwrap(), metrics)
}

fn span(traces: &Traces) -> Arc<Span> {
    traces.request(&Method::POST, "/", &HeaderMap::new()).unwrap()
}

fn lost(metrics: &Metrics, reason: &str) -> u64 {
    let text = metrics.text();
    let name = format!("headrace_spans_dropped_total{{reason=\"{reason}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |n| n.parse().unwrap())
}

#[tokio::test]
async fn a_full_queue_loses_what_comes_and_the_end_what_is_left() {
    // takes requests and never answers: nothing leaves the queue but the first batch
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (traces, metrics) = traces(&format!("http://{}/", listener.local_addr().unwrap()));
    drop(span(&traces)); // the first batch
    let (mut stream, _) = listener.accept().await.unwrap();
    assert!(stream.read(&mut [0; 100]).await.unwrap() > 0, "it is being sent");
    for _ in 0..5_000 {
        drop(span(&traces));
    }
    assert_eq!(lost(&metrics, "queue_full"), 5_000 - 4_096);
    traces.end().await;
    assert_eq!(lost(&metrics, "shutdown"), 4_097);
    drop(span(&traces));
    assert_eq!(lost(&metrics, "shutdown"), 4_098);
    assert_eq!(metrics.spans.exported.get(), 0);
}

#[tokio::test]
async fn that_spans_are_lost_is_told_once_until_they_are_taken_again() {
    let log = KeptLog::default();
    let format = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone());
    let _guard = tracing::subscriber::set_default(format.finish());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (traces, metrics) = traces(&format!("http://{}/", listener.local_addr().unwrap()));
    for (batch, answer) in
        ["400 Bad Request", "400 Bad Request", "200 OK", "400 Bad Request"].into_iter().enumerate()
    {
        drop(span(&traces));
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(stream.read(&mut [0; 4_096]).await.unwrap() > 0);
        let answer = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut stream, answer.as_bytes()).await.unwrap();
        let seen = || lost(&metrics, "not_taken") + metrics.spans.exported.get();
        while seen() < batch as u64 + 1 {
            tokio::task::yield_now().await;
        }
    }
    let count = |text: &str| log.text().matches(text).count();
    assert_eq!((count("spans are lost"), count("takes spans again")), (2, 1));
    assert_eq!(count("tracing requests"), 1);
}

#[tokio::test]
async fn what_nobody_samples_makes_no_span_and_keeps_its_number() {
    let (traces, metrics) = traces("http://127.0.0.1:9/");
    let mut headers = HeaderMap::new();
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    headers.insert(HeaderName::from_static("traceparent"), HeaderValue::from_static(parent));
    let request = traces.request(&Method::POST, "/", &headers).unwrap();
    request.set("key", "value");
    request.event("event", tokio::time::Instant::now());
    request.fail("error", "why");
    let part = request.child_since("part", tokio::time::Instant::now());
    assert_eq!(part.context(), request.context());
    assert!(!request.is_kept() && !part.is_kept());
    drop((request, part));
    traces.end().await;
    assert_eq!((lost(&metrics, "shutdown"), lost(&metrics, "not_taken")), (0, 0));
}

#[tokio::test]
async fn who_only_looks_has_no_span_and_without_a_collector_nobody_has() {
    let (traces, _) = traces("http://127.0.0.1:9/");
    for method in [Method::GET, Method::HEAD, Method::OPTIONS] {
        assert!(traces.request(&method, "/", &HeaderMap::new()).is_none());
    }
    let metrics = Arc::new(Metrics::default());
    let off = Traces::start(None, "router-1", &metrics).unwrap();
    assert!(off.request(&Method::POST, "/", &HeaderMap::new()).is_none());
    off.end().await; // at once
}

#[test]
fn a_file_that_holds_no_certificate_is_refused_by_name() {
    let config = TracesConfig {
        endpoint: "https://localhost/v1/traces".parse().unwrap(),
        sample_ratio: 1.0,
        timeout: Duration::from_secs(1),
        certificate: Some("/dev/null".into()),
        service: None,
    };
    let error = Collector::new(&config).unwrap_err().to_string();
    assert!(error.contains("/dev/null") && error.contains("no certificate"), "{error}");
}
