//! Texts that cannot fit are refused by their length, wherever they come in, and nobody else notices.

use serde_json::json;

use super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, CONTEXT_TOKENS, Event, MODEL};

#[tokio::test]
async fn a_text_that_cannot_fit_is_refused_by_its_length() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let text = "0123456789".repeat(100_000);
    let user = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        ("/v1/completions", json!({"model": MODEL, "prompt": text})),
        ("/v1/completions", json!({"model": MODEL, "prompt": ["short", text]})),
        ("/v1/chat/completions", json!({"model": MODEL, "messages": user})),
        ("/tokenize", json!({"prompt": text})),
        ("/tokenize", json!({"messages": user})),
    ] {
        let reply = router.post(path, body.to_string()).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.text());
        assert_eq!(reply.error()["code"], "context_length_exceeded", "{path}");
        let message = reply.error()["message"].as_str().unwrap().to_owned();
        let limit = format!("context length is {CONTEXT_TOKENS} tokens");
        assert!(message.contains(&limit) && message.contains("at least"), "{message}");
    }
    let heard = worker.so_far();
    assert!(!heard.iter().any(|event| matches!(event, Event::Submit(_))), "{heard:?}");
}

#[tokio::test]
async fn metrics_show_what_waits_for_the_tokeniser_and_what_its_cache_holds() {
    let (router, _worker) = TestRouter::saying("x").await;
    let reply = router.get("/metrics").await;
    let text = reply.text();
    for line in [
        "headrace_tokenizer_queue_requests 0\n",
        "headrace_tokenizer_queue_bytes 0\n",
        "headrace_prompt_cache_bytes 0\n",
        "headrace_prompt_cache_entries 0\n",
        "headrace_chain_memo_bytes ",
        &format!("headrace_prompt_uncut{{model=\"{MODEL}\"}} 0\n"),
        &format!("headrace_prompt_encoder{{model=\"{MODEL}\",encoder=\"fast\"}} 1\n"),
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
}
