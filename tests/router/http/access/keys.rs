//! Keys of a file: how much each may use, what it may ask for, when it ends, and files that change.

use std::path::PathBuf;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::Finish;
use serde_json::{Value, json};

use super::super::client::{Connection, Reply, TestRouter, args};
use crate::fake_worker::*;

/// A file of keys, removed when this drops.
struct KeyFile(PathBuf);

impl KeyFile {
    fn new(name: &str, text: &str) -> Self {
        let name = format!("headrace-router-keys-{}-{name}", std::process::id());
        let file = Self(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }

    fn args(&self) -> RouterArgs {
        RouterArgs { api_key_file: Some(self.0.clone()), ..args() }
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn head(path: &str, key: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}")
}

/// Begins to ask for an answer to a prompt of so many tokens.
async fn ask(router: &TestRouter, key: &str, tokens: u32) -> Connection {
    let prompt: Vec<u32> = (3..3 + tokens).collect();
    let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 64}).to_string();
    let mut connection = router.connect().await;
    connection.request(&head("/v1/completions", key), body.as_bytes()).await;
    connection
}

/// The answer, for which the worker gives so many tokens.
async fn answered(
    router: &TestRouter,
    worker: &mut FakeWorker,
    key: &str,
    (prompt, tokens): (u32, usize),
) -> Reply {
    let mut connection = ask(router, key, prompt).await;
    let request = worker.submitted().await.request;
    let mut ids = vec![letters("a")[0]; tokens - 1];
    ids.push(EOS);
    worker.gives(request, &ids, Some(Finish::Stop));
    let reply = connection.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

async fn get(router: &TestRouter, path: &str, key: &str) -> Reply {
    router.send(&format!("GET {path} HTTP/1.1\r\nAuthorization: Bearer {key}"), b"").await
}

fn number(reply: &Reply, header: &str) -> u64 {
    let text = reply.header(header).unwrap_or_else(|| panic!("{header}: {reply:?}"));
    text.parse().unwrap()
}

/// What a refusal says, after a check of its shape.
fn limited(reply: &Reply) -> (String, u64) {
    let error = reply.error();
    assert_eq!((reply.status, &error["code"]), (429, &"rate_limit_exceeded".into()));
    (error["message"].as_str().unwrap().to_owned(), number(reply, "retry-after"))
}

#[tokio::test]
async fn requests_of_a_key_are_counted_and_those_of_another_are_not() {
    let file = KeyFile::new("rpm", "slow rpm=2\nfast\n");
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    for left in [1, 0] {
        let reply = answered(&router, &mut worker, "slow", (1, 1)).await;
        assert_eq!(number(&reply, "x-ratelimit-limit-requests"), 2);
        assert_eq!(number(&reply, "x-ratelimit-remaining-requests"), left);
        assert!(reply.header("x-ratelimit-reset-requests").unwrap().ends_with('s'));
        assert_eq!(reply.header("x-ratelimit-limit-tokens"), None);
    }
    let reply = ask(&router, "slow", 1).await.reply().await;
    let (message, after) = limited(&reply);
    assert!(message.contains("2 requests a minute"), "{message}");
    assert!((1..=30).contains(&after), "{after}");
    assert_eq!(number(&reply, "x-ratelimit-remaining-requests"), 0);
    // looking at models costs nothing, and others go on
    assert_eq!(get(&router, "/v1/models", "slow").await.status, 200);
    let reply = answered(&router, &mut worker, "fast", (1, 1)).await;
    assert_eq!(reply.header("x-ratelimit-limit-requests"), None);
    // the same for clients of Anthropic's API, in their form
    let body =
        json!({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]});
    let reply = router.send(&head("/v1/messages", "slow"), body.to_string().as_bytes()).await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (429, &"rate_limit_error".into()));
    assert!(reply.header("retry-after").is_some());
}

#[tokio::test]
async fn a_minute_later_there_are_requests_again() {
    let file = KeyFile::new("refill", "k rpm=1\n");
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    answered(&router, &mut worker, "k", (1, 1)).await;
    let (_, after) = limited(&ask(&router, "k", 1).await.reply().await);
    passes(std::time::Duration::from_secs(after)).await;
    worker.leaves(&router.app).await; // it was silent for a minute
    let mut worker = Behaviour::new("w2").ready(&router.app).await;
    answered(&router, &mut worker, "k", (1, 1)).await;
}

