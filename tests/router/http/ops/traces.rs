//! Spans of requests, as a collector gets them over a real socket.

mod collector;

use headrace_router::config::{RouterArgs, TracesVariables};
use headrace_router::core::frame::*;
use serde_json::{Value, json};

use self::collector::{FakeCollector, OK, Seen, tls_of_localhost};
use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::*;

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const SECRET_WORD: &str = "halibut";

fn chat(extra: &Value) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": SECRET_WORD}]);
    let mut body = json!({"model": MODEL, "messages": messages});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

/// The span of a request of this id: all of its other spans have ended before.
fn is_request(id: &'static str) -> impl Fn(&Seen) -> bool {
    move |span| span.says("headrace.request_id") == id
}

fn head(id: &str, more: &str) -> String {
    format!("{CHAT}\r\nX-Request-ID: {id}{more}")
}

fn one<'a>(spans: &'a [Seen], name: &str) -> &'a Seen {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
    assert!(found.next().is_none(), "more than one {name} in {spans:#?}");
    span
}

async fn asked(router: &TestRouter, head: &str, body: &Value) -> Connection {
    let mut connection = router.connect().await;
    connection.request(head, &chat(body)).await;
    connection
}

#[tokio::test]
async fn a_streamed_chat_is_one_trace_under_the_clients_span() {
    let mut collector = FakeCollector::start().await;
    let (router, mut worker) =
        TestRouter::with(Behaviour::says("w", "abc"), collector.args()).await;
    let head =
        head("a", &format!("\r\ntraceparent: {PARENT}\r\ntracestate: x=1\r\ntracestate: y@z=2"));
    let body = json!({"stream": true, "max_tokens": 9, "temperature": 0.5, "top_k": 7});
    let reply = router.send(&head, &chat(&body)).await;
    assert_eq!(reply.status, 200);
    let submit = worker.submitted().await;
    let spans = collector.until(is_request("a")).await;
    assert_eq!(spans.len(), 5, "{spans:#?}");
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    assert!(spans.iter().all(|span| span.trace == trace && span.state == "x=1,y@z=2"));
    let request = one(spans, "POST /v1/chat/completions");
    assert_eq!((request.parent.as_str(), request.kind as i32), ("00f067aa0ba902b7", 2));
    for name in ["tokenise", "queue", "route"] {
        let span = one(spans, name);
        assert_eq!((&span.parent, span.kind as i32), (&request.id, 1));
        assert!(span.nanos.0 >= request.nanos.0 && span.nanos.1 <= request.nanos.1, "{name}");
    }
    let leg = one(spans, "leg");
    assert_eq!((&leg.parent, leg.kind as i32), (&request.id, 3));
    let told = submit.trace.expect("it is traced");
    assert_eq!(told.parent.to_string(), format!("00-{trace}-{}-01", leg.id));
    assert_eq!(told.state.unwrap().as_str(), "x=1,y@z=2");
    assert_eq!(&*submit.request_id, "a");
    for (key, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/v1/chat/completions"),
        ("url.path", "/v1/chat/completions"),
        ("http.response.status_code", "200"),
        ("network.protocol.version", "1.1"),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", MODEL),
        ("gen_ai.response.model", MODEL),
        ("gen_ai.request.max_tokens", "9"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.request.top_k", "7"),
        ("gen_ai.usage.output_tokens", "4"),
        ("gen_ai.usage.cache_read.input_tokens", "0"),
        ("service.name", "headrace-router"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("telemetry.sdk.language", "rust"),
        ("error.type", ""),
    ] {
        assert_eq!(request.says(key), value, "{key}");
    }
    assert!(request.says("gen_ai.response.id").starts_with("chatcmpl-"));
    assert!(request.says("gen_ai.response.finish_reasons").contains("\"stop\""));
    assert!(request.says("service.instance.id").starts_with("router-"));
    assert_eq!(
        (&request.error, request.events.as_slice()),
        (&None, &["first_token".to_owned()][..])
    );
    assert_eq!((leg.says("headrace.result"), leg.says("headrace.worker")), ("finished", "w"));
    assert_eq!(leg.says("headrace.leg"), submit.request.0.to_string());
    assert_eq!(leg.events, ["first_token"]);
    assert_eq!(one(spans, "route").says("headrace.worker"), "w");
    assert_eq!(one(spans, "route").says("headrace.policy"), "kv");
    assert!(!format!("{spans:?}").contains(SECRET_WORD), "no text of anybody");
    until("they are counted", || metric(&router.app, "headrace_spans_exported_total", "") == 5.0)
        .await;
}

#[tokio::test]
async fn without_a_collector_no_leg_is_told_of_a_trace_but_its_requests_id() {
    let args = RouterArgs { otlp: TracesVariables::default(), otlp_endpoint: None, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::says("w", "a"), args).await;
    let head = head("a", &format!("\r\ntraceparent: {PARENT}"));
    assert_eq!(router.send(&head, &chat(&json!({}))).await.status, 200);
    let submit = worker.submitted().await;
    assert_eq!((submit.trace, &*submit.request_id), (None, "a"));
}

#[tokio::test]
async fn the_client_decides_what_is_kept_and_the_share_where_it_says_nothing() {
    let mut collector = FakeCollector::start().await;
    let args = RouterArgs { otlp_sample_ratio: 0.0, ..collector.args() };
    let (router, mut worker) = TestRouter::with(Behaviour::says("w", "a"), args).await;
    let unsampled = format!("{}00", &PARENT[..53]);
    let body = chat(&json!({}));
    assert_eq!(router.send(&head("none", ""), &body).await.status, 200);
    let told = worker.submitted().await.trace.expect("it is told that it is not kept");
    assert!(!told.parent.sampled && told.parent.trace != [0; 16]);
    let traceparent = |text: &str| format!("\r\ntraceparent: {text}");
    router.send(&head("not", &traceparent(&unsampled)), &body).await;
    let told = worker.submitted().await.trace.unwrap().parent;
    let of_client = unsampled.parse::<TraceParent>().unwrap();
    assert_eq!((told.trace, told.sampled), (of_client.trace, false));
    router.send(&head("kept", &traceparent(PARENT)), &body).await;
    assert!(worker.submitted().await.trace.unwrap().parent.sampled);
    let spans = collector.until(is_request("kept")).await;
    assert_eq!(spans.len(), 5, "those of the last request alone: {spans:#?}");
}

#[tokio::test]
async fn a_header_that_is_no_traceparent_begins_a_new_trace() {
    let mut collector = FakeCollector::start().await;
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), collector.args()).await;
    let longer = format!("{PARENT}-and-more");
    let zeros = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
    let twice = format!("{PARENT}\r\ntraceparent: {PARENT}");
    let long = "x".repeat(6_000);
    let wrong = ["", "no", &PARENT.to_uppercase(), &longer, &zeros, &twice, &long, "caf\u{e9}"];
    for wrong in wrong {
        let head = head("wrong", &format!("\r\ntraceparent: {wrong}\r\ntracestate: a=1"));
        assert_eq!(router.send(&head, &chat(&json!({}))).await.status, 200, "{wrong}");
    }
    let head = head("state", &format!("\r\ntraceparent: {PARENT}\r\ntracestate: no member"));
    assert_eq!(router.send(&head, &chat(&json!({}))).await.status, 200);
    let spans = collector.until(is_request("state")).await;
    let roots: Vec<_> = spans.iter().filter(|span| span.parent.is_empty()).collect();
    assert_eq!(roots.len(), 8);
    assert!(roots.iter().all(|root| root.trace != PARENT[3..35] && root.state.is_empty()));
    let last = spans.iter().find(|span| is_request("state")(span)).unwrap();
    assert_eq!((last.trace.as_str(), last.state.as_str()), (&PARENT[3..35], ""));
}

