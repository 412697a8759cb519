//! How much memory requests and answers take at their peak, measured at the allocator, against what they are charged. Alone
//! in its process, and one test at a time, because the allocator counts for all threads.

#![allow(clippy::unwrap_used, reason = "unwrap is for tests, and for their helpers")]
#![allow(unsafe_code, reason = "an allocator that counts cannot be written without")]

#[path = "request_memory/answers.rs"]
mod answers;
#[allow(dead_code, reason = "shared with the other tests, which use more of it")]
#[path = "http/client.rs"]
mod client;
#[path = "request_memory/counting.rs"]
mod counting;
#[allow(dead_code, reason = "shared with the other tests, which use more of it")]
mod fake_worker;
#[path = "request_memory/waiting.rs"]
mod waiting;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Finish, Frame, Output, Ranked, TokenLogprob};
use headrace_router::error::RouteError;
use headrace_router::http::read_body;
use headrace_router::metrics::Gauge;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use self::client::{Connection, TestRouter, args};
use self::counting::{Measure, alone};
use self::fake_worker::{Behaviour, FakeWorker, MODEL, in_time, letters, output, step};

const MIB: usize = 1 << 20;

/// Beside what is charged: sockets, tasks, headers, the test's own worker and client.
const BESIDE: usize = 2 * MIB;

/// Runs a test on one thread. A second one parses.
fn run(test: impl Future<Output = ()>) {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test);
}

/// `item`, again and again up to so many bytes.
fn repeated(item: &str, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + item.len());
    while text.len() < bytes {
        text.push_str(item);
        text.push(',');
    }
    text.pop();
    text
}

