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
    if most.is_some() && model.reasoning.is_none() && model.channels.is_none() {
        let why = match model.conventions.reasoning {
            None => {
                "this model is not known to reason before it answers; name the markers of its reasoning by --reasoning-parser"
            }
            Some(_) => "this model's tokens cannot write the markers of its reasoning",
        };
        return Err(unsupported("max_reasoning_tokens", why));
    }
    Ok(most)
}

/// What the answer follows behind its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterReasoning {
    /// Nothing.
    Free,
    /// The client's grammar.
    Grammar,
    /// A grammar of calls.
    Calls,
}

/// What a worker has to know of the reasoning: where it may be only so long, or a grammar begins behind it.
///
/// # Errors
/// `Unsupported` names the budget, where a grammar of calls has the reasoning in itself.
pub(super) fn before(
    model: &ModelFacts,
    most: Option<u32>,
    behind: AfterReasoning,
) -> Result<Option<Reasoning>, RouteError> {
    if most.is_none() && behind == AfterReasoning::Free {
        return Ok(None);
    }
    let reasoning = match (&model.reasoning, &model.channels, behind) {
        (Some(reasoning), _, _) => reasoning.clone(),
        (None, Some(_), AfterReasoning::Calls) if most.is_some() => {
            let why = "this model's calls are messages among its reasoning, and here they are held to schemas; leave the budget out, or `strict` and `tool_choice`";
            return Err(unsupported("max_reasoning_tokens", why));
        }
        (None, None, _) | (None, Some(_), AfterReasoning::Calls) => return Ok(None),
        (None, Some(channels), AfterReasoning::Free) => channels.clone(),
        // messages of another channel are no answer to the grammar
        (None, Some(channels), AfterReasoning::Grammar) => {
            Reasoning { ends_too: Vec::new(), ..channels.clone() }
        }
    };
    Ok(Some(Reasoning { max_tokens: most, ..reasoning }))
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
    fn a_budget_needs_tokens_that_end_reasoning() {
        let reasoning = Reasoning { begin: vec![3], end: vec![4], ..Reasoning::default() };
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
        for (most, behind, want) in [
            (None, AfterReasoning::Free, None),
            (None, AfterReasoning::Grammar, Some(reasoning.clone())),
            (None, AfterReasoning::Calls, Some(reasoning)),
            (Some(5), AfterReasoning::Free, Some(limited.clone())),
            (Some(5), AfterReasoning::Grammar, Some(limited.clone())),
            (Some(5), AfterReasoning::Calls, Some(limited)),
        ] {
            assert_eq!(before(&thinker, most, behind).unwrap(), want, "{most:?} {behind:?}");
        }
        assert_eq!(before(&ModelFacts::default(), None, AfterReasoning::Grammar).unwrap(), None);
    }

    #[test]
    fn channels_are_left_to_a_grammar_of_calls_and_end_in_calls_without_one() {
        let channels = Reasoning { end: vec![4], ends_too: vec![6], ..Reasoning::default() };
        let model = ModelFacts { channels: Some(channels.clone()), ..ModelFacts::default() };
        let limited = Reasoning { max_tokens: Some(2), ..channels };
        assert_eq!(before(&model, Some(2), AfterReasoning::Free).unwrap(), Some(limited.clone()));
        let held = Some(Reasoning { ends_too: vec![], ..limited });
        assert_eq!(before(&model, Some(2), AfterReasoning::Grammar).unwrap(), held);
        assert_eq!(before(&model, None, AfterReasoning::Free).unwrap(), None);
        assert_eq!(before(&model, None, AfterReasoning::Calls).unwrap(), None);
        match before(&model, Some(2), AfterReasoning::Calls) {
            Err(RouteError::BadRequest { param, .. }) => {
                assert_eq!(param.as_deref(), Some("max_reasoning_tokens"));
            }
            other => panic!("{other:?}"),
        }
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
