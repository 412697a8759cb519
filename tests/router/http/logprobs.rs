//! Log-probabilities on their way from the worker to both kinds of answers.

use headrace_router::core::frame::{Finish, Frame, Output, Ranked, RequestId, TokenLogprob};
use serde_json::{Value, json};

use super::client::{Connection, TestRouter, args, chunks};
use crate::fake_worker::{Behaviour, EOS, FakeWorker, MODEL, letters, output, step};

fn ranked(logprob: f64, top: &[(&str, f64)]) -> TokenLogprob {
    let top = top.iter().map(|(letter, logprob)| Ranked(letters(letter)[0], *logprob));
    TokenLogprob { logprob, top: top.collect() }
}

async fn asked(path: &str, body: &Value) -> (TestRouter, FakeWorker, Connection, RequestId) {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
    connection.request(&head, body.to_string().as_bytes()).await;
    let request = worker.submitted().await.request;
    (router, worker, connection, request)
}

/// "ab", then the stop token.
fn answer(worker: &FakeWorker, request: RequestId) {
    let first = Output {
        logprobs: Some(vec![ranked(-0.5, &[("a", -0.5), ("x", -2.0)])]),
        ..output(request, letters("a"), None)
    };
    worker.send(Frame::Step(step(vec![first])));
    let ids = [letters("b"), vec![EOS]].concat();
    let logprobs = vec![ranked(-3.0, &[("y", -0.25), ("z", -1.0)]), ranked(-0.125, &[("b", -4.0)])];
    let last = Output { logprobs: Some(logprobs), ..output(request, ids, Some(Finish::Stop)) };
    worker.send(Frame::Step(step(vec![last])));
}

#[tokio::test]
async fn a_chat_carries_them_token_by_token() {
    let want = json!([
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "x", "logprob": -2.0, "bytes": [120]}]},
        {"token": "b", "logprob": -3.0, "bytes": [98], "top_logprobs": [
            {"token": "y", "logprob": -0.25, "bytes": [121]}, {"token": "z", "logprob": -1.0, "bytes": [122]}]},
    ]);
    for stream in [false, true] {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}],
            "logprobs": true, "top_logprobs": 2, "stream": stream});
        let (_router, worker, mut connection, request) = asked("/v1/chat/completions", &body).await;
        answer(&worker, request);
        let reply = connection.reply().await;
        if stream {
            let chunks = chunks(reply.text());
            let parts = chunks.iter();
            let parts =
                parts.filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
            assert_eq!(Value::from(parts.flatten().cloned().collect::<Vec<_>>()), want);
        } else {
            let logprobs = &reply.json()["choices"][0]["logprobs"];
            assert_eq!((&logprobs["content"], &logprobs["refusal"]), (&want, &Value::Null));
        }
    }
}

#[tokio::test]
async fn a_plain_answer_carries_them_side_by_side() {
    let body = json!({"model": MODEL, "prompt": "hi", "logprobs": 2});
    let (_router, worker, mut connection, request) = asked("/v1/completions", &body).await;
    answer(&worker, request);
    let reply = connection.reply().await.json();
    // The token that was drawn is there beside the best ones.
    let want = json!({"tokens": ["a", "b"], "token_logprobs": [-0.5, -3.0], "text_offset": [0, 1],
        "top_logprobs": [{"a": -0.5, "x": -2.0}, {"y": -0.25, "z": -1.0, "b": -3.0}]});
    assert_eq!(reply["choices"][0]["logprobs"], want);
}

#[tokio::test]
async fn a_token_that_came_without_leaves_the_others_theirs() {
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = json!({"model": MODEL, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}],
            "logprobs": 1, "top_logprobs": 1});
        let mut body = body;
        let chat = path.contains("chat");
        let object = body.as_object_mut().unwrap();
        if chat {
            object.remove("prompt");
            object["logprobs"] = json!(true);
        } else {
            object.remove("messages");
            object.remove("top_logprobs");
        }
        let (_router, worker, mut connection, request) = asked(path, &body).await;
        // three outputs in one step: they gather before anybody reads
        let bare = output(request, letters("ab"), None);
        let logprobs = Some(vec![ranked(-0.5, &[("c", -0.5)])]);
        let with = Output { logprobs, ..output(request, letters("c"), None) };
        let last = output(request, letters("d"), Some(Finish::Length));
        worker.send(Frame::Step(step(vec![bare, with, last])));
        let reply = connection.reply().await.json();
        let logprobs = &reply["choices"][0]["logprobs"];
        if chat {
            let content = logprobs["content"].as_array().unwrap();
            let pairs = content.iter().map(|one| (one["token"].as_str(), one["logprob"].as_f64()));
            let never = Some(-9999.0);
            let want = [("a", never), ("b", never), ("c", Some(-0.5)), ("d", never)];
            assert!(pairs.eq(want.map(|(token, logprob)| (Some(token), logprob))), "{logprobs}");
        } else {
            assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "d"]));
            assert_eq!(logprobs["token_logprobs"], json!([null, null, -0.5, null]));
            assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
        }
    }
}

#[tokio::test]
async fn echo_begins_with_the_prompt_and_its_log_probabilities() {
    let prompt = letters("pq");
    let body =
        json!({"model": MODEL, "prompt": prompt, "logprobs": 1, "echo": true, "max_tokens": 0});
    let (_router, worker, mut connection, request) = asked("/v1/completions", &body).await;
    let only = Output {
        prompt_logprobs: Some(vec![ranked(-1.5, &[("q", -1.5)])]),
        logprobs: Some(Vec::new()),
        ..output(request, Vec::new(), Some(Finish::Length))
    };
    worker.send(Frame::Step(step(vec![only])));
    let reply = connection.reply().await.json();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("pq"), &json!("length")));
    let want = json!({"tokens": ["p", "q"], "token_logprobs": [null, -1.5],
        "top_logprobs": [null, {"q": -1.5}], "text_offset": [0, 1]});
    assert_eq!(choice["logprobs"], want);
    assert_eq!(reply["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn echo_without_log_probabilities_is_the_prompt_as_it_was_sent() {
    for stream in [false, true] {
        let body = json!({"model": MODEL, "prompt": "say: ", "echo": true, "stream": stream});
        let (_router, worker, mut connection, request) = asked("/v1/completions", &body).await;
        worker.gives(request, &letters("x"), None);
        worker.gives(request, &[EOS], Some(Finish::Stop));
        let reply = connection.reply().await;
        let text: String = if stream {
            let chunks = chunks(reply.text());
            chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect()
        } else {
            reply.json()["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        assert_eq!(text, "say: x");
    }
}

#[tokio::test]
async fn echo_of_nothing_more_needs_no_worker() {
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let body = json!({"model": MODEL, "prompt": "pq", "echo": true, "max_tokens": 0});
    let reply = router.post("/v1/completions", body.to_string()).await.json();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("pq"), &json!("length")));
}
