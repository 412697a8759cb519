//! What good requests get: whole and streamed, one choice and many, chat and plain, stopped and counted.

use headrace_router::core::frame::{Finish, Frame, Output, Submit};
use serde_json::{Value, json};

use super::client::{TestRouter, args, chunks};
use crate::fake_worker::{Behaviour, CONTEXT_TOKENS, EOS, MODEL, Script, letters, output, step};

fn with(mut body: Value, extra: &Value) -> String {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn chat(extra: &Value) -> String {
    with(json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}), extra)
}

fn plain(extra: &Value) -> String {
    with(json!({"model": MODEL, "prompt": "hi", "max_tokens": 100}), extra)
}

/// The text of one choice of a streamed answer.
fn text_of(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let choices = choices.filter(|choice| choice["index"] == index);
    let texts = choices.map(|choice| {
        choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default()
    });
    texts.collect()
}

#[tokio::test]
async fn a_whole_chat_answer_is_that_of_openai() {
    let (router, _worker) = TestRouter::saying("Hello!").await;
    let reply = router.post("/v1/chat/completions", chat(&json!({}))).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")));
    let mut body = reply.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    let prompt_tokens = body["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt_tokens > 5);
    for field in ["id", "created", "system_fingerprint"] {
        assert!(body.as_object_mut().unwrap().remove(field).is_some(), "{field}");
    }
    let want = json!({
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 7,
            "total_tokens": prompt_tokens + 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
                "reasoning_tokens": 0,
            },
        },
        "service_tier": "default",
    });
    assert_eq!(body, want);
}

#[tokio::test]
async fn a_stream_is_role_text_end_usage_done() {
    let script = Script { steps: vec![[letters("Hi"), vec![EOS]].concat()], finish: Finish::Stop };
    let worker = Behaviour::new("w").answers(move |_| Some(script.clone()));
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let body = chat(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let reply = router.post("/v1/chat/completions", body).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(reply.header("cache-control"), Some("no-cache"));

    // The transcript, byte for byte but for what differs from request to request.
    let first = &chunks(reply.text())[0];
    let (id, created) = (first["id"].as_str().unwrap(), first["created"].to_string());
    let version = first["system_fingerprint"].as_str().unwrap();
    let text = reply.text().replace(id, "ID").replace(&created, "TIME").replace(version, "VERSION");
    let envelope = r#"data: {"id":"ID","object":"chat.completion.chunk","created":TIME,"model":"fake","service_tier":"default","system_fingerprint":"VERSION","choices":["#;
    let events = text.replace(envelope, "> ");
    let want = r#"> {"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null}

> {"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}

> {"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}

> ],"usage":{"prompt_tokens":PROMPT,"completion_tokens":3,"total_tokens":TOTAL,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"accepted_prediction_tokens":0,"rejected_prediction_tokens":0,"reasoning_tokens":0}}}

data: [DONE]

"#;
    let usage = &chunks(reply.text())[3]["usage"];
    let want = want.replace("PROMPT", &usage["prompt_tokens"].to_string());
    let want = want.replace("TOTAL", &(usage["prompt_tokens"].as_u64().unwrap() + 3).to_string());
    assert_eq!(events, want);
}

#[tokio::test]
async fn a_streamed_answer_says_what_a_whole_one_says() {
    let text = "It is 12 o'clock, and \"all\" is well\\.";
    let (router, _worker) = TestRouter::saying(text).await;
    for (path, body, read) in [
        ("/v1/chat/completions", chat as fn(&Value) -> String, "/choices/0/message/content"),
        ("/v1/completions", plain, "/choices/0/text"),
    ] {
        let whole = router.post(path, body(&json!({}))).await.json();
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let streamed = router.post(path, body(&options)).await;
        let chunks = chunks(streamed.text());
        assert_eq!(whole.pointer(read).unwrap(), text);
        assert_eq!(text_of(&chunks, 0), text);
        assert_eq!(whole["usage"], chunks.last().unwrap()["usage"]);
    }
}