#[tokio::test]
async fn tokens_of_prompts_and_answers_are_paid_for_also_by_who_hangs_up() {
    let file = KeyFile::new("tpm", "k tpm=60 name=ci\n");
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    let reply = answered(&router, &mut worker, "k", (10, 20)).await;
    assert_eq!(number(&reply, "x-ratelimit-limit-tokens"), 60);
    let left = number(&get(&router, "/v1/models", "k").await, "x-ratelimit-remaining-tokens");
    assert!((30..=31).contains(&left), "{left}");
    // a prompt of more than are left is refused before any worker sees it, and takes nothing
    let (message, after) = limited(&ask(&router, "k", 50).await.reply().await);
    assert!(message.contains("60 tokens a minute") && (10..=20).contains(&after), "{message}");
    assert!(!worker.so_far().iter().any(|event| matches!(event, Event::Submit(_))));

    // the answer is taken as it came: the key may owe it, and pays before it asks again
    let mut connection = ask(&router, "k", 10).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &[letters("a")[0]; 40], None);
    until("they came", || metric(&router.app, "headrace_completion_tokens_total", "") == 60.0)
        .await;
    drop(std::mem::replace(&mut connection, router.connect().await));
    assert_eq!(worker.cancelled().await, request);
    let tokens = |kind: &str| {
        metric(&router.app, "headrace_key_tokens_total", &format!("key=\"ci\",kind=\"{kind}\""))
    };
    until("they were paid", || tokens("completion") == 60.0).await;
    assert_eq!(tokens("prompt"), 20.0);
    let reply = ask(&router, "k", 1).await.reply().await;
    let (message, after) = limited(&reply);
    assert!(message.contains("tokens a minute") && (10..=21).contains(&after), "{message} {after}");
    assert_eq!(number(&reply, "x-ratelimit-remaining-tokens"), 0);
    assert_eq!(metric(&router.app, "headrace_key_limited_total", "kind=\"tokens\""), 2.0);
}

#[tokio::test]
async fn a_key_has_so_many_answers_at_a_time() {
    let file = KeyFile::new("streams", "k streams=2\nother\n");
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    let mut running = Vec::new();
    for _ in 0..2 {
        let connection = ask(&router, "k", 1).await;
        running.push((connection, worker.submitted().await.request));
    }
    let (message, after) = limited(&ask(&router, "k", 1).await.reply().await);
    assert!(message.contains("2 answers at a time") && after == 1, "{message}");
    answered(&router, &mut worker, "other", (1, 1)).await;
    for (mut connection, request) in running {
        worker.gives(request, &[EOS], Some(Finish::Stop));
        assert_eq!(connection.reply().await.status, 200);
    }
    until("they are over", || metric(&router.app, "headrace_key_streams", "") == 0.0).await;
    answered(&router, &mut worker, "k", (1, 1)).await;
    // choices count singly
    let body = json!({"model": MODEL, "prompt": "x", "n": 3, "temperature": 1}).to_string();
    limited(&router.send(&head("/v1/completions", "k"), body.as_bytes()).await);
}

#[tokio::test]
async fn a_model_that_a_key_may_not_use_does_not_exist_for_it() {
    let text = format!("one models={MODEL}\nother models=a,b\nall\n");
    let file = KeyFile::new("models", &text);
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    answered(&router, &mut worker, "one", (1, 1)).await;
    answered(&router, &mut worker, "all", (1, 1)).await;
    let listed = async |key: &str| {
        let listed = get(&router, "/v1/models", key).await.json();
        listed["data"].as_array().unwrap().len()
    };
    assert_eq!((listed("one").await, listed("all").await, listed("other").await), (1, 1, 0));
    let of_model = format!("/v1/models/{MODEL}");
    assert_eq!(get(&router, &of_model, "one").await.status, 200);
    assert_eq!(get(&router, &format!("/tokenizer_info/{MODEL}"), "other").await.status, 404);

    let (text, chat) =
        (json!({"model": MODEL, "prompt": "x"}), json!([{"role": "user", "content": "x"}]));
    let with = |field: &str, value: &Value| {
        let mut body = json!({"model": MODEL});
        body[field] = value.clone();
        body
    };
    let mut message = with("messages", &chat);
    message["max_tokens"] = 1.into();
    let mut rerank = with("query", &"x".into());
    rerank["documents"] = json!(["y"]);
    let mut score = with("text_1", &"x".into());
    score["text_2"] = "y".into();
    for (path, body) in [
        ("/v1/completions", &text),
        ("/v1/chat/completions", &with("messages", &chat)),
        ("/v1/messages", &message),
        ("/v1/messages/count_tokens", &with("messages", &chat)),
        ("/v1/responses", &with("input", &"x".into())),
        ("/v1/embeddings", &with("input", &"x".into())),
        ("/v1/rerank", &rerank),
        ("/v1/score", &score),
        ("/tokenize", &text),
        ("/detokenize", &with("tokens", &json!([3]))),
    ] {
        let reply = router.send(&head(path, "other"), body.to_string().as_bytes()).await;
        assert_eq!(reply.status, 404, "{path}: {}", reply.text());
        let told = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(told.contains("does not exist"), "{path}: {told}");
        // it hears the same of a model that there is not
        let nonsense = body.to_string().replace(&format!("\"{MODEL}\""), "\"nonsense\"");
        let reply = router.send(&head(path, "other"), nonsense.as_bytes()).await;
        let same = reply.json()["error"]["message"].as_str().unwrap().replace("nonsense", MODEL);
        assert_eq!((reply.status, same), (404, told), "{path}");
    }
    let reply = get(&router, &of_model, "other").await;
    assert_eq!((reply.status, &reply.error()["code"]), (404, &"model_not_found".into()));
    assert!(!worker.so_far().iter().any(|event| matches!(event, Event::Submit(_))));
}

