//! Reasoning and calls of tools over HTTP, in OpenAI's shapes.

mod together;

use headrace_router::core::frame::GrammarKind;
use serde_json::{Value, json};

use super::client::{Reply, TestRouter, args, chunks};
use crate::fake_worker::{Behaviour, MODEL, Script};

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false}}})
}

fn body(extra: &Value) -> String {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

async fn ask(router: &TestRouter, extra: &Value) -> Reply {
    let reply = router.post("/v1/chat/completions", body(extra)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// All deltas of a stream, and the reason of its end.
fn streamed(reply: &Reply) -> (Vec<Value>, Value) {
    let chunks = chunks(reply.text());
    let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
    let reason = choices.clone().next_back().unwrap()["finish_reason"].clone();
    (choices.map(|choice| choice["delta"].clone()).collect(), reason)
}

const CALLS: &str = r#"Let me see. <tool_call>{"name": "f", "arguments": {"city": "Bonn"}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>"#;

#[tokio::test]
async fn calls_are_whole_as_openai_has_them() {
    let (router, _worker) = TestRouter::saying(CALLS).await;
    let answer = ask(&router, &json!({"tools": [tool("f"), tool("g")]})).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "Let me see.");
    let calls = message["tool_calls"].as_array().unwrap();
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let call = |place: usize| {
        let mut call = calls[place].clone();
        call.as_object_mut().unwrap().remove("id").unwrap();
        call
    };
    let want = |name: &str, arguments: &str| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(call(0), want("f", r#"{"city": "Bonn"}"#));
    assert_eq!(call(1), want("g", "{}"));
    // what the client sends back is understood
    let messages = json!([{"role": "user", "content": "hi"}, message,
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sun"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "12"}]);
    ask(&router, &json!({"tools": [tool("f"), tool("g")], "messages": messages})).await;
}

#[tokio::test]
async fn calls_are_streamed_as_openai_has_them() {
    let (router, _worker) = TestRouter::saying(CALLS).await;
    let reply = ask(&router, &json!({"stream": true, "tools": [tool("f"), tool("g")]})).await;
    let (deltas, reason) = streamed(&reply);
    assert_eq!(reason, "tool_calls");
    assert_eq!(deltas[0], json!({"role": "assistant", "content": "", "refusal": null}));
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(content, "Let me see.");
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    let begins: Vec<&&Value> = calls.iter().filter(|call| call.get("id").is_some()).collect();
    assert_eq!(begins.len(), 2);
    for (place, name) in ["f", "g"].into_iter().enumerate() {
        let begin = begins[place];
        let function = json!({"name": name, "arguments": ""});
        assert_eq!((&begin["index"], &begin["type"]), (&json!(place), &json!("function")));
        assert_eq!(begin["function"], function);
        let arguments: String = calls
            .iter()
            .filter(|call| call["index"] == place)
            .map(|call| call["function"]["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(arguments, if place == 0 { r#"{"city": "Bonn"}"# } else { "{}" });
    }
    assert_eq!(*deltas.last().unwrap(), json!({}));

    let call = r#"<tool_call>{"name": "f", "arguments": {"city": "B"}}</tool_call>"#;
    let (router, _worker) = TestRouter::saying(call).await;
    let (deltas, _) = streamed(&ask(&router, &json!({"stream": true, "tools": [tool("f")]})).await);
    assert_eq!(deltas[0], json!({"role": "assistant", "content": null, "refusal": null}));
    let answer = ask(&router, &json!({"tools": [tool("f")]})).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
}

#[tokio::test]
async fn without_tools_or_with_none_wanted_text_stays_text() {
    let (router, _worker) = TestRouter::saying(CALLS).await;
    for extra in [json!({}), json!({"tools": [tool("f")], "tool_choice": "none"})] {
        let answer = ask(&router, &extra).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], CALLS);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn one_call_alone_ends_the_answer_and_its_worker() {
    for stream in [false, true] {
        let script = Script::says(CALLS);
        let worker = Behaviour::new("w").answers(move |_| Some(script.clone()));
        let (router, mut worker) = TestRouter::with(worker, args()).await;
        let extra = json!({"tools": [tool("f"), tool("g")], "parallel_tool_calls": false, "stream": stream, "n": 2});
        let reply = ask(&router, &extra).await;
        if stream {
            let text = reply.text();
            assert_eq!(text.matches("\"name\":\"f\"").count(), 2);
            assert!(!text.contains("\"name\":\"g\"") && text.ends_with("data: [DONE]\n\n"));
            assert_eq!(text.matches("\"finish_reason\":\"tool_calls\"").count(), 2);
        } else {
            let answer = reply.json();
            for choice in answer["choices"].as_array().unwrap() {
                assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
                assert_eq!(choice["finish_reason"], "tool_calls");
            }
        }
        let _ = worker.so_far();
    }
}

#[tokio::test]
async fn a_call_that_has_to_be_is_held_to_a_grammar() {
    let call = r#"<tool_call>{"name": "f", "arguments": {"city": "B"}}</tool_call>"#;
    let worker = Behaviour::new("w").answers(move |submit| {
        let grammar = submit.sampling.grammar.clone().expect("a grammar");
        assert_eq!(grammar.kind, GrammarKind::Lark);
        assert!(
            grammar.source.contains("city") && !grammar.source.contains("\\\"g\\\""),
            "{}",
            grammar.source
        );
        Some(Script::says(call))
    });
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let named = json!({"type": "function", "function": {"name": "f"}});
    let only_f = json!({"tools": [tool("f")], "tool_choice": "required"});
    for extra in [only_f, json!({"tools": [tool("f"), tool("g")], "tool_choice": named})] {
        let answer = ask(&router, &extra).await.json();
        assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "f");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[tokio::test]
async fn wrong_tools_are_named() {
    let (router, _worker) = TestRouter::saying("x").await;
    let mut odd = tool("f");
    odd["function"]["parameters"]["properties"]["city"] = json!({"type": "string", "contains": 1});
    for (extra, param) in [
        (json!({"tools": [tool("f"), tool("f")]}), "tools[1].function.name"),
        (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice.function.name",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tools": [odd], "tool_choice": "required"}),
            "tools[0].function.parameters.properties.city.contains",
        ),
    ] {
        let reply = router.post("/v1/chat/completions", body(&extra)).await;
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{extra}");
    }
}

#[tokio::test]
async fn a_cut_answer_says_length() {
    let mut script = Script::says(r#"<tool_call>{"name": "f", "arguments": {"ci"#);
    script.steps.pop();
    script.finish = headrace_router::core::frame::Finish::Length;
    let worker = Behaviour::new("w").answers(move |_| Some(script.clone()));
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let answer = ask(&router, &json!({"tools": [tool("f")]})).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let function = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(function["arguments"], r#"{"ci"#);
}

#[tokio::test]
async fn reasoning_is_apart_and_counted() {
    let text = "<think>a b</think>Hello";
    let mut args = args();
    args.reasoning_parser = Some("think".into());
    let (router, _worker) = TestRouter::with(Behaviour::says("w", text), args).await;
    let answer = ask(&router, &json!({})).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"], &message["reasoning"]),
        (&json!("Hello"), &json!("a b"), &json!("a b"))
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    // every character is a token: the thought, what ends it, and what completed the marker before it
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 1 + 3 + 8);

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let reply = ask(&router, &options).await;
    let (deltas, _) = streamed(&reply);
    let joined =
        |name: &str| deltas.iter().filter_map(|delta| delta[name].as_str()).collect::<String>();
    assert_eq!((joined("reasoning_content"), joined("content")), ("a b".into(), "Hello".into()));
    assert_eq!(joined("reasoning"), "a b");
    let usage = chunks(reply.text()).last().unwrap()["usage"].clone();
    assert_eq!(usage["completion_tokens_details"], *details);

    let hidden = ask(&router, &json!({"include_reasoning": false})).await.json();
    assert_eq!(
        hidden["choices"][0]["message"],
        json!({"role": "assistant", "content": "Hello", "refusal": null})
    );
    assert_eq!(hidden["usage"]["completion_tokens_details"], *details);

    let models = router.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["reasoning_parser"], "think");
}

#[tokio::test]
async fn log_probabilities_come_with_calls() {
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let (router, _worker) = TestRouter::saying(call).await;
    let extra = json!({"tools": [tool("f")], "logprobs": true});
    let answer = ask(&router, &extra).await.json();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().len();
    assert_eq!(tokens, call.len());
    let mut extra = extra;
    extra["stream"] = json!(true);
    let all = chunks(ask(&router, &extra).await.text());
    let tokens =
        all.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(tokens.map(Vec::len).sum::<usize>(), call.len());
}

#[tokio::test]
async fn a_stop_string_inside_of_a_call_leaves_a_call_that_is_not_to_be_run() {
    let (router, _worker) = TestRouter::saying(CALLS).await;
    for (stop, reason) in [("onn", "stop"), ("</tool_call>", "tool_calls")] {
        let answer = ask(&router, &json!({"tools": [tool("f"), tool("g")], "stop": stop})).await;
        assert_eq!(answer.json()["choices"][0]["finish_reason"], reason, "{stop}");
    }
}
