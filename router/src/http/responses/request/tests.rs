//! What requests become, and what is refused by name.

use serde_json::json;

use super::*;
use crate::limits::memory::MemoryPool;

fn translated(body: Value, known: &Known) -> Result<(Value, Wishes), RouteError> {
    let pool = MemoryPool::private(1 << 20);
    let (mut values, mut answer) = (pool.share(), pool.share());
    let ids = ResponseIds::new();
    let memory = (&mut values, &mut answer);
    let (fields, wishes) = to_chat(Fields::of_body(body)?, known, &ids, true, memory)?;
    Ok((Value::Object(fields.into_rest()), wishes))
}

fn body(more: &Value) -> Value {
    let mut body = json!({"model": "m", "input": "hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: &Value) -> Value {
    translated(body(more), &Known::default()).unwrap().0
}

fn echo(more: &Value) -> Value {
    let (_, wishes) = translated(body(more), &Known::default()).unwrap();
    serde_json::from_str(&format!("{{{}}}", wishes.echo)).unwrap()
}

fn param(more: &Value) -> String {
    match translated(body(more), &Known::default()) {
        Err(RouteError::BadRequest { param: Some(param), message }) => {
            assert!(message.contains(&param), "{param}: {message}");
            param
        }
        other => panic!("{more}: {other:?}"),
    }
}

fn hi() -> Value {
    json!({"role": "user", "content": [{"type": "text", "text": "hi"}]})
}

#[test]
fn parameters_of_a_chat_pass_as_they_are() {
    let more = json!({"allowed_token_ids": [1], "bad_words": ["x"], "guided_regex": "a", "include_reasoning": false,
        "max_reasoning_tokens": 3, "nvext": {"top_k": 2}, "presence_penalty": 1, "truncate_prompt_tokens": 9,
        "add_special_tokens": true});
    let got = chat(&more);
    for (name, value) in more.as_object().unwrap() {
        assert_eq!(&got[name], value, "{name}");
    }
    for name in ["n", "return_token_ids", "prompt_logprobs", "response_format"] {
        assert_eq!(param(&json!({ name: 1 })), name);
    }
}

#[test]
fn a_small_request_is_a_small_chat() {
    assert_eq!(chat(&json!({})), json!({"model": "m", "messages": [hi()]}));
    let said = echo(&json!({}));
    for (field, want) in [
        ("instructions", Value::Null),
        ("metadata", json!({})),
        ("previous_response_id", Value::Null),
        ("store", json!(true)),
        ("parallel_tool_calls", json!(true)),
        ("max_output_tokens", Value::Null),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("text", json!({"format": {"type": "text"}, "verbosity": "medium"})),
        ("reasoning", json!({"effort": null, "summary": null})),
    ] {
        assert_eq!(said[field], want, "{field}");
        assert!(said.as_object().unwrap().contains_key(field), "{field}");
    }
}

#[test]
fn what_has_another_name_there_has_ours_here() {
    let schema = json!({"type": "object"});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let more = json!({
        "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0.5, "stream": true,
        "text": {"format": format}, "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"}, "user": "u", "truncation": "disabled", "background": false,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "stream_options": {"include_obfuscation": false}, "top_logprobs": 0,
    });
    let got = chat(&more);
    assert_eq!(got["messages"], json!([{"role": "system", "content": "Be brief."}, hi()]));
    let wrapper = json!({"name": "n", "schema": schema, "strict": true});
    for (name, want) in [
        ("max_completion_tokens", json!(20)),
        ("temperature", json!(0.5)),
        ("stream", json!(true)),
        ("reasoning_effort", json!("low")),
        ("user", json!("u")),
        ("response_format", json!({"type": "json_schema", "json_schema": wrapper})),
    ] {
        assert_eq!(got[name], want, "{name}");
    }
    let said = echo(&more);
    assert_eq!((&said["text"]["format"], &said["metadata"]), (&format, &json!({"a": "b"})));
    assert_eq!((&said["max_output_tokens"], &said["user"]), (&json!(20), &json!("u")));
    assert!(translated(body(&more), &Known::default()).unwrap().1.seals);
}

#[test]
fn log_probabilities_are_asked_for_by_name_or_number() {
    let included = json!({"include": ["message.output_text.logprobs"]});
    for (more, want) in [
        (json!({}), (Value::Null, Value::Null, json!(0))),
        (json!({"top_logprobs": 0}), (Value::Null, Value::Null, json!(0))),
        (included, (json!(true), json!(0), json!(0))),
        (json!({"top_logprobs": 3}), (json!(true), json!(3), json!(3))),
    ] {
        let got = chat(&more);
        let got = (got["logprobs"].clone(), got["top_logprobs"].clone());
        assert_eq!((got.0, got.1, echo(&more)["top_logprobs"].clone()), want, "{more}");
    }
}

#[test]
fn tools_and_their_choice_become_those_of_a_chat() {
    let tool = json!({"type": "function", "name": "f", "description": "d", "parameters": {},
        "strict": true});
    let function = json!({"name": "f", "description": "d", "parameters": {}, "strict": true});
    let named = json!({"type": "function", "function": {"name": "f"}});
    let allowed = json!({"type": "allowed_tools", "mode": "auto",
        "tools": [{"type": "function", "name": "f"}]});
    let ours = json!({"type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named]}});
    for (theirs, ours) in [
        (json!("required"), json!("required")),
        (json!({"type": "function", "name": "f"}), named),
        (allowed, ours),
    ] {
        let more = json!({"tools": [tool], "tool_choice": theirs});
        let got = chat(&more);
        assert_eq!(got["tools"], json!([{"type": "function", "function": function}]));
        assert_eq!(got["tool_choice"], ours);
        let said = echo(&more);
        assert_eq!((&said["tools"], &said["tool_choice"]), (&json!([tool]), &theirs));
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    for (more, want) in [
        (json!({"wish": 1}), "wish"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"background": true}), "background"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"top_logprobs": "many"}), "top_logprobs"),
        (json!({"include": ["all"]}), "include[0]"),
        (json!({"store": "yes"}), "store"),
        (json!({"metadata": {"a": 1}}), "metadata.a"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "file_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "computer_use_preview"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.name"),
        (
            json!({"stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
        ),
        (json!({"input": [{"type": "item_reference", "id": "msg_1_2"}]}), "input[0].id"),
    ] {
        assert_eq!(param(&more), want, "{more}");
    }
}

fn stored(input: &Value, output: &Value) -> Arc<StoredResponse> {
    let bytes = |value: &Value| value.to_string().into_bytes().into();
    Arc::new(StoredResponse {
        head: bytes(&json!(1)),
        output: bytes(output),
        tail: bytes(&json!(1)),
        input: bytes(input),
        previous: None,
        _memory: None,
    })
}

#[test]
fn what_was_stored_comes_before_what_is_new() {
    let answer = |text: &str| {
        json!([{"type": "message", "role": "assistant", "id": "msg_x_0",
            "content": [{"type": "output_text", "text": text}]}])
    };
    let asks = |text: &str| json!([{"type": "message", "role": "user", "content": text}]);
    let chain = vec![stored(&asks("a"), &answer("b")), stored(&asks("c"), &answer("d"))];
    let known = Known { chain, ..Known::default() };
    let (got, wishes) =
        translated(body(&json!({"previous_response_id": "resp_2"})), &known).unwrap();
    let said: Vec<_> = got["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| {
            (message["role"].as_str().unwrap(), message["content"][0]["text"].as_str().unwrap())
        })
        .collect();
    let want =
        [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "hi")];
    assert_eq!(said, want);
    assert_eq!(wishes.previous.as_deref(), Some("resp_2"));
    let input: Value = serde_json::from_str(&wishes.input).unwrap();
    assert_eq!(input.as_array().unwrap().len(), 1, "what was stored is not stored again");
}

#[test]
fn a_reference_is_the_item_that_it_names() {
    let output = json!([{"type": "message", "role": "assistant", "id": "msg_x_0",
        "content": [{"type": "output_text", "text": "a"}]}]);
    let named = HashMap::from([("resp_x".to_owned(), stored(&json!([]), &output))]);
    let known = Known { named, ..Known::default() };
    for reference in [json!({"type": "item_reference", "id": "msg_x_0"}), json!({"id": "msg_x_0"})]
    {
        let input = json!({"input": [reference, {"role": "user", "content": "hi"}]});
        let (got, _) = translated(body(&input), &known).unwrap();
        assert_eq!(got["messages"][0]["content"][0]["text"], "a");
    }
}
