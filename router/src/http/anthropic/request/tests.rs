//! What conversations become, and what is refused by name.

use super::*;
use crate::limits::memory::MemoryPool;

fn translated(body: Value) -> Result<Value, RouteError> {
    let mut memory = MemoryPool::private(1 << 20).share();
    let fields = to_chat(Fields::of_body(body)?, false, &mut memory)?;
    Ok(Value::Object(fields.fields.into_rest()))
}

/// A request with these fields beside the required ones.
fn body(more: &Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: &Value) -> Value {
    translated(body(more)).unwrap()
}

fn param(more: &Value) -> String {
    match translated(body(more)) {
        Err(RouteError::BadRequest { param: Some(param), message }) => {
            assert!(message.contains(&param), "{param}: {message}");
            param
        }
        other => panic!("{more}: {other:?}"),
    }
}

#[test]
fn a_small_request_is_a_small_chat() {
    let want = json!({
        "model": "m",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": false, "thinking": false},
    });
    assert_eq!(chat(&json!({})), want);
}

#[test]
fn parameters_of_a_chat_pass_as_they_are() {
    let more = json!({"allowed_token_ids": [1], "bad_words": ["x"], "guided_regex": "a", "include_reasoning": false,
        "max_reasoning_tokens": 3, "nvext": {"top_k": 2}, "truncate_prompt_tokens": 9, "add_special_tokens": true});
    let got = chat(&more);
    for (name, value) in more.as_object().unwrap() {
        assert_eq!(&got[name], value, "{name}");
    }
    for name in ["n", "return_token_ids", "prompt_logprobs", "response_format", "stop"] {
        assert_eq!(param(&json!({ name: 1 })), name);
    }
    let both =
        json!({"max_reasoning_tokens": 3, "thinking": {"type": "enabled", "budget_tokens": 3}});
    assert_eq!(param(&both), "max_reasoning_tokens");
}

#[test]
fn what_has_another_name_there_has_ours_here() {
    let got = chat(&json!({
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "stream": true,
        "thinking": {"type": "enabled", "budget_tokens": 50},
        "service_tier": "auto",
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "seed": 3,
    }));
    let system = json!({"role": "system", "content": [{"type": "text", "text": "a"}]});
    assert_eq!(got["messages"][0], system);
    let thinks = json!({"enable_thinking": true, "thinking": true});
    let format = json!({"type": "json_schema", "json_schema": {"schema": {}}});
    for (name, want) in [
        ("stop", json!(["x"])),
        ("user", json!("u")),
        ("top_k", json!(5)),
        ("stream", json!(true)),
        ("seed", json!(3)),
        ("chat_template_kwargs", thinks),
        ("response_format", format),
    ] {
        assert_eq!(got[name], want, "{name}");
    }
}

#[test]
fn tools_and_their_choice_become_those_of_a_chat() {
    let schema = json!({"type": "object", "properties": {}});
    let tool = json!({"name": "f", "description": "d", "input_schema": schema,
        "cache_control": {"type": "ephemeral"}, "type": "custom"});
    let got = chat(&json!({"tools": [tool], "tool_choice": {"type": "auto"}}));
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    assert_eq!(got["tools"], json!([{"type": "function", "function": function}]));
    let named = json!({"type": "function", "function": {"name": "f"}});
    for (theirs, ours, parallel) in [
        (json!({"type": "auto"}), json!("auto"), Value::Null),
        (json!({"type": "any"}), json!("required"), Value::Null),
        (json!({"type": "none"}), json!("none"), Value::Null),
        (json!({"type": "tool", "name": "f"}), named, Value::Null),
        (json!({"type": "auto", "disable_parallel_tool_use": true}), json!("auto"), json!(false)),
    ] {
        let got = chat(&json!({"tools": [tool], "tool_choice": theirs}));
        assert_eq!((&got["tool_choice"], &got["parallel_tool_calls"]), (&ours, &parallel));
    }
}

#[test]
fn the_last_words_of_the_assistant_are_gone_on_with() {
    let asks = json!({"role": "user", "content": "hi"});
    let calls = json!([{"type": "tool_use", "id": "i", "name": "f", "input": {}}]);
    for (content, goes_on) in [
        (json!("{"), json!(true)),
        (json!([{"type": "text", "text": "{"}]), json!(true)),
        (calls, Value::Null),
    ] {
        let says = json!({"role": "assistant", "content": content});
        let got = chat(&json!({"messages": [asks, says]}));
        assert_eq!(got["continue_final_message"], goes_on);
        let got = chat(&json!({"messages": [asks, says, asks]}));
        assert_eq!(got["continue_final_message"], Value::Null);
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let tool = |more: Value| {
        let mut tool = json!({"name": "f", "input_schema": {}});
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"tools": [tool]})
    };
    for (more, want) in [
        (json!({"model": "m", "wish": 1}), "wish"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), "messages[0].role"),
        (json!({"system": 5}), "system"),
        (json!({"system": [{"type": "image"}]}), "system[0].type"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 100}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "deep"}}), "thinking.type"),
        (json!({"tool_choice": {"type": "all"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (tool(json!({"type": "web_search_20250305"})), "tools[0].type"),
        (tool(json!({"defer_loading": true})), "tools[0].defer_loading"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (json!({"container": "c"}), "container"),
        (json!({"service_tier": "fast"}), "service_tier"),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "context_management",
        ),
        (json!({"metadata": {"user_id": 1}}), "metadata.user_id"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
    ] {
        assert_eq!(param(&more), want, "{more}");
    }
}

#[test]
fn counting_needs_no_length_of_an_answer() {
    let mut body = body(&json!({}));
    body.as_object_mut().unwrap().remove("max_tokens");
    let mut memory = MemoryPool::private(1 << 20).share();
    assert!(to_chat(Fields::of_body(body.clone()).unwrap(), true, &mut memory).is_ok());
    assert!(to_chat(Fields::of_body(body).unwrap(), false, &mut memory).is_err());
}

#[test]
fn a_budget_of_thoughts_is_that_of_thinking_that_is_on() {
    for (thinking, want) in [
        (json!({"type": "enabled", "budget_tokens": 50}), Some(50)),
        (json!({"type": "adaptive"}), None),
        (json!({"type": "disabled"}), None),
        (Value::Null, None),
    ] {
        let mut memory = MemoryPool::private(1 << 20).share();
        let fields = Fields::of_body(body(&json!({ "thinking": thinking }))).unwrap();
        let conversation = to_chat(fields, false, &mut memory).unwrap();
        assert_eq!(conversation.most_thinking, want, "{thinking}");
    }
}
