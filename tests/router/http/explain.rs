//! What an answer says of its own way: stages, worker, decision; deadlines, tenants and what is counted of them.

use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::decision::{Decision, replay};
use headrace_router::core::frame::{Failed, FailureKind, Finish, Frame, StepCost};
use headrace_router::server::Server;
use serde_json::{Value, json};

use super::client::{Reply, TestRouter, args, chunks};
use crate::fake_worker::{Behaviour, Event, FakeWorker, MODEL, letters, metric, until};

fn chat(extra: &Value) -> Vec<u8> {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

fn head(path: &str, headers: &[&str]) -> String {
    let mut head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
    for header in headers {
        head.push_str("\r\n");
        head.push_str(header);
    }
    head
}

async fn ask(router: &TestRouter, headers: &[&str], extra: &Value) -> Reply {
    router.send(&head("/v1/chat/completions", headers), &chat(extra)).await
}

/// Names and ms of `Server-Timing`.
fn stages(reply: &Reply) -> Vec<(String, f64)> {
    let stages = reply.header("server-timing").unwrap_or_default().split(", ");
    let stages = stages.filter(|stage| !stage.is_empty()).map(|stage| {
        let (name, ms) = stage.split_once(";dur=").unwrap();
        (name.to_owned(), ms.parse().unwrap())
    });
    stages.collect()
}

fn names(stages: &[(String, f64)]) -> Vec<&str> {
    stages.iter().map(|(name, _)| name.as_str()).collect()
}

fn decision(reply: &Reply) -> Value {
    serde_json::from_str(reply.header("x-headrace-decision").unwrap()).unwrap()
}

#[tokio::test]
async fn every_generation_says_its_worker_and_how_long_its_stages_took() {
    let (router, _worker) = TestRouter::saying("hello").await;
    let completion = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 8}).to_string();
    for reply in [
        ask(&router, &[], &json!({})).await,
        ask(&router, &[], &json!({"stream": true})).await,
        ask(&router, &[], &json!({"n": 2})).await,
        router.post("/v1/completions", &completion).await,
    ] {
        assert_eq!((reply.status, reply.header("x-headrace-worker")), (200, Some("w")));
        assert_eq!(reply.header("x-headrace-decision"), None, "nobody asked");
        let stages = stages(&reply);
        assert_eq!(names(&stages), ["tokenise", "queue", "route", "prefill", "first-token"]);
        let sum: f64 = stages[..4].iter().map(|(_, ms)| ms).sum();
        assert!(stages[4].1 < 20_000.0 && sum <= stages[4].1 + 1.0, "{stages:?}");
    }
}

#[tokio::test]
async fn an_error_says_the_stages_that_it_went_through() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let reply = ask(&router, &[], &json!({"max_tokens": 1_000_000})).await;
    assert_eq!((reply.status, reply.header("x-headrace-worker")), (400, None));
    assert_eq!(names(&stages(&reply)), ["tokenise"]);
    let mut connection = router.connect().await;
    connection.request(&head("/v1/chat/completions", &[]), &chat(&json!({}))).await;
    let request = worker.submitted().await.request;
    let (kind, message) = (FailureKind::BadToken, "no".into());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.header("x-headrace-worker")), (500, Some("w")));
    assert_eq!(names(&stages(&reply)), ["tokenise", "queue", "route"]);
    let reply = router.post("/v1/chat/completions", "{").await;
    assert_eq!((reply.status, reply.header("server-timing")), (400, None));
}