#[tokio::test]
async fn a_split_request_has_a_span_for_each_leg() {
    let mut collector = FakeCollector::start().await;
    let args = RouterArgs { policy: "round-robin".into(), ..collector.args() };
    let router = TestRouter::start(args).await;
    let mut prefill = Behaviour::of_role("p1", Role::Prefill).ready(&router.app).await;
    let mut decode = Behaviour::of_role("d1", Role::Decode).ready(&router.app).await;
    let mut client = asked(&router, &head("split", ""), &json!({})).await;
    let (on_prefill, on_decode) = tokio::join!(prefill.submitted(), decode.submitted());
    prefill.gives(on_prefill.request, &letters("a"), None);
    decode.told_to_go_on().await;
    prefill.send(Frame::Freed(Freed { request: on_prefill.request, blocks: 3 }));
    until("it is let go", || metric(&router.app, "headrace_legs_total", "let_go") == 1.0).await;
    decode.gives(on_decode.request, &letters("b"), Some(Finish::Length));
    assert_eq!(client.reply().await.status, 200);
    let spans = collector.until(is_request("split")).await;
    for (name, worker, result, submit) in
        [("prefill leg", "p1", "let_go", &on_prefill), ("decode leg", "d1", "finished", &on_decode)]
    {
        let leg = one(spans, name);
        assert_eq!((leg.says("headrace.worker"), leg.says("headrace.result")), (worker, result));
        assert_eq!((leg.says("gen_ai.usage.output_tokens"), &leg.error), ("1", &None));
        assert_eq!(leg.events, ["first_token"]);
        let told = submit.trace.as_ref().unwrap().parent.to_string();
        assert_eq!(told[36..52], leg.id);
    }
    assert_eq!(one(spans, "route").says("headrace.prefill_worker"), "p1");
}

