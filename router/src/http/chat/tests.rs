//! What of a chat body is taken, and what is refused.

use serde_json::json;

use super::*;
use crate::limits::memory::MemoryPool;
use crate::prompt::Conventions;

fn checked(extra: &Value) -> Result<ChatRequest, RouteError> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().append(&mut extra.as_object().unwrap().clone());
    let model = ModelFacts { vocab_size: 100, ..ModelFacts::default() };
    check(Fields::of_body(body).unwrap(), &model, &mut MemoryPool::private(1 << 20).share())
}

fn param(extra: &Value) -> String {
    match checked(extra) {
        Err(RouteError::BadRequest { param: Some(param), .. }) => param,
        other => panic!("{extra}: {other:?}"),
    }
}

#[test]
fn what_real_clients_send_is_accepted() {
    for extra in [
        json!({}),
        json!({"max_completion_tokens": 5, "max_tokens": 5, "user": "u", "metadata": {"a": "b"},
            "store": false, "service_tier": "auto", "parallel_tool_calls": true}),
        json!({"ignore_eos": true, "stream": true, "stream_options":
            {"include_usage": true, "continuous_usage_stats": true}}),
        json!({"logprobs": true, "top_logprobs": 20, "modalities": ["text"], "tools": null}),
        json!({"logprobs": null, "top_logprobs": 0, "tool_choice": "auto", "n": 3, "seed": 7}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        checked(&extra).unwrap_or_else(|error| panic!("{extra}: {error}"));
    }
}

#[test]
fn each_wrong_parameter_is_named() {
    for (name, value) in [
        ("messages", json!("hi")),
        ("messages", json!([])),
        ("messages", json!(null)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!("abc")),
        ("max_completion_tokens", json!(-1)),
        ("top_logprobs", json!(5)),
        ("tool_choice", json!("required")),
        ("reasoning_effort", json!("high")),
        ("audio", json!({})),
        ("store", json!(true)),
        ("service_tier", json!("flex")),
        ("functions", json!([{"name": "f"}])),
        ("frobnicate", json!(1)),
        ("continue_final_message", json!(true)),
    ] {
        assert_eq!(param(&json!({ name: value })), name);
    }
    assert_eq!(param(&json!({"tools": [{"type": "function"}]})), "tools[0].function");
    assert_eq!(param(&json!({"max_tokens": 1, "max_completion_tokens": 2})), "max_tokens");
    assert_eq!(param(&json!({"min_tokens": 5, "max_tokens": 2})), "min_tokens");
    let kwargs = json!({"chat_template_kwargs": {"messages": []}});
    assert_eq!(param(&kwargs), "chat_template_kwargs.messages");
}

/// Operators may have unknown parameters ignored; a part of a constraint is none.
#[test]
fn parts_of_constraints_that_nobody_knows_are_refused_even_where_unknown_parameters_pass() {
    let ignored = crate::http::parse::ignored::IgnoredFields::new(true);
    let checked = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {}}}]});
        body.as_object_mut().unwrap().append(&mut extra.as_object().unwrap().clone());
        let conventions = Conventions { knows_tools: true, ..Conventions::default() };
        let conventions =
            Conventions { tools: Some(crate::prompt::ToolParser::Hermes), ..conventions };
        let model = ModelFacts { vocab_size: 100, conventions, ..ModelFacts::default() };
        let fields = Fields::of_body(body).unwrap().noting(&ignored);
        check(fields, &model, &mut MemoryPool::private(1 << 20).share())
    };
    for (extra, want) in [
        (
            json!({"response_format": {"type": "json_object", "schema": {}}}),
            "response_format.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}),
            "response_format.json_schema.x",
        ),
        (
            json!({"structured_outputs": {"regex": "a", "backend": "x"}}),
            "structured_outputs.backend",
        ),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "f", "strict": true}}}),
            "tool_choice.function.strict",
        ),
        (json!({"messages": [{"role": "user", "content": "a", "mood": 1}]}), "messages[0].mood"),
        (json!({"nvext": {"frobnicate": 1}}), "nvext.frobnicate"),
    ] {
        match checked(extra.clone()) {
            Err(RouteError::BadRequest { param, .. }) => assert_eq!(param.as_deref(), Some(want)),
            other => panic!("{extra}: {other:?}"),
        }
    }
    assert!(ignored.header().is_none());
    checked(json!({"frobnicate": {"a": 1}, "stream": true, "stream_options": {"pad": 1}})).unwrap();
    assert_eq!(ignored.header().unwrap(), "frobnicate, stream_options.pad");
}

