//! What can be held to a schema, and what is refused by its place.

use serde_json::json;

use super::*;
use crate::core::frame::Reasoning;
use crate::limits::memory::MemoryPool;
use crate::prompt::Conventions;

/// The place of an error.
fn place<T: std::fmt::Debug>(result: Result<T, RouteError>) -> Option<String> {
    match result {
        Ok(_) => None,
        Err(RouteError::BadRequest { param, .. }) => param,
        Err(error) => panic!("{error}"),
    }
}

fn model(parser: ToolParser, reasoning: Option<ReasoningParser>, tokens: bool) -> ModelFacts {
    let tools = Some(parser);
    ModelFacts {
        conventions: Conventions { knows_tools: true, tools, reasoning, ..Conventions::default() },
        reasoning: tokens.then(|| Reasoning {
            begin: vec![3],
            end: vec![4],
            ..Reasoning::default()
        }),
        ..ModelFacts::default()
    }
}

/// The calls that a request with one function is held to.
fn held_by(
    function: &Value,
    choice: ToolChoice,
    model: &ModelFacts,
) -> Result<Option<HeldCalls>, RouteError> {
    let mut memory = MemoryPool::private(1 << 20).share();
    let tools = [json!({"type": "function", "function": function})];
    let wish = CallWish { choice, only: None, parallel: true };
    let read = super::super::tools::reading(&wish, &tools, model, &mut memory)?;
    held(&wish, read.as_ref(), &tools, None, model, &mut memory)
}

fn one_by_one(parser: ToolParser) -> bool {
    matches!(
        parser,
        ToolParser::QwenCoder | ToolParser::Glm | ToolParser::Pythonic | ToolParser::Gemma
    )
}

#[test]
fn arguments_that_the_form_of_calls_cannot_write_are_named() {
    let check = |parameters: Value, parser| place(can_be_written(&parameters, parser, "p"));
    for parser in ToolParser::ALL {
        assert_eq!(check(json!({"type": "string"}), parser).as_deref(), Some("p.type"));
        for good in
            [json!({}), json!({"type": ["object", "null"]}), json!({"properties": {"a_b": {}}})]
        {
            assert_eq!(check(good, parser), None);
        }
        let odd = check(json!({"type": "object", "properties": {"a>b": {}}}), parser);
        assert_eq!(odd.as_deref(), one_by_one(parser).then_some("p.properties.a>b"));
    }
}

#[test]
fn what_forms_without_json_cannot_hold_is_named() {
    for parser in ToolParser::ALL {
        for (parameters, want) in [
            (json!({"required": ["a b"]}), "required"),
            (json!({"required": ["a"], "additionalProperties": false}), "required"),
            (json!({"anyOf": [{"required": ["a"]}]}), "anyOf"),
            (json!({"minProperties": 1, "properties": {"a": {}}}), "minProperties"),
        ] {
            let found = place(can_be_written(&parameters, parser, "p"));
            assert_eq!(found, one_by_one(parser).then(|| format!("p.{want}")), "{parser:?}");
        }
        let pattern = json!({"properties": {"a": {"type": "string", "pattern": "x"}}});
        let texts = matches!(parser, ToolParser::QwenCoder | ToolParser::Glm);
        let found = place(can_be_written(&pattern, parser, "p"));
        assert_eq!(found.as_deref(), texts.then_some("p.properties.a.pattern"), "{parser:?}");
        let good =
            json!({"required": ["a"], "properties": {"b": {"type": "string", "maxLength": 3}}});
        assert_eq!(place(can_be_written(&good, parser, "p")), None, "{parser:?}");
    }
}

/// The grammar as a whole is good where each schema is: references into themselves among them.
#[test]
fn schemas_that_name_themselves_work_or_are_named() {
    let tree = json!({"type": "object", "properties": {"n": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["n"]});
    let linked = json!({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}},
        "required": ["n"], "additionalProperties": false});
    let named = json!({"$ref": "#/$defs/tree", "$defs": {"tree": tree}});
    for parser in ToolParser::ALL {
        for parameters in [&linked, &named] {
            let function = json!({"name": "f", "parameters": parameters});
            let model = model(parser, None, false);
            let calls = held_by(&function, ToolChoice::Must, &model).unwrap().unwrap();
            for schema in &calls.schemas {
                schema.check().unwrap_or_else(|error| panic!("{parser:?}: {error}"));
            }
            let (whole, each) = calls.to_check().unwrap();
            for asked in [&whole, &each[0]] {
                asked.check().unwrap_or_else(|error| panic!("{parser:?}: {error}"));
            }
        }
        for around in [json!({"$ref": "#"}), json!({"$ref": "#/$defs/none"})] {
            let function = json!({"name": "f", "parameters": around});
            let found = place(held_by(&function, ToolChoice::Must, &model(parser, None, false)));
            assert_eq!(found.as_deref(), Some("tools[0].function.parameters.$ref"), "{parser:?}");
        }
    }
}

/// A schema whose values would have no end is a 400 by its place.
#[test]
fn a_schema_that_no_value_fits_is_named() {
    let endless = json!({"properties": {"a": {"$ref": "#"}}, "required": ["a"]});
    for parser in ToolParser::ALL {
        let function = json!({"name": "f", "parameters": endless});
        let found = place(held_by(&function, ToolChoice::Must, &model(parser, None, false)));
        let want = "tools[0].function.parameters.properties.a";
        assert_eq!(found.as_deref(), Some(want), "{parser:?}");
    }
}

#[test]
fn reasoning_before_calls_is_passed_where_a_token_ends_it() {
    use ReasoningFirst::{Analysis, Opened, Passed};
    let strict = || json!({"name": "f", "strict": true});
    for parser in ToolParser::ALL {
        for (reasoning, tokens, want) in [
            (None, false, ReasoningFirst::None),
            (Some(ReasoningParser::Think), true, Passed),
            (Some(ReasoningParser::Think), false, Opened("</think>")),
            (Some(ReasoningParser::Gemma), false, Opened("<channel|>")),
            (Some(ReasoningParser::Mistral), true, Passed),
            (Some(ReasoningParser::Harmony), false, Analysis),
        ] {
            let model = model(parser, reasoning, tokens);
            let calls = held_by(&strict(), ToolChoice::Must, &model).unwrap().unwrap();
            assert_eq!(format!("{:?}", calls.reasoning), format!("{want:?}"));
            assert_eq!(calls.knows_reasoning(), reasoning.is_some());
            let leads = matches!(parser, ToolParser::Llama | ToolParser::Pythonic);
            let unsure = leads && reasoning.is_some() && !tokens;
            let found = place(held_by(&strict(), ToolChoice::May, &model));
            assert_eq!(
                found.as_deref(),
                unsure.then_some("tools[0].function.strict"),
                "{parser:?}"
            );
        }
    }
    let free = json!({"name": "f"});
    let model = model(ToolParser::Hermes, None, false);
    assert!(held_by(&free, ToolChoice::May, &model).unwrap().is_none());
}