#[tokio::test]
async fn a_lost_worker_leaves_a_leg_with_an_error_and_the_next_one_goes_on() {
    let mut collector = FakeCollector::start().await;
    let router = TestRouter::start(collector.args()).await;
    let mut first = Behaviour::new("w1").ready(&router.app).await;
    let mut client = asked(&router, &head("resumed", ""), &json!({"stream": true})).await;
    let submit = first.submitted().await;
    first.gives(submit.request, &letters("ab"), None);
    assert_eq!(client.head().await.status, 200);
    client.piece().await;
    let mut second = Behaviour::new("w2").ready(&router.app).await;
    drop(first);
    let submit = second.submitted().await;
    assert_eq!(&*submit.request_id, "resumed");
    second.gives(submit.request, &letters("c"), Some(Finish::Length));
    while client.chunk().await.is_some() {}
    let spans = collector.until(is_request("resumed")).await;
    let mut legs: Vec<_> = spans.iter().filter(|span| span.name == "leg").collect();
    legs.sort_by_key(|leg| leg.nanos.0);
    let [lost, next] = legs[..] else { panic!("{legs:#?}") };
    assert_eq!((lost.says("headrace.worker"), lost.says("headrace.result")), ("w1", "worker_lost"));
    assert_eq!((lost.says("error.type"), lost.error.is_some()), ("worker_lost", true));
    assert_eq!((next.says("headrace.worker"), next.says("headrace.result")), ("w2", "finished"));
    assert_eq!((next.says("headrace.retry"), next.says("headrace.resumed_tokens")), ("true", "2"));
    assert_eq!(next.error, None);
    assert_eq!(spans.iter().filter(|span| span.name == "queue").count(), 2);
    let request = spans.iter().find(|span| is_request("resumed")(span)).unwrap();
    assert_eq!((&request.error, request.says("gen_ai.usage.output_tokens")), (&None, "3"));
}