#[tokio::test]
async fn every_choice_has_its_own_text_and_seed() {
    let worker = Behaviour::new("w")
        .answers(|submit: &Submit| Some(Script::says(&format!("seed {}", submit.sampling.seed))));
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let body = chat(&json!({"n": 3, "seed": 40}));
    let whole = router.post("/v1/chat/completions", body).await.json();
    let texts: Vec<&Value> = (0..3).map(|i| &whole["choices"][i]["message"]["content"]).collect();
    assert_eq!(texts, ["seed 40", "seed 41", "seed 42"]);
    assert_eq!(whole["usage"]["completion_tokens"], 24);

    let body = chat(&json!({"n": 3, "seed": 40, "stream": true}));
    let reply = router.post("/v1/chat/completions", body).await;
    let chunks = chunks(reply.text());
    for i in 0..3 {
        assert_eq!(text_of(&chunks, i), format!("seed {}", 40 + i));
    }
    assert_eq!(reply.text().matches("\"finish_reason\":\"stop\"").count(), 3);
}

#[tokio::test]
async fn several_prompts_are_choices_of_one_answer() {
    let worker = Behaviour::new("w").answers(|submit: &Submit| {
        let (tokens, seed) = (submit.tokens.len() / 4, submit.sampling.seed);
        Some(Script::says(&format!("{tokens} tokens, seed {seed}")))
    });
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let mut body = json!({"prompt": [[5], [5, 6], [5, 6, 7]], "n": 2, "seed": 0});
    let whole = router.post("/v1/completions", plain(&body)).await.json();
    assert_eq!(whole["object"], "text_completion");
    assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"));
    let want = |i: usize| format!("{} tokens, seed {i}", i / 2 + 1);
    for i in 0..6 {
        let choice = &whole["choices"][i];
        assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &json!(want(i))));
    }
    assert_eq!(whole["usage"]["prompt_tokens"], 6);

    body["stream"] = true.into();
    let reply = router.post("/v1/completions", plain(&body)).await;
    let chunks = chunks(reply.text());
    for i in 0..6 {
        assert_eq!(text_of(&chunks, i), want(i));
    }

    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let chunks = self::chunks(router.post("/v1/completions", plain(&body)).await.text());
    for (i, chunk) in chunks.iter().enumerate() {
        let usage = &chunk["usage"];
        assert_eq!(usage["prompt_tokens"], 6, "{i}: {usage}");
        assert!(usage["completion_tokens"].as_u64() > Some(0), "{i}: {usage}");
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it() {
    let (router, _worker) = TestRouter::saying("one two three").await;
    for stream in [false, true] {
        let body = chat(&json!({"stop": ["nothing", " t"], "stream": stream}));
        let reply = router.post("/v1/chat/completions", body).await;
        if stream {
            let chunks = chunks(reply.text());
            assert_eq!(text_of(&chunks, 0), "one");
            assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
        } else {
            let choice = &reply.json()["choices"][0];
            assert_eq!(choice["message"]["content"], "one");
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
}

#[tokio::test]
async fn the_worker_gets_what_the_client_asked_for() {
    let (router, mut worker) = TestRouter::saying("x").await;
    let body = chat(
        &json!({"temperature": 0.5, "top_k": 7, "max_completion_tokens": 33, "seed": 9,
        "ignore_eos": true, "logit_bias": {"5": -100}, "stop_token_ids": [8], "frequency_penalty": 1,
        "priority": -3, "min_tokens": 2}),
    );
    assert_eq!(router.post("/v1/chat/completions", body).await.status, 200);
    let submit = worker.submitted().await;
    let sampling = submit.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.5, 7, 9));
    assert_eq!((sampling.frequency_penalty, sampling.min_tokens), (1.0, 2));
    assert!(!sampling.ignore_eos, "it would reach the stop token that the client named");
    let bias: Vec<(u32, f64)> = sampling.logit_bias.iter().map(|bias| (bias.0, bias.1)).collect();
    assert_eq!(bias, [(5, -100.0)]);
    assert_eq!(submit.stop_ids, [8]);
    assert_eq!((submit.max_tokens, submit.priority), (33, 3));
}

#[tokio::test]
async fn an_answer_cut_by_max_tokens_says_so() {
    let steps = letters("abc").into_iter().map(|id| vec![id]).collect();
    let script = Script { steps, finish: Finish::Length };
    let worker = Behaviour::new("w").answers(move |_| Some(script.clone()));
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let reply = router.post("/v1/completions", plain(&json!({"max_tokens": 3}))).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn running_usage_stands_in_every_event() {
    let (router, _worker) = TestRouter::saying("abc").await;
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = chat(&json!({"stream": true, "stream_options": options}));
    let reply = router.post("/v1/chat/completions", body).await;
    let chunks = chunks(reply.text());
    let counts = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap());
    let counts: Vec<u64> = counts.collect();
    assert!(counts.is_sorted() && counts.last() == Some(&4), "{counts:?}");
}

#[tokio::test]
async fn usage_says_what_became_of_drafts_over_all_choices() {
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for stream in [false, true] {
            let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
            let mut connection = router.connect().await;
            let prompt = if path.contains("chat") { chat } else { plain };
            let mut more = json!({"n": 2, "stream": stream});
            if stream {
                more["stream_options"] = json!({"include_usage": true});
            }
            let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
            connection.request(&head, prompt(&more).as_bytes()).await;
            for finish in [Finish::Length, Finish::Stop] {
                let request = worker.submitted().await.request;
                let first = Output { drafted: 0, ..output(request, letters("a"), None) };
                let next =
                    Output { drafted: 3, accepted: 1, ..output(request, letters("bc"), None) };
                let last = Output {
                    drafted: 3,
                    accepted: 2,
                    ..output(request, [letters("de"), vec![EOS]].concat(), Some(finish))
                };
                worker.send(Frame::Step(step(vec![first, next])));
                worker.send(Frame::Step(step(vec![last])));
            }
            let reply = connection.reply().await;
            let usage = if stream {
                chunks(reply.text()).last().unwrap()["usage"].clone()
            } else {
                reply.json()["usage"].clone()
            };
            assert_eq!(usage["completion_tokens"], 12, "{usage}");
            let want = json!({
                "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6, "reasoning_tokens": 0
            });
            assert_eq!(usage["completion_tokens_details"], want);
            let metrics = router.get("/metrics").await;
            for line in ["headrace_drafted_tokens_total 12", "headrace_accepted_tokens_total 6"] {
                assert!(metrics.text().lines().any(|is| is == line), "{line}");
            }
        }
    }
}