#[tokio::test]
async fn a_key_that_has_expired_is_told_so_and_opens_nothing() {
    let file = KeyFile::new("expired", "old expires=2020-01-01\nnew expires=2999-12-31\n");
    let router = TestRouter::start(file.args()).await;
    assert_eq!(get(&router, "/v1/models", "new").await.status, 200);
    for header in ["Authorization: Bearer old", "X-Api-Key: old"] {
        let reply = router.send(&format!("GET /v1/models HTTP/1.1\r\n{header}"), b"").await;
        assert_eq!((reply.status, &reply.error()["code"]), (401, &"invalid_api_key".into()));
        assert!(reply.error()["message"].as_str().unwrap().contains("has expired"), "{reply:?}");
    }
    assert_eq!(get(&router, "/decisions/x", "old").await.status, 401);
    // its sender may be a page of a stranger again
    let head =
        "POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer old\r\nOrigin: https://evil.com";
    assert_eq!(router.send(head, b"{}").await.status, 403);
}

#[tokio::test]
async fn a_file_holds_digests_in_the_place_of_keys() {
    let (one, two) = (
        blake3::hash(b"first").to_hex(),
        "16367aacb67a4a017c8da8ab95682ccb390863780f7114dda0a0e0c55644c7c4",
    );
    let file = KeyFile::new("hashed", &format!("blake3:{one} rpm=9\nalice sha256:{two}\n"));
    let router = TestRouter::start(file.args()).await;
    for (key, status) in [
        ("first", 200),
        ("second", 200),
        ("third", 401),
        (&format!("blake3:{one}"), 401),
        (&format!("sha256:{two}"), 401),
        (two, 401),
    ] {
        assert_eq!(get(&router, "/v1/models", key).await.status, status, "{key}");
    }
}

#[tokio::test]
async fn keys_change_while_it_serves_and_a_bad_file_changes_nothing() {
    let file = KeyFile::new("reload", "stays rpm=2 name=a\ngoes\n");
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), file.args()).await;
    let reloads = |outcome: &str| {
        metric(
            &router.app,
            "headrace_reloads_total",
            &format!("files=\"keys\",outcome=\"{outcome}\""),
        )
    };
    let status = async |key: &str| get(&router, "/v1/models", key).await.status;
    answered(&router, &mut worker, "stays", (1, 1)).await;

    for bad in ["", "# nothing\n", "stays rpm=2\nnew rpm=none\n", "stays rpm=2\nstays rpm=3\n"] {
        let before = reloads("refused");
        file.write(bad);
        router.reload.ask();
        until("it was refused", || reloads("refused") > before).await;
        assert_eq!(
            (status("stays").await, status("goes").await, status("new").await),
            (200, 200, 401)
        );
    }
    until("and is said to be", || metric(&router.app, "headrace_reloads_refused", "") == 1.0).await;
    file.write("stays rpm=3 name=b\nnew\n");
    until("a look found it", || reloads("loaded") > 0.0).await;
    assert_eq!((status("stays").await, status("goes").await, status("new").await), (200, 401, 200));
    assert_eq!(metric(&router.app, "headrace_reloads_refused", ""), 0.0);
    // what a key has used stays used
    let left = number(&get(&router, "/v1/models", "stays").await, "x-ratelimit-remaining-requests");
    assert_eq!(left, 1);
    assert_eq!(metric(&router.app, "headrace_key_requests_total", "key=\"b\""), 1.0);
    assert_eq!(metric(&router.app, "headrace_key_requests_total", "key=\"a\""), 0.0);
    let before = reloads("refused");
    std::fs::remove_file(&file.0).unwrap();
    router.reload.ask();
    until("it was refused", || reloads("refused") > before).await;
    assert_eq!(status("new").await, 200);
}