#[tokio::test]
async fn who_hangs_up_ends_the_spans_of_every_stage() {
    let mut collector = FakeCollector::start().await;
    let mut behaviour = Behaviour::new("w");
    behaviour.hello.capacity = Capacity { sequences: 1, waiting: 0, ..behaviour.hello.capacity };
    let (router, mut worker) = TestRouter::with(behaviour, collector.args()).await;
    let queued = |n| metric(&router.app, "headrace_queue_requests", "") == n;

    let running = asked(&router, &head("first", ""), &json!({"stream": true})).await;
    let first = worker.submitted().await;
    let waiting = asked(&router, &head("queue", ""), &json!({})).await;
    until("it waits", || queued(1.0)).await;
    drop(waiting);
    until("it left", || queued(0.0)).await;
    drop(running); // before its first token
    assert_eq!(worker.cancelled().await, first.request);
    let mut streaming = asked(&router, &head("stream", ""), &json!({"stream": true})).await;
    let second = worker.submitted().await;
    worker.gives(second.request, &letters("a"), None);
    assert_eq!(streaming.head().await.status, 200);
    drop(streaming);
    assert_eq!(worker.cancelled().await, second.request);

    for id in ["queue", "first", "stream"] {
        let request = collector.until(is_request(id)).await;
        let request = request.iter().find(|span| is_request(id)(span)).unwrap().clone();
        assert_eq!((request.says("error.type"), &request.error), ("client_gone", &None), "{id}");
        let spans = collector.until(|span| span.parent == request.id).await;
        let parts = spans.iter().filter(|span| span.parent == request.id);
        let mut names: Vec<_> = parts.map(|span| span.name.as_str()).collect();
        names.sort_unstable();
        match id {
            "queue" => assert_eq!(names, ["queue", "tokenise"]),
            _ => assert_eq!(names, ["leg", "queue", "route", "tokenise"], "{id}"),
        }
    }
    let spans = collector.until(|_| true).await;
    let mut stages: Vec<_> = spans.iter().filter(|span| span.name == "leg").collect();
    stages.sort_by_key(|leg| leg.nanos.0);
    let stages: Vec<_> = stages
        .iter()
        .map(|leg| (leg.says("headrace.result"), leg.says("headrace.cancelled")))
        .collect();
    assert_eq!(stages, [("cancelled", "first_token"), ("cancelled", "streaming")]);
}

#[tokio::test]
async fn what_is_refused_or_fails_says_so() {
    let mut collector = FakeCollector::start().await;
    let router = TestRouter::start(collector.args()).await;
    let mut worker = Behaviour::new("w").ready(&router.app).await;
    let unknown = chat(&json!({"model": "\u{1f600}".repeat(20)}));
    assert_eq!(router.send(&head("unknown", ""), &unknown).await.status, 404);
    let path = "POST /v1/nothing HTTP/1.1\r\nX-Request-ID: nowhere";
    assert_eq!(router.send(path, b"{}").await.status, 404);
    assert_eq!(router.get("/v1/models").await.status, 200);
    let mut client = asked(&router, &head("fails", ""), &json!({})).await;
    let request = worker.submitted().await.request;
    let (kind, message) = (FailureKind::BadToken, "out of luck".into());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    assert_eq!(client.reply().await.status, 500);

    let spans = collector.until(is_request("fails")).await;
    let by_id = |id: &'static str| spans.iter().find(|span| is_request(id)(span)).unwrap();
    let unknown = by_id("unknown");
    assert_eq!((unknown.says("error.type"), &unknown.error), ("unknown_model", &None));
    assert_eq!(unknown.says("http.response.status_code"), "404");
    assert_eq!(by_id("nowhere").name, "POST unknown");
    assert_eq!(by_id("nowhere").says("http.route"), "");
    let fails = by_id("fails");
    assert_eq!(fails.says("error.type"), "worker_failed");
    assert!(fails.error.as_ref().unwrap().contains("out of luck"));
    let leg = one(spans, "leg");
    assert_eq!(
        (leg.says("headrace.result"), leg.says("error.type")),
        ("worker_failed", "worker_failed")
    );
    assert!(!spans.iter().any(|span| span.name.starts_with("GET")), "who only looks has none");
}

#[tokio::test]
async fn several_choices_are_several_legs() {
    let mut collector = FakeCollector::start().await;
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "ab"), collector.args()).await;
    assert_eq!(router.send(&head("n", ""), &chat(&json!({"n": 3}))).await.status, 200);
    let spans = collector.until(is_request("n")).await;
    let mut choices: Vec<_> = spans.iter().filter(|span| span.name == "leg").collect();
    choices.sort_by_key(|leg| leg.says("headrace.choice").to_owned());
    let choices: Vec<_> = choices.iter().map(|leg| leg.says("headrace.choice")).collect();
    assert_eq!(choices, ["0", "1", "2"]);
    let request = spans.iter().find(|span| is_request("n")(span)).unwrap();
    assert_eq!(request.says("gen_ai.request.choice.count"), "3");
    assert_eq!(request.says("gen_ai.response.finish_reasons").matches("stop").count(), 3);
    assert_eq!(request.events, ["first_token"]);
}

