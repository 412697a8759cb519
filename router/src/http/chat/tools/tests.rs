//! Every wrong field of tools is named.

use serde_json::json;

use super::*;
use crate::limits::memory::MemoryPool;
use crate::prompt::{Conventions, ToolParser};

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

fn wish(body: Value) -> Result<(CallWish, Option<Vec<Value>>), RouteError> {
    let mut fields = Fields::of_body(body)?;
    let tools = take(&mut fields)?;
    let wish = take_wish(&mut fields, tools.as_deref())?;
    fields.finish()?;
    Ok((wish, tools))
}

#[test]
fn each_wrong_field_is_named_by_its_path() {
    let many: Vec<Value> = (0..129).map(|i| tool(&format!("f{i}"))).collect();
    let with = |field: &str, value: Value| {
        let mut tool = tool("f");
        tool["function"][field] = value;
        json!({"tools": [tool]})
    };
    let choice = |choice: Value| json!({"tools": [tool("f")], "tool_choice": choice});
    for (body, want) in [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": many}), "tools"),
        (json!({"tools": ["f"]}), "tools[0]"),
        (json!({"tools": [{}]}), "tools[0].type"),
        (json!({"tools": [{"type": 5}]}), "tools[0].type"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "function", "function": 1}]}), "tools[0].function"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
        (json!({"tools": [tool("")]}), "tools[0].function.name"),
        (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
        (json!({"tools": [tool(&"x".repeat(65))]}), "tools[0].function.name"),
        (json!({"tools": [tool("f"), tool("g"), tool("f")]}), "tools[2].function.name"),
        (with("description", json!(1)), "tools[0].function.description"),
        (with("parameters", json!([])), "tools[0].function.parameters"),
        (with("strict", json!("yes")), "tools[0].function.strict"),
        (choice(json!("any")), "tool_choice"),
        (choice(json!(1)), "tool_choice"),
        (choice(json!({})), "tool_choice.type"),
        (choice(json!({"type": "custom"})), "tool_choice.type"),
        (choice(json!({"type": "function"})), "tool_choice.function"),
        (choice(json!({"type": "function", "function": {}})), "tool_choice.function.name"),
        (
            choice(json!({"type": "function", "function": {"name": "g"}})),
            "tool_choice.function.name",
        ),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}})),
            "tool_choice.allowed_tools.mode",
        ),
        (
            choice(
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
            ),
            "tool_choice.allowed_tools.tools",
        ),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto",
                "tools": [{"type": "custom", "function": {"name": "f"}}]}})),
            "tool_choice.allowed_tools.tools[0].type",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"parallel_tool_calls": "no"}), "parallel_tool_calls"),
    ] {
        match wish(body.clone()) {
            Err(RouteError::BadRequest { param: Some(param), message }) => {
                assert_eq!(param, want, "{body}");
                assert!(message.len() < 300);
            }
            other => panic!("{body}: {other:?}"),
        }
    }
}

#[test]
fn a_choice_is_never_may_or_must() {
    let tools = [tool("f"), tool("g")];
    let named = json!({"type": "function", "function": {"name": "g"}});
    let allowed =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}});
    for (choice, want, only) in [
        (json!(null), ToolChoice::May, None),
        (json!("auto"), ToolChoice::May, None),
        (json!("none"), ToolChoice::Never, None),
        (json!("required"), ToolChoice::Must, None),
        (named.clone(), ToolChoice::Must, Some(vec!["g".to_owned()])),
        (allowed, ToolChoice::May, Some(vec!["g".to_owned()])),
    ] {
        let (wish, _) = wish(json!({"tools": tools, "tool_choice": choice})).unwrap();
        assert_eq!(wish.parallel, choice["type"] != "function", "one function is one call");
        assert_eq!((wish.choice, wish.only), (want, only), "{choice}");
    }
    for choice in [json!(null), json!("auto"), json!("none")] {
        let (wish, tools) = wish(json!({"tools": [], "tool_choice": choice})).unwrap();
        assert_eq!((wish.choice, tools), (ToolChoice::Never, None));
    }
}

#[test]
fn arguments_have_the_kinds_of_their_schemas() {
    for (schema, want) in [
        (json!({"type": "string"}), None),
        (json!({"enum": ["a", "b"]}), None),
        (json!({"type": ["string", "null"]}), Some(ArgumentKind::OptionalText)),
        (
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            Some(ArgumentKind::OptionalText),
        ),
        (json!({"type": "integer"}), Some(ArgumentKind::Json)),
        (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), Some(ArgumentKind::Json)),
        (json!({}), Some(ArgumentKind::Json)),
        (json!({"$ref": "#/$defs/x"}), Some(ArgumentKind::Json)),
    ] {
        assert_eq!(kind(&schema), want, "{schema}");
    }
    let schema = json!({"$ref": "#/$defs/x", "$defs": {"x": {"required": ["b", "c"],
        "properties": {"a": {}, "c": {"type": "string"}}}}});
    let kinds = arguments(&schema);
    assert_eq!((kinds.len(), kinds["a"], kinds["b"]), (2, ArgumentKind::Json, ArgumentKind::Json));
}

#[test]
fn a_model_whose_calls_nobody_knows_gets_no_tools() {
    let mut memory = MemoryPool::private(1 << 20).share();
    let (wish, tools) = wish(json!({"tools": [tool("f")]})).unwrap();
    let tools = tools.unwrap();
    let mut read = |conventions: Conventions| {
        reading(&wish, &tools, &ModelFacts { conventions, ..ModelFacts::default() }, &mut memory)
    };
    assert!(read(Conventions { knows_tools: true, ..Conventions::default() }).is_err());
    let hermes = read(Conventions::default()).unwrap().unwrap();
    assert_eq!(hermes.parser, ToolParser::Hermes);
    assert!(hermes.functions.contains_key("f") && hermes.parallel && !hermes.forced);
}