#[tokio::test]
async fn a_decision_is_explained_in_a_header() {
    let args = RouterArgs { shadow: Some("round-robin".into()), ..args() };
    let (router, _one) = TestRouter::with(Behaviour::says("w-one", "hello"), args).await;
    let _two = Behaviour::says("w-zwö", "hello").ready(&router.app).await;
    let explain = "X-Headrace-Explain: 1";
    let reply = ask(&router, &[explain, "X-Request-ID: my-id"], &json!({})).await;
    let text = reply.header("x-headrace-decision").unwrap();
    assert!(text.is_ascii() && text.contains("w-zw\\u00f6"), "{text}");
    let explained = decision(&reply);
    assert_eq!((&explained["request"], &explained["policy"]), (&json!("my-id"), &json!("kv")));
    let candidates = explained["candidates"].as_array().unwrap();
    let workers: Vec<&Value> = candidates.iter().map(|one| &one["worker"]).collect();
    assert_eq!(workers, ["w-one", "w-zwö"]);
    assert!(workers.contains(&&explained["winner"]));
    for one in candidates {
        assert_eq!(one["excluded"], Value::Null);
        for figure in ["cached_tokens", "queue_ms", "prefill_ms", "transfer_ms", "decode_ms"] {
            assert!(one[figure].is_number(), "{figure} of {one}");
        }
    }
    assert_eq!(explained["shadow"]["policy"], "round-robin");
    // n choices, several prompts, and a stream
    for (extra, n) in [(json!({"n": 2}), 2), (json!({"n": 3, "stream": true}), 3)] {
        let reply = ask(&router, &[explain], &extra).await;
        assert_eq!(decision(&reply).as_array().unwrap().len(), n);
        assert!(!reply.text().contains("headrace-decision"));
    }
    let prompts = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 8}).to_string();
    let reply = router.send(&head("/v1/completions", &[explain]), prompts.as_bytes()).await;
    assert_eq!(decision(&reply).as_array().unwrap().len(), 2);
}

/// A router with so many workers that a decision does not fit a header.
async fn large_fleet() -> (TestRouter, Vec<FakeWorker>) {
    let router = TestRouter::start(args()).await;
    let mut workers = Vec::new();
    for i in 0..16 {
        let name = format!("{}-{i:02}", "w".repeat(200));
        workers.push(Behaviour::says(&name, "hello").ready(&router.app).await);
    }
    (router, workers)
}

#[tokio::test]
async fn a_long_decision_ends_the_stream_or_is_to_be_fetched() {
    let (router, _workers) = large_fleet().await;
    let headers = ["X-Headrace-Explain: 1", "X-Request-ID: a/b%c"];
    let reply = ask(&router, &headers, &json!({"stream": true})).await;
    let (before, last) = reply.text().split_once("\n\n: headrace-decision ").unwrap();
    let (comment, done) = last.split_once("\n\n").unwrap();
    assert_eq!(done, "data: [DONE]\n\n");
    chunks(&format!("{before}\n\n{done}"));
    let explained: Value = serde_json::from_str(comment).unwrap();
    assert_eq!(explained["candidates"].as_array().unwrap().len(), 16);

    let reply = ask(&router, &headers, &json!({})).await;
    assert_eq!(reply.header("x-headrace-decision"), None);
    let path = reply.header("x-headrace-decision-location").unwrap();
    assert_eq!(path, "/decisions/a%2Fb%25c");
    let fetched = router.get(path).await.json();
    assert_eq!(fetched["request"], "a/b%c");
    let decisions = fetched["decisions"].as_array().unwrap();
    assert_eq!(decisions.len(), 2, "both requests of this name");
    for one in decisions {
        let inputs: Decision = serde_json::from_value(one["inputs"].clone()).unwrap();
        assert_eq!(replay(&inputs), inputs);
    }
}