#[tokio::test]
async fn models_are_listed_and_found_by_name() {
    let (router, _worker) = TestRouter::saying("x").await;
    let list = router.get("/v1/models").await.json();
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][0]["object"]),
        (&json!(MODEL), &json!("model"))
    );
    let one = router.get(&format!("/v1/models/{MODEL}")).await.json();
    assert_eq!(one, list["data"][0]);
    assert_eq!(router.get("/ready").await.status, 200);
}

#[tokio::test]
async fn text_and_tokens_turn_into_each_other() {
    let (router, _worker) = TestRouter::saying("x").await;
    let back = async |tokens: &Value| {
        let body = json!({ "tokens": tokens }).to_string();
        router.post("/detokenize", body).await.json()["prompt"].clone()
    };
    let body = r#"{"prompt": "ab c", "return_token_strs": true}"#;
    let reply = router.post("/tokenize", body).await.json();
    let count = reply["tokens"].as_array().unwrap().len();
    assert_eq!((&reply["count"], &reply["max_model_len"]), (&json!(count), &json!(CONTEXT_TOKENS)));
    assert_eq!(reply["token_strs"].as_array().unwrap().len(), count);
    assert_eq!(back(&reply["tokens"]).await, "ab c");

    let reply = router.post("/tokenize", chat(&json!({}))).await.json();
    let want = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(back(&reply["tokens"]).await, want);
}

#[tokio::test]
async fn a_chat_of_ten_thousand_messages_is_measured_and_refused() {
    let (router, _worker) = TestRouter::saying("x").await;
    let role = |i| if i % 2 == 0 { "user" } else { "assistant" };
    let messages = (0..10_000).map(|i| json!({"role": role(i), "content": format!("message {i}")}));
    let messages: Vec<Value> = messages.collect();
    let reply = router.post("/v1/chat/completions", chat(&json!({ "messages": messages }))).await;
    let error = reply.error();
    assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")));
    assert!(error["message"].as_str().unwrap().contains("4096"), "{error}");
}
