use serde_json::json;

use super::*;

fn asked(body: Value) -> Result<Option<Asked>, RouteError> {
    let mut fields = Fields::of_body(body)?;
    let asked = take(&mut fields)?;
    fields.finish()?;
    if let Some(asked) = &asked {
        asked.check()?;
    }
    Ok(asked)
}

fn param(body: &Value) -> String {
    match asked(body.clone()) {
        Err(RouteError::BadRequest { param: Some(param), message }) => {
            assert!(message.len() < 800, "{message}");
            param
        }
        other => panic!("{body}: {other:?}"),
    }
}

#[test]
fn each_way_of_asking_is_read() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    for (body, kind) in [
        (json!({}), None),
        (json!({"response_format": {"type": "text"}, "guided_json": null}), None),
        (json!({"response_format": {"type": "json_object"}}), Some(GrammarKind::Json)),
        (
            json!({"response_format": {"type": "json_schema", "json_schema":
                {"name": "x", "strict": true, "schema": schema}}}),
            Some(GrammarKind::Json),
        ),
        (json!({"guided_json": schema}), Some(GrammarKind::Json)),
        (json!({"guided_json": schema.to_string()}), Some(GrammarKind::Json)),
        (json!({"guided_regex": "[a-z]+"}), Some(GrammarKind::Regex)),
        (json!({"guided_choice": ["yes", "\"no\""]}), Some(GrammarKind::Lark)),
        (json!({"guided_grammar": "start: /[0-9]+/"}), Some(GrammarKind::Lark)),
        (json!({"guided_grammar": "root ::= [0-9]+ \"x\""}), Some(GrammarKind::Lark)),
        (json!({"structured_outputs": {"json_object": true}}), Some(GrammarKind::Json)),
        (json!({"structured_outputs": {"regex": "a|b"}}), Some(GrammarKind::Regex)),
    ] {
        let asked = asked(body.clone()).unwrap_or_else(|error| panic!("{body}: {error}"));
        assert_eq!(asked.map(|asked| asked.grammar.kind), kind, "{body}");
    }
}

#[test]
fn each_wrong_shape_is_named() {
    let wrapped = |schema: Value| {
        json!({"response_format": {"type": "json_schema", "json_schema":
            {"name": "x", "schema": schema}}})
    };
    let at = "response_format.json_schema.schema";
    for (body, want) in [
        (json!({"response_format": "text"}), "response_format".to_owned()),
        (json!({"response_format": {}}), "response_format.type".to_owned()),
        (json!({"response_format": {"type": "xml"}}), "response_format.type".to_owned()),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema".to_owned(),
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            at.to_owned(),
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": {}}}),
            "response_format.schema".to_owned(),
        ),
        (wrapped(json!([])), at.to_owned()),
        (wrapped(json!({"type": "strange"})), at.to_owned()),
        (wrapped(json!({"not": {}})), format!("{at}.not")),
        (
            wrapped(
                json!({"type": "object", "properties": {"a": {"type": "array", "contains": 1}}}),
            ),
            format!("{at}.properties.a.contains"),
        ),
        (
            wrapped(
                json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
            ),
            format!("{at}.properties.a"),
        ),
        (
            wrapped(
                json!({"anyOf": [{"type": "string"}, {"type": "string", "format": "strange"}]}),
            ),
            format!("{at}.anyOf[1]"),
        ),
        (wrapped(json!({"items": {"x-guidance": {}}})), format!("{at}.items.x-guidance")),
        (wrapped(json!({"$ref": "#/$defs/none"})), at.to_owned()),
        (wrapped(json!({"$ref": "https://example.org/x"})), at.to_owned()),
        (wrapped(json!({"properties": {"a": 7}})), format!("{at}.properties.a")),
        (json!({"guided_json": "{"}), "guided_json".to_owned()),
        (json!({"guided_json": 7}), "guided_json".to_owned()),
        (json!({"guided_json": "x".repeat(70_000)}), "guided_json".to_owned()),
        (json!({"guided_regex": "("}), "guided_regex".to_owned()),
        (json!({"guided_regex": ""}), "guided_regex".to_owned()),
        (json!({"guided_regex": "(".repeat(1000)}), "guided_regex".to_owned()),
        (json!({"guided_regex": ["a"]}), "guided_regex".to_owned()),
        (json!({"guided_choice": []}), "guided_choice".to_owned()),
        (json!({"guided_choice": ["a", 1]}), "guided_choice[1]".to_owned()),
        (json!({"guided_choice": [""]}), "guided_choice[0]".to_owned()),
        (json!({"guided_choice": vec!["x"; 2000]}), "guided_choice".to_owned()),
        (json!({"guided_grammar": "start: nothing"}), "guided_grammar".to_owned()),
        (json!({"guided_grammar": "root ::= \"x"}), "guided_grammar".to_owned()),
        (json!({"structured_outputs": {}}), "structured_outputs".to_owned()),
        (
            json!({"structured_outputs": {"regex": "a", "json": {}}}),
            "structured_outputs.regex".to_owned(),
        ),
        (json!({"structured_outputs": {"other": 1}}), "structured_outputs.other".to_owned()),
        (
            json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
            "guided_regex".to_owned(),
        ),
    ] {
        assert_eq!(param(&body), want, "{body}");
    }
}

#[test]
fn what_would_take_much_is_neither_compiled_for_long_nor_the_end_of_the_process() {
    // each rule is twice the one before it
    let mut lark = String::from("start: r0\n");
    for rule in 0..60 {
        writeln!(lark, "r{rule}: r{next} r{next}", next = rule + 1).unwrap();
    }
    lark.push_str("r60: \"x\"\n");
    drop(asked(json!({"guided_grammar": lark}))); // either is right, in bounded time
    drop(asked(json!({"guided_regex": "((a{1,1000}){1,1000}){1,1000}"})));
    let mut chain = String::from("start: A0\n");
    for name in 0..3000 {
        writeln!(chain, "A{name}: A{} \"x\"", name + 1).unwrap();
    }
    chain.push_str("A3000: \"y\"\n");
    drop(asked(json!({"guided_grammar": chain}))); // nor is this the end of the process
}