#[tokio::test]
async fn a_decision_among_many_that_nobody_asked_for_says_how_many_it_leaves_out() {
    let (router, _workers) = large_fleet().await;
    ask(&router, &["X-Request-ID: quiet"], &json!({})).await;
    let fetched = router.get("/decisions/quiet").await.json();
    let decision = &fetched["decisions"][0];
    let candidates = decision["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 8);
    assert!(candidates.iter().any(|one| one["worker"] == decision["winner"]));
    let left_out = &decision["left_out"];
    assert_eq!((&left_out["candidates"], &left_out["excluded"]), (&json!(8), &json!(0)));
    let totals = candidates.iter().map(|one| one["total_ms"].as_f64().unwrap());
    let dearest_ms = totals.fold(0.0, f64::max);
    // of those that nobody estimated a floor is known, a billionth below, and all are rounded to thousandths
    let least_ms = left_out["least_ms"].as_f64().unwrap() + 0.001_1;
    assert!(least_ms >= dearest_ms, "the best are kept");
    assert_eq!(decision["inputs"], Value::Null, "it cannot be made again");
    assert!(fetched["words"]["predicted"]["left_out"].is_string());
}

#[tokio::test]
async fn each_try_leaves_a_decision() {
    let (router, mut first) = TestRouter::with(Behaviour::new("w1"), args()).await;
    let mut connection = router.connect().await;
    let headers = ["X-Request-ID: tried", "X-Headrace-Explain: 1"];
    connection.request(&head("/v1/chat/completions", &headers), &chat(&json!({}))).await;
    let request = first.submitted().await.request;
    let _second = Behaviour::says("w2", "hello").ready(&router.app).await;
    let (kind, message) = (FailureKind::Engine, "no".into());
    first.send(Frame::Failed(Failed { request, kind, message }));
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.header("x-headrace-worker")), (200, Some("w2")));
    assert_eq!(decision(&reply)["winner"], "w2");
    let fetched = router.get("/decisions/tried").await.json();
    let decisions = fetched["decisions"].as_array().unwrap();
    let winners: Vec<&Value> = decisions.iter().map(|one| &one["winner"]).collect();
    assert_eq!(winners, ["w1", "w2"]);
    assert_eq!(decisions[1]["candidates"][0]["excluded"], "failed");
    let [lost, served] = [&decisions[0]["actual"], &decisions[1]["actual"]];
    assert_eq!((&lost["outcome"], &lost["error"]), (&json!("failed"), &json!("worker_failed")));
    assert_eq!((&lost["first_token_ms"], &lost["output_tokens"]), (&Value::Null, &json!(0)));
    assert_eq!(
        (&served["outcome"], &served["finish_reason"]),
        (&json!("finished"), &json!("stop"))
    );
    assert_eq!(served["output_tokens"], 6, "the letters, and the token that ends them");
    let times = ["waited_ms", "first_token_ms", "decode_ms", "total_ms"]
        .map(|time| served[time].as_f64().unwrap_or_else(|| panic!("{time} of {served}")));
    assert!(times[0] >= 0.0 && times[1] + times[2] <= times[3] + 0.001, "{times:?}");
}

#[tokio::test]
async fn what_happens_to_a_request_is_told_while_it_runs_and_after_its_client_left() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let headers = ["X-Request-ID: left"];
    connection
        .request(&head("/v1/chat/completions", &headers), &chat(&json!({"stream": true})))
        .await;
    let request = worker.submitted().await.request;
    let actual = async || {
        let fetched = router.get("/decisions/left").await.json();
        fetched["decisions"][0]["actual"].clone()
    };
    let before = actual().await;
    assert_eq!((&before["outcome"], &before["first_token_ms"]), (&json!("running"), &Value::Null));
    worker.gives(request, &letters("ab"), None);
    connection.head().await;
    connection.chunk().await;
    let during = actual().await;
    assert_eq!((&during["outcome"], &during["output_tokens"]), (&json!("running"), &json!(2)));
    assert!(during["first_token_ms"].is_number() && during["total_ms"].is_null(), "{during}");
    drop(connection);
    assert_eq!(worker.cancelled().await, request);
    let after = actual().await;
    assert_eq!((&after["outcome"], &after["output_tokens"]), (&json!("cancelled"), &json!(2)));
    assert!(after["total_ms"].is_number(), "{after}");
}

#[tokio::test]
async fn every_figure_of_a_decision_is_put_into_words() {
    let (router, _worker) = TestRouter::saying("hello").await;
    ask(&router, &["X-Request-ID: words"], &json!({})).await;
    let fetched = router.get("/decisions/words").await.json();
    let explained = |figures: &Value, side: &str| {
        for (name, figure) in figures.as_object().unwrap() {
            let is_name = ["worker", "role", "excluded"].contains(&name.as_str());
            assert!(is_name || fetched["words"][side][name].is_string(), "{name}: {figure}");
        }
    };
    explained(&fetched["decisions"][0]["candidates"][0], "predicted");
    explained(&fetched["decisions"][0]["actual"], "actual");
}

