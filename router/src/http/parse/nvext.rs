//! `nvext`, in which clients of NVIDIA Dynamo say what OpenAI has no parameter for.
//!
//! What has a parameter of its own here becomes that. Annotations come with streams as Dynamo sends them. What only hints
//! changes no answer: it is noted as ignored. All else is refused by name.

use serde_json::Value;

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};

/// Of annotations and of further fields of the answer. A guess.
const MOST_NAMES: usize = 32;

const NO_PLACE: &str = "the router places requests itself";

/// What a stream tells beside its answer, each as an event of that name without data, whose comment says it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::http) struct Annotations {
    /// The prompt as text.
    pub(in crate::http) formatted_prompt: bool,
    /// Its tokens.
    pub(in crate::http) token_ids: bool,
    pub(in crate::http) request_id: bool,
    /// Counts of tokens, at the end.
    pub(in crate::http) llm_metrics: bool,
}

impl Annotations {
    pub(in crate::http) const NAMES: [&str; 4] =
        ["formatted_prompt", "token_ids", "request_id", "llm_metrics"];

    /// False of a name that is not known.
    fn add(&mut self, name: &str) -> bool {
        match name {
            "formatted_prompt" => self.formatted_prompt = true,
            "token_ids" => self.token_ids = true,
            "request_id" => self.request_id = true,
            "llm_metrics" => self.llm_metrics = true,
            _ => return false,
        }
        true
    }

    pub(in crate::http) fn any(self) -> bool {
        self != Self::default()
    }
}

/// Fields of an answer that Dynamo has and we have not, and where else it is said.
const EXTRA_FIELDS: [(&str, &str); 5] = [
    ("worker_id", "the header X-Headrace-Worker of the answer names its worker"),
    ("timing", "the header Server-Timing of the answer has its times"),
    ("stop_reason", "`finish_reason` says why an answer ended, and /v1/messages with which string"),
    ("token_ids", "use `return_token_ids`"),
    ("completion_token_ids", "use `return_token_ids`"),
];

