//! What a request says about reasoning: how much, and whether it is shown.

use serde_json::{Map, Value};

use crate::core::frame::Reasoning;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported};
use crate::http::parse::params::ModelFacts;
use crate::prompt::Conventions;

const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// Takes `reasoning_effort`, which becomes a variable of the template, and `include_reasoning`: whether reasoning is shown.
///
/// # Errors
/// `BadRequest` about a wrong field, or an effort that the model cannot make.
pub(super) fn take(
    fields: &mut Fields,
    model: &Conventions,
    variables: &mut Map<String, Value>,
) -> Result<bool, RouteError> {
    let shown = fields.boolean("include_reasoning")?.unwrap_or(true);
    if let Some(effort) = fields.string("reasoning_effort")? {
        if !EFFORTS.contains(&effort.as_str()) {
            let message = format!(
                "`reasoning_effort` is \"{}\"; it must be one of {}",
                clip(&effort),
                EFFORTS.join(", ")
            );
            return Err(bad("reasoning_effort", message));
        }
        set_effort(effort, model, variables)?;
    }
    Ok(shown)
}

/// Takes `max_reasoning_tokens`.
///
/// # Errors
/// `BadRequest` where it is no count, or no token ends the model's reasoning.
pub(super) fn take_budget(
    fields: &mut Fields,
    model: &ModelFacts,
) -> Result<Option<u32>, RouteError> {
    let most = fields.count("max_reasoning_tokens", 0)?;
    if most.is_some() && model.reasoning.is_none() {
        let why = "this model has no token that ends reasoning before an answer";
        return Err(unsupported("max_reasoning_tokens", why));
    }
    Ok(most)
}

/// What a worker has to know of the reasoning: where it may be only so long, or a grammar begins behind it.
pub(super) fn before(model: &ModelFacts, most: Option<u32>, grammar: bool) -> Option<Reasoning> {
    let reasoning = model.reasoning.clone().filter(|_| most.is_some() || grammar)?;
    Some(Reasoning { max_tokens: most, ..reasoning })
}

/// Variables that the client set itself stay as they are.
fn set_effort(
    effort: String,
    model: &Conventions,
    variables: &mut Map<String, Value>,
) -> Result<(), RouteError> {
    let none = effort == "none";
    if let Some(switch) = model.switch {
        variables.entry(switch).or_insert(Value::Bool(!none));
    }
    if model.knows_effort && !(none && model.switch.is_some()) {
        variables.entry("reasoning_effort").or_insert(Value::String(effort));
        return Ok(());
    }
    match (model.reasoning, model.switch) {
        (_, Some(_)) => Ok(()),
        (Some(_), None) if none => {
            Err(unsupported("reasoning_effort", "this model always reasons before it answers"))
        }
        // the one effort that it makes
        (Some(_), None) => Ok(()),
        (None, None) if none => Ok(()),
        (None, None) => Err(unsupported(
            "reasoning_effort",
            "the chat template of this model knows no reasoning",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::prompt::ReasoningParser;

    fn variables(effort: &str, model: Conventions) -> Result<Value, String> {
        let mut variables = Map::new();
        let mut fields = Fields::of_body(json!({"reasoning_effort": effort})).unwrap();
        match take(&mut fields, &model, &mut variables) {
            Ok(shown) => {
                assert!(shown);
                fields.finish().unwrap();
                Ok(Value::Object(variables))
            }
            Err(RouteError::BadRequest { param, message }) => {
                assert_eq!(param.as_deref(), Some("reasoning_effort"));
                Err(message)
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_effort_is_what_the_template_knows() {
        let plain = Conventions::default();
        let thinker = Conventions { reasoning: Some(ReasoningParser::Think), ..plain };
        let switched = Conventions { switch: Some("enable_thinking"), ..thinker };
        let graded = Conventions { knows_effort: true, ..thinker };
        for (effort, model, want) in [
            ("none", plain, Some(json!({}))),
            ("low", plain, None),
            ("none", thinker, None),
            ("high", thinker, Some(json!({}))),
            ("none", switched, Some(json!({"enable_thinking": false}))),
            ("medium", switched, Some(json!({"enable_thinking": true}))),
            ("low", graded, Some(json!({"reasoning_effort": "low"}))),
            ("most", graded, None),
        ] {
            assert_eq!(variables(effort, model).ok(), want, "{effort} {model:?}");
        }
    }

    #[test]
    fn a_budget_needs_a_token_that_ends_reasoning() {
        let reasoning = Reasoning { begin: vec![3], end: vec![4], max_tokens: None };
        let thinker = ModelFacts { reasoning: Some(reasoning.clone()), ..ModelFacts::default() };
        let budget = |model: &ModelFacts, value: Value| {
            let mut fields = Fields::of_body(json!({ "max_reasoning_tokens": value })).unwrap();
            take_budget(&mut fields, model).ok()
        };
        assert_eq!(budget(&thinker, json!(0)), Some(Some(0)));
        assert_eq!(budget(&thinker, json!(-1)), None);
        assert_eq!(budget(&ModelFacts::default(), json!(5)), None);
        assert_eq!(budget(&ModelFacts::default(), json!(null)), Some(None));
        let limited = Reasoning { max_tokens: Some(5), ..reasoning.clone() };
        for (most, grammar, want) in [
            (None, false, None),
            (None, true, Some(reasoning)),
            (Some(5), false, Some(limited.clone())),
            (Some(5), true, Some(limited)),
        ] {
            assert_eq!(before(&thinker, most, grammar), want, "{most:?} {grammar}");
        }
        assert_eq!(before(&ModelFacts::default(), None, true), None);
    }

    #[test]
    fn what_the_client_set_itself_stays() {
        let model = Conventions { switch: Some("enable_thinking"), ..Conventions::default() };
        let mut set = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
        let mut fields = Fields::of_body(json!({"reasoning_effort": "high"})).unwrap();
        take(&mut fields, &model, &mut set).unwrap();
        assert_eq!(Value::Object(set), json!({"enable_thinking": false}));
    }
}
