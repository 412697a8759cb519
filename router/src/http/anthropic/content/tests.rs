//! What messages become.

use super::*;
use crate::limits::memory::MemoryPool;

fn added(messages: Value) -> Result<Vec<Value>, RouteError> {
    let Value::Array(messages) = messages else { panic!("tests pass arrays") };
    let mut memory = MemoryPool::private(1 << 20).share();
    let mut chat = ChatMessages::default();
    for (i, message) in messages.into_iter().enumerate() {
        chat.add(Fields::of(message, format!("messages[{i}]"))?, &mut memory)?;
    }
    Ok(chat.messages)
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[test]
fn a_turn_with_tools_is_the_same_turn_of_a_chat() {
    let got = added(json!([
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "headrace-1"},
            {"type": "redacted_thinking", "data": "x"},
            text("c"),
            {"type": "tool_use", "id": "i", "name": "f", "input": {"x": [1]}},
            {"type": "tool_use", "id": "j", "name": "g", "input": {}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "i", "content": "r"},
            {"type": "tool_result", "tool_use_id": "j", "content": [text("s")], "is_error": true},
            {"type": "tool_result", "tool_use_id": "k", "is_error": false},
            text("d"),
        ]},
    ]))
    .unwrap();
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let result =
        |id: &str, content: Value| json!({"role": "tool", "tool_call_id": id, "content": content});
    let want = [
        json!({"role": "user", "content": [text("a"), text("b")]}),
        json!({
            "role": "assistant",
            "content": [text("c")],
            "reasoning_content": "hm",
            "tool_calls": [call("i", "f", r#"{"x":[1]}"#), call("j", "g", "{}")],
        }),
        result("i", json!("r")),
        result("j", json!([text("Error:"), text("s")])),
        result("k", json!("")),
        json!({"role": "user", "content": [text("d")]}),
    ];
    assert_eq!(got, want);
}

#[test]
fn a_failed_tool_says_so() {
    let result =
        json!({"type": "tool_result", "tool_use_id": "i", "content": "no", "is_error": true});
    let got = added(json!([{"role": "user", "content": [result]}])).unwrap();
    assert_eq!(got[0]["content"], "Error: no");
}

#[test]
fn each_wrong_block_is_named_by_its_path() {
    for (role, block, want) in [
        ("user", json!("x"), "content[0]"),
        ("user", json!({"text": "x"}), "content[0].type"),
        ("user", json!({"type": "text"}), "content[0].text"),
        ("user", json!({"type": "text", "text": "x", "mood": 1}), "content[0].mood"),
        ("user", json!({"type": "image", "source": {}}), "content[0].type"),
        ("user", json!({"type": "document", "source": {}}), "content[0].type"),
        ("user", json!({"type": "tool_use"}), "content[0].type"),
        ("user", json!({"type": "tool_result"}), "content[0].tool_use_id"),
        (
            "user",
            json!({"type": "tool_result", "tool_use_id": "i", "content": [{"type": "image"}]}),
            "content[0].content[0].type",
        ),
        ("assistant", json!({"type": "tool_result"}), "content[0].type"),
        ("assistant", json!({"type": "server_tool_use"}), "content[0].type"),
        ("assistant", json!({"type": "tool_use", "id": "i"}), "content[0].name"),
        (
            "assistant",
            json!({"type": "tool_use", "id": "i", "name": "f", "input": "{}"}),
            "content[0].input",
        ),
        ("assistant", json!({"type": "thinking"}), "content[0].thinking"),
    ] {
        match added(json!([{"role": role, "content": [block]}])) {
            Err(RouteError::BadRequest { param, .. }) => {
                assert_eq!(param.unwrap(), format!("messages[0].{want}"), "{block}");
            }
            other => panic!("{block}: {other:?}"),
        }
    }
    for content in [json!([]), json!(5), Value::Null] {
        assert!(added(json!([{"role": "user", "content": content}])).is_err());
    }
}