/// Takes `nvext` out of the body's fields, and puts what it says among them.
///
/// # Errors
/// `BadRequest` about the first wrong field, or about one that says something else than the parameter of its own.
pub(in crate::http) fn take(fields: &mut Fields) -> Result<Annotations, RouteError> {
    let Some(mut nvext) = fields.object("nvext")? else { return Ok(Annotations::default()) };
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
    for name in SAME {
        let said = nvext.take(name);
        same(fields, name, said)?;
    }
    if nvext.boolean("use_raw_prompt")? == Some(true) {
        return Err(unsupported("nvext.use_raw_prompt", "use /v1/completions"));
    }
    for (name, why) in REFUSED {
        if nvext.take_missing(name).is_some() {
            return Err(unsupported(nvext.path(name), why));
        }
    }
    let annotations = annotations(&mut nvext)?;
    if let Some(name) = names(&mut nvext, "extra_fields")?.first() {
        let known = EXTRA_FIELDS.into_iter().find(|(field, _)| field == name);
        let why = known.map_or("answers have no such field", |(_, instead)| instead);
        return Err(unsupported("nvext.extra_fields[0]", why));
    }
    if nvext.object("agent_context")?.is_some() {
        nvext.ignore("agent_context");
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
    nvext.finish()?;
    Ok(annotations)
}

/// Parameters of their own of the same names.
const SAME: [&str; 6] = [
    "cache_salt",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
];

const REFUSED: [(&str, &str); 10] = [
    ("guided_whitespace_pattern", "use a grammar"),
    ("backend_instance_id", NO_PLACE),
    ("prefill_worker_id", NO_PLACE),
    ("decode_worker_id", NO_PLACE),
    ("dp_rank", NO_PLACE),
    ("prefill_dp_rank", NO_PLACE),
    ("routing_constraints", NO_PLACE),
    ("router", "the header X-Headrace-TTFT-Deadline-Ms has the deadline of the first token"),
    ("token_data", "send token ids as `prompt` to /v1/completions"),
    (
        "metadata_upload",
        "nothing is uploaded; /decisions/REQUEST_ID has what is known of a request",
    ),
];

/// What the stream is to tell.
fn annotations(nvext: &mut Fields) -> Result<Annotations, RouteError> {
    let mut annotations = Annotations::default();
    for (at, name) in names(nvext, "annotations")?.into_iter().enumerate() {
        if annotations.add(&name) {
            continue;
        }
        let param = format!("nvext.annotations[{at}]");
        if name.split(':').next() == Some("query_instance_id") {
            let why =
                format!("{NO_PLACE}; with X-Headrace-Explain: 1 the answer says where it went");
            return Err(unsupported(param, &why));
        }
        let known = Annotations::NAMES.join("`, `");
        let message = format!("`{param}` is {:?}; there are `{known}`", clip(&name));
        return Err(bad(param, message));
    }
    Ok(annotations)
}

/// A list of names.
fn names(nvext: &mut Fields, name: &str) -> Result<Vec<String>, RouteError> {
    let names = nvext.array(name)?.unwrap_or_default();
    let path = nvext.path(name);
    if names.len() > MOST_NAMES {
        let message = format!("`{path}` holds more than {MOST_NAMES} names");
        return Err(bad(path, message));
    }
    let names = names.into_iter().enumerate().map(|(at, name)| {
        let Value::String(name) = name else {
            return Err(wrong_type(format!("{path}[{at}]"), "a string", &name));
        };
        Ok(name)
    });
    names.collect()
}

fn agent_hints(mut hints: Fields, fields: &mut Fields) -> Result<(), RouteError> {
    // there as here inside, higher goes first
    let priority = hints.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
    let priority = priority.map(|priority| Value::from(-priority.clamp(-127, 127)));
    same(fields, "priority", priority)?;
    for name in ["osl", "strict_priority"] {
        if hints.count(name, 0)?.is_some() {
            hints.ignore(name);
        }
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

    fn taken(body: Value) -> Result<(Value, String, Annotations), RouteError> {
        let ignored = IgnoredFields::new(false);
        let mut fields = Fields::of_body(body)?.noting(&ignored);
        let annotations = take(&mut fields)?;
        let header = ignored.header().map_or(String::new(), |h| h.to_str().unwrap().to_owned());
        Ok((Value::Object(fields.into_rest()), header, annotations))
    }

    #[test]
    fn what_has_a_parameter_of_its_own_becomes_that() {
        let (rest, ignored, told) = taken(json!({"temperature": 1, "top_k": 5, "nvext": {
            "greed_sampling": true, "ignore_eos": true, "top_k": 5.0, "repetition_penalty": 1.2,
            "max_thinking_tokens": 9, "cache_salt": "c", "guided_json": {"type": "object"},
            "agent_hints": {"priority": 500}, "session_control": {"session_id": "s"}}}))
        .unwrap();
        let want = json!({"temperature": 0, "top_k": 5, "ignore_eos": true,
            "repetition_penalty": 1.2, "max_reasoning_tokens": 9, "priority": -127, "prompt_cache_key": "s",
            "cache_salt": "c", "guided_json": {"type": "object"}});
        assert_eq!((rest, ignored.as_str(), told.any()), (want, "", false));
    }

    #[test]
    fn what_only_hints_is_noted() {
        let (rest, ignored, told) = taken(json!({"nvext": {"annotations": [], "extra_fields": [],
            "agent_hints": {"osl": 5, "strict_priority": 1}, "agent_context": {"session_id": "a"}}}))
        .unwrap();
        let want = "nvext.agent_context, nvext.agent_hints.osl, nvext.agent_hints.strict_priority";
        assert_eq!((rest, ignored.as_str(), told.any()), (json!({}), want, false));
    }

    #[test]
    fn annotations_are_known_by_their_names() {
        let one = |name: &str| taken(json!({"nvext": {"annotations": [name]}})).unwrap().2;
        let none = Annotations::default();
        assert_eq!(one("formatted_prompt"), Annotations { formatted_prompt: true, ..none });
        assert_eq!(one("token_ids"), Annotations { token_ids: true, ..none });
        assert_eq!(one("request_id"), Annotations { request_id: true, ..none });
        assert_eq!(one("llm_metrics"), Annotations { llm_metrics: true, ..none });
        let (_, ignored, all) =
            taken(json!({"nvext": {"annotations": Annotations::NAMES}})).unwrap();
        let every = Annotations {
            formatted_prompt: true,
            token_ids: true,
            request_id: true,
            llm_metrics: true,
        };
        assert_eq!((ignored.as_str(), all), ("", every));
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
            ("nvext.annotations[1]", json!({"nvext": {"annotations": ["token_ids", 1]}})),
            ("nvext.annotations[0]", json!({"nvext": {"annotations": ["a"]}})),
            (
                "nvext.annotations[1]",
                json!({"nvext": {"annotations": ["token_ids", "query_instance_id:"]}}),
            ),
            ("nvext.annotations", json!({"nvext": {"annotations": vec!["token_ids"; 33]}})),
            ("nvext.annotations", json!({"nvext": {"annotations": "token_ids"}})),
            ("nvext.extra_fields[0]", json!({"nvext": {"extra_fields": ["timing"]}})),
            ("nvext.extra_fields[0]", json!({"nvext": {"extra_fields": ["frobnicate"]}})),
            ("nvext.agent_context", json!({"nvext": {"agent_context": "a"}})),
            ("nvext.routing_constraints", json!({"nvext": {"routing_constraints": {}}})),
            ("nvext.router", json!({"nvext": {"router": {"ttft_target": 5}}})),
            ("nvext.metadata_upload", json!({"nvext": {"metadata_upload": {"url": "s3://a"}}})),
            ("cache_salt", json!({"cache_salt": "a", "nvext": {"cache_salt": "b"}})),
            (
                "guided_json",
                json!({"guided_json": {}, "nvext": {"guided_json": {"type": "object"}}}),
            ),
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
