//! Requests that are wrong in one place are refused with that place, and no worker hears of them.

use serde_json::{Value, json};

use super::client::{Reply, TestRouter, args};
use crate::fake_worker::{Behaviour, CONTEXT_TOKENS, Event, MODEL};

fn param_of(reply: &Reply) -> Value {
    assert_eq!(reply.status, 400, "{}", reply.text());
    reply.error()["param"].clone()
}

#[tokio::test]
async fn a_wrong_chat_is_refused_by_the_name_of_the_field() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let user = json!([{"role": "user", "content": "hi"}]);
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    for (extra, param) in [
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [7]}), "messages[0]"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": null}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": image}]}), "messages[0].content[0].type"),
        (json!({"model": null}), "model"),
        (json!({"model": 7}), "model"),
        (json!({"model": "m".repeat(1000)}), "model"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": "abc"}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 1e30}), "max_tokens"),
        (json!({"temperature": 99}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"n": 0}), "n"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"logit_bias": {"577": 1}}), "logit_bias"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f g"}}]}),
            "tools[0].function.name",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"some_new_thing": true}), "some_new_thing"),
    ] {
        let mut body = json!({"model": MODEL, "messages": user});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = router.post("/v1/chat/completions", body.to_string()).await;
        assert_eq!(param_of(&reply), param);
    }
    let heard = worker.so_far();
    assert!(!heard.iter().any(|event| matches!(event, Event::Submit(_))), "{heard:?}");
}

#[tokio::test]
async fn an_unknown_model_is_404_and_names_those_that_are_served() {
    let (router, _worker) = TestRouter::saying("x").await;
    for (path, rest) in [
        ("/v1/chat/completions", r#""messages": [{"role": "user", "content": "x"}]"#),
        ("/v1/completions", r#""prompt": "x""#),
        ("/tokenize", r#""prompt": "x""#),
    ] {
        let reply = router.post(path, format!(r#"{{"model": "gpt-9", {rest}}}"#)).await;
        let error = reply.error();
        assert_eq!((reply.status, &error["code"]), (404, &json!("model_not_found")));
        assert_eq!(error["param"], "model");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("gpt-9") && message.contains(MODEL), "{message}");
    }
}

#[tokio::test]
async fn what_does_not_fit_the_context_is_refused_with_both_numbers() {
    let (router, _worker) = TestRouter::saying("x").await;
    let tokens = vec![5; CONTEXT_TOKENS as usize + 10];
    for body in [
        json!({"model": MODEL, "prompt": tokens}),
        json!({"model": MODEL, "prompt": "hi", "max_tokens": CONTEXT_TOKENS}),
    ] {
        let reply = router.post("/v1/completions", body.to_string()).await;
        let error = reply.error();
        assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")));
        let message = error["message"].as_str().unwrap();
        let numbers = message.split(|c: char| !c.is_ascii_digit());
        let numbers: Vec<u32> = numbers.filter_map(|number| number.parse().ok()).collect();
        assert!(numbers.contains(&CONTEXT_TOKENS), "{message}");
        assert!(numbers.iter().any(|number| *number > CONTEXT_TOKENS), "{message}");
    }
}

#[tokio::test]
async fn tokens_outside_the_vocabulary_are_refused() {
    let (router, _worker) = TestRouter::saying("x").await;
    let body = json!({"model": MODEL, "prompt": [5, 577]}).to_string();
    assert_eq!(param_of(&router.post("/v1/completions", body).await), "prompt[1]");
    let body = json!({"tokens": [577]}).to_string();
    assert_eq!(param_of(&router.post("/detokenize", body).await), "tokens[0]");
}