#[tokio::test]
async fn what_is_not_remembered_is_404_and_keys_guard_the_rest() {
    let router = TestRouter::start(RouterArgs { api_key: vec!["k".into()], ..args() }).await;
    assert_eq!(router.get("/decisions/x").await.status, 401);
    let reply = router.send("GET /decisions/x HTTP/1.1\r\nAuthorization: Bearer k", b"").await;
    let error = reply.error();
    assert_eq!((reply.status, &error["code"]), (404, &json!("unknown_request")));
    assert!(error["message"].as_str().unwrap().contains("--decision-log"), "{error}");
}

#[tokio::test]
async fn wrong_headers_are_named() {
    let (router, mut worker) = TestRouter::saying("hello").await;
    let long = format!("X-Headrace-Tenant: {}", "t".repeat(129));
    for (headers, name) in [
        (vec!["X-Headrace-TTFT-Deadline-Ms: soon"], "X-Headrace-TTFT-Deadline-Ms"),
        (vec!["X-Headrace-TTFT-Deadline-Ms: -5"], "X-Headrace-TTFT-Deadline-Ms"),
        (vec!["X-Headrace-TTFT-Deadline-Ms: 1.5"], "X-Headrace-TTFT-Deadline-Ms"),
        (vec!["X-Headrace-TTFT-Deadline-Ms: 99999999999"], "X-Headrace-TTFT-Deadline-Ms"),
        (
            vec!["X-Headrace-TTFT-Deadline-Ms: 1", "X-Headrace-TTFT-Deadline-Ms: 2"],
            "X-Headrace-TTFT-Deadline-Ms",
        ),
        (vec!["X-Headrace-Explain: maybe"], "X-Headrace-Explain"),
        (vec!["X-Headrace-Tenant: "], "X-Headrace-Tenant"),
        (vec![&long], "X-Headrace-Tenant"),
    ] {
        let reply = ask(&router, &headers, &json!({})).await;
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(name)), "{headers:?}");
    }
    let fine = ["X-Headrace-Tenant: team-1", "X-Headrace-TTFT-Deadline-Ms: 0"];
    assert_eq!(ask(&router, &fine, &json!({})).await.status, 200);
    worker.submitted().await;
    assert!(worker.so_far().is_empty(), "the others did not reach a worker");
    assert_eq!(metric(&router.app, "headrace_slo_requests_total", ""), 0.0);
}

fn counted(router: &TestRouter, result: &str) -> f64 {
    metric(&router.app, "headrace_slo_requests_total", &format!("result=\"{result}\""))
}

#[tokio::test]
async fn goodput_is_counted_where_there_is_a_deadline() {
    let mut args = RouterArgs { ttft_deadline_ms: 60_000, slo_tpot_ms: 60_000.0, ..args() };
    args.queue_timeout_ms = 300; // so long an answer that broke off waits for another worker
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    for stream in [false, true] {
        let mut connection = router.connect().await;
        let body = chat(&json!({ "stream": stream }));
        connection.request(&head("/v1/chat/completions", &[]), &body).await;
        let request = worker.submitted().await.request;
        worker.gives(request, &letters("abc"), Some(Finish::Length));
        assert_eq!(connection.reply().await.status, 200);
        assert_eq!(counted(&router, "met"), if stream { 2.0 } else { 1.0 });
    }
    // a request that wants none, and one that is wrong, do not count
    let mut connection = router.connect().await;
    let none = head("/v1/chat/completions", &["X-Headrace-TTFT-Deadline-Ms: 0"]);
    connection.request(&none, &chat(&json!({}))).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("abc"), Some(Finish::Length));
    assert_eq!(connection.reply().await.status, 200);
    assert_eq!(ask(&router, &[], &json!({"max_tokens": -1})).await.status, 400);
    // one that breaks off in its stream
    let mut connection = router.connect().await;
    connection.request(&head("/v1/chat/completions", &[]), &chat(&json!({"stream": true}))).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    connection.head().await;
    drop(worker);
    while connection.chunk().await.is_some() {}
    assert_eq!(counted(&router, "failed"), 1.0);
    // and one for which there is no worker
    assert_eq!(ask(&router, &[], &json!({})).await.status, 503);
    assert_eq!(counted(&router, "rejected"), 1.0);
    assert_eq!(metric(&router.app, "headrace_slo_requests_total", ""), 4.0);
}

