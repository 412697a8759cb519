//! `nvext`, in which clients of NVIDIA Dynamo say what OpenAI has no parameter for.
//!
//! What has a parameter of its own here becomes that. What only asks for further information, or only hints, changes no
//! answer: it is noted as ignored. What would change the answer or its place is refused by name.

use serde_json::Value;

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, unsupported};

/// Of annotations and of further fields of the answer. A guess.
const MOST_NAMES: usize = 32;

const NO_PLACE: &str = "the router places requests itself";

/// Takes `nvext` out of the body's fields, and puts what it says among them.
///
/// # Errors
/// `BadRequest` about the first wrong field, or about one that says something else than the parameter of its own.
pub(in crate::http) fn take(fields: &mut Fields) -> Result<(), RouteError> {
    let Some(mut nvext) = fields.object("nvext")? else { return Ok(()) };
    if nvext.boolean("greed_sampling")? == Some(true) {
        fields.put("temperature", 0.into()); // whatever else was said of it, as Dynamo has it
    }
    let ignore_eos = nvext.boolean("ignore_eos")?;
    same(fields, "ignore_eos", ignore_eos.map(Value::from))?;
    let top_k = nvext.integer("top_k", -1..=i64::from(i32::MAX))?;
    same(fields, "top_k", top_k.map(Value::from))?;
    let penalty = nvext.number("repetition_penalty", 0.0..=10.0)?;
    same(fields, "repetition_penalty", penalty.map(Value::from))?;
    let most_reasoning = nvext.count("max_thinking_tokens", 0)?;
    same(fields, "max_reasoning_tokens", most_reasoning.map(Value::from))?;
    if nvext.boolean("use_raw_prompt")? == Some(true) {
        return Err(unsupported("nvext.use_raw_prompt", "use /v1/completions"));
    }
    for name in [
        "backend_instance_id",
        "prefill_worker_id",
        "decode_worker_id",
        "dp_rank",
        "prefill_dp_rank",
    ] {
        if nvext.take_missing(name).is_some() {
            return Err(unsupported(nvext.path(name), NO_PLACE));
        }
    }
    if nvext.take_missing("token_data").is_some() {
        let why = "send token ids as `prompt` to /v1/completions";
        return Err(unsupported("nvext.token_data", why));
    }
    for name in ["annotations", "extra_fields"] {
        let names = nvext.array(name)?.unwrap_or_default();
        if names.len() > MOST_NAMES {
            let message = format!("`{}` holds more than {MOST_NAMES} names", nvext.path(name));
            return Err(bad(nvext.path(name), message));
        }
        if let Some(at) = names.iter().position(|name| !name.is_string()) {
            let path = format!("{}[{at}]", nvext.path(name));
            return Err(bad(path.clone(), format!("`{path}` must be a string")));
        }
        if !names.is_empty() {
            nvext.ignore(name);
        }
    }
    if nvext.number("request_timestamp_ms", 0.0..=f64::MAX)?.is_some() {
        nvext.ignore("request_timestamp_ms");
    }
    if let Some(hints) = nvext.object("agent_hints")? {
        agent_hints(hints, fields)?;
    }
    if let Some(mut session) = nvext.object("session_control")? {
        let id = session.string("session_id")?;
        let id = session.require("session_id", id)?;
        same(fields, "prompt_cache_key", Some(Value::String(id)))?;
        if session.string("action")?.is_some() {
            session.ignore("action");
        }
        if session.count("timeout", 0)?.is_some() {
            session.ignore("timeout");
        }
        session.finish()?;
    }
    nvext.finish()
}

fn agent_hints(mut hints: Fields, fields: &mut Fields) -> Result<(), RouteError> {
    // there as here inside, higher goes first
    let priority = hints.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
    let priority = priority.map(|priority| Value::from(-priority.clamp(-127, 127)));
    same(fields, "priority", priority)?;
    if hints.count("osl", 0)?.is_some() {
        hints.ignore("osl");
    }
    if hints.boolean("speculative_prefill")?.is_some() {
        hints.ignore("speculative_prefill");
    }
    if hints.number("latency_sensitivity", f64::MIN..=f64::MAX)?.is_some() {
        hints.ignore("latency_sensitivity");
    }
    hints.finish()
}

