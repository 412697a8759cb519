//! What items become.

use super::*;

fn messages(items: Value) -> Result<Vec<Value>, RouteError> {
    let Value::Array(items) = items else { panic!("tests pass arrays") };
    let mut messages = ItemMessages::default();
    for (i, item) in items.into_iter().enumerate() {
        messages.add(item, format!("input[{i}]"))?;
    }
    Ok(messages.finish())
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[test]
fn what_the_assistant_did_between_others_is_one_message() {
    let got = messages(json!([
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content":
            [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "i", "name": "f", "arguments": "{}",
            "status": "completed"},
        {"type": "function_call", "call_id": "j", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "i", "output": "d"},
        {"type": "function_call_output", "call_id": "j", "output":
            [{"type": "input_text", "text": "e"}]},
        {"type": "reasoning", "encrypted_content": "headrace:so", "summary": []},
        {"type": "reasoning", "encrypted_content": "of another server", "summary": []},
    ]))
    .unwrap();
    let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
    let want = [
        json!({"role": "developer", "content": [text("a")]}),
        json!({"role": "user", "content": [text("b")]}),
        json!({"role": "assistant", "content": [text("c")], "reasoning_content": "hm",
            "tool_calls": [call("i", "f"), call("j", "g")]}),
        json!({"role": "tool", "tool_call_id": "i", "content": [text("d")]}),
        json!({"role": "tool", "tool_call_id": "j", "content": [text("e")]}),
        json!({"role": "assistant", "content": "", "reasoning_content": "so"}),
    ];
    assert_eq!(got, want);
}

#[test]
fn each_wrong_item_is_named_by_its_path() {
    for (item, want) in [
        (json!("x"), "input[0]"),
        (json!({"role": "user"}), "input[0].content"),
        (json!({"role": "robot", "content": "x"}), "input[0].role"),
        (json!({"role": "user", "content": []}), "input[0].content"),
        (json!({"role": "user", "content": "x", "mood": 1}), "input[0].mood"),
        (
            json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
            "input[0].content[0].type",
        ),
        (json!({"type": "web_search_call", "id": "ws_1"}), "input[0].type"),
        (json!({"type": "function_call", "name": "f", "arguments": "{}"}), "input[0].call_id"),
        (json!({"type": "function_call_output", "call_id": "i"}), "input[0].output"),
        (
            json!({"type": "reasoning", "content": [{"type": "summary_text", "text": "x"}]}),
            "input[0].content[0].type",
        ),
    ] {
        match messages(json!([item])) {
            Err(RouteError::BadRequest { param, .. }) => assert_eq!(param.unwrap(), want, "{item}"),
            other => panic!("{item}: {other:?}"),
        }
    }
}

#[test]
fn what_is_stored_has_ids_and_parts() {
    let mut items = [
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "b", "id": "msg_own"}),
        json!({"type": "function_call_output", "call_id": "i", "output": "c"}),
    ];
    normalised(&mut items, |prefix| format!("{prefix}_x")).unwrap();
    let output = json!({"type": "output_text", "text": "b", "annotations": []});
    let want = [
        json!({"type": "message", "id": "msg_x", "role": "user", "status": "completed",
            "content": [{"type": "input_text", "text": "a"}]}),
        json!({"type": "message", "id": "msg_own", "role": "assistant", "status": "completed",
            "content": [output]}),
        json!({"type": "function_call_output", "id": "fco_x", "call_id": "i", "output": "c"}),
    ];
    assert_eq!(items, want);
    assert!(messages(Value::Array(items.to_vec())).is_ok(), "it can be read again");
    assert!(normalised(&mut [json!(5)], |_| String::new()).is_err());
}