#[test]
fn tools_reach_a_template_that_knows_them_and_a_message_otherwise() {
    let tools = json!([{"type": "function", "function": {"name": "f", "strict": true}}]);
    for (knows_tools, choice, read) in
        [(true, "none", false), (true, "auto", true), (false, "none", false), (false, "auto", true)]
    {
        let parser = Some(crate::prompt::ToolParser::Hermes);
        let conventions = Conventions { knows_tools, tools: parser, ..Conventions::default() };
        let body = json!({"messages": [{"role": "user", "content": "hi"}],
            "tools": tools, "tool_choice": choice});
        let model = ModelFacts { vocab_size: 100, conventions, ..ModelFacts::default() };
        let mut memory = MemoryPool::private(1 << 20).share();
        let request = check(Fields::of_body(body).unwrap(), &model, &mut memory).unwrap();
        assert_eq!(request.format.is_some(), read);
        let Prompt::Chat(prompt) = request.job.prompt else { panic!("chat makes chat prompts") };
        assert_eq!(prompt.tools.map(Value::Array), knows_tools.then(|| tools.clone()));
        assert_eq!(prompt.messages.len(), if read && !knows_tools { 2 } else { 1 });
    }
}

#[test]
fn a_text_as_long_as_a_body_may_be_is_charged_three_times_and_fits() {
    const LONGEST: usize = 1 << 20;
    let text = "a line\nand a \"word\" ".repeat(LONGEST / 24);
    let body = json!({"messages": [{"role": "user", "content": text}]}).to_string();
    assert!((LONGEST / 2..LONGEST).contains(&body.len()));
    // as `config` has it for bodies of this length
    let mut memory = MemoryPool::private(8 * LONGEST + (4 << 20)).share();
    let fields = crate::http::parse::json::parse(body.as_bytes(), None, &mut memory).unwrap().value;
    let model = ModelFacts { vocab_size: 100, ..ModelFacts::default() };
    check(Fields::of_body(fields).unwrap(), &model, &mut memory).unwrap();
    assert!((3 * text.len()..3 * text.len() + 10_000).contains(&memory.used()));
}

#[test]
fn what_a_template_would_copy_beyond_the_memory_of_a_request_is_refused() {
    let arguments = format!("{{\"a\": [{}]}}", vec!["[0]"; 1000].join(","));
    let call = json!([{"id": "a", "function": {"name": "f", "arguments": arguments}}]);
    for (message, read, param) in [
        (json!({"role": "user", "content": "x"}), 40_000, "messages"),
        (
            json!({"role": "assistant", "tool_calls": call}),
            1_000,
            "messages[0].tool_calls[0].function.arguments.a",
        ),
    ] {
        let mut memory = MemoryPool::private(100_000).share();
        memory.charge(read).unwrap(); // what the body took
        let fields = Fields::of_body(json!({ "messages": [message] })).unwrap();
        match check(fields, &ModelFacts::default(), &mut memory) {
            Err(RouteError::BodyTooComplex { param: Some(got), .. }) => {
                assert!(got.starts_with(param), "{got}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_message_to_be_continued_gets_no_new_header() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let request = checked(&json!({"messages": messages, "continue_final_message": true})).unwrap();
    let Prompt::Chat(prompt) = request.job.prompt else { panic!("chat makes chat prompts") };
    assert!(prompt.continue_final_message && !prompt.add_generation_prompt);
}