/// Puts what `nvext` says of a parameter in its place, unless the body says the same there.
fn same(fields: &mut Fields, name: &str, said: Option<Value>) -> Result<(), RouteError> {
    let Some(said) = said else { return Ok(()) };
    match fields.take(name) {
        Some(other) if !equal(&other, &said) => {
            Err(bad(name, format!("`{name}` and `nvext` say different things; send one of them")))
        }
        Some(_) | None => {
            fields.put(name, said);
            Ok(())
        }
    }
}

fn equal(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64().is_some_and(|b| a.total_cmp(&b).is_eq()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::http::parse::ignored::IgnoredFields;

    fn taken(body: Value) -> Result<(Value, String), RouteError> {
        let ignored = IgnoredFields::new(false);
        let mut fields = Fields::of_body(body)?.noting(&ignored);
        take(&mut fields)?;
        let header = ignored.header().map_or(String::new(), |h| h.to_str().unwrap().to_owned());
        Ok((Value::Object(fields.into_rest()), header))
    }

    #[test]
    fn what_has_a_parameter_of_its_own_becomes_that() {
        let (rest, ignored) = taken(json!({"temperature": 1, "top_k": 5, "nvext": {
            "greed_sampling": true, "ignore_eos": true, "top_k": 5.0, "repetition_penalty": 1.2,
            "max_thinking_tokens": 9,
            "agent_hints": {"priority": 500}, "session_control": {"session_id": "s"}}}))
        .unwrap();
        let want = json!({"temperature": 0, "top_k": 5, "ignore_eos": true,
            "repetition_penalty": 1.2, "max_reasoning_tokens": 9, "priority": -127, "prompt_cache_key": "s"});
        assert_eq!((rest, ignored.as_str()), (want, ""));
    }

    #[test]
    fn what_asks_for_further_information_is_noted() {
        let (rest, ignored) = taken(json!({"nvext": {"annotations": ["llm_metrics"],
            "extra_fields": [], "agent_hints": {"osl": 5}}}))
        .unwrap();
        assert_eq!(
            (rest, ignored.as_str()),
            (json!({}), "nvext.agent_hints.osl, nvext.annotations")
        );
    }

    #[test]
    fn what_is_wrong_or_would_change_the_answer_is_named() {
        for (param, body) in [
            ("nvext", json!({"nvext": []})),
            ("nvext.ignore_eos", json!({"nvext": {"ignore_eos": 1}})),
            ("ignore_eos", json!({"ignore_eos": false, "nvext": {"ignore_eos": true}})),
            ("nvext.use_raw_prompt", json!({"nvext": {"use_raw_prompt": true}})),
            ("nvext.max_thinking_tokens", json!({"nvext": {"max_thinking_tokens": -1}})),
            (
                "max_reasoning_tokens",
                json!({"max_reasoning_tokens": 1, "nvext": {"max_thinking_tokens": 2}}),
            ),
            ("nvext.decode_worker_id", json!({"nvext": {"decode_worker_id": 3}})),
            ("nvext.token_data", json!({"nvext": {"token_data": [1]}})),
            ("nvext.annotations[1]", json!({"nvext": {"annotations": ["a", 1]}})),
            ("nvext.session_control.session_id", json!({"nvext": {"session_control": {}}})),
            ("nvext.agent_hints.priority", json!({"nvext": {"agent_hints": {"priority": "x"}}})),
            ("nvext.frobnicate", json!({"nvext": {"frobnicate": 1}})),
        ] {
            match taken(body.clone()) {
                Err(RouteError::BadRequest { param: got, .. }) => {
                    assert_eq!(got.as_deref(), Some(param));
                }
                other => panic!("{body}: {other:?}"),
            }
        }
    }
}
