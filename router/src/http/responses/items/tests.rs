//! What items become.

use super::*;

fn messages(items: Value) -> Result<Vec<Value>, RouteError> {
    let Value::Array(items) = items else { panic!("tests pass arrays") };
    let mut messages = ItemMessages::default();
    for (i, item) in items.into_iter().enumerate() {
        messages.add(item, &format!("input[{i}]"))?;
    }
    Ok(messages.finish().0)
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

#[test]
fn an_error_about_a_message_names_the_item() {
    let mut messages = ItemMessages::default();
    messages.instruct("Be brief.");
    let call =
        |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
    for (i, item) in [
        json!({"role": "user", "content": "a"}),
        json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}),
        call("1"),
        call("2"),
        json!({"type": "function_call_output", "call_id": "1", "output": "c"}),
    ]
    .into_iter()
    .enumerate()
    {
        messages.add(item, &format!("input[{i}]")).unwrap();
    }
    let (_, origins) = messages.finish();
    for (ours, theirs) in [
        ("messages[0].content", "instructions"),
        ("messages[1].content[0].text", "input[0]"),
        ("messages[2].tool_calls[1].function.arguments", "input[3].arguments"),
        ("messages[2].tool_calls[0].id", "input[2].id"),
        ("messages[2].reasoning_content", "input[1]"),
        ("messages[3].tool_call_id", "input[4]"),
        ("messages[9]", "messages[9]"),
        ("stop", "stop"),
    ] {
        let error = origins.of_client(bad(ours, format!("`{ours}` is wrong")));
        let RouteError::BadRequest { param, message } = error else { panic!("{error:?}") };
        assert_eq!(param.as_deref(), Some(theirs));
        assert_eq!(message, format!("`{theirs}` is wrong"));
    }
}