#[tokio::test]
async fn a_collector_behind_tls_is_checked_and_reached() {
    let mut collector = FakeCollector::over_tls(tls_of_localhost()).await;
    let with = |file: &str| {
        let certificate = Some(data(file));
        RouterArgs {
            otlp: TracesVariables { certificate, ..TracesVariables::default() },
            ..collector.args()
        }
    };
    let (trusting, other) = (with("localhost.crt"), with("tls/other_ca.crt"));
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), other).await;
    assert_eq!(router.send(&head("stranger", ""), &chat(&json!({}))).await.status, 200);
    until("they are lost", || {
        metric(&router.app, "headrace_spans_dropped_total", "not_taken") == 5.0
    })
    .await;
    assert_eq!(collector.count(), 0);
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), trusting).await;
    assert_eq!(router.send(&head("known", ""), &chat(&json!({}))).await.status, 200);
    assert_eq!(collector.until(is_request("known")).await.len(), 5);
}

#[tokio::test]
async fn spans_of_the_last_requests_are_sent_before_the_router_ends() {
    let mut collector = FakeCollector::start().await;
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), collector.args()).await;
    assert_eq!(router.send(&head("last", ""), &chat(&json!({}))).await.status, 200);
    router.stopper.stop();
    assert_eq!(collector.until(is_request("last")).await.len(), 5);
}

/// A dead collector, and one that answers nothing, cost spans alone.
#[tokio::test]
async fn a_collector_that_takes_nothing_holds_up_neither_requests_nor_the_end() {
    let silent = FakeCollector::answering(vec![None]).await;
    let nobody = FakeCollector::start().await.args(); // its listener is gone with it... or soon will be
    for args in
        [silent.args(), RouterArgs { otlp_endpoint: Some("http://127.0.0.1:9".into()), ..nobody }]
    {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), args).await;
        for _ in 0..20 {
            assert_eq!(router.send(&head("a", ""), &chat(&json!({}))).await.status, 200);
        }
        let began = std::time::Instant::now();
        router.stopper.stop();
        let lost = || metric(&router.app, "headrace_spans_dropped_total", "");
        until("all are counted", || lost() == 100.0).await;
        assert!(began.elapsed().as_secs() < 10, "10 s is what one try may take");
        assert_eq!(metric(&router.app, "headrace_spans_exported_total", ""), 0.0);
    }
}

#[tokio::test]
async fn what_is_taken_late_or_in_part_is_counted_as_it_is() {
    const LATER: &str =
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n";
    // partial_success of 2 spans
    const PART: &str = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\x0a\x02\x08\x02";
    const NEVER: &str = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
    let mut collector =
        FakeCollector::answering(vec![Some(LATER), Some(PART), Some(NEVER), Some(OK)]).await;
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "a"), collector.args()).await;
    assert_eq!(router.send(&head("part", ""), &chat(&json!({}))).await.status, 200);
    assert_eq!(collector.until(is_request("part")).await.len(), 5);
    let count = |name, reason| metric(&router.app, name, reason);
    until("3 of 5 are taken", || count("headrace_spans_exported_total", "") == 3.0).await;
    assert_eq!(count("headrace_spans_dropped_total", "refused"), 2.0);
    assert_eq!(router.send(&head("never", ""), &chat(&json!({}))).await.status, 200);
    until("5 are lost", || count("headrace_spans_dropped_total", "not_taken") == 5.0).await;
    assert_eq!(router.send(&head("again", ""), &chat(&json!({}))).await.status, 200);
    collector.until(is_request("again")).await;
    until("it works again", || count("headrace_spans_exported_total", "") == 8.0).await;
}