/// Bodies that are small as text and large as values, and where they go.
fn attacks(bytes: usize) -> Vec<(&'static str, String)> {
    let mut attacks = Vec::new();
    let user = r#""messages": [{"role": "user", "content": "hi"}]"#;
    let deep = format!("{}0{}", "[".repeat(50), "]".repeat(50));
    for item in ["1", "[0]", "[[0]]", r#"{"":0}"#, r#""""#, deep.as_str()] {
        let list = repeated(item, bytes);
        let chat = |field: String| format!(r#"{{"model": "{MODEL}", {field}}}"#);
        attacks.push(("/v1/completions", chat(format!(r#""prompt": [{list}]"#))));
        let kwargs = format!(r#"{user}, "chat_template_kwargs": {{"a": [{list}]}}"#);
        attacks.push(("/v1/chat/completions", chat(kwargs)));
        attacks.push(("/v1/chat/completions", chat(format!(r#""messages": [{list}]"#))));
        attacks.push(("/v1/chat/completions", chat(format!(r#"{user}, "tools": [{list}]"#))));
        attacks.push((
            "/v1/chat/completions",
            chat(format!(r#"{user}, "metadata": {{"a": [{list}]}}"#)),
        ));
        attacks.push(("/detokenize", format!(r#"{{"tokens": [{list}]}}"#)));
        let arguments = Value::from(format!(r#"{{"a": [{list}]}}"#)).to_string();
        let call = format!(
            r#""messages": [{{"role": "assistant", "tool_calls": [{{"id": "a",
            "function": {{"name": "f", "arguments": {arguments}}}}}]}}]"#
        );
        attacks.push(("/v1/chat/completions", chat(call)));
    }
    // messages that are right, and as many as fit: a million in a body of 32 MB
    let list = repeated(r#"{"role":"user","content":""}"#, bytes);
    attacks
        .push(("/v1/chat/completions", format!(r#"{{"model": "{MODEL}", "messages": [{list}]}}"#)));
    let list = repeated(r#"{"type":"text","text":""}"#, bytes);
    let parts = format!(r#"{{"role": "user", "content": [{list}]}}"#);
    attacks.push((
        "/v1/chat/completions",
        format!(r#"{{"model": "{MODEL}", "messages": [{parts}]}}"#),
    ));
    let mut biases = String::new();
    for id in 0.. {
        if biases.len() > bytes {
            break;
        }
        biases.push_str(&format!(r#""{id}":1,"#));
    }
    biases.pop();
    let biases = format!(r#"{{"model": "{MODEL}", {user}, "logit_bias": {{{biases}}}}}"#);
    attacks.push(("/v1/chat/completions", biases));
    attacks
}

fn small_router() -> RouterArgs {
    RouterArgs { max_body_bytes: 2 * MIB, max_body_memory_bytes: 48 * MIB, ..args() }
}

/// One thread that remembers nothing.
fn slow_tokeniser(args: RouterArgs) -> RouterArgs {
    RouterArgs { tokenizer_threads: 1, tokenizer_cache_bytes: 0, ..args }
}

/// A model whose tokens are made by `tokenizers`, which takes its time.
fn slow_doc() -> Value {
    let mut doc = fake_worker::doc();
    let mut tokenizer: Value = serde_json::from_str(doc["tokenizer"].as_str().unwrap()).unwrap();
    tokenizer["normalizer"] = json!({"type": "NFKC"});
    doc["tokenizer"] = json!(tokenizer.to_string());
    doc
}

async fn comes_to_nothing(gauge: &Gauge) {
    in_time("memory that is given back", async {
        while gauge.get() != 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[test]
fn a_body_takes_no_more_than_it_is_charged_and_no_more_than_its_limit() {
    run(async {
        let (router, worker) = TestRouter::with(Behaviour::says("w", "x"), small_router()).await;
        let limit = 8 * 2 * MIB + 4 * MIB;
        for (path, body) in attacks(MIB) {
            let start = body.chars().take(100).collect::<String>();
            let measure = Measure::begin();
            let reply = router.post(path, body).await;
            let peak = measure.peak();
            assert!(peak < limit + BESIDE, "{peak} bytes for {path} {start}");
            if reply.status != 200 {
                assert_eq!(reply.status, 400, "{path} {start}: {}", reply.text());
                let code = &reply.error()["code"];
                let codes =
                    [json!("body_too_complex"), json!("context_length_exceeded"), Value::Null];
                assert!(codes.contains(code), "{path} {start}: {}", reply.text());
            }
            comes_to_nothing(&router.app.metrics.http.body_bytes).await;
        }
        drop(worker);
    });
}

#[test]
fn what_passes_takes_three_times_its_values_on_its_way_through_the_template() {
    run(async {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), small_router()).await;
        let mut passed = 0;
        for (path, body) in attacks(48 << 10) {
            let start = body.chars().take(100).collect::<String>();
            let charge = |text: &str| read_body(text.as_bytes(), usize::MAX / 2).unwrap();
            let (values, mut charged) = charge(&body);
            let call = &values["messages"][0]["tool_calls"][0];
            charged += call["function"]["arguments"].as_str().map_or(0, |text| charge(text).1);
            drop(values);
            let measure = Measure::begin();
            let reply = router.post(path, &body).await;
            let peak = measure.peak();
            assert!(
                peak < 3 * charged + 2 * body.len() + BESIDE,
                "{peak} bytes for {path} {start}"
            );
            passed += usize::from(reply.status == 200);
        }
        assert!(passed >= 6, "{passed} passed");
    });
}

#[test]
fn token_ids_take_a_few_bytes_each() {
    run(async {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), small_router()).await;
        for (path, field) in [("/v1/completions", "prompt"), ("/detokenize", "tokens")] {
            let body = format!(r#"{{"model": "{MODEL}", "{field}": [{}]}}"#, repeated("7", MIB));
            let measure = Measure::begin();
            let reply = router.post(path, body).await;
            assert_eq!(reply.error()["code"], "context_length_exceeded");
            // half a million ids of 4 bytes, while their list grows from 1 MiB to 2 beside it, and the body
            let peak = measure.peak();
            assert!(peak < 6 * MIB + BESIDE, "{peak} bytes for {path}");
        }
    });
}

#[test]
fn a_client_that_hangs_up_while_its_text_is_tokenised_leaves_no_memory_behind() {
    run(async {
        let args = slow_tokeniser(small_router());
        let mut behaviour = Behaviour::says("w", "x");
        behaviour.doc = slow_doc().to_string().into_bytes();
        let (router, _worker) = TestRouter::with(behaviour, args).await;
        let gauge = &router.app.metrics.http.body_bytes;
        let body = json!({"prompt": "a b ".repeat(4_000)}).to_string();
        let head = "POST /tokenize HTTP/1.1\r\nContent-Type: application/json";
        // the first one is tokenised, the others wait for the thread
        let mut connections = Vec::new();
        for _ in 0..3 {
            let mut connection = router.connect().await;
            connection.request(head, body.as_bytes()).await;
            connections.push(connection);
        }
        in_time("the bodies", async {
            while gauge.get() < 16_000 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        drop(connections);
        comes_to_nothing(gauge).await;
    });
}

#[test]
fn a_prompt_that_waits_for_a_thread_keeps_what_it_was_charged() {
    run(async {
        let mut behaviour = Behaviour::says("w", "x");
        behaviour.hello.context_tokens = 10_000_000;
        let mut doc = slow_doc();
        doc["context_tokens"] = json!(10_000_000);
        behaviour.doc = doc.to_string().into_bytes();
        let args = slow_tokeniser(args());
        let (router, _worker) = TestRouter::with(behaviour, args).await;
        let text = "a b ".repeat(150_000); // takes far longer to tokenise than to read
        let gauge = &router.app.metrics.http.body_bytes;
        for (path, prompt) in [
            ("/v1/completions", json!({ "prompt": text })),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]})),
            ("/tokenize", json!({ "prompt": text })),
        ] {
            let mut body = prompt;
            body["model"] = json!(MODEL);
            let (head, body) = (format!("POST {path} HTTP/1.1\r\n{JSON}"), body.to_string());
            let mut connections = Vec::new();
            for _ in 0..8 {
                let mut connection = router.connect().await;
                connection.request(&head, body.as_bytes()).await;
                connections.push(connection);
            }
            // bodies that are all read, whose texts wait for the one thread
            in_time("prompts that wait", async {
                let waiting =
                    || fake_worker::metric(&router.app, "headrace_tokenizer_queue_requests", "");
                while waiting() < 4.0 || gauge.get() < 4 * 600_000 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
            drop(connections);
            comes_to_nothing(gauge).await;
        }
    });
}

#[test]
fn a_body_is_paid_for_until_it_is_tokens_and_an_echo_until_it_is_sent() {
    run(async {
        let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
        let gauge = &router.app.metrics.http.body_bytes;
        let chat = json!({"messages": [{"role": "user", "content": "x"}]});
        for (path, mut body) in [
            ("/v1/completions", json!({ "prompt": ["x", "y"] })),
            ("/v1/chat/completions", chat),
            ("/v1/completions", json!({"prompt": "x", "echo": true})),
            ("/v1/completions", json!({"prompt": "x", "echo": true, "stream": true})),
        ] {
            let (echo, stream) = (body["echo"] == true, body["stream"] == true);
            let answers = body["prompt"].as_array().map_or(1, Vec::len);
            body["model"] = json!(MODEL);
            let mut connection = router.connect().await;
            let head = format!("POST {path} HTTP/1.1\r\n{JSON}");
            connection.request(&head, body.to_string().as_bytes()).await;
            let mut requests = Vec::new();
            for _ in 0..answers {
                requests.push(worker.submitted().await.request);
            }
            if echo {
                assert!(gauge.get() > 0);
            } else {
                comes_to_nothing(gauge).await;
            }
            if stream {
                worker.gives(requests[0], &letters("a"), None);
                connection.head().await;
                connection.chunk().await;
                assert!(gauge.get() > 0, "another choice may begin with it");
            }
            for request in requests {
                worker.gives(request, &letters("a"), Some(Finish::Length));
            }
            if stream {
                while connection.chunk().await.is_some() {}
            } else {
                assert_eq!(connection.reply().await.status, 200);
            }
            comes_to_nothing(gauge).await;
        }
    });
}

const JSON: &str = "Content-Type: application/json";

#[test]
fn an_echo_is_charged_like_what_it_repeats() {
    run(async {
        let args = RouterArgs { max_body_bytes: MIB / 2, max_body_memory_bytes: 3 * MIB, ..args() };
        let (router, mut worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
        let ids = vec![5; 5000];
        let body = json!({"model": MODEL, "prompt": ids, "echo": true});
        let reply = router.post("/v1/completions", body.to_string()).await;
        assert_eq!(reply.error()["code"], "context_length_exceeded");
        let prompts = vec![vec![5; 4000]; 60];
        let body = json!({"model": MODEL, "prompt": prompts, "echo": true}).to_string();
        let measure = Measure::begin();
        let reply = router.post("/v1/completions", body).await;
        let peak = measure.peak();
        assert!(peak < 3 * MIB + 2 * BESIDE, "{peak} bytes");
        assert!([200, 400, 429].contains(&reply.status), "{}", reply.text());
        worker.so_far();
        comes_to_nothing(&router.app.metrics.http.body_bytes).await;
    });
}

#[test]
fn stop_strings_are_prepared_once_for_all_prompts() {
    run(async {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args()).await;
        let stop: Vec<String> = (0..16).map(|i| format!("{i:01000}")).collect();
        let body = json!({"model": MODEL, "prompt": vec!["a"; 200], "stop": stop}).to_string();
        let measure = Measure::begin();
        let reply = router.post("/v1/completions", body).await;
        let peak = measure.peak();
        assert_eq!(reply.status, 200, "{}", reply.text());
        // 0.4 MB made ready, and 20 kB for each choice with its frames; not 200 times 0.4 MB
        assert!(peak < 200 * 20_000 + 2 * BESIDE, "{peak} bytes");
        comes_to_nothing(&router.app.metrics.http.answer_bytes).await;
    });
}

#[test]
fn many_bodies_together_are_bounded_and_some_are_told_to_come_again() {
    run(async {
        let args =
            RouterArgs { max_body_bytes: 4 * MIB, max_body_memory_bytes: 24 * MIB, ..args() };
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
        // more than a socket takes at once, so all of them are in flight before the first one is whole
        let list = repeated("[0]", 4 * MIB - 1024);
        let body = format!(r#"{{"model": "{MODEL}", "chat_template_kwargs": {{"a": [{list}]}}}}"#);
        let measure = Measure::begin();
        let requests = (0..8).map(|_| router.post("/v1/chat/completions", &body));
        let replies = futures_util::future::join_all(requests).await;
        let peak = measure.peak();
        assert!(peak < 24 * MIB + 2 * BESIDE, "{peak} bytes");
        let mut refused = 0;
        for reply in replies {
            match reply.status {
                400 => assert_eq!(reply.error()["code"], "body_too_complex"),
                429 => {
                    refused += 1;
                    assert_eq!(reply.error()["code"], "overloaded");
                    assert_eq!(reply.header("retry-after"), Some("1"));
                }
                other => panic!("{other}: {}", reply.text()),
            }
        }
        assert!(refused > 0, "8 bodies of 4 MiB do not fit 24 MiB");
        comes_to_nothing(&router.app.metrics.http.body_bytes).await;
    });
}

#[test]
fn a_client_that_hangs_up_leaves_no_memory_behind() {
    run(async {
        let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), small_router()).await;
        let gauge = &router.app.metrics.http.body_bytes;
        let list = repeated("[0]", MIB);
        let body = format!(r#"{{"model": "{MODEL}", "chat_template_kwargs": {{"a": [{list}]}}}}"#);
        for sent in [body.len() / 2, body.len()] {
            let mut connection = router.connect().await;
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            connection.stream.write_all(head.as_bytes()).await.unwrap();
            connection.stream.write_all(&body.as_bytes()[..sent]).await.unwrap();
            if sent < body.len() {
                in_time("the body", async {
                    while gauge.get() == 0 {
                        tokio::task::yield_now().await;
                    }
                })
                .await;
            }
            drop(connection);
            comes_to_nothing(gauge).await;
        }
    });
}

fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
    ];
    scalar.prop_recursive(6, 200, 30, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..30).prop_map(Value::from),
            prop::collection::vec((".{0,20}", inner), 0..30)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_the_body_it_takes_no_more_than_it_is_charged(value in value()) {
        let _alone = alone();
        let body = value.to_string();
        let measure = Measure::begin();
        let (read, charged) = read_body(body.as_bytes(), usize::MAX / 2).unwrap();
        let peak = measure.peak();
        // beside it, serde_json takes some numbers of a thousand bits to read a float exactly
        prop_assert!(peak <= charged + 4096, "{} bytes, charged {}: {}", peak, charged, body);
        prop_assert!(charged <= 3 * peak + 256, "{} bytes, charged {}: {}", peak, charged, body);
        prop_assert_eq!(&read, &serde_json::from_str::<Value>(&body).unwrap());
    }
}

#[test]
fn a_body_is_refused_where_its_memory_ends() {
    let _alone = alone();
    for item in ["1", "[0]", "[[0]]", r#"{"":0}"#, r#""a""#] {
        let body = format!(r#"{{"a": {{"b": [{}]}}}}"#, repeated(item, MIB));
        let measure = Measure::begin();
        let error = read_body(body.as_bytes(), 4 * MIB).unwrap_err();
        let peak = measure.peak();
        assert!(peak <= 4 * MIB + 1024, "{peak} bytes for {item}");
        let RouteError::BodyTooComplex { limit, param: Some(param) } = error else {
            panic!("{item}: {error}")
        };
        assert!(limit == 4 * MIB && param.starts_with("a.b"), "{item}: {param}");
    }
}