/// A worker whose steps take so long: it says so, and no heartbeat says otherwise.
fn taking(step_ms: f64) -> Behaviour {
    let mut worker = Behaviour::new("w");
    let (prefill_ms, context_ms, row_ms, kv_ms) = (0.0, 0.0, 0.0, 0.0);
    let cost = StepCost { fixed_ms: step_ms, prefill_ms, context_ms, row_ms, kv_ms };
    worker.hello.step_prior = Some(cost);
    worker.lives = false;
    worker
}

#[tokio::test]
async fn a_deadline_that_cannot_be_met_is_told_at_once() {
    let (router, mut worker) = TestRouter::with(taking(5_000.0), args()).await;
    let reply = ask(&router, &["X-Headrace-TTFT-Deadline-Ms: 50"], &json!({})).await;
    assert_eq!((reply.status, &reply.error()["code"]), (429, &json!("deadline_impossible")));
    let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    assert!((4..=6).contains(&seconds), "{seconds} s");
    assert!(!worker.so_far().iter().any(|event| matches!(event, Event::Submit(_))));
    assert_eq!(counted(&router, "rejected"), 1.0);
}

#[tokio::test]
async fn a_deadline_that_passes_in_the_queue_ends_the_wait() {
    let mut small = taking(0.001);
    small.hello.capacity.sequences = 1;
    small.hello.capacity.waiting = 0;
    let (router, mut worker) = TestRouter::with(small, args()).await;
    let mut first = router.connect().await;
    first.request(&head("/v1/chat/completions", &[]), &chat(&json!({}))).await;
    worker.submitted().await;
    let reply = ask(&router, &["X-Headrace-TTFT-Deadline-Ms: 60"], &json!({})).await;
    assert_eq!((reply.status, &reply.error()["code"]), (429, &json!("deadline_impossible")));
    assert_eq!(names(&stages(&reply)), ["tokenise", "queue"]);
    assert!(stages(&reply)[1].1 >= 40.0, "{:?}", stages(&reply));
    assert_eq!(counted(&router, "rejected"), 1.0);
}

#[tokio::test]
async fn decisions_are_logged_and_can_be_made_again() {
    let path = std::env::temp_dir().join(format!("headrace-decisions-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let args = RouterArgs { decision_log: Some(path.clone()), ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "hello"), args).await;
    for i in 0..3 {
        let id = format!("X-Request-ID: logged-{i}");
        assert_eq!(ask(&router, &[&id], &json!({"n": 2})).await.status, 200);
    }
    let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
    until("all are written", || lines() == 6).await;
    for (i, line) in std::fs::read_to_string(&path).unwrap().lines().enumerate() {
        let decision: Decision = serde_json::from_str(line).unwrap();
        assert_eq!(*decision.request, format!("logged-{}", i / 2));
        assert_eq!(serde_json::to_string(&replay(&decision)).unwrap(), line);
    }
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn a_decision_log_that_cannot_be_written_stops_the_start() {
    let path = std::env::temp_dir().join("headrace-no-such-directory/decisions");
    let args = RouterArgs { decision_log: Some(path), ..args() };
    let Err(error) = Server::start(Config::try_from(args).unwrap()).await else {
        panic!("it started");
    };
    let text = error.to_string();
    assert!(text.starts_with("--decision-log: cannot use") && text.contains("No such"), "{text}");
}
